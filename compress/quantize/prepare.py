"""A quantized network gets the weights of a floating one, and everything that is found before any training."""

from __future__ import annotations

import torch

from penjing.compress.quantize.bias_correction import correct_biases
from penjing.compress.quantize.equalize import equalize
from penjing.compress.quantize.place_resnet import calibrate
from penjing.compress.quantize.targets import ClassifierSettings
from penjing.compress.samples.data import ImageData
from penjing.core.models.resnet import ResNet


@torch.no_grad()
def prepare(model: ResNet, floating: ResNet, settings: ClassifierSettings, data: ImageData) -> None:
    """Fill `model`, to which `apply_quantization` was done, from `floating`: equalised if the settings say so,
    calibrated, its biases corrected if they say so.

    Args:
        floating: in evaluation mode; equalised in place, which leaves its answers as they are.

    Raises:
        InputError: a weight or an activation is not finite, or the data do not fit.
    """
    if settings.equalize:
        equalize(floating, data.inputs())
    unknown = model.load_state_dict(floating.state_dict(), strict=False).unexpected_keys
    assert not unknown, f"the quantized network lacks {unknown}"
    calibrate(model, data.inputs())
    if settings.correct_bias:
        was_training = model.training
        correct_biases(model.eval(), floating, data.inputs())
        model.train(was_training)
