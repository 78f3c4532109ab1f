"""How busy a GPU is, as NVIDIA's management library counts it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penjing.core.errors import SetupError
from penjing.train.monitor.alarms import Action


def gpu_use(device: torch.device, alarm: Action, note: Callable[[str], None]) -> Callable[[], float] | None:
    """What reads the share of the last sample period in which a kernel ran on `device`; None off a GPU, or where that
    cannot be read. Then the alarm of that name cannot ring, which `note` is told with what to do.

    Raises:
        SetupError: it cannot be read, and `alarm` is to stop the run.
    """
    if device.type != "cuda":
        return None

    def read() -> float:
        return torch.cuda.utilization(device) / 100

    try:
        read()
    except ModuleNotFoundError:
        reason = "the package nvidia-ml-py is missing: pip install 'penjing[train]' (or nvidia-ml-py)"
    except Exception as error:  # RuntimeError of torch, or an NVMLError, as of a part of a GPU (MIG): both are told
        reason = f"NVIDIA's management library says {type(error).__name__}: {error}"
    else:
        return read
    if alarm == "stop":
        raise SetupError(f"alarms.gpu_use = 'stop', but the GPU's use cannot be read; {reason}")
    if alarm == "log":
        note(f"the GPU's use cannot be read, so alarms.gpu_use will not ring; {reason}; 'off' silences this")
    return None
