"""The GPU's use, and what is told where it cannot be read."""

from __future__ import annotations

import pytest
import torch

from penjing.core.errors import SetupError
from penjing.train.monitor.alarms import AlarmConfig, Alarms
from penjing.train.monitor.gpu import gpu_use
from penjing.train.monitor.monitor import Monitor

GPU = torch.device("cuda", 0)


class NVMLError_NotSupported(Exception):  # noqa: N801, N818  as pynvml has it
    pass


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ModuleNotFoundError("nvidia-ml-py"), "nvidia-ml-py is missing: pip install 'penjing[train]'"),
        (NVMLError_NotSupported("Not Supported"), "says NVMLError_NotSupported: Not Supported"),
    ],
)
def test_what_is_missing_is_told_once(monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    def refuse(device: torch.device) -> int:
        raise error

    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    notes: list[str] = []
    assert gpu_use(GPU, "off", notes.append) is None
    assert notes == []
    assert gpu_use(GPU, "log", notes.append) is None
    assert len(notes) == 1
    assert says in notes[0]
    with pytest.raises(SetupError, match=r"alarms.gpu_use = 'stop', but the GPU's use cannot be read"):
        gpu_use(GPU, "stop", notes.append)
    assert gpu_use(torch.device("cpu"), "stop", notes.append) is None


def test_the_alarm_hears_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 30)
    read = gpu_use(GPU, "log", lambda line: pytest.fail(line))
    monitor = Monitor(Alarms(AlarmConfig(patience=1)), every=1, gpu_use=read)
    told: list[str] = []
    monkeypatch.setattr(monitor.progress, "note", told.append)
    monitor.start(0, 1)
    monitor.on_step(1, 1, {"loss": 1.0, "learning_rate": 0.1}, 8, 0.0, False)
    assert monitor.last["gpu_use"] == 0.3
    assert any("gpu_use is 30%, below 70%" in line for line in told)
