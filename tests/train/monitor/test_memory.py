from __future__ import annotations

import torch

from penjing.train.monitor.memory import memory_limit, memory_use

CPU = torch.device("cpu")


def test_memory_of_the_machine() -> None:
    use = memory_use(CPU)
    assert use is not None
    used, total = use
    assert 10 * 2**20 < used < total
    assert 0 < memory_limit(CPU, 4) < total
