"""How a network of another family is stored, and the fields of `config.json` that such families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import NATIVE, decoder_config_from_hf, decoder_config_to_hf
from penjing.core.models.hf_variants import latent_from_hf

Values = dict[str, Any]
LARGEST = 1e18  # of a factor: its square is still a float32, and an integer of hundreds of digits is none
_PLAIN_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_EXPERT_TYPES = ("mixtral", "qwen3_moe", "dots1", "deepseek_v3")


@dataclass(frozen=True)
class LayerHeads:
    """How the heads of a layer are stored, where layers differ: smaller ones get zeros behind each of their halves, and
    fewer heads of keys and values are repeated.

    Attributes:
        size: dimensions of a head there.
        keys: heads of keys and values there.
        values: dimensions of a head of values there, if others; those of queries and keys are then all of ours.
        sinks: whether the heads have sinks there; else ours have such as no score is below.
        values_are_keys: values come from the matrix of the keys.
    """

    size: int
    keys: int
    values_are_keys: bool = False
    values: int | None = None
    sinks: bool = True

    def as_ours(self, size: int, keys: int, dim: int, of_keys: bool, of_values: bool) -> Stretched | None:
        """What makes of a tensor, whose heads stand along `dim`, one of heads of `size`, and of `keys` if it is
        `of_keys`; None where it is one."""
        repeats = keys // self.keys if of_keys else 1
        there = self.size if self.values is None or not of_values else self.values
        return None if (there, repeats) == (size, 1) else Stretched(dim, there, size, repeats)


@dataclass(frozen=True)
class Stretched:
    """Heads along `dim` of a tensor, of `there` dimensions, that become `repeats` times as many of `whole`."""

    dim: int
    there: int
    whole: int
    repeats: int = 1

    def size(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that it gets; as it is where it is none of such heads."""
        if len(shape) <= self.dim:
            return shape
        heads, rest = divmod(shape[self.dim], self.there)
        found = heads * self.repeats * self.whole
        return shape if rest else (*shape[: self.dim], found, *shape[self.dim + 1 :])

    def added(self, tensor: Tensor) -> Tensor:
        """The tensor so."""
        halves = tensor.unflatten(self.dim, (-1, 2, self.there // 2))
        sizes = list(halves.shape)
        sizes[self.dim + 2] = (self.whole - self.there) // 2
        halves = torch.cat((halves, halves.new_zeros(sizes)), self.dim + 2)
        return halves.repeat_interleave(self.repeats, self.dim).flatten(self.dim, self.dim + 2)


@dataclass(frozen=True)
class Fold:
    """A network as it is stored and how its tensors become those of `config`.

    Attributes:
        names: module of ours in a layer → its name in the folder, where that is another; of experts with * for their
            number, and of what is no weight or bias of a module the whole name.
        outside: the same of modules outside layers.
        layers: what the names of a layer's tensors begin with there.
        spelled: `names` where folders have one of several names: as published, or as transformers 5 has them.
        fused: q, k, v are one matrix `self_attn.qkv_proj` there.
        fused_heads: so they are, with the queries, keys and values of one head of keys behind each other.
        fused_mlp: gate and up are one matrix `gate_up_proj` there, but for experts'.
        plus_one: norms multiply by 1 + w.
        embedding, final: factors of the embedding and of the last norm.
        query: factor of the queries.
        value: factor of the values.
        residual: factor of what attention and MLP add: of their last matrix, or of the norm behind it.
        experts: factor of what experts and the MLP beside them add, too.
        rotary: dimensions of a head that rotate, the first ones.
        interleaved: 2i and 2i + 1 rotate together there; else i and i + rotary / 2.
        backwards: all rotate the other way there, which is the same of heads whose halves are exchanged.
        centred: norms subtract the mean there (see `FoldedCheckpoint`).
        stored: of a folder with centred norms what it holds of "norm" (weights of norms), "shift" (their biases) and
            biases of "qkv", "out", "mlp", "head". What it does not hold is 1 or 0.
        tied: the head is the embedding there, and a matrix of its own here.
        plain_norms: norms have no weights there.
        normed: the embedding passes the last norm, before the first layer, too.
        transposed: names there of linear layers of a layer whose weights are stored with inputs first.
        first_position: rows of the table of positions that stand before that of the first.
        more_layers: the folder has layers beyond those of the network, which guess further tokens.
        heads: of each layer the heads of queries that it has there, where some have fewer than others; those it lacks
            are zeros here, which give nothing.
        layer_heads: how the heads of each layer are stored, where layers differ.
        plain_values: norms of values have no weights there.
        reads: module of ours → the vector of its layer by which it multiplies what the norm before the MLP leaves,
            where that norm has no weight there; ours has the vector of `main_reader`.
        main_reader: one of `reads`.
        gains: module of ours, of experts → the vector that has a factor of each.
        router: factor of the router's weights.
        unused: ends of names of tensors that older checkpoints store and nothing reads.
        apart: beginnings of names of what guesses further tokens, or sees.
        left_out: what a user is told of those.
        inside: beginnings of names of a network inside another one, of which a folder has one.
    """

    config: DecoderConfig
    names: dict[str, str] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)
    layers: str = "model.layers."
    spelled: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fused: bool = False
    fused_heads: bool = False
    fused_mlp: bool = False
    plus_one: bool = False
    embedding: float = 1.0
    final: float = 1.0
    query: float = 1.0
    value: float = 1.0
    residual: float = 1.0
    experts: float = 1.0
    rotary: int = 0
    interleaved: bool = False
    backwards: bool = False
    centred: bool = False
    stored: frozenset[str] = frozenset()
    tied: bool = False
    plain_norms: bool = False
    normed: bool = False
    transposed: tuple[str, ...] = ()
    first_position: int = 0
    more_layers: bool = False
    heads: tuple[int, ...] = ()
    layer_heads: tuple[LayerHeads, ...] = ()
    plain_values: bool = False
    reads: dict[str, str] = field(default_factory=dict)
    main_reader: str = ""
    gains: dict[str, str] = field(default_factory=dict)
    router: float = 1.0
    left_out: str = ""
    inside: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """How a type of folder is read.

    Attributes:
        defaults: what transformers assumes when a config.json leaves the field out.
        activations: what it may name; the first is assumed.
        also: another architecture that such a folder may name.
        aliases: other names of fields → those that are read.
    """

    read: Callable[[Values, str], Fold]
    defaults: Values
    activations: tuple[str, ...] = ("silu", "swish")
    also: str | None = None
    aliases: dict[str, str] = field(default_factory=dict)


SEEING: dict[str, tuple[str, ...]] = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "mistral3": ("mistral", "ministral3"),
}
"""Networks that see, by the types that their text parts may have; those are read, for texts alone."""
_EYES = ("vision_tower.", "vision_model.", "vision_embedder.", "embed_vision.", "multi_modal_projector.")
_EARS = ("audio_tower.", "embed_audio.")
_ABOVE = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def text_of(values: Values, source: str) -> Values:
    """The settings of the text part of one of SEEING."""
    kinds, text = SEEING[values["model_type"]], values.get("text_config")
    text = {} if text is None else text
    if not isinstance(text, dict):
        raise InputError(f"{source}: text_config must have the settings of what reads text")
    kind = text.get("model_type", kinds[0])
    if kind not in kinds:
        raise InputError(f"{source}: a text part of type {kind!r} is not supported; {' or '.join(kinds)} is")
    above = {name: values[name] for name in _ABOVE if values.get(name) is not None}
    return text | above | {"model_type": kind, "architectures": None}


