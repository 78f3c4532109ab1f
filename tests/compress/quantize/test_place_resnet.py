"""Quantizers in a network: exact folds, what training changes, what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from penjing.compress.quantize.modules import QuantizedConvNorm
from penjing.compress.quantize.place_resnet import (
    activation_quantizers,
    apply_quantization,
    calibrate,
    freeze_statistics,
    layers,
    set_mode,
)
from penjing.compress.quantize.targets import TARGETS, ClassifierSettings, TargetName
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.resnet import ConvNorm, ResNet
from tests.compress.quantize.networks import basic, bottleneck, images, random_resnet


def quantized(
    target: TargetName = "onnxruntime-cpu", settings: ClassifierSettings | None = None, seed: int = 0
) -> ResNet:
    model = apply_quantization(random_resnet(basic(), seed), target, settings)
    calibrate(model, [(images(basic(), 32),)])
    return model.eval()


def test_off_is_the_identity_and_calibrated_is_close() -> None:
    for config in (basic(), bottleneck()):
        x = images(config)
        original = random_resnet(config)
        model = apply_quantization(copy.deepcopy(original), "onnxruntime-cpu")
        assert torch.equal(model(x), original(x))
        calibrate(model, [(x,)])
        error = (model(x) - original(x)).square().mean().sqrt() / original(x).std()
        assert 1e-6 < error < 0.05
        set_mode(model, "off")
        assert torch.equal(model(x), original(x))


def test_floating_folds_are_torch_s() -> None:
    model = random_resnet(basic())
    for module in [module for module in model.modules() if isinstance(module, ConvNorm)]:
        folded = QuantizedConvNorm(module, None).fold(None)
        expected = fuse_conv_bn_eval(copy.deepcopy(module.conv), copy.deepcopy(module.norm))
        torch.testing.assert_close(folded.weight, expected.weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(folded.bias, expected.bias, rtol=1e-5, atol=1e-6)
        x = torch.randn(2, module.conv.in_channels, 6, 6, generator=torch.Generator().manual_seed(2))
        y = F.conv2d(x, folded.weight, folded.bias, module.conv.stride, module.conv.padding)
        torch.testing.assert_close(y, module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [ClassifierSettings(), ClassifierSettings(learn_weights=True)])
def test_a_folded_layer_computes_what_was_trained(settings: ClassifierSettings) -> None:
    """Also where the norm's factor is zero, tiny (the INT32 bias would overflow) or negative."""
    model = quantized(settings=settings)
    for name, layer in layers(model):
        if not isinstance(layer, QuantizedConvNorm):
            continue
        scale = torch.tensor(0.01)
        folded = layer.fold(scale)
        assert folded.scale is not None
        assert folded.weight.dtype == torch.int8
        assert int(folded.weight.abs().max()) <= 127
        assert bool((folded.bias.abs() / (scale * folded.scale) <= 2.0**30 * 1.001).all()), name
        x = torch.randn(2, layer.conv.in_channels, 6, 6, generator=torch.Generator().manual_seed(3))
        y = F.conv2d(x, folded.dequantized(), folded.bias, layer.conv.stride, layer.conv.padding)
        weight = layer.weight_quantizer(layer.conv.weight) if layer.weight_quantizer else layer.conv.weight
        expected = layer.norm(F.conv2d(x, weight, None, layer.conv.stride, layer.conv.padding))
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_training_learns_weights_scales_and_norms_and_freezes_late() -> None:
    model = quantized(settings=ClassifierSettings(learn_weights=True))
    targets = torch.arange(32) % 4
    x = images(basic(), 32) + 2 * targets.view(-1, 1, 1, 1)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    model.train()
    for step in range(30):
        if step == 15:
            freeze_statistics(model)
            model.train()  # as the loop calls after each evaluation
            statistics = model.stem.norm.running_mean.clone()  # type: ignore[union-attr]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]
    after = model.state_dict()
    for name in (
        "stem.conv.weight",
        "blocks.0.input_quantizer.growth",
        "stem.weight_quantizer.growth",
        "stem.norm.bias",
    ):
        assert not torch.equal(before[name], after[name]), name
    assert torch.equal(model.stem.norm.running_mean, statistics)  # type: ignore[arg-type]
    loaded = apply_quantization(ResNet(basic()), "onnxruntime-cpu", ClassifierSettings(learn_weights=True))
    loaded.load_state_dict(after)
    set_mode(loaded, "on")
    assert not loaded.train().stem.norm.training  # type: ignore[union-attr]
    assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_targets_place_what_they_fuse() -> None:
    names = {target: [q.name for q in activation_quantizers(quantized(target))] for target in TARGETS}
    assert names["onnxruntime-cpu"] == names["onnxruntime-avx2"]
    assert {"stem.input", "blocks.1.layers.1.output", "blocks.1.shortcut.output", "blocks.2.output"} <= set(
        names["onnxruntime-cpu"]
    )
    # TensorRT: the residual branch goes into the addition unquantized, the shortcut is quantized, K = 9 stays floating.
    assert "blocks.1.shortcut.output" in names["tensorrt"]
    assert not {"stem.input", "blocks.1.layers.1.output", "fc.input"} & set(names["tensorrt"])
    floating = [name for name, layer in layers(quantized("tensorrt")) if layer.weight_quantizer is None]
    assert {"stem", "fc"} <= set(floating)  # 9 and 10 are below 16
    assert {name for name, _ in layers(quantized())} == {
        name for name, module in random_resnet(basic()).named_modules() if isinstance(module, ConvNorm | nn.Linear)
    }


