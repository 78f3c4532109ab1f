"""A decoder's checkpoint as what pruning takes: MLP channels, key-value groups, the hidden width, whole layers.

Weights are read one tensor at a time and written as they are cut, so that the model is in memory only where data runs
through it. Key-value groups and hidden width leave every layer alike: the cache has one shape. Where the widths of the
MLPs differ, the result is of type "penjing" with `intermediate_sizes`; else it is a plain Hugging Face model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penjing.compress.decoder.check import check_finite, check_model, refuse_experts
from penjing.compress.decoder.stream import refuse_tokens
from penjing.compress.measure.skeleton import BATCH, TOKENS
from penjing.compress.prune.graph import Group, Place
from penjing.compress.prune.ranking import Choice
from penjing.compress.prune.subject import Part, Shapes
from penjing.compress.prune.surgery import Cut
from penjing.core.checkpoint.decoder import open_checkpoint, save_checkpoint
from penjing.core.errors import ConfigError, InputError
from penjing.core.manifest import verify, write_manifest
from penjing.core.memory import release_unused
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.models.hf_config import NATIVE
from penjing.core.models.rope import inverse_frequencies
from penjing.core.models.tensor_names import tensor_shapes
from penjing.core.progress import Progress

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
# The place that tells a part, inside a layer.
_MARKS: dict[str, tuple[str, int]] = {
    "ffn": ("mlp.gate_proj.weight", 0),
    "heads": ("self_attn.k_proj.weight", 0),
    "hidden": (EMBEDDING, 1),
}


class DecoderSubject:
    """See `Subject`.

    Args:
        parts: which of "ffn", "heads" and "hidden" lose units.
        dropped: layers that leave as a whole, by number from 0.

    Raises:
        ConfigError: `dropped` names a layer that is not there, or all.
        InputError: the folder is no whole checkpoint of a plain decoder, or holds NaN; names the tensor.
    """

    unit: str = "token"
    inputs = BATCH * TOKENS
    config: DecoderConfig
    """Of `model`."""

    def __init__(self, folder: Path, parts: Sequence[str], dropped: Sequence[int], progress: Progress) -> None:
        self.folder, self._parts, self.dropped = folder, parts, tuple(dropped)
        self.kept_whole: dict[str, str] = {}
        self._checkpoint = open_checkpoint(folder)
        check_model(self._checkpoint)
        self._stored_names = frozenset(self._checkpoint.tensor_names)
        refuse_experts(self._checkpoint.config, folder, "pruning")
        refuse_tokens(self._checkpoint.config, folder, "pruning")
        if self._checkpoint.manifest is not None:
            verify(folder)
        check_finite(self._checkpoint, progress)
        whole = self._checkpoint.config
        self._kept = kept_layers(whole, dropped)
        self.config = _without_layers(whole, self._kept)
        if "heads" in parts and any(whole.layer_type(layer) == "lsh_attention" for layer in self._kept):
            raise InputError(
                f"{folder} has lsh_attention, whose hashing is drawn for its heads: leave 'heads' out of parts"
            )
        if "heads" in parts and self.config.attention_sinks:
            raise InputError(f"{folder} has attention_sinks, a number of each head: leave 'heads' out of parts")
        if "hidden" in parts and self.config.conv_taps:
            raise InputError(
                f"{folder} has short convolutions, which are as wide as the network: leave 'hidden' out of parts"
            )
        with torch.device("meta"):
            self.dense: nn.Module = self.build(whole)
            # Windows decide which tokens meet, not which channels: full attention has all the couplings. A soft cap
            # changes each score by itself.
            plain: dict[str, Any] = {
                "layer_types": None,
                "sliding_window": None,
                "sliding_windows": None,
                "attention_cap": None,
            }
            if self.config.conv_taps:
                kinds = map(self.config.is_conv, range(self.config.num_hidden_layers))
                plain["layer_types"] = tuple("short_conv" if conv else "full_attention" for conv in kinds)
            self.model: nn.Module = self.build(self.config.model_copy(update=plain))
            self.example = (torch.zeros(BATCH, TOKENS, dtype=torch.int64),)

    def weights(self, name: str) -> Tensor | None:
        """See `Subject`; read now, from a file that is opened anew: mapped pages count as memory."""
        return open_checkpoint(self.folder).get(self._stored(name))

    def network(self) -> nn.Module:
        """See `Subject`."""
        release_unused()  # what the analysis held: 0.3 of SmolLM2-135M
        with torch.device("meta"):
            model = self.build(self.config)
        for name, _ in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            value = self.weights(name)
            assert value is not None
            setattr(model.get_submodule(owner), leaf, nn.Parameter(value.to(torch.float32, copy=True)))
        assert isinstance(model, Decoder)
        model.tie_weights()
        model.model.inverse_frequency = inverse_frequencies(self.config)
        return model

    def parts(self, groups: Sequence[Group]) -> dict[Part, list[Group]]:
        """See `Subject`.

        Raises:
            InputError: a part has nothing that can leave.
        """
        found: dict[Part, list[Group]] = {}
        for part in self._parts:
            members = [group for group in groups if _is(part, group)]
            if not members:
                why = "there is one key-value head, or it is protected" if part == "heads" else "it is protected"
                raise InputError(f"{self.folder}: nothing of {part!r} can leave: {why}; leave it out of parts")
            found[part] = members  # pyright: ignore[reportArgumentType]
        return found

    def config_of(self, shapes: Shapes, choice: Choice) -> DecoderConfig:
        """See `Subject`."""
        config, layers = self.config, range(self.config.num_hidden_layers)
        hidden = shapes[EMBEDDING][1]
        kv_heads = shapes[f"model.layers.{config.attention_layers[0]}.self_attn.k_proj.weight"][0] // config.head_dim
        inner = tuple(shapes[f"model.layers.{layer}.mlp.gate_proj.weight"][0] for layer in layers)
        even = len(set(inner)) == 1
        changed = {
            "hidden_size": hidden,
            "num_key_value_heads": kv_heads,
            "num_attention_heads": kv_heads * (config.num_attention_heads // config.num_key_value_heads),
            "intermediate_size": max(inner),
            "intermediate_sizes": None if even else inner,
            "model_type": config.model_type if even else NATIVE,
            # With the norms' weights scaled alike (`write`), a norm over fewer channels is what it was over all with
            # the others at zero.
            "rms_norm_eps": config.rms_norm_eps * config.hidden_size / hidden,
        }
        return DecoderConfig.model_validate(config.model_dump() | changed)

    def build(self, config: DecoderConfig) -> nn.Module:
        """See `Subject`."""
        # .to: a buffer is computed on the CPU whatever the default device is
        return Decoder(config).to(torch.get_default_device()).eval()

    def item_bytes(self, name: str) -> int:
        """See `Subject`; all layers are taken to be stored as the first that has such a tensor."""
        if (inside := re.fullmatch(r"model\.layers\.\d+\.(.+)", name)) is not None:
            layers = range(self._checkpoint.config.num_hidden_layers)
            names = (f"model.layers.{layer}.{inside[1]}" for layer in layers)
            name = next(each for each in names if each in self._stored_names)
        return getattr(torch, DTYPES[self._checkpoint.dtype(name)]).itemsize

    def write(self, partial: Path, config: Any, cuts: Mapping[str, Cut], created_by: dict[str, Any]) -> None:
        """See `Subject`; each tensor stays in its stored type."""
        dtype = DTYPES[self._checkpoint.dtype(EMBEDDING)]
        save_checkpoint(partial, config, self.smaller(config, cuts), tokenizer_from=self.folder, dtype=dtype)
        write_manifest(partial, "checkpoint", created_by)

    def smaller(self, config: DecoderConfig, cuts: Mapping[str, Cut]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the decoder that is left."""
        whole = self.config
        gain = math.sqrt(whole.hidden_size / config.hidden_size)
        # A norm over all heads, or over an MLP's units, counts those that left as zeros, as the norms over the hidden
        # width do. Its epsilon stays as it is, because the network has one for all norms.
        heads_gain = math.sqrt(whole.num_key_value_heads / config.num_key_value_heads)
        over_heads = ("attn_sub_norm.weight",)
        over_heads += ("q_norm.weight", "k_norm.weight") if whole.qk_norm_over == "all" else ()
        for name in tensor_shapes(config):
            tensor = self.weights(name)
            assert tensor is not None
            tensor = cuts[name].of(tensor) if name in cuts else tensor
            over_hidden = name.endswith(("layernorm.weight", "model.norm.weight", "output_norm.weight"))
            factor = gain if over_hidden else heads_gain if name.endswith(over_heads) else 1.0
            if name.endswith("ffn_sub_norm.weight"):
                layer = int(name.split(".")[2])
                factor = math.sqrt(whole.ffn_size(layer) / config.ffn_size(layer))
            yield name, tensor * factor if factor != 1 else tensor

    def _stored(self, name: str) -> str:
        """The name in the checkpoint of a tensor of `model`."""
        if name == HEAD and self.config.tie_word_embeddings:
            return EMBEDDING
        prefix, layers, rest = name.partition("model.layers.")
        if prefix or not layers:
            return name
        number, _, leaf = rest.partition(".")
        return f"{layers}{self._kept[int(number)]}.{leaf}"


