"""Bias correction removes the mean error of every layer, also where the calibration data come in batches."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from penjing.compress.quantize.bias_correction import correct_biases
from penjing.compress.quantize.place_resnet import apply_quantization, calibrate
from penjing.compress.quantize.targets import ClassifierSettings
from penjing.core.models.resnet import ResNet
from tests.compress.quantize.networks import basic, bottleneck, images, random_resnet


@torch.no_grad()
def shifts(model: ResNet, floating: ResNet, x: Tensor) -> float:
    """Mean error of the logits, relative to how much they vary between images."""
    return float((model(x).mean(0) - floating(x).mean(0)).norm() / floating(x).std(0).norm())


def quantized(floating: ResNet, x: Tensor) -> ResNet:
    model = apply_quantization(copy.deepcopy(floating), "onnxruntime-avx2", ClassifierSettings())
    calibrate(model, [(x,)])
    return model.eval()


def test_means_are_those_of_the_floating_network() -> None:
    for config in (basic(), bottleneck()):
        floating = random_resnet(config)
        x, others = images(config, 64), images(config, 64, seed=5)
        for batches in ([(x,)], [(part,) for part in x.split(16)]):
            model = quantized(floating, x)
            seen, unseen = shifts(model, floating, x), shifts(model, floating, others)
            correct_biases(model, floating, batches)
            assert seen > 0.01  # or there is nothing to mend
            assert shifts(model, floating, x) < 0.35 * seen
            assert shifts(model, floating, others) < 0.6 * unseen


def test_only_biases_change_and_no_hook_stays() -> None:
    floating = random_resnet(basic())
    x = images(basic(), 32)
    model = quantized(floating, x)
    before = copy.deepcopy(model.state_dict())
    correct_biases(model, floating, [(x,)])
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.endswith(".bias") for name in changed)
    assert not any(module._forward_hooks for network in (model, floating) for module in network.modules())