def inside_of(fold: Fold) -> Fold:
    """`fold` of a text part, as transformers 5 stores it inside what sees, or as it was published."""
    found = tuple(f"{begin}{part}" for begin in ("", "model.") for part in (*_EYES, *_EARS))
    inside = ("model.language_model.", "language_model.model.")
    return replace(fold, inside=inside, apart=fold.apart + found, left_out="what sees and hears")


def config_of(values: Values, source: str, rope: Values | None = None, **changes: Any) -> DecoderConfig:
    """The common fields as Llama reads them, and `changes`; of a type that others read where one has it."""
    apart = ("model_type", "architectures", "hidden_act", "hidden_activation", "layer_types", "rope_local_base_freq")
    ropes = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    plain = {
        name: value for name, value in values.items() if name not in (*apart, *(ropes if rope is not None else ()))
    }
    base = decoder_config_from_hf(plain | (rope or {}) | {"model_type": "llama"}, source)
    try:
        made = parse_config(DecoderConfig, base.model_dump() | {"model_type": NATIVE} | changes, source)
    except ConfigError as error:
        raise InputError(str(error)) from None
    return of_known_type(made)


def of_known_type(made: DecoderConfig) -> DecoderConfig:
    """`made` of a type that others read, where one has it."""
    for kind in () if made.departures() else _PLAIN_TYPES if made.moe is None else _EXPERT_TYPES:
        candidate = made.model_copy(update={"model_type": kind})
        try:
            decoder_config_to_hf(candidate)
        except InputError:
            continue
        return candidate
    return made


