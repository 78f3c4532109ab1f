"""A real pipeline of torch over gloo processes whose stages sleep for given times: what a step takes, in seconds.

Sleeping stages leave the processors free, so four ranks run side by side on any machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

TORCH = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        if not x.is_meta:
            time.sleep(seconds)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        gradient = gradients[0].contiguous()  # gloo sends nothing else
        return gradient, gradient.sum().view(1), None


class SleepingStage(nn.Module):
    def __init__(self, seconds: float):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(1)), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, self.weight, self.seconds)  # type: ignore[no-any-return]


def _rank(rank: int, ranks: int, cases: list[tuple[str, list[float], int]], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    seconds = []
    for name, costs, micro_batches in cases:
        mine = list(range(rank, len(costs), ranks))
        x = torch.ones(micro_batches, 4, requires_grad=True)
        stages = [PipelineStage(SleepingStage(costs[s]), s, len(costs), torch.device("cpu")) for s in mine]
        made: Any = get_schedule_class(TORCH[name])
        loss = lambda y, target: ((y - target) ** 2).sum()  # noqa: E731
        schedule = made(stages if name == "interleaved" else stages[0], micro_batches, loss_fn=loss)
        taken = []
        for _ in range(3):  # the first one finds out shapes
            dist.barrier()
            began = time.perf_counter()
            given = {"target": torch.zeros(micro_batches, 4)} if mine[-1] == len(costs) - 1 else {}
            schedule.step(*([x] if rank == 0 else []), **given)
            step = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(step, op=dist.ReduceOp.MAX)
            taken.append(float(step))
        seconds.append(min(taken[1:]))
    if rank == 0:
        torch.save(torch.tensor(seconds), Path(folder) / "seconds.pt")
    dist.destroy_process_group()


def run(ranks: int, cases: Sequence[tuple[str, list[float], int]], folder: Path) -> list[float]:
    """Seconds of a step of each case: (schedule, forward seconds of each stage, micro-batches); backward takes twice
    as long."""
    given = [str(ranks), json.dumps(cases), str(folder)]
    started = [subprocess.Popen([sys.executable, __file__, str(rank), *given]) for rank in range(ranks)]
    try:
        for process in started:
            assert process.wait(timeout=120) == 0
    finally:
        for process in started:
            process.kill()
    return torch.load(folder / "seconds.pt", weights_only=True).tolist()


if __name__ == "__main__":
    _rank(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4])
