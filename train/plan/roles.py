"""Which pool learns, which samples answers and which prepares data: the roles with the shortest predicted step.

A step of rollouts samples its answers, sends the new weights where they are sampled next, and learns; these follow each
other, for answers are sampled by the newest weights. Data is prepared beside it:

    step  =  max(data, sampling + weights + learning)

A pool may learn and sample in turns; a pool that prepares data does nothing else. Every way to give pools roles is
compared, with the fastest placement of the learners, and answers are shared so that the last is done soonest. Sampling
reads all weights and the streams' keys and values for each token, or multiplies, whichever takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, combinations, product
from math import ceil

from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig
from penjing.train.parallel.config import ParallelConfig
from penjing.train.pipeline.shape import ModelShape, decoder_shape
from penjing.train.plan.cluster import Cluster, Pool, figures
from penjing.train.plan.cost import reached, step_time
from penjing.train.plan.hardware import Hardware
from penjing.train.plan.memory import Run, rank_memory
from penjing.train.plan.placement import Found, Part, Placement, find_ways
from penjing.train.plan.search import HEADROOM, MICRO_BATCHES, RECOMPUTE

BYTES = 2  # of a weight that samples, and of a number of the key-value cache


@dataclass(frozen=True)
class Sampling:
    """What a step of rollouts samples: `samples` answers of up to `tokens` to each of `prompts` prompts of `length`."""

    prompts: int
    samples: int
    tokens: int
    length: int

    @property
    def count(self) -> int:
        """Sampling of a step."""
        return self.prompts * self.samples


@dataclass(frozen=True)
class Assignment:
    """Who does what.

    Attributes:
        learner: which pools learn, and how.
        rollout: of each pool that samples, answers of its fullest device.
        data: the pools that prepare data.
        seconds: of a step, by what takes them: "data", "sampling", "weights", "learning".
    """

    learner: Placement
    rollout: dict[str, int]
    data: tuple[str, ...]
    seconds: dict[str, float]

    @property
    def step(self) -> float:
        """Seconds."""
        return max(self.seconds["data"], sum(self.seconds[each] for each in ("sampling", "weights", "learning")))

    @property
    def runs(self) -> bool:
        """Whether penjing's own loop does it so: it samples where it learns."""
        return not self.rollout or self.rollout.keys() == {part.pool.label for part in self.learner.parts}


def assign_roles(
    model: DecoderConfig, cluster: Cluster, *, batch_size: int, length: int, answers: Sampling | None = None
) -> list[Assignment]:
    """All ways that fit, the fastest first; of each the fastest placement of its learners.

    Args:
        batch_size, length: sequences that a step learns from, and their tokens.
        answers: what a recipe of rollouts samples; None: it learns from texts.

    Raises:
        ConfigError: nothing fits, an unknown kind without figures, or a role that nobody may have.
    """
    if answers is not None and (model.moe is not None or model.shared_layers > 1):
        raise ConfigError("rollouts are of dense decoders; roles of one with experts or shared layers are not planned")
    wanted = [*(["rollout"] if answers else []), *(["data"] if any("data" in p.roles for p in cluster.pools) else [])]
    for role in ("learner", *wanted):
        if not any(role in pool.roles for pool in cluster.pools):
            raise ConfigError(f"no pool may be {role}; add it to the roles of one, such as roles = ['{role}']")
    job = _Job(decoder_shape(model), {pool.label: figures(pool) for pool in cluster.pools}, cluster, answers)
    learners = _learners(model, job, batch_size, length)
    prepared = batch_size * length if answers is None else answers.prompts * answers.length
    found = [
        assignment
        for choice in product(*(_options(pool, answers is not None) for pool in cluster.pools))
        if (assignment := _assigned(job, learners, choice, prepared, wanted)) is not None
    ]
    if not found:
        raise ConfigError(
            "no way to give the pools roles fits: the model is too large for those that may learn or sample, or "
            "data.batch_size has too few sequences for them; allow more pools more roles, or give another batch"
        )
    return sorted(found, key=lambda each: (each.step, len(each.rollout), each.learner.devices))


def answer_seconds(shape: ModelShape, device: Hardware, load: int, answers: Sampling, taken: float) -> float | None:
    """What a device takes for `load` answers; None if not even one fits beside `taken` bytes of what else it holds."""
    weights = BYTES * shape.parameters
    token = BYTES * sum(layer.key_values for layer in shape.layers)
    room = device.memory * HEADROOM - taken - weights
    streams = min(load, int(room / (token * (answers.length + answers.tokens))))
    if streams < 1:
        return None
    multiplied = 2 * shape.parameters * streams / reached(shape, device)
    read = (weights + streams * token * (answers.length + answers.tokens / 2)) / device.memory_bandwidth
    return ceil(load / streams) * (answers.tokens * max(read, multiplied) + answers.length * multiplied)


@dataclass(frozen=True)
class _Job:
    shape: ModelShape
    devices: dict[str, Hardware]
    cluster: Cluster
    answers: Sampling | None


