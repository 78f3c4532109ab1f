"""`--profile`: a few steps under torch's profiler, as a trace for Perfetto or chrome://tracing and a table.

With several processes it also says what they exchanged, how much of it hid behind arithmetic, and what share of the
bandwidth of the links the gradients reached.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from penjing.core.files import atomic_write_text, writing
from penjing.core.progress import Progress
from penjing.train.parallel.mesh import MeshWorld
from penjing.train.parallel.probe import all_reduce_bandwidth, gradient_group
from penjing.train.parallel.traffic import Traffic, read_trace
from penjing.train.processes.devices import synchronize
from penjing.train.processes.world import World

_SKIPPED, _WARM_UP, _RECORDED = 2, 1, 3


@contextmanager
def profiling(folder: Path, world: World, progress: Progress) -> Iterator[Callable[[int], None]]:
    """Yield what to call after each step; steps 4 to 6 of this process are recorded.

    Writes trace-RANK.json and table-RANK.txt into `folder`, with several processes communication-RANK.json: the
    `overlap` of reductions with arithmetic, bytes/s of `gradients`, and of each size of `all_reduce` alone.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    limits = all_reduce_bandwidth(world)
    if limits:
        shown = ", ".join(f"{limit / 1e9:.2f} GB/s with {size // 1024} KiB" for size, limit in limits.items())
        progress.note(f"all-reduce over {gradient_group(world)[1]} processes with nothing else to do: {shown}")
    beside = world.device.type != "cpu"
    activities = [*supported_activities()] if beside else [ProfilerActivity.CPU]

    def save(recorded: profile) -> None:
        trace = folder / f"trace-{world.rank}.json"
        recorded.export_chrome_trace(str(trace))
        order = "self_device_time_total" if beside else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=order, row_limit=25)
        atomic_write_text(folder / f"table-{world.rank}.txt", table)
        progress.note(f"profile of {_RECORDED} steps: {trace}\n{table}")
        if world.size > 1:
            traffic = read_trace(trace)
            reached = _gradient_bandwidth(traffic, world, limits)
            atomic_write_text(
                folder / f"communication-{world.rank}.json",
                json.dumps({"overlap": traffic.overlap, "gradients": reached, "all_reduce": limits}),
            )
            lines = [f"communication of process {world.rank}:", *traffic.lines(_RECORDED)]
            if reached is not None:
                share = reached / max(limits.values())
                lines.append(f"gradients: {reached / 1e9:.2f} GB/s, {share:.0%} of the fastest all-reduce measured")
            progress.note("\n".join(lines))

    plan = schedule(skip_first=_SKIPPED, wait=0, warmup=_WARM_UP, active=_RECORDED, repeat=1)
    with profile(
        activities=activities, schedule=plan, on_trace_ready=save, record_shapes=True, profile_memory=True
    ) as active:
        yield lambda step: active.step()
    synchronize(world.device)


def _gradient_bandwidth(traffic: Traffic, world: World, limits: dict[int, float]) -> float | None:
    """Bytes/s; None where reductions of other dimensions of the mesh cannot be told from those of gradients."""
    split = isinstance(world, MeshWorld) and world.config.tp * world.config.cp * world.config.pp > 1
    return None if split or not limits else traffic.bandwidth(world.data.size)
