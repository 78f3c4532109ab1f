"""Where rounding loses visibly, training with rounded weights and activations wins back most of it.

Three bits, on a network that tells noisy textures apart; judged on images that neither calibration nor training saw.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.compress.graph.calibrate import calibrate_graph
from penjing.compress.graph.place import apply_quantization, products
from penjing.compress.quantize.targets import GraphSettings
from penjing.compress.rounding.formats import SignedInteger, UnsignedInteger
from penjing.compress.rounding.modes import activation_quantizers
from penjing.compress.rounding.observers import Method
from penjing.compress.samples.data import ImageData
from penjing.core.graph.network import Network
from tests.compress.quantize.folders import MEAN, STD, image_set, trained_resnet
from tests.compress.quantize.networks import network_of

STEPS, BATCH = 40, 64


def three_bits(observer: Method, images: Tensor) -> Network:
    network = apply_quantization(network_of(trained_resnet()), GraphSettings(observer=observer))
    for product in products(network):
        assert product.rounding is not None
        product.rounding.format = SignedInteger("int8", -3.0, 3.0)
    for quantizer in activation_quantizers(network.module):
        quantizer.format = UnsignedInteger(high=7.0)
    calibrate_graph(network, [(images,)])
    return network


@torch.no_grad()
def divergence(network: Network, images: Tensor) -> float:
    """Nats an image from the floating network's answers."""
    wanted = trained_resnet()(images).log_softmax(1)
    return float(F.kl_div(network(images)[0].log_softmax(1), wanted, log_target=True, reduction="batchmean"))


def normalised(count: int, seed: int) -> Tensor:
    data = ImageData(image_set(count, seed=seed), (MEAN,), (STD,), count)
    return next(data.inputs())[0]


def test_training_recovers_what_three_bits_lose() -> None:
    images, unseen = normalised(512, seed=3), normalised(256, seed=9)
    calibrated = min(divergence(three_bits(method, images), unseen) for method in ("minmax", "mse"))
    network, teacher = three_bits("mse", images), trained_resnet()
    optimizer = torch.optim.SGD(network.module.parameters(), lr=0.01, momentum=0.9)
    for step in range(STEPS):
        x = images.roll(-BATCH * step, 0)[:BATCH]
        with torch.no_grad():
            wanted = teacher(x).log_softmax(1)
        optimizer.zero_grad()
        F.kl_div(network(x)[0].log_softmax(1), wanted, log_target=True, reduction="batchmean").backward()
        optimizer.step()
    trained = divergence(network, unseen)
    assert calibrated > 0.02  # visible
    assert trained < 0.3 * calibrated, (trained, calibrated)
