"""The Fisher score against measured divergence, and the choice of layers against every other choice."""

from __future__ import annotations

import copy
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from penjing.compress.quantize.bits import (
    effective_bits,
    fisher_scores,
    keep_floating,
    quantized_layers,
    quantizers_on,
    within_bits,
)
from penjing.compress.quantize.place_resnet import apply_quantization, calibrate, set_mode
from penjing.compress.quantize.targets import ClassifierSettings
from penjing.core.errors import ConfigError
from penjing.core.models.resnet import ResNet
from tests.compress.quantize.folders import image_data, trained_resnet


def calibrated(settings: ClassifierSettings | None = None) -> ResNet:
    model = apply_quantization(trained_resnet(), "onnxruntime-cpu", settings)
    calibrate(model, image_data(256).inputs())
    return model


def test_scores_estimate_the_divergence_that_each_layer_causes() -> None:
    data = image_data(256)
    model, floating = calibrated(), trained_resnet()
    scores = fisher_scores(model, data)
    measured = {}
    with torch.no_grad():
        answers = [floating(images).log_softmax(1) for (images,) in data.inputs()]
        for name, layer in quantized_layers(model):
            with quantizers_on(layer):
                found = [model(images).log_softmax(1) for (images,) in data.inputs()]
            divergences = [
                F.kl_div(q, p, log_target=True, reduction="sum") for p, q in zip(answers, found, strict=True)
            ]
            measured[name] = float(torch.stack(divergences).sum()) / 256
    assert scores.keys() == measured.keys()
    ratios = [scores[name] / measured[name] for name in scores]
    assert 0.5 < np.median(ratios) < 2.0, ratios
    ours, theirs = (np.argsort(np.argsort(list(each.values()))) for each in (scores, measured))
    assert np.corrcoef(ours, theirs)[0, 1] > 0.8
    assert fisher_scores(model, data) == scores


def test_the_budget_is_kept_and_the_sum_of_scores_is_the_largest() -> None:
    values = {"a": 5.0, "b": 4.0, "c": 3.0, "d": 0.5, "dead": 0.0}
    sizes = {"a": 60, "b": 50, "c": 49, "d": 1, "dead": 1}
    for budget in (0.5, 1, 51, 60, 99, 100, 111, 1000):
        chosen = keep_floating(values, sizes, budget)
        sets = [names for count in range(5) for names in combinations("abcd", count)]
        allowed = [names for names in sets if sum(sizes[name] for name in names) <= budget]
        best = max(sum(values[name] for name in names) for names in allowed)
        assert sum(sizes[name] for name in chosen) <= budget
        assert sum(values[name] for name in chosen) == best


def test_effective_bits_keep_the_layers_that_lose_most() -> None:
    """Weights that read a dead channel are huge, and leave the other weights of their layer few levels."""
    floating = trained_resnet()
    block = floating.blocks[1]
    with torch.no_grad():
        block.layers[0].norm.weight[0], block.layers[0].norm.bias[0] = 0.0, -1.0  # type: ignore[union-attr, index]
        block.layers[1].conv.weight[:, 0] = 20.0  # type: ignore[union-attr, index]
    data = image_data(256)
    settings = within_bits(floating, "onnxruntime-cpu", ClassifierSettings(effective_bits=16), data)
    assert settings.effective_bits is None
    assert "blocks.1.layers.1" in settings.keep
    errors, bits = [], []
    for kept in (ClassifierSettings(), settings):
        model = apply_quantization(copy.deepcopy(floating), "onnxruntime-cpu", kept)
        calibrate(model, data.inputs())
        bits.append(effective_bits(model))
        (images,) = next(data.inputs())
        set_mode(model, "on")
        with torch.no_grad():
            errors.append(float((model(images) - floating(images)).norm()))
    assert bits[0] == 8
    assert 8 < bits[1] <= 16
    assert errors[1] < 0.3 * errors[0]


def test_a_budget_that_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"effective_bits=8\.1 cannot be kept: target tensorrt and keep leave stem, "):
        within_bits(trained_resnet(), "tensorrt", ClassifierSettings(effective_bits=8.1), image_data())
