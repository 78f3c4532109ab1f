"""What another program quantized becomes an artifact with the very same integers, where penjing has such a form.

Of 4 bits that is weight = code × scale + offset for groups of inputs that lie together, offset = −zero × scale, which
float32 holds exactly; where all zeros are in the middle no offsets are needed. Activations, which such folders leave in
16 bits, become bfloat16 (W4A16), or get 8 bits and a scale for each group (W4A8), for which there always are offsets.
Of 8 bits it is W8A8: symmetric, one scale a channel. Of three values, as BitNet has them, it is W8A8 too, stored in 4
bits where groups of inputs have a length that the kernels know (`kernels.stepped`), with steps of 1: the same products.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Any

import torch
from torch import Tensor

from penjing.core.artifact.decoder import quantization_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.foreign.bitnet import BitNet
from penjing.core.foreign.folder import FoldedForeignCheckpoint, ForeignCheckpoint
from penjing.core.foreign.layer import TERNARY, TERNARY_ZERO, Grouped, num_groups
from penjing.core.models.tensor_names import tensor_shapes
from penjing.core.runtime.schemes import quantized_modules
from penjing.kernels.cpu.packing import LARGEST_STEPPED_GROUP, LEAST_GROUP
from penjing.kernels.int4_linear import FLOATING, OFFSET, ActivationBits, pack_int4

EMBEDDING = "model.embed_tokens.weight"
_LINEAR = ("_proj.weight", ".mlp.gate.weight", ".shared_expert_gate.weight")  # the last two choose experts
_DTYPES = {"BF16": "bfloat16", "F16": "float16"}


class Kept:
    """The tensors and the quantization_config of the artifact that `checkpoint` becomes.

    Attributes:
        activation_bits: of what the 4-bit layers read.
        group: inputs of a group of the 4-bit layers, which divides the folder's own: scales are repeated.
        four, eight: how many layers have that many bits.
        three: how many have three values.
        dtype: of the embedding, which stays as it was stored, as `config.json` says it.
        reason: why the integers cannot be kept; None: they can.
    """

    def __init__(self, checkpoint: ForeignCheckpoint, activation_bits: ActivationBits | None = None) -> None:
        """Look at each layer, one in memory at a time.

        Args:
            activation_bits: None: 8 where the folder rounds activations, else 16.

        Raises:
            InputError: damaged.
        """
        self._checkpoint = checkpoint
        self.activation_bits: ActivationBits = activation_bits or (8 if _rounds(checkpoint) else FLOATING)
        self.reason = _reason(checkpoint)
        self._symmetric, self._eight, self.four, self.three, self.group = True, list[str](), 0, 0, 0
        self._layers = frozenset(checkpoint.layers())
        for name in sorted(self._layers) if self.reason is None else ():
            layer = checkpoint.layer(name)
            self.reason = self.reason or _reason_of_layer(name, layer)
            self._symmetric &= layer.symmetric()
            if layer.bits == 8:
                self._eight.append(name)
            elif layer.bits == TERNARY:
                self.three += 1
                self.group = gcd(self.group or LARGEST_STEPPED_GROUP, layer.code_NK.shape[1])
            else:
                self.four += 1
                self.group = gcd(self.group, _spacing(layer))
        self.eight = len(self._eight)
        self.dtype = _DTYPES.get(checkpoint.dtype(EMBEDDING), "float32")
        if self.three and activation_bits == FLOATING:
            raise ConfigError("activations=16: a network of three values was trained with activations of 8 bits")
        if self.reason is None and self.group % LEAST_GROUP and not self.three:
            self.reason = f"its groups begin every {self.group} inputs; multiples of {LEAST_GROUP} fit"

    def quantization(self) -> dict[str, Any]:
        """`quantization_config` of the artifact."""
        shapes = tensor_shapes(self._checkpoint.config)
        linear = {name.removesuffix(".weight") for name in shapes if name.endswith(_LINEAR)}
        keep = sorted((linear | {"lm_head"}) - self._layers)
        if self._in_steps:
            return quantization_config(keep, group=self.group, whole=True)
        if not self.four:
            return quantization_config(keep)
        bits = self.activation_bits
        return quantization_config(
            keep, group=self.group, eight=self._eight, offsets=self._offsets, activation_bits=bits
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of everything stored, one layer in memory at a time."""
        for name in tensor_shapes(self._checkpoint.config):
            module = name.removesuffix(".weight")
            if not name.endswith(".weight") or module not in self._layers:
                yield name, self._checkpoint.get(name)
                continue
            layer = self._checkpoint.layer(module)
            if layer.bits == 8 or (layer.bits == TERNARY and not self._in_steps):
                yield name, (layer.code_NK.to(torch.int16) - (1 << (layer.bits - 1))).to(torch.int8)
                yield f"{module}.weight_scale", layer.scale_NG
                continue
            if layer.bits == TERNARY:
                yield from self._stepped(module, layer)
                continue
            scale_NG, offset_NG = self._scales(layer)
            yield f"{module}.weight_packed", pack_int4(layer.code_NK.to(torch.int8) - OFFSET)
            yield f"{module}.weight_shape", torch.tensor(layer.code_NK.shape)
            yield f"{module}.weight_scale", scale_NG
            if self._offsets:
                yield f"{module}.weight_offset", offset_NG

    @property
    def _in_steps(self) -> bool:
        return self.three > 0 and self.group % LEAST_GROUP == 0

    def _stepped(self, module: str, layer: Grouped) -> Iterator[tuple[str, Tensor]]:
        outputs, inputs = layer.code_NK.shape
        step_NG = torch.ones(outputs, inputs // self.group, dtype=torch.int8)
        yield f"{module}.weight_packed", pack_int4(layer.code_NK.to(torch.int8) - TERNARY_ZERO)
        yield f"{module}.weight_shape", torch.tensor(layer.code_NK.shape)
        yield f"{module}.weight_scale", layer.scale_NG
        yield f"{module}.weight_step", step_NG
        yield f"{module}.weight_offset", -OFFSET * step_NG

    @property
    def _offsets(self) -> bool:
        return not (self._symmetric and self.activation_bits == FLOATING)

    def _scales(self, layer: Grouped) -> tuple[Tensor, Tensor]:
        """(N, K / group) scales and offsets; in their own type where every zero of the folder is the middle."""
        group_G = torch.arange(0, layer.code_NK.shape[1], self.group) // layer.size
        scale_NG = layer.scale_NG if self._symmetric else layer.scale_NG.to(torch.float32)
        offset_NG = scale_NG * -layer.zero_NG.to(scale_NG.dtype)
        return scale_NG[:, group_G].contiguous(), offset_NG[:, group_G].contiguous()


def _rounds(checkpoint: ForeignCheckpoint) -> bool:
    """Whether the program that made the folder rounds activations."""
    if isinstance(checkpoint.packing, BitNet):
        return True
    groups = (checkpoint.quantization or {}).get("config_groups") or {}
    return any(group.get("input_activations") is not None for group in groups.values())


def _reason(checkpoint: ForeignCheckpoint) -> str | None:
    """Why no integers of this network can be kept; None: it depends on its layers."""
    config, shapes = checkpoint.config, tensor_shapes(checkpoint.config)
    if (mixed := checkpoint.mixes()) is not None:
        return mixed
    for name in checkpoint.layers():
        if f"{name}.weight" not in shapes or not name.endswith(("_proj", "lm_head")):
            return f"{name} is no linear layer that runs in integers"
    if config.latent_attention is not None:
        return "it has latent attention"
    if "lm_head" in checkpoint.layers() and config.tie_word_embeddings:
        return "lm_head is quantized but tied to the embedding"
    return None


def _reason_of_layer(name: str, layer: Grouped) -> str | None:
    if layer.group_K is not None and not torch.equal(layer.group_K, _together(layer)):
        return f"the inputs of {name} are grouped in the order of how active they are (desc_act)"
    if layer.bits == 8 and (layer.scale_NG.shape[1] > 1 or not layer.symmetric()):
        return f"{name} has 8 bits and not one scale a channel around zero"
    return None


def _together(layer: Grouped) -> Tensor:
    return torch.arange(layer.code_NK.shape[1]) // layer.size


def _spacing(layer: Grouped) -> int:
    """Every so many inputs, at most, a group may begin; a last group that is short counts too."""
    inputs = layer.code_NK.shape[1]
    return inputs if num_groups(inputs, layer.size) == 1 else gcd(inputs, layer.size)


def said_of_integers(kept: Kept | None, checkpoint: ForeignCheckpoint, dtype: str) -> str:
    """What an import says of the integers; `kept` is None where floating weights were asked for."""
    name = checkpoint.packing.name
    if kept is None or kept.reason is not None:
        why = "" if kept is None else f", because {kept.reason}"
        return f"{name}: {len(checkpoint.modules)} layers are made {dtype}{why}; 'penjing compress' rounds them again"
    if kept.three:
        where = f"in 4 bits, steps of 1 in groups of {kept.group}" if kept.group % LEAST_GROUP == 0 else "in 8 bits"
        return (
            f"{name}: {kept.three} layers of three values keep them, {where}; activations will be rounded to 8 bits "
            "with a scale for each token, as they were in training"
        )
    four = f"{kept.four} layers of 4 bits keep their integers, in groups of {kept.group}" if kept.four else ""
    eight = f"{kept.eight} layers of 8 bits keep theirs, with a scale a channel" if kept.eight else ""
    said = f"{name}: {' and '.join(part for part in (four, eight) if part)}; "
    if not kept.four:
        return f"{said}activations will be rounded to 8 bits with a scale for each token"
    if kept.activation_bits != FLOATING:
        return f"{said}activations will be rounded to 8 bits with a scale for each group of 4-bit weights"
    rounded = ", those of layers of 8 bits to 8 bits with a scale for each token" if kept.eight else ""
    return f"{said}activations will be bfloat16{rounded} (--activations 8 rounds them to 8 bits, which is faster)"


def runs_as_it_is(checkpoint: ForeignCheckpoint) -> bool:
    """Whether penjing runs the folder without an import: its layers are W8A8 or W4A8 of compressed-tensors.

    One of W4A16 it runs too, but an import chooses whether its activations are rounded.
    """
    assert checkpoint.quantization is not None
    if isinstance(checkpoint, FoldedForeignCheckpoint):
        return False  # only an import folds it
    try:
        schemes = quantized_modules(checkpoint.quantization, checkpoint.modules)
        return bool(schemes) and all(scheme.activation_bits != FLOATING for scheme in schemes.values())
    except InputError:
        return False
