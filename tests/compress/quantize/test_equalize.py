"""Equalisation changes no answer of the floating network, and brings back what badly scaled channels cost in INT8."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from penjing.compress.quantize.equalize import equalize, links
from penjing.compress.quantize.place_resnet import apply_quantization, calibrate
from penjing.core.errors import InputError
from penjing.core.models.resnet import ConvNorm, ResNet
from penjing.core.models.resnet_config import ResNetConfig
from tests.compress.quantize.networks import basic, bottleneck, images, random_resnet


@torch.no_grad()
def badly_scaled(config: ResNetConfig, seed: int = 3) -> ResNet:
    """`random_resnet` with channels up to 2^6 wider than others, which the layers that read them undo."""
    model = random_resnet(config, seed)
    generator = torch.Generator().manual_seed(seed)
    for link in links(model):
        width = link.writers[0].norm.num_features
        factor = torch.randint(-6, 7, (width,), generator=generator).float().exp2()
        for writer in link.writers:
            writer.norm.weight.mul_(factor)
            writer.norm.bias.mul_(factor)
        for reader in link.readers:
            groups = reader.groups if isinstance(reader, nn.Conv2d) else 1
            outputs, inputs = reader.weight.shape[:2]
            for group in range(groups):
                rows = slice(group * outputs // groups, (group + 1) * outputs // groups)
                columns = factor[group * inputs : (group + 1) * inputs]
                reader.weight[rows] /= columns.view(1, -1, *[1] * (reader.weight.dim() - 2))
    return model


@torch.no_grad()
def int8_error(model: ResNet, config: ResNetConfig) -> float:
    """Of the logits, relative."""
    x = images(config, 32)
    expected = model(x)
    quantized = apply_quantization(copy.deepcopy(model), "onnxruntime-cpu")
    calibrate(quantized, [(x,)])
    return float((quantized(x) - expected).norm() / expected.norm())


@pytest.mark.parametrize("config", [basic(), bottleneck()], ids=["basic", "bottleneck"])
def test_the_floating_network_answers_bit_by_bit_as_before_and_int8_much_better(config: ResNetConfig) -> None:
    model = badly_scaled(config)
    x = images(config, 32)
    before, worse = model(x), int8_error(model, config)
    equalize(model, [(x[:16],), (x[16:],)])
    assert torch.equal(model(x), before)
    assert worse > 0.1  # or there is nothing to mend
    assert int8_error(model, config) < 0.25 * worse


def test_every_norm_that_writes_and_every_layer_that_reads_is_linked_once() -> None:
    for config in (basic(), bottleneck()):
        model = random_resnet(config)
        norms = [module for module in model.modules() if isinstance(module, ConvNorm)]
        readers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
        found = links(model)
        writers = [writer for link in found for writer in link.writers]
        assert sorted(map(id, writers)) == sorted(map(id, norms))
        assert sorted(id(reader) for link in found for reader in link.readers) == sorted(
            id(reader)
            for reader in readers
            if reader is not model.stem.conv  # the image's own scale is fixed
        )


@torch.no_grad()
def test_dead_channels_stay_and_damage_is_refused_by_name() -> None:
    model = random_resnet(basic())
    model.stem.norm.weight.zero_()
    model.stem.norm.bias.zero_()
    x = images(basic())
    before = model(x)
    equalize(model, [(x,)])
    assert torch.equal(model(x), before)
    with pytest.raises(InputError, match="do not fit the model"):
        equalize(model, [(torch.zeros(2, 3, 12, 12),)])
    model.blocks[0].layers[0].norm.running_var.fill_(-1.0)  # type: ignore[union-attr]
    with pytest.raises(InputError, match="an activation holds NaN"):
        equalize(model, [(x,)])
    model.fc.weight[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"fc\.weight holds NaN"):
        equalize(model, [(x,)])
