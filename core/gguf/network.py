"""The network of a GGUF file, by its metadata and the names of its tensors, and how the file holds that network."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penjing.core.errors import InputError
from penjing.core.folded.fold import Fold, of_known_type
from penjing.core.gguf.architecture import IN_LAYER, OUTSIDE, Architecture
from penjing.core.gguf.metadata import Metadata
from penjing.core.gguf.names import END_OF_TURN
from penjing.core.gguf.table import ARCHITECTURES, CAPS, SPELLED
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import NATIVE, decoder_config_to_hf
from penjing.core.models.tensor_names import check_layers

SUPPORTED_ARCHITECTURES = (*ARCHITECTURES, *SPELLED)
EMBEDDING, HEAD_WEIGHT, FINAL_SHIFT = "token_embd.weight", "output.weight", "output_norm.bias"
_GATING = ("softmax", "sigmoid")  # expert_gating_func from 1 on: how the router's outputs become scores
_SOFTMAX, _SIGMOID = 1, 2
_FACTORS = ("embedding_scale", "residual_scale", "attention.scale")
_BIASES = {"out": ("attn_output",), "mlp": ("ffn_gate", "ffn_up"), "qkv": ("attn_q", "attn_qkv")}


@dataclass(frozen=True)
class Factors:
    """What is multiplied apart from the weights: logits, embeddings, what layers add, and queries."""

    logits: float = 1.0
    embedding: float = 1.0
    residual: float = 1.0
    query: float = 1.0


class GgufNetwork(Metadata):
    """What a file says of its network.

    Attributes:
        path: the file.
        fields: metadata, key → value (numbers, text, lists).
        architecture: what llama.cpp computes of it.
        config: the network.
        fold: how the file holds it.

    Args:
        tensors: name → its shape, the fastest dimension first as `shape`, and of rotary divisors its `data`.

    Raises:
        InputError: of another architecture (named), or what it says is no network.
    """

    def __init__(self, path: Path, fields: dict[str, Any], tensors: Mapping[str, Any]) -> None:
        name = fields.get("general.architecture")
        if not isinstance(name, str) or name not in SUPPORTED_ARCHITECTURES:
            raise InputError(
                f"{path} has the architecture {name!r}, which is not supported; "
                f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        super().__init__(path, fields, name)
        self._tensors = tensors
        self.architecture = ARCHITECTURES[SPELLED.get(name, name)]
        self.config = self._read_config()
        here = self.architecture
        self.fold = fold_of(
            here,
            self.config,
            biases=frozenset(each for each in (*_BIASES, "head") if self._has_bias(each)),
            fused=any(name.endswith(".attn_qkv.weight") for name in tensors),
            tied=HEAD_WEIGHT not in tensors,
            factors=self._factors(),
        )

    def _read_config(self) -> DecoderConfig:
        here = self.architecture
        layers = self._number("block_count") - self._number("nextn_predict_layers", 0)
        heads = self._number("attention.head_count")
        check_layers(layers, str(self.path))
        hidden = self._number("embedding_length")
        head_dim = self._number("attention.key_length", hidden // max(heads, 1))
        if self._number("attention.value_length", head_dim) != head_dim:
            raise InputError(f"{self.path}: keys and values of different length are not supported")
        rotary = self._number("rope.dimension_count", head_dim)
        if rotary != head_dim and not (here.partial and 0 < rotary < head_dim):
            raise InputError(f"{self.path}: rotates {rotary} of {head_dim} elements a head; only all are supported")
        if odd := [each for each in (*_BIASES, "head") if self._has_bias(each) and each not in here.biases]:
            raise InputError(f"{self.path}: biases of {odd[0]} in a {self._architecture} network are not supported")
        tied = HEAD_WEIGHT not in self._tensors
        shift = "shift" in here.stored
        widths = self._widths(layers)
        uneven = len(set(widths)) > 1
        key_heads, attends = self._key_heads(layers, heads)
        values: dict[str, Any] = {
            "vocab_size": self._vocab_size(),
            "hidden_size": hidden,
            "intermediate_size": max(widths),
            "intermediate_sizes": widths if uneven else None,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": key_heads,
            "head_dim": head_dim,
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": self._eps(),
            "rope_theta": self._real("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(rotary, here.scalings, here.whole_pairs),
            "rotary_pairs": None if rotary == head_dim else rotary // 2,
            "tie_word_embeddings": tied and not (here.layer_norm and "norm" in here.stored),
            "attention_bias": shift or self._has_bias("qkv"),
            "attention_output_bias": self._has_bias("out"),
            "mlp_bias": shift or self._has_bias("mlp"),
            "head_bias": shift or self._has_bias("head"),
            "moe": self._experts(max(widths)),
            "bos_token_id": self.fields.get("tokenizer.ggml.bos_token_id"),
            "eos_token_ids": self._stops(),
            "pad_token_id": self.fields.get("tokenizer.ggml.padding_token_id"),
        }
        values |= dict(here.fields) | self._windows(layers) | self._caps()
        if here.maybe_normed:
            values["qk_norm"] = any(name.endswith(".attn_q_norm.weight") for name in self._tensors)
        for name, (field, usual) in here.flags.items():
            values[field] = bool(self._field(name, usual))
        if values.get("learned_positions"):
            values["layer_rotary"] = ["none"] * layers
        if not all(attends):
            values["layer_types"] = ["full_attention" if each else "short_conv" for each in attends]
            values["conv_taps"] = self._number("shortconv.l_cache")
        made = self._parse(DecoderConfig, values | {"model_type": NATIVE})
        return made if uneven else _named(made, self._kind(made), here.kind)

    def _factors(self) -> Factors:
        """Factors that the file has apart from its weights."""
        how = self.architecture.factors
        names = {"none": (), "logits": ("logit_scale",)}.get(how, ("logit_scale", *_FACTORS))
        said = {name: self._real(name, 0.0) or None for name in names}  # llama.cpp takes 0 as none
        logits = said.get("logit_scale") or 1.0
        scores = said.get("attention.scale")
        return Factors(
            logits=1 / logits if how == "all" else logits,
            embedding=said.get("embedding_scale") or 1.0,
            residual=said.get("residual_scale") or 1.0,
            query=1.0 if scores is None else scores * self.config.head_dim**0.5,
        )

    def _kind(self, config: DecoderConfig) -> str:
        kind = self.architecture.kind
        if kind != "llama":
            return kind
        return "mixtral" if config.moe is not None else "mistral" if config.sliding_window is not None else "llama"

    def _windows(self, layers: int) -> dict[str, Any]:
        """Windows of the layers, and what follows from them for their rotation."""
        here = self.architecture
        if here.rotates == "fourth":
            return {"layer_rotary": ["none" if (layer + 1) % 4 == 0 else "main" for layer in range(layers)]}
        said = self._number("attention.sliding_window", 0)
        if here.window == "none":
            if said:
                raise InputError(f"{self.path}: a sliding window for {self._architecture} is not supported")
            return {}
        if here.window == "ignored":
            return {"sliding_window": said or None}
        if here.window_layers not in (0, layers):
            return {}
        window = said or (here.usual_window if here.always_slides else 0)
        if not window:
            return {}
        slides = self._slides(layers, here.window)
        found: dict[str, Any] = {
            "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
            "sliding_window": window if any(slides) else None,
        }
        if here.rotates == "local":
            base = self._real("rope.freq_base", 10000.0)
            if here.local_base is not None:
                base = self._real("rope.freq_base_swa", here.local_base)
            found |= {"layer_rotary": ["local" if each else "main" for each in slides], "rope_local_theta": base}
        if here.rotates == "sliding":
            found["layer_rotary"] = ["main" if each else "none" for each in slides]
        return found

    def _slides(self, layers: int, usual: int) -> list[bool]:
        pattern = self._field("attention.sliding_window_pattern", usual)
        if not isinstance(pattern, list):
            every = self._number("attention.sliding_window_pattern", usual)
            return [every == 0 or layer % every < every - 1 for layer in range(layers)]
        if len(pattern) != layers:
            raise InputError(f"{self.path}: attention.sliding_window_pattern names {len(pattern)} of {layers} layers")
        return [bool(each) for each in pattern]

    def _caps(self) -> dict[str, Any]:
        caps = self.architecture.caps
        for name in CAPS:
            if name not in caps and (cap := self._real(name, 0.0)):
                raise InputError(f"{self.path}: {name}={cap} is not supported")
        if clamp := self._real("attention.clamp_kqv", 0.0):
            raise InputError(f"{self.path}: attention.clamp_kqv={clamp} is not supported")
        return {field: self._real(name, usual or 0.0) or None for name, (field, usual) in caps.items()}

    def _key_heads(self, layers: int, heads: int) -> tuple[int, list[bool]]:
        """Heads of keys, and which layers have them."""
        value = self._field("attention.head_count_kv", heads)
        if self.architecture.convolves and isinstance(value, list) and len(value) == layers and any(value):
            attends = [bool(each) for each in value]
            return self._one([each for each in value if each], "attention.head_count_kv"), attends
        return self._number("attention.head_count_kv", heads), [True] * layers

    def _experts(self, width: int) -> dict[str, Any] | None:
        """The fields of `MoEConfig`; None for a network without experts. How scores become weights is not in the file
        but in llama.cpp."""
        here = self.architecture
        if here.dense and not self._number("expert_count", 0):
            return None
        if here.experts is None:
            raise InputError(f"{self.path}: experts of {self._architecture} are not supported")
        gating = self._number("expert_gating_func", _SIGMOID if "gating" in here.routing else _SOFTMAX)
        known = _GATING if "gating" in here.routing else _GATING[:1]
        if not 0 < gating <= len(known):
            supported = " and ".join(f"{each} ({number})" for number, each in enumerate(known, 1))
            raise InputError(f"{self.path}: experts are chosen by function {gating}; supported: {supported}")
        values: dict[str, Any] = {
            "num_experts": self._number("expert_count"),
            "num_experts_per_tok": self._number("expert_used_count"),
            "moe_intermediate_size": self._number(here.expert_width, width if here.dense else None),
            "router_bias": self._has("biases for the choice of experts", ".exp_probs_b.bias", here.choice),
            "scoring_func": known[gating - 1],
            **here.experts,
        }
        if "norm" in here.routing:
            values["norm_topk_prob"] = bool(self._field("expert_weights_norm", False))
        if "scale" in here.routing:
            values["routed_scaling_factor"] = self._real("expert_weights_scale", 0.0) or 1.0
        if "lead" in here.routing:
            values["mlp_only_layers"] = list(range(self._number("leading_dense_block_count", 0)))
        if self._has("shared experts", "_shexp.weight", here.shared):
            many = self._number("expert_shared_count", 1) * values["moe_intermediate_size"]
            size = self._number("expert_shared_feed_forward_length", many)
            values |= {"shared_expert_intermediate_size": size, "shared_expert_gate": here.shared == "gated"}
        return values

    def _has(self, what: str, end: str, how: str) -> bool:
        """Whether tensors of such names are there, which the architecture "may" or "must" have."""
        found = any(name.endswith(end) for name in self._tensors)
        if found and how == "no":
            raise InputError(f"{self.path}: {what} of {self._architecture} are not supported")
        if not found and how == "must":
            raise InputError(f"{self.path} lacks {what}, which {self._architecture} has; get a complete file")
        return found

    def _widths(self, layers: int) -> list[int]:
        """Inner width of the MLP of each layer."""
        value = self._field("feed_forward_length")
        widths = value if isinstance(value, list) else [value] * layers
        if len(widths) != layers or not widths or not all(isinstance(width, int) for width in widths):
            raise InputError(f"{self.path}: feed_forward_length must be a whole number a layer (got {value!r})")
        return widths

    def _eps(self) -> float:
        # 1e-5 is stored as float32; its shortest decimal is what config.json said
        name = "attention.layer_norm_epsilon" if self.architecture.layer_norm else "attention.layer_norm_rms_epsilon"
        return float(str(np.float32(self._real(name))))

    def _vocab_size(self) -> int:
        embedding = self._tensors.get(EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise InputError(f"{self.path} has no token_embd.weight; it is not a complete language model")
        return int(embedding.shape[1])  # GGUF lists the fastest dimension first

    def _stops(self) -> tuple[int, ...]:
        """What the file names, and tokens that llama.cpp knows by their text: files of Gemma 3, and early ones of Llama
        3, name the end of a text alone and not that of a turn."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        ids = [self.fields.get(f"tokenizer.ggml.{key}") for key in keys]
        tokens = self.fields.get("tokenizer.ggml.tokens")
        ids += [
            number for number, token in enumerate(tokens if isinstance(tokens, list) else ()) if token in END_OF_TURN
        ]
        return tuple(dict.fromkeys(stop for stop in ids if stop is not None))

    def _has_bias(self, part: str) -> bool:
        if part == "head":
            return "output.bias" in self._tensors
        ends = tuple(f".{name}.bias" for name in _BIASES[part])
        return any(name.endswith(ends) for name in self._tensors)


