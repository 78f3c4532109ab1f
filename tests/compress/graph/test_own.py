"""penjing's own classifiers as graphs: the same answers and names, where quantizers stand, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penjing.compress.graph.calibrate import calibrate_graph
from penjing.compress.graph.place import apply_quantization, products
from penjing.compress.quantize.targets import TARGETS, GraphSettings, TargetName
from penjing.compress.rounding.modes import activation_quantizers, set_mode
from penjing.core.errors import ConfigError, InputError
from penjing.core.graph.network import tensor_at
from penjing.core.models.resnet import ConvNorm
from tests.compress.quantize.networks import basic, bottleneck, images, network_of, quantized, random_resnet


@torch.no_grad()
def test_off_is_the_network_itself_and_calibrated_is_close() -> None:
    for config in (basic(), bottleneck()):
        x, model = images(config), random_resnet(config)
        wanted = model(x)
        network = network_of(model)
        assert torch.equal(network(x)[0], wanted)
        made = quantized(model, x)
        error = (made(x)[0] - wanted).square().mean().sqrt() / wanted.std()
        assert 1e-6 < error < 0.05
        set_mode(made.module, "off")
        torch.testing.assert_close(made(x)[0], wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(model(x), wanted)  # whose weights the graph shares


def test_names_are_those_of_the_model_and_of_the_server() -> None:
    model = random_resnet(basic())
    network = network_of(model)
    layers = [name for name, module in model.named_modules() if isinstance(module, ConvNorm | nn.Linear)]
    assert {product.name for product in products(network)} == set(layers)
    assert tensor_at(network.module, "stem.weight") is model.stem.conv.weight
    assert [str(spec) for spec in (*network.config.inputs, *network.config.outputs)] == [
        "images: float32[batch, 1, 12, 12]", "logits: float32[batch, 10]",
    ]  # fmt: skip


def test_targets_place_what_they_fuse() -> None:
    """TensorRT: the residual branch goes into the addition unquantized, and the narrow layers stay floating."""
    x = images(basic(), 32)
    made = {target: quantized(random_resnet(basic()), x, target=target) for target in TARGETS}
    counts = {target: len(list(activation_quantizers(network.module))) for target, network in made.items()}
    # images, the stem; of three blocks: inside, what is added, the sum; two shortcuts; the average, which fc reads
    assert counts == {"onnxruntime-cpu": 14, "onnxruntime-avx2": 14, "tensorrt": 6}
    floating = {each.name for each in products(made["tensorrt"]) if each.rounding is None}
    assert {"stem", "fc"} <= floating  # 9 and 10 are below 16
    assert all(each.rounding is not None for each in products(made["onnxruntime-cpu"]))


def test_keep_leaves_layers_floating() -> None:
    network = quantized(random_resnet(basic()), images(basic()), keep=("stem", "blocks.0", "blocks.1.s*"))
    kept = {each.name for each in products(network) if each.rounding is None}
    assert kept == {"stem", "blocks.0.layers.0", "blocks.0.layers.1", "blocks.1.shortcut"}
    with pytest.raises(ConfigError, match=r"'block\.\*' matches no layer"):
        quantized(random_resnet(basic()), images(basic()), keep=("block.*",))


def test_what_a_target_cannot_express_is_refused() -> None:
    cases: tuple[tuple[TargetName, dict[str, str], str], ...] = (
        ("onnxruntime-cpu", {"activations": "int8"}, "no activations in int8; use uint8"),
        ("onnxruntime-avx2", {"weights": "int8"}, "no weights in int8; use int7"),
        ("tensorrt", {"activations": "fp8", "weights": "int8"}, "do not mix"),
    )
    for target, settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            apply_quantization(
                network_of(random_resnet(basic())), GraphSettings.model_validate({"target": target, **settings})
            )


@torch.no_grad()
def test_bad_weights_activations_and_data_are_refused_by_name() -> None:
    model = random_resnet(basic())
    model.blocks[1].layers[0].conv.weight[0, 0, 0, 0] = float("nan")  # type: ignore[index, union-attr]
    with pytest.raises(InputError, match=r"blocks\.1\.layers\.0\.weight holds NaN"):
        quantized(model, images(basic()))
    model = random_resnet(basic())
    model.stem.norm.bias.fill_(3e38)
    with pytest.raises(InputError, match=r"activation \w+ holds NaN"):
        quantized(model, images(basic()))
    network = apply_quantization(network_of(random_resnet(basic())), GraphSettings())
    with pytest.raises(InputError, match="do not fit the model"):
        calibrate_graph(network, [(torch.zeros(2, 3, 12, 12),)])
    network = apply_quantization(network_of(random_resnet(basic())), GraphSettings())
    with pytest.raises(InputError, match="no value of the activation images"):
        calibrate_graph(network, [])
    with pytest.raises(InputError, match="quantized already"):
        apply_quantization(network, GraphSettings())


@torch.no_grad()
def test_dead_activations_are_stored_exactly() -> None:
    """The last norm of a residual starts at zero: everything there is zero until it is trained."""
    model = random_resnet(basic())
    for block in model.blocks:
        nn.init.zeros_(block.layers[-1].norm.weight)  # type: ignore[union-attr]
        nn.init.zeros_(block.layers[-1].norm.bias)  # type: ignore[union-attr]
    wanted = model(images(basic()))
    error = quantized(model, images(basic()))(images(basic()))[0] - wanted
    assert error.abs().max() < 0.1 * wanted.std()
