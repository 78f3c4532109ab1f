"""Which pools of unlike machines a run uses, and for what: the placement with the shortest predicted step.

Three ways are compared, over every subset of the pools:

alike     One mesh over all devices, each taken for as good as the worst of the pools in every figure.
replicas  A whole model on every device, which get samples by their predicted speed (`parallel.shares = "auto"`).
stages    A pipeline, of which each pool has some neighbouring stages, with layers by its speed (`stage_layers`).

Tensor parallelism never leaves a machine. Nothing is tried: the times are those of `cost`, the bytes those of `memory`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, permutations
from math import gcd
from typing import Literal

from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig
from penjing.train.parallel.config import ParallelConfig, check_parallel
from penjing.train.parallel.share_balancer import fairest
from penjing.train.pipeline.shape import ModelShape, decoder_shape
from penjing.train.plan.cluster import Cluster, Pool, figures
from penjing.train.plan.cost import hidden_rest, layer_forward, passes, reached, ring, step_time, update_seconds
from penjing.train.plan.hardware import Hardware
from penjing.train.plan.memory import Run, rank_memory
from penjing.train.plan.search import HEADROOM, MICRO_BATCHES, RECOMPUTE, divisors, search

Way = Literal["alike", "replicas", "stages"]


@dataclass(frozen=True)
class Part:
    """What a pool does. `samples`: of a step, of its devices with most (replicas); `layers`: of each of its stages;
    `memory`: bytes of its fullest device."""

    pool: Pool
    memory: float
    samples: int = 0
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """A way to use some pools: `step` seconds are predicted. Processes are numbered in the order of `parts`."""

    way: Way
    run: Run
    parts: tuple[Part, ...]
    step: float

    @property
    def devices(self) -> int:
        """Processes."""
        return sum(part.pool.count for part in self.parts)


@dataclass
class Found:
    """What fits, the fastest first, and how often something did not, by why."""

    placements: list[Placement] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)


def find_placements(model: DecoderConfig, cluster: Cluster, *, batch_size: int, length: int) -> Found:
    """All ways to train `model` on pools of the cluster, at most one for each way and order of pools.

    Raises:
        ConfigError: an unknown kind without figures, a pool that can hold no part of the model in any way, or nothing
            that works.
    """
    found = find_ways(model, cluster, batch_size=batch_size, length=length)
    _check_pools(cluster, found)
    return found


def find_ways(model: DecoderConfig, cluster: Cluster, *, batch_size: int, length: int) -> Found:
    """`find_placements`, where pools that can do nothing are no error."""
    shape = decoder_shape(model)
    devices = {pool.label: figures(pool) for pool in cluster.pools}
    found = Found()
    for size in range(1, len(cluster.pools) + 1):
        for pools in combinations(cluster.pools, size):
            job = _Job(model, shape, devices, cluster.between, batch_size, length, found.rejected)
            ways = [_alike(job, pools), _replicas(job, pools)]
            ways += [_stages(job, order) for order in permutations(pools)] if size > 1 else []
            found.placements += [way for way in ways if way is not None]
    found.placements.sort(key=lambda each: (each.step, each.devices))
    return found


def _check_pools(cluster: Cluster, found: Found) -> None:
    used = {part.pool.label for each in found.placements for part in each.parts}
    for pool in cluster.pools:
        if pool.label not in used:
            reasons = "; ".join(why for why, _ in found.rejected.most_common(2)) or "no mesh divides its devices"
            raise ConfigError(
                f"pool {pool.label!r} can do no part of this run, neither replicas nor stages on devices of "
                f"{figures(pool).memory / 2**30:.1f} GiB: {reasons}; leave it out, or give another model or batch"
            )


@dataclass(frozen=True)
class _Job:
    model: DecoderConfig
    shape: ModelShape
    devices: dict[str, Hardware]
    between: float | None
    batch: int
    length: int
    rejected: Counter[str]

    def of(self, pools: Sequence[Pool]) -> list[Hardware]:
        return [self.devices[pool.label] for pool in pools]

    def across(self, pools: Sequence[Pool]) -> float:
        """Bytes/s of a device to those of other machines of these pools."""
        slowest = min(device.network for device in self.of(pools))
        return min(slowest, self.between or slowest) if len(pools) > 1 else slowest


def _alike(job: _Job, pools: Sequence[Pool]) -> Placement | None:
    devices, node = job.of(pools), gcd(*(pool.node for pool in pools))
    lowest = {
        name: min(getattr(device, name) for device in devices)
        for name in ("memory", "memory_bandwidth", "node_link", "link_share")
    }
    slowest = min(devices, key=lambda device: device.flops * device.efficiency)
    worst = replace(slowest, network=job.across(pools), **lowest)
    count = sum(pool.count for pool in pools)
    try:
        best = search(
            job.model, worst, gpus=count, memory=worst.memory, gpus_per_node=min(node, count), batch_size=job.batch,
            length=job.length,
        ).best[0]  # fmt: skip
    except ConfigError as error:
        job.rejected[str(error).split(";")[0]] += 1
        return None
    parts = tuple(Part(pool, best.memory.total) for pool in pools)
    return Placement("alike", best.run, parts, best.time.total)


def _replicas(job: _Job, pools: Sequence[Pool]) -> Placement | None:
    """Data parallelism alone, with unlike shares: one model a device."""
    if job.model.moe is not None or job.model.shared_layers > 1 or len(pools) == 1:
        return None
    total = sum(pool.count for pool in pools)
    best: Placement | None = None
    layers = (tuple(range(len(job.shape.layers))),)
    parallel = ParallelConfig(dp=total, shares="auto")
    for micro_batch in MICRO_BATCHES:
        pieces = job.batch // micro_batch
        if job.batch % micro_batch or pieces % total or pieces < 2 * total:
            job.rejected["replicas: too few micro-batches of data.batch_size for every device"] += 1
            continue
        for recompute in RECOMPUTE:
            run = Run(parallel, total, micro_batch, pieces // total, job.length, recompute)
            need = rank_memory(job.shape, run, 0, layers).total
            if any(need > device.memory * HEADROOM for device in job.of(pools)):
                job.rejected["replicas: a whole model on a device is too large"] += 1
                continue
            # The ring of gradients goes through all pools, at the pace of the slowest link.
            devices = [replace(device, network=job.across(pools)) for device in job.of(pools)]
            one = [step_time(job.shape, replace(run, micro_batches=1), device, 1).compute for device in devices]
            counts = fairest([each for each, pool in zip(one, pools, strict=True) for _ in range(pool.count)], pieces)
            parts, step, first = [], 0.0, 0
            for pool, device in zip(pools, devices, strict=True):
                most = max(counts[first : first + pool.count])
                first += pool.count
                step = max(step, step_time(job.shape, replace(run, micro_batches=most), device, 1).total)
                parts.append(Part(pool, need, samples=most * micro_batch))
            if best is None or step < best.step:
                best = Placement("replicas", run, tuple(parts), step)
    return best


def _stages(job: _Job, pools: Sequence[Pool]) -> Placement | None:
    """A pipeline (1F1B) through the pools in this order, the same mesh of dp × tp in every stage."""
    best: Placement | None = None
    for run, counts in _pipelines(job, pools):
        found = assign_layers(
            job.shape, run, [(job.devices[p.label], p.node) for p in pools], counts, job.across(pools)
        )
        if found is None:
            job.rejected["stages: too large for some pool"] += 1
            continue
        step, layers, memory = found
        if best is None or step < best.step:
            firsts = [sum(counts[:place]) for place in range(len(pools))]
            parts = tuple(
                Part(pool, max(memory[first : first + count]), layers=tuple(layers[first : first + count]))
                for pool, first, count in zip(pools, firsts, counts, strict=True)
            )
            best = Placement("stages", run, parts, step)
    return best


def _pipelines(job: _Job, pools: Sequence[Pool]) -> Iterator[tuple[Run, tuple[int, ...]]]:
    """Runs, with the number of stages in each pool."""
    if job.model.shared_layers > 1 or job.model.moe is not None:
        job.rejected["stages: not for experts and shared layers"] += 1
        return
    for tp in divisors(gcd(*(pool.node for pool in pools))):
        for dp in divisors(gcd(*(pool.count // tp for pool in pools))):
            counts = tuple(pool.count // tp // dp for pool in pools)
            parallel = ParallelConfig(dp=dp, tp=tp, pp=sum(counts), sequence=tp > 1)
            try:
                check_parallel(parallel, job.model, sum(pool.count for pool in pools), job.length, compiled=False)
            except ConfigError:
                job.rejected["stages: impossible with this model"] += 1
                continue
            for micro_batch in MICRO_BATCHES:
                passes_, rest = divmod(job.batch, dp * micro_batch)
                if rest or passes_ < parallel.pp:
                    continue
                for zero in (0, 1) if dp > 1 else (0,):
                    for recompute in RECOMPUTE:
                        mesh = parallel.model_copy(update={"zero": zero})
                        yield Run(mesh, dp, micro_batch, passes_, job.length, recompute), counts


def assign_layers(
    shape: ModelShape,
    run: Run,
    devices: Sequence[tuple[Hardware, int]],
    counts: Sequence[int],
    across: float,
) -> tuple[float, tuple[int, ...], tuple[float, ...]] | None:
    """The layers of each stage with which a step is shortest: (seconds, layers, bytes of a rank), or None if none fits.

    A step is one micro-batch through all stages, and the others through the slowest of them (or the slowest link), and
    then what is left of summing gradients and updating. Exact: of the ways to give the first layers to the first
    stages, those are kept that no other beats in all three of these.

    Args:
        devices: of each pool, with its devices a machine; `counts`: its stages. across: bytes/s between pools.
    """
    homes = [device for device, count in zip(devices, counts, strict=True) for _ in range(count)]
    stages, num = len(homes), len(shape.layers)
    kinds = [shape.layers.index(layer) for layer in shape.layers]
    sent = 2 * run.tokens * shape.hidden / run.parallel.tp / across

    @cache
    def judged(stage: int, held: tuple[int, ...]) -> tuple[float, float, float] | None:
        return stage_cost(shape, run, stage, stages, held, *homes[stage])

    # by the number of layers given out: (slowest, sum, tail, layers so far, bytes so far)
    kept: dict[int, list[tuple[float, float, float, tuple[int, ...], tuple[float, ...]]]] = {0: [(sent, 0, 0, (), ())]}
    for stage in range(stages):
        after: dict[int, list[tuple[float, float, float, tuple[int, ...], tuple[float, ...]]]] = {}
        for start, ways in kept.items():
            ends = [num] if stage == stages - 1 else range(start + 1, num - (stages - stage - 1) + 1)
            for end in ends:
                cost = judged(stage, tuple(sorted(kinds[start:end]))) if end > start else None
                if cost is None:
                    continue
                seconds, tail, size = cost
                after.setdefault(end, []).extend(
                    (max(slow, seconds), total + seconds, max(rest, tail), (*layers, end - start), (*sizes, size))
                    for slow, total, rest, layers, sizes in ways
                )
        kept = {end: _undominated(ways) for end, ways in after.items()}
    done = [
        ((run.micro_batches - 1) * slow + total + rest, layers, sizes)
        for slow, total, rest, layers, sizes in kept.get(num, [])
    ]
    return min(done, default=None)


def stage_cost(
    shape: ModelShape, run: Run, stage: int, stages: int, held: Sequence[int], device: Hardware, node: int
) -> tuple[float, float, float] | None:
    """Of a stage with the layers `held`: seconds of a micro-batch, seconds once a step, bytes; None if too large."""
    first = [()] * stage
    need = rank_memory(shape, run, stage, [*first, held, *[()] * (stages - stage - 1)]).total
    if need > device.memory * HEADROOM:
        return None
    tp, last = run.parallel.tp, stage == stages - 1
    rate = reached(shape, device)
    work = sum(layer_forward(shape.layers[index], run, rate) for index in held)
    work += 2 * shape.table * run.tokens / tp / rate if last else 0.0
    repeats = 3 if run.recompute == "full" else 2
    inside = 4 * repeats * len(held) * ring(2 * run.tokens * shape.hidden, tp, device.node_link * device.link_share)
    seconds = work * passes(run) + inside
    tables = shape.table if stage == 0 or last else 0
    parameters = (sum(shape.layers[index].parameters for index in held) + tables) / tp
    link = device.node_link if tp * run.dp <= node else device.network
    gathers = 0.5 if run.parallel.zero else 1
    traffic = (1 + gathers) * ring(4 * parameters, run.dp, link * device.link_share)
    rest = hidden_rest(traffic, seconds * run.micro_batches) if run.dp > 1 else 0.0
    return seconds, rest + update_seconds(parameters / run.shards, device), need


def _undominated(
    ways: list[tuple[float, float, float, tuple[int, ...], tuple[float, ...]]],
) -> list[tuple[float, float, float, tuple[int, ...], tuple[float, ...]]]:
    found: list[tuple[float, float, float, tuple[int, ...], tuple[float, ...]]] = []
    for way in sorted(ways):
        if not any(other[1] <= way[1] and other[2] <= way[2] for other in found):  # sorted: none is slower
            found.append(way)
    return found
