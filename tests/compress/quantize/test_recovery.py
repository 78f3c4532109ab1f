"""Where rounding loses visibly, training with rounded weights and activations wins back most of it.

Three bits, on a network that tells noisy textures apart; judged on images that neither calibration nor training saw.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.compress.quantize.place_resnet import (
    activation_quantizers,
    apply_quantization,
    calibrate,
    freeze_statistics,
    layers,
)
from penjing.compress.quantize.targets import ClassifierSettings
from penjing.compress.rounding.formats import SignedInteger, UnsignedInteger
from penjing.compress.rounding.observers import Method
from penjing.compress.samples.data import ImageData
from penjing.core.models.resnet import ResNet
from tests.compress.quantize.folders import MEAN, STD, image_set, trained_resnet

STEPS, BATCH = 40, 64


def three_bits(observer: Method, images: Tensor) -> ResNet:
    settings = ClassifierSettings(observer=observer, learn_activations=True)
    model = apply_quantization(trained_resnet(), "onnxruntime-cpu", settings)
    for _, layer in layers(model):
        assert layer.weight_quantizer is not None
        layer.weight_quantizer.format = SignedInteger("int8", -3.0, 3.0)
    for quantizer in activation_quantizers(model):
        quantizer.format = UnsignedInteger(high=7.0)
    calibrate(model, [(images,)])
    return model.eval()


@torch.no_grad()
def divergence(model: ResNet, images: Tensor) -> float:
    """Nats an image from the floating network's answers."""
    wanted = trained_resnet()(images).log_softmax(1)
    return float(F.kl_div(model(images).log_softmax(1), wanted, log_target=True, reduction="batchmean"))


def normalised(count: int, seed: int) -> Tensor:
    data = ImageData(image_set(count, seed=seed), (MEAN,), (STD,), count)
    return next(data.inputs())[0]


def test_training_recovers_what_three_bits_lose() -> None:
    images, unseen = normalised(512, seed=3), normalised(256, seed=9)
    calibrated = min(divergence(three_bits(method, images), unseen) for method in ("minmax", "mse"))
    model, teacher = three_bits("mse", images), trained_resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model.train()
    for step in range(STEPS):
        if step == STEPS // 2:
            freeze_statistics(model)
        x = images.roll(-BATCH * step, 0)[:BATCH]
        with torch.no_grad():
            wanted = teacher(x).log_softmax(1)
        optimizer.zero_grad()
        F.kl_div(model(x).log_softmax(1), wanted, log_target=True, reduction="batchmean").backward()
        optimizer.step()
    trained = divergence(model.eval(), unseen)
    assert calibrated > 0.02  # visible
    assert trained < 0.3 * calibrated, (trained, calibrated)