def _options(pool: Pool, samples: bool) -> Iterator[frozenset[str]]:
    """The sets of roles that a pool may have at once."""
    shared = [role for role in pool.roles if role == "learner" or (role == "rollout" and samples)]
    yield from map(frozenset, chain.from_iterable(combinations(shared, size) for size in range(len(shared) + 1)))
    if "data" in pool.roles:
        yield frozenset({"data"})


def _learners(model: DecoderConfig, job: _Job, batch_size: int, length: int) -> dict[frozenset[str], Placement]:
    """The fastest placement on each set of pools that may learn."""
    pools = tuple(pool for pool in job.cluster.pools if "learner" in pool.roles)
    if job.answers is None:
        found = find_ways(model, job.cluster.model_copy(update={"pools": pools}), batch_size=batch_size, length=length)
    else:
        sets = chain.from_iterable(combinations(pools, size) for size in range(1, len(pools) + 1))
        found = Found([each for some in sets if (each := _together(job, job.answers, some, length)) is not None])
    best: dict[frozenset[str], Placement] = {}
    for placement in sorted(found.placements, key=lambda each: (each.step, each.devices)):
        best.setdefault(frozenset(part.pool.label for part in placement.parts), placement)
    return best


def _together(job: _Job, answers: Sampling, pools: Sequence[Pool], length: int) -> Placement | None:
    """Data parallelism with equal shares, which is what rollouts take: at the pace of the slowest device and link."""
    devices = [job.devices[pool.label] for pool in pools]
    between = job.cluster.between if len(pools) > 1 else None
    link = min(*(device.network for device in devices), between or float("inf"))
    total, layers = sum(pool.count for pool in pools), (tuple(range(len(job.shape.layers))),)
    best: Placement | None = None
    for prompts, recompute in product(MICRO_BATCHES, RECOMPUTE):
        passes, rest = divmod(answers.prompts, total * prompts)
        if rest or not passes:
            continue
        run = Run(ParallelConfig(dp=total), total, prompts * answers.samples, passes, length, recompute)
        need = rank_memory(job.shape, run, 0, layers).total
        if any(need > device.memory * HEADROOM for device in devices):
            continue
        step = max(step_time(job.shape, run, replace(device, network=link), 1).total for device in devices)
        if best is None or step < best.step:
            best = Placement("alike", run, tuple(Part(pool, need) for pool in pools), step)
    return best


def _assigned(
    job: _Job,
    learners: dict[frozenset[str], Placement],
    choice: Sequence[frozenset[str]],
    tokens: int,
    wanted: Sequence[str],
) -> Assignment | None:
    """What a choice of roles takes; None where a role is missing or something does not fit."""
    of = {
        role: [pool for pool, roles in zip(job.cluster.pools, choice, strict=True) if role in roles]
        for role in ("learner", "rollout", "data")
    }
    learner = learners.get(frozenset(pool.label for pool in of["learner"]))
    if learner is None or any(not of[role] for role in wanted):
        return None
    seconds = {"data": 0.0, "sampling": 0.0, "weights": 0.0, "learning": learner.step}
    loads: dict[str, int] = {}
    if of["data"]:
        seconds["data"] = tokens / sum(pool.count * (pool.data_rate or 0.0) for pool in of["data"])
    if job.answers is not None:
        held = {part.pool.label: part.memory for part in learner.parts}
        shared = share_answers(job.shape, job.devices, of["rollout"], job.answers, held)
        if shared is None:
            return None
        loads, seconds["sampling"] = shared
        seconds["weights"] = _sending(job, of["learner"], of["rollout"])
    return Assignment(learner, loads, tuple(pool.label for pool in of["data"]), seconds)


def share_answers(
    shape: ModelShape, devices: dict[str, Hardware], pools: Sequence[Pool], answers: Sampling, held: dict[str, float]
) -> tuple[dict[str, int], float] | None:
    """Sampling of the fullest device of each pool, and seconds until all are sampled; None if they fit nowhere.

    Each answer goes to the pool that would be done with it soonest, which is best where more answers never take less
    time. held: bytes that a device of a pool needs for learning.
    """

    @cache
    def taken(label: str, load: int) -> float:
        found = answer_seconds(shape, devices[label], load, answers, held.get(label, 0.0)) if load else 0.0
        return float("inf") if found is None else found

    counts = {pool.label: 0 for pool in pools}
    sizes = {pool.label: pool.count for pool in pools}
    for _ in range(answers.count):
        soonest = min(counts, key=lambda label: taken(label, ceil((counts[label] + 1) / sizes[label])))
        counts[soonest] += 1
    loads = {label: ceil(count / sizes[label]) for label, count in counts.items()}
    seconds = max(taken(label, load) for label, load in loads.items())
    return None if seconds == float("inf") or 0 in loads.values() else (loads, seconds)


def _sending(job: _Job, learners: Sequence[Pool], rollouts: Sequence[Pool]) -> float:
    """Seconds in which new weights reach pools that sample and do not learn, one pool after another."""
    apart = [pool for pool in rollouts if pool not in learners]
    link = min(job.devices[pool.label].network for pool in (*learners, *rollouts))
    return len(apart) * BYTES * job.shape.parameters / min(link, job.cluster.between or link)
