"""A folder that another program quantized, opened like a checkpoint: its weights are made floating as they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penjing.core.checkpoint.decoder import Checkpoint
from penjing.core.errors import InputError
from penjing.core.folded.weights import FoldedCheckpoint
from penjing.core.foreign.awq import Awq
from penjing.core.foreign.bitnet import BitNet
from penjing.core.foreign.compressed import Compressed
from penjing.core.foreign.gptq import Gptq
from penjing.core.foreign.layer import Grouped, Packing, Shape
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import decoder_config_from_hf
from penjing.core.models.tensor_names import tensor_shapes

PACKINGS: dict[str, Callable[[dict[str, Any], str], Packing]] = {
    "awq": Awq,
    "gptq": Gptq,
    "bitnet": BitNet,
    "compressed-tensors": Compressed,
}


class ForeignCheckpoint(Checkpoint):
    """See the head of this file. Layers and their shapes are checked when it is opened, from headers alone.

    Attributes:
        packing: how it stores quantized layers.
        modules: name of each quantized layer → its (N, K).

    Raises:
        InputError: a method, bits or a layout that penjing does not read; tensors that do not fit each other.
    """

    def __init__(
        self, folder: Path, read_config: Callable[[dict[str, Any], str], DecoderConfig] = decoder_config_from_hf
    ) -> None:
        super().__init__(folder, read_config)
        assert self.quantization is not None  # the caller has looked
        path = folder / "config.json"
        method = self.quantization.get("quant_method")
        if not isinstance(method, str) or method not in PACKINGS:
            known = ", ".join(PACKINGS)
            raise InputError(f"{path}: quant_method is {method!r}; penjing reads {known}. Import the original")
        self.packing = PACKINGS[method](self.quantization, f"{path}: quantization_config")
        names = self.packing.modules(self.tensor_names)
        if not names:
            raise InputError(f"{path} says {self.packing.name}, but no tensor is quantized; get the folder again")
        try:
            self.modules: dict[str, Shape] = {name: self.packing.check(name, self) for name in names}
        except InputError as error:
            raise InputError(f"{folder}: {error}; get the folder again") from None
        self.tensor_names = self._floating_names()

    def get(self, name: str) -> torch.Tensor:
        """See `Checkpoint`; float32 where it is quantized."""
        module = self._module(name)
        return super().get(name) if module is None else self.grouped(module).dequantize()

    def shape(self, name: str) -> Shape:
        """See `Checkpoint`."""
        module = self._module(name)
        return super().shape(name) if module is None else self.modules[module]

    def dtype(self, name: str) -> str:
        """See `Checkpoint`."""
        return super().dtype(name) if self._module(name) is None else "F32"

    def grouped(self, module: str) -> Grouped:
        """The quantized layer `module` with its own integers.

        Raises:
            InputError: values that no writer of its layout makes.
        """
        try:
            return self.packing.read(module, self)
        except InputError as error:
            raise InputError(f"{self.folder}: {error}; get the folder again") from None

    def layers(self) -> tuple[str, ...]:
        """Our names of the quantized layers."""
        return tuple(self.modules)

    def layer(self, name: str) -> Grouped:
        """The layer that we call `name`, with the folder's integers; see `grouped`."""
        return self.grouped(name)

    def mixes(self) -> str | None:
        """Why integers cannot stay, whatever the layers; None: nothing hinders them."""
        return None

    def stored(self, name: str) -> torch.Tensor:
        """See `layer.Folder`."""
        return super().get(name)

    def stored_shape(self, name: str) -> Shape:
        """See `layer.Folder`."""
        return super().shape(name)

    def stored_dtype(self, name: str) -> str:
        """See `layer.Folder`."""
        return super().dtype(name)

    def _module(self, name: str) -> str | None:
        module = name.removesuffix(".weight")
        return module if name.endswith(".weight") and module in self.modules else None

    def _floating_names(self) -> tuple[str, ...]:
        """Our names of what is stored. AutoGPTQ gives each layer a bias; where a bias is zero it is left out."""
        found: dict[str, None] = {}
        for name in self.tensor_names:
            module, _, leaf = name.rpartition(".")
            if module in self.modules and leaf == "bias" and not self._has_bias(module):
                if self.stored(name).any():
                    raise InputError(f"{self.folder}: {name} is not zero, and config.json knows no such bias")
            elif module in self.modules and leaf in (*self.packing.suffixes, "weight"):
                found[f"{module}.weight"] = None
            elif leaf not in self.packing.suffixes:
                found[name] = None
        return tuple(found)

    def _has_bias(self, module: str) -> bool:
        config, leaf = self.config, module.rpartition(".")[2]
        if ".conv." in module:
            return config.conv_bias
        if leaf in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
            return config.attention_bias
        return config.attention_output_bias if leaf in ("o_proj", "dense") else config.mlp_bias


class FoldedForeignCheckpoint(FoldedCheckpoint, ForeignCheckpoint):
    """Of a family whose factors go into its weights. Integers stay where these only move rows and multiply them: then
    zeros move along, and scales are multiplied. Else weights are made floating first, then folded."""

    def layers(self) -> tuple[str, ...]:
        """See `ForeignCheckpoint`."""
        linear = [name for name in tensor_shapes(self.config) if name.endswith(".weight")]
        there = {name.removesuffix(".weight"): self._placement.place(name)[0] for name in linear}
        return tuple(ours for ours, theirs in there.items() if theirs.removesuffix(".weight") in self.modules)

    def layer(self, name: str) -> Grouped:
        """See `ForeignCheckpoint`; scales are float32 where they are multiplied."""
        theirs, rows = self._placement.place(f"{name}.weight")
        found = self.grouped(theirs.removesuffix(".weight"))
        order, factor = self._placement.arranged(f"{name}.weight")

        def own(each: torch.Tensor) -> torch.Tensor:
            mine = each if rows is None else rows.of(each)
            return mine if order is None else mine[order]

        scale_NG = own(found.scale_NG)
        if factor is not None:
            scale_NG = (scale_NG.to(torch.float64) * factor.view(-1, 1)).to(torch.float32)
        return replace(found, code_NK=own(found.code_NK), zero_NG=own(found.zero_NG), scale_NG=scale_NG)

    def mixes(self) -> str | None:
        """See `ForeignCheckpoint`."""
        if self._fold.heads or self._fold.layer_heads:
            return "what heads of some layers lack is added to them"
        return "means of its norms go into its weights" if self._fold.centred else None