def test_keep_leaves_layers_floating() -> None:
    model = quantized(settings=ClassifierSettings(keep=("stem", "blocks.0.*")))
    kept = [name for name, layer in layers(model) if layer.weight_quantizer is None]
    assert kept == ["stem", "blocks.0.layers.0", "blocks.0.layers.1"]
    with pytest.raises(ConfigError, match=r"'block\.\*' matches no layer"):
        quantized(settings=ClassifierSettings(keep=("block.*",)))


def test_what_a_target_cannot_express_is_refused() -> None:
    cases: tuple[tuple[TargetName, ClassifierSettings, str], ...] = (
        ("onnxruntime-cpu", ClassifierSettings(activations="int8"), "no activations in int8; use uint8"),
        ("onnxruntime-avx2", ClassifierSettings(weights="int8"), "no weights in int8; use int7"),
        ("tensorrt", ClassifierSettings(activations="fp8", weights="int8"), "do not mix"),
    )
    for target, settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            quantized(target, settings)


@torch.no_grad()
def test_bad_weights_activations_and_data_are_refused_by_name() -> None:
    model = random_resnet(basic())
    model.blocks[1].layers[0].conv.weight[0, 0, 0, 0] = float("nan")  # type: ignore[index, union-attr]
    with pytest.raises(InputError, match=r"blocks\.1\.layers\.0\.conv\.weight holds NaN"):
        calibrate(apply_quantization(model, "onnxruntime-cpu"), [(images(basic()),)])
    model = random_resnet(basic())
    model.blocks[0].layers[0].norm.running_var.fill_(-1.0)  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"activation blocks\.0\.layers\.1\.input holds NaN"):
        calibrate(apply_quantization(model, "onnxruntime-cpu"), [(images(basic()),)])
    model = apply_quantization(random_resnet(basic()), "onnxruntime-cpu")
    with pytest.raises(InputError, match="do not fit the model"):
        calibrate(model, [(torch.zeros(2, 3, 12, 12),)])
    model = apply_quantization(random_resnet(basic()), "onnxruntime-cpu")
    with pytest.raises(InputError, match=r"no value of the activation stem\.input"):
        calibrate(model, [])
    with pytest.raises(InputError, match="quantized already"):
        apply_quantization(model, "onnxruntime-cpu")
    with pytest.raises(InputError, match="Linear is not quantized"):
        apply_quantization(nn.Linear(2, 2), "onnxruntime-cpu")  # type: ignore[arg-type]


def test_dead_activations_are_stored_exactly() -> None:
    """The last norm of a residual starts at zero: everything there is zero until it is trained."""
    model = random_resnet(basic())
    for block in model.blocks:
        nn.init.zeros_(block.layers[-1].norm.weight)  # type: ignore[union-attr]
        nn.init.zeros_(block.layers[-1].norm.bias)  # type: ignore[union-attr]
    apply_quantization(model, "onnxruntime-cpu")
    calibrate(model, [(images(basic()),)])
    assert bool(torch.isfinite(model(images(basic()))).all())
