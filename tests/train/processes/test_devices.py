"""Training on whatever accelerator torch names."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from penjing.core.errors import ConfigError
from penjing.train.monitor import memory
from penjing.train.processes import devices
from penjing.train.processes.devices import backends, choose_device
from tests import forking

NPU = Path(__file__).with_name("npu.py")


def test_a_recipe_trains_on_an_accelerator_that_nobody_named(recipe: Path) -> None:
    command = [sys.executable, str(NPU), "train", str(recipe), "--set", "device=auto", "--set", "memory.limit=1GiB"]
    ended = forking.run(command)
    assert ended.returncode == 0, ended.stderr
    assert "1 process on npu" in ended.stderr
    assert int(ended.stdout.split()[0]) > 8, ended.stdout  # products
    rows = [json.loads(line) for line in (recipe.parent / "out-run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["eval/loss"] < rows[0]["loss"]
    assert (recipe.parent / "out" / "model.safetensors").exists()


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, count: int = 2) -> None:
    """That torch finds so many accelerators of a type, which cannot be computed on."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(name))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def test_each_process_has_an_accelerator_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "xpu")
    monkeypatch.setattr(devices, "_cannot_train", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto") == choose_device("xpu") == torch.device("xpu", 1)
    assert choose_device("cpu") == torch.device("cpu")
    assert backends(torch.device("xpu", 1)) == "cpu:gloo,xpu:xccl"
    assert backends(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    assert backends(torch.device("cpu")) == "gloo"
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"process 3 of this machine, where torch finds 2 of type 'xpu'; start 2"):
        choose_device("auto")


def test_what_cannot_sum_losses_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "meta")
    monkeypatch.setattr(devices, "_cannot_train", lambda device: "no float64 here")
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"device = 'meta' cannot sum losses in 64 bits.*\(no float64 here\)"):
        choose_device("meta")


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("xpu", "torch finds no xpu device here; write device = 'cpu', 'cuda' or 'auto'"),
        ("tpu9", "torch knows no device of this name .*; write device = 'cpu', 'cuda' or 'auto'"),
        ("cuda:1", "a type has no number; write device = 'cpu', 'cuda' or 'auto'"),
        ("", "torch knows no device of this name"),
        ("meta", "torch finds no meta device here"),
    ],
)
def test_devices_that_are_not_here_are_refused(monkeypatch: pytest.MonkeyPatch, device: str, said: str) -> None:
    pretend(monkeypatch, "cuda")
    with pytest.raises(ConfigError, match=said):
        choose_device(device)


def test_memory_that_is_not_told_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def untold(device: torch.device) -> int:
        raise RuntimeError("not a DeviceAllocator")

    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", untold)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", untold)
    assert memory.memory_use(torch.device("xpu", 0)) is None
    with pytest.raises(ConfigError, match=r"how much memory xpu:0 has; say it by memory\.limit"):
        memory.memory_limit(torch.device("xpu", 0))