def sliding_of(values: Values, source: str, pattern: Any) -> Values:
    """`layer_types` and `sliding_window` where every `pattern`-th layer sees all; 0: none does."""
    layers, window = count_of(values, "num_hidden_layers", source), values.get("sliding_window")
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 0:
        raise InputError(f"{source}: sliding_window_pattern must be a whole number (got {pattern!r})")
    types = values.get("layer_types")
    if types is None:
        full = [pattern > 0 and (layer + 1) % pattern == 0 for layer in range(layers)]
        types = ["full_attention" if each or window is None else "sliding_attention" for each in full]
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise InputError(f"{source}: layer_types must name sliding_attention or full_attention for {layers} layers")
    slides = "sliding_attention" in types
    return {"layer_types": types, "sliding_window": window if slides else None}


def unrotated_of(values: Values, source: str) -> Values:
    """`sliding_of` of EXAONE, by numbers or by letters, and `layer_rotary`: beside layers that slide those that see all
    do not rotate."""
    pattern = values.get("sliding_window_pattern", 4)
    layers = count_of(values, "num_hidden_layers", source)
    if pattern == "":
        raise InputError(f"{source}: sliding_window_pattern is empty; it names kinds of layers, such as LLLG")
    if values.get("layer_types") is None and isinstance(pattern, str):
        types = [pattern[layer % len(pattern)] == "L" and layer < layers - 1 for layer in range(layers)]
        values = values | {"layer_types": ["sliding_attention" if near else "full_attention" for near in types]}
    sliding = sliding_of(values, source, 0 if isinstance(pattern, str) else pattern)
    hybrid = values.get("sliding_window") is not None
    kinds = ["main" if kind == "sliding_attention" else "none" for kind in sliding["layer_types"]] if hybrid else None
    return sliding | {"layer_rotary": kinds}


def dense_of(values: Values, source: str, first: int) -> tuple[int, ...]:
    """Layers that keep a plain MLP where others have experts: as mlp_layer_types says, or the `first` ones."""
    layers = count_of(values, "num_hidden_layers", source)
    kinds = values.get("mlp_layer_types")
    if kinds is None:
        return tuple(range(min(first, layers)))
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise InputError(f"{source}: mlp_layer_types must name dense or sparse for {layers} layers")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")


