"""`penjing.Network`: any network from Python."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import penjing
from penjing.batches import BATCH_SIZE, SAMPLES, gathered, to_learn
from tests.core.artifact.graph_artifacts import two_inputs


class Small(nn.Module):
    """(batch, 6) → (batch, 4)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Pair(nn.Module):
    """(batch, 6) and (batch, 2) → (batch, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(torch.cat([x, y], 1))


def small() -> nn.Module:
    return Small().eval()


def network() -> penjing.Network:
    return penjing.Network.from_torch(small(), torch.randn(4, 6))


def test_a_named_axis_stays_open_where_the_example_has_one_row() -> None:
    net = penjing.Network.from_torch(small(), torch.randn(1, 6), dynamic={"x": {0: "rows"}})
    assert net.config.inputs[0].shape == ("rows", 6)
    assert net(torch.randn(3, 6))[0].shape[0] == 3


def test_a_torch_module_comes_in_is_kept_and_goes_out_as_onnx(tmp_path: Path) -> None:
    net, x = network(), torch.randn(3, 6)
    expected = small()(x)
    assert torch.allclose(net(x)[0], expected, atol=1e-6)
    assert "linear" in net.text()
    net.save(tmp_path / "net")
    loaded = penjing.load(tmp_path / "net")
    assert isinstance(loaded, penjing.Network)
    assert torch.equal(loaded(x)[0], net(x)[0])
    with pytest.raises(penjing.InputError):
        net.save(tmp_path / "net")
    session = onnxruntime.InferenceSession(net.export(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    name = net.config.inputs[0].name
    assert torch.allclose(torch.from_numpy(session.run(None, {name: x.numpy()})[0]), expected, atol=1e-5)
    again = penjing.Network.from_onnx(tmp_path / "net.onnx")
    assert torch.allclose(again(x)[0], expected, atol=1e-5)
    assert "parameters" in again.report()


def test_weights_are_its_own_and_any_loop_trains_them() -> None:
    model = small()
    net = penjing.Network.from_torch(model, torch.randn(4, 6))
    with torch.no_grad():
        next(iter(model.parameters())).zero_()
    x = torch.randn(3, 6)
    before = net(x)[0]
    assert torch.allclose(before, small()(x), atol=1e-6)
    module = net.module()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(x)[0].square().mean().backward()
    optimizer.step()
    assert not torch.equal(net(x)[0], before)


def test_samples_come_in_every_form_of_a_loader() -> None:
    config = network().config
    name = config.inputs[0].name
    rows, labels = torch.randn(5, 6), torch.arange(5)
    for batch in (rows, [rows], (rows, labels), {name: rows, "labels": labels}):
        found = gathered([batch, batch], config)
        assert torch.equal(found[name], torch.cat([rows, rows]))
        assert ("labels" in found) == (len(batch) == 2)
    assert len(gathered(iter([torch.zeros(SAMPLES, 6)] * 3), config)[name]) == SAMPLES
    for alone in ({name: rows}, rows):
        assert torch.equal(gathered(alone, config)[name], rows)
        found, batch_size = to_learn(alone, config)
        assert torch.equal(found[name], rows)
        assert batch_size == BATCH_SIZE
    for bad in ([], [[rows, labels, labels]], [{"other": rows}], [["text"]], [rows, (rows, labels)]):
        with pytest.raises(penjing.InputError, match=name):
            gathered(bad, config)


def test_an_artifact_is_loaded_and_answers(tmp_path: Path) -> None:
    quantized = penjing.load(two_inputs(tmp_path / "int8"))
    assert isinstance(quantized, penjing.QuantizedNetwork)
    scores, sure = quantized(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    assert scores.shape == (3, 3)
    assert torch.equal(sure, scores > 0)
    kept = penjing.QuantizedNetwork.load(quantized.save(tmp_path / "kept"))
    assert kept.config == quantized.config
    assert kept.export(tmp_path / "net.onnx").stat().st_size > 0
    with pytest.raises(penjing.InputError, match="1 input given"):
        quantized(torch.randn(3, 4))


def test_a_folder_of_another_family_is_refused_by_its_name(tiny_checkpoint: Path) -> None:
    with pytest.raises(penjing.InputError, match="is of the family 'decoder', and no graph"):
        penjing.Network.load(tiny_checkpoint)


def test_what_is_no_module_and_no_tensor_is_refused_by_name() -> None:
    with pytest.raises(penjing.InputError, match=r"function is no torch.nn.Module; write one whose forward calls it"):
        penjing.Network.from_torch(cast("torch.nn.Module", lambda x: x), torch.randn(2, 4))
    for example in (np.zeros((2, 4), np.float32), [np.zeros((2, 4), np.float32)]):
        with pytest.raises(penjing.InputError, match=r"give tensors, as torch.from_numpy"):
            penjing.Network.from_torch(torch.nn.Linear(4, 2), cast("torch.Tensor", example))
    with pytest.raises(penjing.InputError, match="Linear does not run on its example"):
        penjing.Network.from_torch(torch.nn.Linear(4, 2), cast("torch.Tensor", None))


def test_inputs_that_do_not_fit_are_refused_by_name() -> None:
    pair = penjing.Network.from_torch(Pair().eval(), (torch.randn(4, 6), torch.randn(4, 2)))
    quantized = pair.quantize({"x": torch.randn(64, 6), "y": torch.randn(64, 2)})
    x, y = torch.randn(3, 6), torch.randn(3, 2)
    takes = re.escape("the network takes x: float32[batch, 6], y: float32[batch, 2]")
    for called in (pair, quantized):
        for inputs, given in (
            ((x,), "1 input given"),
            ((x, y, y), "3 inputs given"),
            ((x, torch.randn(3, 5)), re.escape("y was given as float32[3, 5]")),
            ((x, torch.randn(4, 2)), re.escape("y was given as float32[4, 2]")),
            ((x[0], y), re.escape("x was given as float32[6]")),
            ((x[None], y), re.escape("x was given as float32[1, 3, 6]")),
            ((x.double(), y), re.escape("x was given as float64[3, 6]")),
            ((x.numpy(), y), "x was given as ndarray, which is no tensor"),
        ):
            with pytest.raises(penjing.InputError, match=f"{given}.*{takes}"):
                called(*inputs)  # type: ignore[arg-type]
        assert torch.equal(called(x.clone().requires_grad_(), y)[0].detach(), called(x, y)[0].detach())


def test_how_long_it_learns_from_a_file_has_to_be_said() -> None:
    with pytest.raises(penjing.ConfigError, match="give steps=N"):
        network().distill(network(), data="samples.npz")


def test_a_pruned_network_is_another_one_and_its_report_says_what_left() -> None:
    net = network()
    small = net.prune(0.3)
    assert small.module().state_dict()["layers.0.weight"].shape == (24, 6)
    assert net.module().state_dict()["layers.0.weight"].shape == (32, 6)
    assert "75% of the multiply-accumulates" in small.report()  # 24 of 32, each read and written once
    x = torch.randn(5, 6)
    assert small(x)[0].shape == net(x)[0].shape


def test_a_network_learns_in_place_what_a_teacher_answers() -> None:
    teacher, student = network(), network()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in student.module().parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    rate = {"peak": 0.02, "kind": "constant"}
    found = student.distill(teacher, data={"x": torch.randn(512, 6)}, epochs=15, batch_size=64, learning_rate=rate)
    assert found is student
    before, after = map(float, re.findall(r"[\d.]+", found.report().partition("teacher")[2]))
    assert after > before + 0.5


def test_an_update_takes_a_batch_of_the_loader_and_all_of_it_is_learnt() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(2500, 6)), batch_size=500)
    found = network().distill(network(), data=loader).report()
    assert found.startswith("distill: 5 updates of 500 from 2,500 samples")
    with pytest.raises(penjing.InputError, match="data gives no batches"):
        network().distill(network(), data=[])


def test_batches_without_rows_are_passed_over_and_nothing_else_is_refused() -> None:
    teacher, student, none = network(), network(), torch.randn(0, 6)
    student.distill(teacher, data=[none, torch.randn(8, 6), none], epochs=1.0)
    assert "1 updates of 8 from 8 samples" in student.report()
    for nothing in ([], [none], [none, none]):
        with pytest.raises(penjing.InputError, match="data gives no batches"):
            student.distill(teacher, data=nothing)
        with pytest.raises(penjing.InputError, match="data gives no batches"):
            student.quantize(data=nothing)
    with pytest.raises(penjing.InputError, match="give a tensor for each of x"):
        student.distill(teacher, data=[torch.tensor(1.0)])


def test_a_network_becomes_int8_on_the_batches_of_a_loader(tmp_path: Path) -> None:
    net, loader = network(), [(torch.randn(16, 6), torch.zeros(16, dtype=torch.int64)) for _ in range(4)]
    int8 = net.quantize(loader)
    x = torch.randn(32, 6)
    expected = net(x)[0]
    assert (int8(x)[0] - expected).abs().mean() < 0.05 * expected.std()
    assert int8.report().startswith("quantize: ")
    assert net.report() == int8.report()
    assert (tmp_path / "int8") == int8.save(tmp_path / "int8")
    assert torch.equal(penjing.QuantizedNetwork.load(tmp_path / "int8")(x)[0], int8(x)[0])