def fold_of(
    here: Architecture,
    config: DecoderConfig,
    *,
    biases: Collection[str],
    fused: bool,
    tied: bool,
    factors: Factors | None = None,
) -> Fold:
    """How a file of this architecture holds `config`.

    Args:
        biases: which are there, of "qkv", "out", "mlp", "head".
        fused: whether queries, keys and values are one matrix.
        tied: whether the file has no LM head.
        factors: which the file has apart from its weights.
    """
    factors, width = factors or Factors(), config.hidden_size
    query, embedding = factors.query, factors.embedding
    if here.wide_queries and config.num_hidden_layers == here.wide_queries:
        query = (config.head_dim / (width // config.num_attention_heads)) ** 0.5
    if here.scaled:
        embedding *= width**0.5
    return Fold(
        config,
        dict(IN_LAYER) | dict(here.names),
        dict(OUTSIDE) | dict(here.outside),
        "blk.",
        fused=fused,
        fused_mlp=here.fused_mlp,
        embedding=embedding,
        final=factors.logits / (embedding if config.tie_word_embeddings else 1.0),
        query=query,
        residual=factors.residual,
        rotary=0 if config.rotary_pairs is None else 2 * config.rotary_pairs,
        interleaved=here.interleaved,
        centred=here.layer_norm,
        stored=here.stored | frozenset(biases),
        tied=here.layer_norm and tied and not config.tie_word_embeddings,
    )


def _named(made: DecoderConfig, kind: str, usual: str) -> DecoderConfig:
    """`made` as the type `kind` if it is one, else as another that has it."""
    if usual == NATIVE or made.departures():
        return of_known_type(made)
    candidate = made.model_copy(update={"model_type": kind})
    try:
        decoder_config_to_hf(candidate)
    except InputError:
        return of_known_type(made)
    return candidate