def ropes_of(values: Values, source: str, main: float, local: float) -> tuple[Values, float]:
    """Rotary settings of full layers as Llama spells them, and the base of sliding layers."""
    rope = values.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    if "full_attention" in rope or "sliding_attention" in rope:
        sections = [rope.get(name) or {} for name in ("full_attention", "sliding_attention")]
        if not all(isinstance(section, dict) for section in sections):
            raise InputError(f"{source}: rope_parameters must have rotary settings for each kind of layer")
        whole, near = (dict(section) for section in sections)
        if near.get("rope_type", "default") != "default":
            raise InputError(f"{source}: rotary scaling of sliding layers is not supported")
        if near.get("partial_rotary_factor", 1.0) != 1.0:
            raise InputError(f"{source}: partial_rotary_factor of sliding layers is not supported")
        whole.setdefault("rope_theta", values.get("rope_theta", main))
        theta = near.get("rope_theta", values.get("rope_local_base_freq", local))
        return {"rope_parameters": whole}, number_of({"rope_theta": theta}, "rope_theta", source)
    theta = values.get("rope_theta", main)
    made = {"rope_theta": theta, "rope_scaling": values.get("rope_scaling"), "rope_parameters": rope or None}
    return made, number_of({"rope_local_base_freq": local} | values, "rope_local_base_freq", source)


def partial_of(values: Values, source: str, **changes: Any) -> tuple[DecoderConfig, int]:
    """The network of which the first dimensions of a head rotate, and how many."""
    rope = {name: values[name] for name in ("rope_theta", "rope_scaling", "rope_parameters") if name in values}
    sections = [dict(rope[name]) for name in ("rope_scaling", "rope_parameters") if isinstance(rope.get(name), dict)]
    share = values.get("partial_rotary_factor", 1.0)
    for section in sections:
        share = section.pop("partial_rotary_factor", share)
    merged: Values = {"rope_theta": rope.get("rope_theta", 10000.0)}
    for section in sections:
        merged |= section
    plain = {name: value for name, value in values.items() if name not in rope}
    whole = config_of(plain, source, {"rope_parameters": {"rope_theta": merged["rope_theta"]}}, **changes)
    rotary = int(whole.head_dim * number_of({"partial_rotary_factor": share}, "partial_rotary_factor", source))
    divisors = merged.get("short_factor")
    if isinstance(divisors, list) and len(divisors) != rotary // 2:
        raise InputError(f"{source}: short_factor has {len(divisors)} numbers for {rotary // 2} pairs of dimensions")
    if rotary == whole.head_dim:
        return config_of(plain, source, {"rope_parameters": merged}, **changes), 0
    if rotary < 2 or rotary % 2 or rotary > whole.head_dim:
        raise InputError(f"{source}: partial_rotary_factor {share} of {whole.head_dim} dimensions is no even number")
    return config_of(plain, source, {"rope_parameters": merged}, **changes, rotary_pairs=rotary // 2), rotary


def latent_of(values: Values, source: str, **changes: Any) -> DecoderConfig:
    """The network of one width whose keys and values come from one small vector, as DeepSeek-V3's do."""
    latent = latent_from_hf(values, "deepseek_v3", source)
    assert latent is not None  # such a type has it
    size = latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]
    heads = {"head_dim": size, "num_key_value_heads": values.get("num_attention_heads")}
    return config_of(values | heads, source, latent_attention=latent, **changes)


def number_of(values: Values, name: str, source: str) -> float:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST:
        raise InputError(f"{source}: {name} must be a positive number (got {value!r})")
    return float(value)


def count_of(values: Values, name: str, source: str, most: int = 10_000) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise InputError(f"{source}: {name} must be a positive whole number (got {value!r})")
    return value


def whole_of(values: Values, name: str, source: str) -> int:
    """A whole number that may be 0."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise InputError(f"{source}: {name} must be a whole number (got {value!r})")
    return value


def flag_of(values: Values, name: str, source: str) -> bool:
    value = values[name]
    if not isinstance(value, bool):
        raise InputError(f"{source}: {name} must be true or false (got {value!r})")
    return value
