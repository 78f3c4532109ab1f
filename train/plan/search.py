"""The search for a way to run a model on a cluster: each mesh, ZeRO stage, micro-batch and recomputation by its time.

Nothing is tried: `cost` and `memory` predict. What is impossible, or does not fit, is counted by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig
from penjing.core.progress import plural
from penjing.train.numerics.recompute import Recompute
from penjing.train.parallel.config import ParallelConfig, check_parallel
from penjing.train.pipeline.schedules import chunks_of
from penjing.train.pipeline.shape import ModelShape, decoder_shape
from penjing.train.plan.cost import StepTime, step_time
from penjing.train.plan.hardware import Hardware
from penjing.train.plan.memory import ParallelMemory, Run, parallel_memory, show_bytes

HEADROOM = 0.92  # of the memory may be planned: allocators lose the rest to fragments
MICRO_BATCHES = (1, 2, 4, 8, 16)
_SHORT = 8192  # sequences below this are not spread over context ranks: all else is cheaper
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Candidate:
    """A way to run, with what is predicted of it."""

    run: Run
    time: StepTime
    memory: ParallelMemory


@dataclass(frozen=True)
class Plan:
    """`best`: at most one for each mesh and schedule, the fastest first. `rejected`: how many fell out for what."""

    best: tuple[Candidate, ...]
    considered: int
    rejected: dict[str, int]


def search(
    model: DecoderConfig,
    gpu: Hardware,
    *,
    gpus: int,
    memory: float,
    gpus_per_node: int,
    batch_size: int,
    length: int,
    check: Callable[[ParallelConfig, Recompute], None] = lambda parallel, recompute: None,
) -> Plan:
    """The ten best ways to train `model` on `gpus` GPUs.

    Args:
        memory: bytes that one rank may use.
        check: raises ConfigError for what the rest of a recipe does not go with.
        batch_size: sequences of a step, over all ranks; it stays as it is.
        length: tokens of a sequence.

    Raises:
        ConfigError: counts that make no cluster, no mesh that the model allows, or none that fits (names the smallest).
    """
    if gpus < 1 or gpus_per_node < 1:
        raise ConfigError(f"--gpus {gpus} --gpus-per-node {gpus_per_node}: both must be 1 or more")
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise ConfigError(f"--gpus {gpus} is no multiple of --gpus-per-node {gpus_per_node}; nodes must be whole")
    shape = decoder_shape(model)
    rejected: Counter[str] = Counter()
    best: dict[tuple[object, ...], Candidate] = {}
    smallest: Candidate | None = None
    considered = 0
    for parallel in _meshes(model, gpus, gpus_per_node, length, rejected):
        dp = parallel.data_size(gpus)
        ways: list[Recompute] = [each for each in _ways(parallel) if not _refused(check, parallel, each, rejected)]
        for run in _runs(parallel, dp, batch_size, length, ways, rejected):
            considered += 1
            need = parallel_memory(shape, run)
            if need.total > memory * HEADROOM:
                rejected[_why_memory(shape, need, memory)] += 1
                if smallest is None or need.total < smallest.memory.total:
                    smallest = Candidate(run, step_time(shape, run, gpu, gpus_per_node), need)
                continue
            found = Candidate(run, step_time(shape, run, gpu, gpus_per_node), need)
            key = (dp, parallel.tp, parallel.pp, parallel.cp, parallel.ep, parallel.schedule)
            if key not in best or _order(found) < _order(best[key]):
                best[key] = found
    if not best:
        if smallest is None:
            reasons = "; ".join(f"{why} ({count})" for why, count in rejected.most_common(3))
            raise ConfigError(
                f"no mesh of {plural(gpus, 'GPU')} can run this model with batches of {batch_size}: {reasons}"
            )
        need = smallest.memory.total / HEADROOM
        raise ConfigError(
            f"nothing fits into {show_bytes(memory)} on {plural(gpus, 'GPU')}; the smallest needs {show_bytes(need)}: "
            f"{run_line(smallest.run)}; give --memory {need / 2**30 + 0.05:.1f}GiB, more --gpus, or a smaller model"
        )
    ranked = sorted(best.values(), key=_order)[:10]
    return Plan(tuple(ranked), considered, dict(rejected.most_common()))


def run_line(run: Run) -> str:
    """A run's settings in one line."""
    parallel = run.parallel
    axes = {"dp": run.dp, "tp": parallel.tp, "pp": parallel.pp, "cp": parallel.cp, "ep": parallel.ep}
    mesh = " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one process"
    schedule = f", {parallel.schedule}" if parallel.pp > 1 else ""
    spread = f" over {parallel.shards}" if parallel.shards else ""
    return f"{mesh}, ZeRO {parallel.zero}{spread}{schedule}, micro-batch {run.micro_batch}, recompute {run.recompute}"


