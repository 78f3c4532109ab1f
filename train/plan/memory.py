"""Bytes of one rank of a distributed run, by what they are for, from numbers alone.

What is split by what (P: parameters of a rank's stage; each is 4 bytes, AdamW's state 8 a parameter):

parameters   P / tp (experts also / ep), and / shards with ZeRO 1 to 3, where shards = dp × cp, or as
             parallel.shards says
gathered     whole parameters that ZeRO has collected: all of the stage (1, 2), or two blocks and the tables (3)
gradients    as P; / shards with ZeRO 2 and 3, and with 1 where a step is one micro-batch
optimizer    as P; / shards with ZeRO 1 to 3
reduction    the largest block's gradient on its way
activations  what the layers keep for each micro-batch alive in the pipeline; split by cp, partly by tp
logits       at the end of the last stage

ZeRO: https://arxiv.org/abs/1910.02054; activations: https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from penjing.train.numerics.recompute import Recompute
from penjing.train.parallel.config import ParallelConfig
from penjing.train.pipeline.schedules import Schedule, chunks_of, stage_ranks
from penjing.train.pipeline.shape import ModelShape
from penjing.train.pipeline.split import split_layers

STATE_PER_PARAMETER = {"adamw": 2, "adamw8bit": 0.51, "sgd": 1, "muon": 2}  # × the parameters' bytes; muon: at most
_LOGIT_CHUNK = 4 * 2**27  # bytes of the blocks of logits that kernels/cross_entropy.py makes on a GPU


@dataclass(frozen=True)
class Accounting:
    """What a framework keeps where. `gathered`: bytes of a collected parameter of a layer; `tables`: of one of the
    embedding or the head; `residual`: of an element of the residual stream; `kept`: of other activations;
    `whole_logits`: of a logit, 0 where they never exist at once."""

    gathered: int = 2
    tables: int = 4
    residual: int = 4
    kept: int = 4
    whole_logits: int = 0


# float32 parameters under autocast, which keeps what it casts beside the cast: 1.6 times the two bytes in the preflight
PENJING = Accounting()  # loss in blocks
TORCHTITAN = Accounting(tables=2, residual=2, kept=2, whole_logits=2 + 4 + 4)  # bf16, fp32, and its gradient


@dataclass(frozen=True)
class Run:
    """A way to run a model: the mesh, and the settings beside it. `dp` is resolved."""

    parallel: ParallelConfig
    dp: int
    micro_batch: int
    micro_batches: int
    length: int
    recompute: Recompute = "none"

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO spreads."""
        return self.parallel.spread(self.dp) * self.parallel.cp if self.parallel.zero else 1

    @property
    def tokens(self) -> float:
        """Of a micro-batch on one rank."""
        return self.micro_batch * self.length / self.parallel.cp


@dataclass(frozen=True)
class ParallelMemory:
    """Bytes of the rank that needs most."""

    parameters: float
    gathered: float
    gradients: float
    optimizer: float
    reduction: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """All together."""
        return sum(self.__dict__.values())

    @property
    def model_state(self) -> float:
        """What ZeRO shrinks: parameters, gradients, optimiser."""
        return self.parameters + self.gradients + self.optimizer

    def __str__(self) -> str:
        parts = [f"{name} {show_bytes(size)}" for name, size in self.__dict__.items() if size >= self.total / 50]
        return f"{show_bytes(self.total)} ({', '.join(parts)})"


