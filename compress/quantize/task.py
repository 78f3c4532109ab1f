"""A task of train's loop whose network is quantized while it learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from penjing.compress.distill.task import WrappedTask
from penjing.compress.quantize.place_resnet import apply_quantization, freeze_statistics, set_mode
from penjing.compress.quantize.prepare import prepare
from penjing.compress.quantize.targets import ClassifierSettings, TargetName
from penjing.compress.samples.data import ImageData
from penjing.core.checkpoint.classifier import load_classifier
from penjing.core.models.resnet import ResNet
from penjing.train.families.base import Task
from penjing.train.processes.world import World


class QuantizedTask(WrappedTask):
    """`task`, an image classifier's, learnt with rounded weights and activations; exported with the quantizers' ranges
    beside the weights.

    Args:
        source: the checkpoint that the network begins with.
        data: what its ranges are calibrated on.
        freeze_at: the step after which batch norms keep their statistics.
    """

    def __init__(
        self,
        task: Task,
        source: Path,
        target: TargetName,
        settings: ClassifierSettings,
        data: ImageData,
        freeze_at: int,
    ) -> None:
        super().__init__(task)
        self._source, self._data = source, data
        self._target: TargetName = target
        self._settings = settings
        self._freeze_at = freeze_at

    def build_model(self) -> nn.Module:
        """See `Task`; every quantizer is on."""
        model = super().build_model()
        assert isinstance(model, ResNet)
        set_mode(apply_quantization(model, self._target, self._settings), "on")
        return model

    def initialize(self, model: nn.Module) -> None:
        """See `Task`: the weights of the checkpoint, and calibrated ranges."""
        assert isinstance(model, ResNet)
        prepare(model, load_classifier(self._source)[0], self._settings, self._data)

    def after_update(self, model: nn.Module, world: World) -> tuple[Callable[[int], None], ...]:
        """See `Task`; statistics are frozen once, late, so that the rest of the run sees the norm as it is folded."""

        def freeze(step: int) -> None:
            if step == self._freeze_at:
                freeze_statistics(model)

        return (*super().after_update(model, world), freeze)