def _order(candidate: Candidate) -> tuple[float, float]:
    return candidate.time.total, candidate.memory.total


def _why_memory(shape: ModelShape, need: ParallelMemory, memory: float) -> str:
    state = need.model_state + need.gathered
    return "too large: model state alone" if state > memory * HEADROOM else "too large: with activations"


def _meshes(
    model: DecoderConfig, gpus: int, gpus_per_node: int, length: int, rejected: Counter[str]
) -> Iterator[ParallelConfig]:
    for tp in divisors(min(gpus, gpus_per_node)):
        for pp in divisors(gpus // tp):
            for cp in divisors(gpus // tp // pp) if length > _SHORT else (1,):
                dp = gpus // (tp * pp * cp)
                for ep in divisors(dp) if model.moe is not None else (1,):
                    for schedule in ("1f1b", "interleaved", "zbv", "dualpipev") if pp > 1 else ("1f1b",):
                        values = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "schedule": schedule}
                        mesh = ParallelConfig.model_validate(values | {"sequence": tp > 1})
                        try:
                            check_parallel(mesh, model, gpus, length, compiled=False)
                        except ConfigError as error:
                            rejected[f"impossible: {_subject(str(error))}"] += 1
                            continue
                        near = gpus_per_node // (tp * pp * cp)  # of the dp, those within a node
                        groups = (None, near) if ep == 1 and 1 < near < dp and dp % near == 0 else (None,)
                        for zero in (0, 1, 2, 3) if dp * cp > 1 else (0,):
                            for shards in groups if zero else (None,):
                                yield mesh.model_copy(update={"zero": zero, "shards": shards})


def _subject(message: str) -> str:
    """The setting that an error of `check_parallel` is about, without its value."""
    return message.split("=")[0].split(":")[0].strip()


def _ways(parallel: ParallelConfig) -> tuple[Recompute, ...]:
    """What may be recomputed: nothing where the backward pass is split, for it would be done twice."""
    return ("none",) if parallel.splits_backward else RECOMPUTE


def _refused(
    check: Callable[[ParallelConfig, Recompute], None],
    parallel: ParallelConfig,
    recompute: Recompute,
    rejected: Counter[str],
) -> bool:
    try:
        check(parallel, recompute)
    except ConfigError as error:
        rejected[f"impossible: {_subject(str(error))}"] += 1
        return True
    return False


def _runs(
    parallel: ParallelConfig, dp: int, batch: int, length: int, ways: Sequence[Recompute], rejected: Counter[str]
) -> Iterator[Run]:
    if batch % dp:
        rejected["impossible: dp does not divide data.batch_size"] += 1
        return
    for micro_batch in MICRO_BATCHES:
        if batch // dp % micro_batch:
            continue
        micro_batches = batch // dp // micro_batch
        if not _schedule_runs(parallel, micro_batches):
            rejected["impossible: too few micro-batches for the pipeline's schedule"] += 1
            continue
        for recompute in ways:
            yield Run(parallel, dp, micro_batch, micro_batches, length, recompute)


def _schedule_runs(parallel: ParallelConfig, micro_batches: int) -> bool:
    pp = parallel.pp
    if pp == 1:
        return True
    if parallel.schedule == "interleaved":
        return micro_batches % max(1, micro_batches // pp) == 0 and micro_batches >= pp
    return micro_batches >= pp * chunks_of(parallel.schedule)


def divisors(number: int) -> list[int]:
    """From 1 to the number itself."""
    return [size for size in range(1, number + 1) if number % size == 0]
