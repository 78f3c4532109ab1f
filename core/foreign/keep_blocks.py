"""Layers of a GGUF file become an artifact with the very same integers, where penjing has such a form.

Q4_0, Q4_1 and Q4_K are weights of 4 bits in groups of 32 inputs with offsets. Q8_0 is W8A8 where all blocks of a row
have one scale, as in files that penjing wrote. Everything else, Q5_K and Q6_K among it, becomes floating, and so does
the embedding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from penjing.core.artifact.decoder import quantization_config
from penjing.core.checkpoint.dtypes import DTYPES
from penjing.core.errors import InputError
from penjing.core.foreign.gguf_blocks import GROUP, MIDDLE, BlockWeight, read_blocks
from penjing.core.models.config import DecoderConfig
from penjing.core.models.tensor_names import tensor_shapes
from penjing.kernels.int4_linear import FLOATING, ActivationBits, pack_int4

EMBEDDING = "model.embed_tokens"


class File(Protocol):
    """A GGUF file, its tensors under the names that they have in the model."""

    @property
    def config(self) -> DecoderConfig: ...

    def get(self, name: str) -> Tensor: ...

    def kind(self, name: str) -> str: ...

    def is_whole(self, name: str) -> bool: ...

    def rows(self, name: str) -> Tensor: ...


class KeptBlocks:
    """The tensors and the quantization_config of the artifact that `file` becomes.

    Attributes:
        four, eight: the layers that keep their integers, by their bits.
        dtype: of what becomes floating, as `config.json` says it.
        reason: why no integers are kept; None: some are.
    """

    def __init__(self, file: File, dtype: str, activation_bits: ActivationBits = 8) -> None:
        """Look at each layer, one in memory at a time.

        Args:
            activation_bits: of what the 4-bit layers read; 8, as llama.cpp has them.

        Raises:
            InputError: scales that are no numbers.
        """
        self._file, self.dtype = file, dtype
        self._activation_bits: ActivationBits = activation_bits
        self.four, self.eight = list[str](), list[str]()
        shapes = tensor_shapes(file.config)
        linear = [name.removesuffix(".weight") for name in shapes if name.endswith("_proj.weight")]
        self._linear = linear + (["lm_head"] if "lm_head.weight" in shapes else [])
        self.reason = None
        if file.config.moe is not None or file.config.latent_attention is not None:
            self.reason = "it has experts or latent attention"
            return
        for module in self._linear:
            layer = self._layer(module)
            if layer is not None:
                (self.eight if layer.offset_NG is None else self.four).append(module)
        if not self.four and not self.eight:
            self.reason = "no layer is in Q4_0, Q4_1 or Q4_K, nor in Q8_0 with one scale a row"

    def quantization(self) -> dict[str, Any]:
        """`quantization_config` of the artifact."""
        keep = sorted({*self._linear, "lm_head"} - set(self.four) - set(self.eight))
        if not self.four:
            return quantization_config(keep)
        return quantization_config(
            keep, group=GROUP, eight=self.eight, offsets=True, activation_bits=self._activation_bits
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of everything stored, one layer in memory at a time."""
        kept = {*self.four, *self.eight}
        for name in tensor_shapes(self._file.config):
            module = name.removesuffix(".weight")
            layer = self._layer(module) if name.endswith(".weight") and module in kept else None
            if layer is None:
                yield name, self._file.get(name).to(DTYPES[self.dtype])
            elif layer.offset_NG is None:
                yield name, layer.code_NK
                yield f"{module}.weight_scale", layer.scale_NG[:, :1].to(torch.float32)
            else:
                yield f"{module}.weight_packed", pack_int4(layer.code_NK.to(torch.int8) - MIDDLE)
                yield f"{module}.weight_shape", torch.tensor(layer.code_NK.shape)
                yield f"{module}.weight_scale", layer.scale_NG
                yield f"{module}.weight_offset", layer.offset_NG

    def said(self) -> str:
        """What an import says of the integers."""
        if self.reason is not None:
            return (
                f"GGUF: all layers are made {self.dtype}, because {self.reason}; 'penjing compress' rounds them again"
            )
        parts: list[str] = []
        if self.four:
            parts.append(f"{len(self.four)} layers of 4 bits ({self._kinds(self.four)}) keep their integers")
        if self.eight:
            parts.append(f"{len(self.eight)} layers in Q8_0 keep theirs, with a scale a channel")
        floating = [name for name in self._linear if name not in {*self.four, *self.eight}]
        if floating:
            parts.append(f"{len(floating)} layers ({self._kinds(floating)}) are made {self.dtype}")
        parts.append(f"the embedding ({self._kinds([EMBEDDING])}) is made {self.dtype}")
        if self.four and self._activation_bits == FLOATING:
            return f"GGUF: {', '.join(parts)}; activations beside 4 bits will be bfloat16"
        where = "group of 32 inputs" if self.four else "token"
        return f"GGUF: {', '.join(parts)}; activations will be rounded to 8 bits with a scale for each {where}"

    def _kinds(self, modules: list[str]) -> str:
        counts = Counter(self._file.kind(f"{module}.weight") for module in modules)
        return ", ".join(kind for kind, _ in counts.most_common())

    def _layer(self, module: str) -> BlockWeight | None:
        """The layer's blocks; None where its integers have no place in an artifact."""
        name = f"{module}.weight"
        if not self._file.kind(name).startswith("Q") or not self._file.is_whole(name):
            return None
        layer = read_blocks(self._file.rows(name), self._file.kind(name))
        if layer is None:
            return None
        if not layer.finite():
            raise InputError(f"{name} has scales that are NaN or infinite; get the file again")
        if layer.offset_NG is None and not _one_scale(layer):
            return None
        return layer


def _one_scale(layer: BlockWeight) -> bool:
    """Whether each row of 8-bit integers has one positive scale, and no integer that W8A8 has not."""
    same = torch.equal(layer.scale_NG, layer.scale_NG[:, :1].expand_as(layer.scale_NG))
    return same and bool((layer.scale_NG > 0).all()) and bool((layer.code_NK > -128).all())