def kept_layers(config: DecoderConfig, dropped: Sequence[int]) -> list[int]:
    """The layers that stay.

    Raises:
        ConfigError: a layer that is not there, one twice, or all of them.
    """
    count = config.num_hidden_layers
    if odd := [layer for layer in dropped if layer not in range(count)]:
        raise ConfigError(f"layers: {odd[0]} is none of the model's layers 0 … {count - 1}")
    if len(set(dropped)) != len(dropped) or len(dropped) >= count:
        raise ConfigError(f"layers={list(dropped)}: name each once, and leave at least one of the {count}")
    return [layer for layer in range(count) if layer not in dropped]


def _without_layers(config: DecoderConfig, kept: list[int]) -> DecoderConfig:
    types = [config.layer_type(layer) for layer in kept]
    if set(types) == {"short_conv"}:
        raise ConfigError("layers: none with attention stays, only short convolutions; drop others")
    windows = [config.layer_window(layer) for layer in kept]
    changed: dict[str, Any] = {"num_hidden_layers": len(kept)}
    if config.layer_types is not None:
        changed |= {"layer_types": types, "conv_taps": config.conv_taps if "short_conv" in types else 0}
        changed["sliding_window"] = max((each for each in windows if each is not None), default=None)
        if config.sliding_windows is not None:
            changed["sliding_windows"] = [each or 0 for each in windows] if changed["sliding_window"] else None
    if config.layer_rotary is not None:
        changed["layer_rotary"] = [config.layer_rotary[layer] for layer in kept]
    if config.intermediate_sizes is not None:
        inner = [config.intermediate_sizes[layer] for layer in kept]
        changed |= {"intermediate_sizes": inner, "intermediate_size": max(inner)}
    return DecoderConfig.model_validate(config.model_dump() | changed)


def _is(part: str, group: Group) -> bool:
    tensor, dim = _MARKS[part]
    return any(place.dim == dim and _inside_layer(place) == tensor for place in group.places)


def _inside_layer(place: Place) -> str:
    return place.tensor.split(".", 3)[-1] if place.tensor.startswith("model.layers.") else place.tensor