def show_bytes(size: float) -> str:
    """`size` in the largest unit of which there is one."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size / 2**10:.1f} KiB"


def parallel_memory(shape: ModelShape, run: Run, accounting: Accounting = PENJING) -> ParallelMemory:
    """Memory of the rank of a pipeline that needs most; data-parallel ranks are alike."""
    stages = layers_of(shape, run.parallel.pp, run.parallel.schedule, run.length)
    ranks = [rank_memory(shape, run, rank, stages, accounting) for rank in range(run.parallel.pp)]
    return max(ranks, key=lambda memory: memory.total)


@lru_cache(maxsize=256)
def layers_of(shape: ModelShape, pp: int, schedule: Schedule, length: int) -> tuple[tuple[int, ...], ...]:
    """The layers of each stage, split by cost."""
    stages = pp * (chunks_of(schedule) if pp > 1 else 1)
    bounds = split_layers(shape.costs(length), stages)
    return tuple(tuple(range(bounds[stage], bounds[stage + 1])) for stage in range(stages))


def live_chunks(schedule: Schedule, rank: int, ranks: int, micro_batches: int) -> int:
    """Micro-batches × chunks whose activations `rank` holds at most (see `Timeline.peak_live`)."""
    if ranks == 1:
        return 1
    chunks = chunks_of(schedule)
    limit = {
        "gpipe": micro_batches,
        "1f1b": ranks - rank,
        "interleaved": (chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1,
        "zb": chunks * ranks,
        "zbv": 2 * ranks,
        "dualpipev": 2 * ranks + 1,
    }[schedule]
    return min(limit, micro_batches * chunks)


def rank_memory(
    shape: ModelShape,
    run: Run,
    rank: int,
    stages: Sequence[Sequence[int]],
    accounting: Accounting = PENJING,
) -> ParallelMemory:
    """Memory of a rank of a pipeline whose stages have these layers."""
    parallel, pp = run.parallel, run.parallel.pp
    home = stage_ranks(parallel.schedule, pp) if pp > 1 else (0,)
    mine = [stage for stage, owner in enumerate(home) if owner == rank]
    layers = [shape.layers[index] for stage in mine for index in stages[stage]]
    ends = (0 in mine) + (len(stages) - 1 in mine)
    tables = shape.table * (1 if ends == 2 and shape.tied else ends) / parallel.tp
    tables += shape.hidden if len(stages) - 1 in mine else 0  # the last norm
    dense = sum(layer.dense for layer in layers) / parallel.tp + tables
    experts = sum(layer.experts for layer in layers) / (parallel.tp * parallel.ep)
    # A rank's share of the experts is spread over dp / ep: all in all as the rest
    sharded = dense / run.shards + (experts * parallel.ep / run.shards if run.shards > 1 else experts)
    whole = dense + experts
    block = max(layer.dense + layer.experts / parallel.ep for layer in layers) / parallel.tp
    zero, one_pass = parallel.zero, run.micro_batches == 1
    layers_gathered = {0: 0.0, 1: whole - tables, 2: whole - tables, 3: min(2 * block, whole - tables)}[zero]
    summed = sharded if zero >= 2 or (zero == 1 and one_pass) else whole
    chunks = len(mine)
    kept = sum(_kept(layer.kept[run.recompute], run, accounting) for layer in layers)
    live = live_chunks(parallel.schedule, rank, pp, run.micro_batches)
    working = 0.0 if run.recompute == "none" else max(_kept(layer.kept["none"], run, accounting) for layer in layers)
    if parallel.tp > 1:  # inputs of products, gathered over the tensor ranks, and their gradients
        working += 4 * accounting.kept * run.tokens * shape.hidden
    logits = 0.0
    if len(stages) - 1 in mine:
        whole_logits = run.tokens * shape.vocabulary / parallel.tp * accounting.whole_logits
        logits = whole_logits or min(2 * _LOGIT_CHUNK, 8 * run.tokens * shape.vocabulary / parallel.tp)
    return ParallelMemory(
        parameters=4 * (sharded if zero else whole),
        gathered=accounting.gathered * layers_gathered + (accounting.tables * tables if zero else 0),
        gradients=4 * summed,
        optimizer=4 * STATE_PER_PARAMETER["adamw"] * (sharded if zero else whole),
        reduction=4 * block if run.dp * parallel.cp > 1 else 0,
        activations=kept * live / chunks + working,
        logits=logits,
    )


def _kept(elements: tuple[int, int], run: Run, accounting: Accounting) -> float:
    products, residual = elements
    tp = run.parallel.tp
    spread = residual / tp if run.parallel.sequence else residual
    return run.tokens * (accounting.kept * products / tp + accounting.residual * spread)
