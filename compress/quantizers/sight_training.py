"""A decoder that sees learns while it is rounded: its decoder, its vision transformer and its projection with the
rounding of the runtime, from conversations about images and from whoever answers them in floating point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penjing.compress.decoder.qat import apply_rounding, begin_all, rounded_layers
from penjing.compress.decoder.weights import QuantizedWeight
from penjing.compress.distill.task import WrappedTask
from penjing.compress.quantizers.decoder import HEAD_MODULE, RoundedDecoder
from penjing.compress.sight.rounding import RoundedSight
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.sight import save_sight
from penjing.core.manifest import write_manifest
from penjing.core.runtime.quantized import Int8Linear
from penjing.core.runtime.schemes import INT8, INT8_ABOVE
from penjing.core.vision.sight import Sight, is_above
from penjing.core.vision.vision_language import VisionLanguage
from penjing.train.families.base import Task

DECODER = "decoder."


class RoundedSightTask(WrappedTask):
    """`task`, of a decoder that sees, learnt with rounded weights and activations; its export is an artifact without
    records.

    Args:
        decoder: whose transformed and calibrated forms training begins with.
        sight: what the eyes begin with, in the basis of that decoder.
        eyes: the same in INT8; None: they learn, and stay, in floating point.
    """

    def __init__(self, task: Task, decoder: RoundedDecoder, sight: Sight, eyes: RoundedSight | None) -> None:
        super().__init__(task)
        self._decoder, self._sight, self._eyes = decoder, sight, eyes
        tensors = {} if eyes is None else eyes.tensors
        self._seeing = [
            name.removesuffix("_scale").removesuffix(".weight") for name in tensors if name.endswith("_scale")
        ]

    def build_model(self) -> nn.Module:
        """See `Task`."""
        model = self._plain()
        self._decoder.part(model.decoder)
        schemes = {DECODER + name: scheme for name, scheme in self._decoder.schemes.items()}
        schemes |= {name: INT8_ABOVE if is_above(name) else INT8 for name in self._seeing}
        apply_rounding(model, schemes, {DECODER + name for name in self._decoder.fixed})
        self._decoder.freeze(model.decoder)
        return model

    @torch.no_grad()
    def initialize(self, model: nn.Module) -> None:
        """See `Task`: rounded, the network is what was calibrated."""
        assert isinstance(model, VisionLanguage)
        plain, floating = self._plain(), open_checkpoint(self._decoder.floating)
        for name, parameter in plain.decoder.named_parameters():
            parameter.copy_(floating.get(name))
        state = self._sight.state_dict()
        if self._eyes is not None:
            biases = {name: tensor for name, tensor in self._eyes.tensors.items() if name.endswith(".bias")}
            state = self._eyes.sight.state_dict() | biases | self._eyes.floating
        Sight.of(plain).load_state_dict(state)
        begin_all(model, plain, self._stored, {DECODER + HEAD_MODULE: self._decoder.head_smoothing()})
        self._decoder.begin_tables(model.decoder)

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        """See `Task`."""
        assert isinstance(model, VisionLanguage)
        self._decoder.save(folder, model.decoder)
        integers = dict[str, Tensor]()
        sight = Sight.of(model.cpu())
        for name, layer in rounded_layers(sight).items():
            quantized, bias_N = layer.quantized(), None if layer.bias is None else layer.bias.detach()
            assert isinstance(quantized, QuantizedWeight)
            integers |= {f"{name}.weight": quantized.weight_NK, f"{name}.weight_scale": quantized.scale_N1}
            if bias_N is not None:
                integers[f"{name}.bias"] = bias_N
            sight.set_submodule(name, Int8Linear(quantized.weight_NK, quantized.scale_N1, bias_N, is_above(name)))
        save_sight(folder, sight, integers or None)
        write_manifest(folder, "artifact", created_by)

    def _plain(self) -> VisionLanguage:
        model = super().build_model()
        assert isinstance(model, VisionLanguage)
        config = open_checkpoint(self._decoder.floating).config  # rotated, it may have a head of its own
        return VisionLanguage(model.config.model_copy(update={"decoder": config}))

    def _stored(self, name: str) -> Tensor:
        if name.startswith(DECODER):
            return self._decoder.stored(name.removeprefix(DECODER))
        assert self._eyes is not None, "nothing else is rounded"
        return self._eyes.tensors[name]
