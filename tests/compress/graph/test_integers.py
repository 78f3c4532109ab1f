"""Stored graphs computed as ONNX Runtime's integer kernels compute them, and calibrated ones held to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx.helper import make_empty_tensor_value_info
from torch import Tensor, nn

from penjing.compress.export.onnx_graph import export_network
from penjing.compress.graph.calibrate import calibrate_graph
from penjing.compress.graph.integers import IntegerRun
from penjing.compress.graph.place import apply_quantization
from penjing.compress.graph.roundings import LARGEST_MEAN, roundings
from penjing.compress.graph.stored import stored
from penjing.compress.quantize.targets import GraphSettings
from penjing.core.errors import InputError
from penjing.core.graph.network import Network, set_tensor, tensor_at
from penjing.core.graph.trace import from_torch
from tests.compress.graph.networks import Branches, randomised


class Deep(nn.Module):
    """(batch, 3, 12, 12) → (batch, 4): residual blocks, each of which enlarges what is rounded differently."""

    def __init__(self, blocks: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU6(), nn.Conv2d(16, 16, 1)) for _ in range(blocks)
        )
        self.last = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.stem(images))
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.last(x.mean((2, 3)))


class Dead(nn.Module):
    """(batch, 3, 16, 16) → (batch, 8, 16, 16): between its two convolutions everything is zero but a bias is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        for value in self.first.parameters():
            nn.init.zeros_(value)

    def forward(self, images: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(images)))


IMAGES = 3 * torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(3))


def _quantized(kind: Callable[[], nn.Module], **given: object) -> tuple[Network, Network]:
    torch.manual_seed(0)
    settings = GraphSettings.model_validate(given)
    network = apply_quantization(from_torch(randomised(kind()), (IMAGES,)), settings)
    calibrate_graph(network, [(IMAGES,)])
    network.module.eval()
    return network, stored(network, settings.target)


def _stored_by_onnx_runtime(file: Path) -> list[NDArray[Any]]:
    """What each QuantizeLinear of `file` stores, less its zero point."""
    model = onnx.load(file)
    pairs = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    constants = {each.name: int(onnx.numpy_helper.to_array(each)) for each in model.graph.initializer if not each.dims}
    model.graph.output.extend(make_empty_tensor_value_info(node.output[0]) for node in pairs)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    found = session.run([node.output[0] for node in pairs], {session.get_inputs()[0].name: IMAGES.numpy()})
    return [np.asarray(codes).astype(int) - constants[node.input[2]] for node, codes in zip(pairs, found, strict=True)]


@pytest.mark.parametrize("kind", [Deep, Branches])
def test_integers_are_those_of_onnx_runtime(kind: Callable[[], nn.Module], tmp_path: Path) -> None:
    _, made = _quantized(kind, weights="int7")  # which no processor's kernels saturate
    export_network(made, tmp_path / "net.onnx", {})
    run = IntegerRun(made)
    with torch.no_grad():
        run.run(IMAGES)
    theirs = _stored_by_onnx_runtime(tmp_path / "net.onnx")
    unlike = sum(int((one.numpy() != other).sum()) for one, other in zip(run.codes, theirs, strict=True))
    assert unlike <= 1e-5 * sum(each.numel() for each in run.codes)  # none where additions are fused


def test_what_a_pair_stores_is_the_calibrated_networks() -> None:
    for settings in ({}, {"target": "tensorrt"}, {"target": "tensorrt", "activations": "fp8"}):
        network, made = _quantized(Branches, **settings)
        run = IntegerRun(made)
        with torch.no_grad():
            answers = run.run(IMAGES)
        held = roundings(network, run.codes, (IMAGES,))
        assert held.num_values == sum(each.numel() for each in run.codes)
        assert held.largest <= 1
        assert held.mean <= LARGEST_MEAN / 5
        with torch.no_grad():
            torch.testing.assert_close(answers[0], made(IMAGES)[0], rtol=0, atol=0.1 * float(answers[0].std()))


def test_a_bias_behind_what_was_only_zero_is_stored_as_finely_as_others() -> None:
    network, made = _quantized(Dead)
    run = IntegerRun(made)
    with torch.no_grad():
        answers = run.run(IMAGES)
    held = roundings(network, run.codes, (IMAGES,))
    assert held.mean <= LARGEST_MEAN / 5
    bias = tensor_at(network.module, "second.bias").detach()
    torch.testing.assert_close(answers[0][0, :, 0, 0], bias, rtol=0, atol=0.51 * float(bias.max() - bias.min()) / 255)


def test_a_layer_that_is_stored_differently_is_refused_though_later_ones_hide_it() -> None:
    network, made = _quantized(Deep)
    name = next(name for name in made.module.state_dict() if name.startswith("stem") and name.endswith("bias"))
    bias = tensor_at(made.module, name)
    set_tensor(made.module, name, bias + int(bias.abs().max()) // 50)
    run = IntegerRun(made)
    with torch.no_grad():
        run.run(IMAGES)
    with pytest.raises(InputError, match=r"what is stored of relu differs from the calibrated network"):
        roundings(network, run.codes, (IMAGES,))


def test_codes_hold_eight_bits() -> None:
    assert torch.arange(-255, 256).half().int().tolist() == list(np.arange(-255, 256))
