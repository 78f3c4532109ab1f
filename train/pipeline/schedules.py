"""The order of work of pipeline schedules: torch's own, taken from its schedule objects without any process group.

gpipe        all forwards, then all backwards (https://arxiv.org/abs/1811.06965)
1f1b         one forward, one backward: fewer activations alive (https://arxiv.org/abs/2104.04473)
interleaved  1f1b over several chunks of the model on each rank (the same paper)
zb           interleaved, the backward pass split into inputs and weights: torch's ZB1P (https://arxiv.org/abs/2401.10241)
zbv          two chunks a rank in the shape of a V, split backward (the same paper, section 6)
dualpipev    the V of DeepSeek's DualPipe: forward of one chunk beside backward of the other (https://arxiv.org/abs/2412.19437)
"""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

from penjing.core.errors import ConfigError

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
Kind = Literal["F", "I", "W", "B"]  # forward, backward for inputs, for weights, whole backward

_TORCH = {
    "interleaved": "Interleaved1F1B",
    "zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_KINDS: dict[str, Kind] = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
_SINGLE = ("gpipe", "1f1b")  # one chunk a rank
_V_SHAPED = ("zbv", "dualpipev")  # two chunks a rank, the second in reverse


class Work(NamedTuple):
    """One piece of work of a rank; `overlapped`: it is the forward half of a pair that DualPipeV runs at once."""

    stage: int
    kind: Kind
    micro_batch: int
    overlapped: bool = False


Order = tuple[tuple[Work, ...], ...]  # of each rank


def known_schedule(name: str) -> Schedule:
    """`name`, if there is such a schedule.

    Raises:
        ConfigError: lists those that there are.
    """
    for schedule in SCHEDULES:
        if name.lower() == schedule:
            return schedule
    raise ConfigError(f"schedule {name!r} is unknown; choose one of {', '.join(SCHEDULES)}")


def chunks_of(schedule: Schedule, chunks: int | None = None) -> int:
    """Model chunks (stages) of each rank: `chunks` where the schedule leaves a choice, 2 by default.

    Raises:
        ConfigError: the schedule is made for another number.
    """
    if schedule in ("interleaved", "zb"):
        if chunks is not None and chunks < 2:
            raise ConfigError(f"schedule {schedule} needs 2 or more chunks a rank, not {chunks}; for one use 1f1b")
        return chunks or 2
    fixed = 1 if schedule in _SINGLE else 2
    if chunks not in (None, fixed):
        raise ConfigError(f"schedule {schedule} has {fixed} chunk{'s' * (fixed > 1)} a rank, not {chunks}")
    return fixed


def stage_ranks(schedule: Schedule, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """The rank of each stage, in the order of the layers: round about, or there and back for the V-shaped ones."""
    turns = [range(ranks) for _ in range(chunks_of(schedule, chunks))]
    if schedule in _V_SHAPED:
        return (*turns[0], *reversed(turns[1]))
    return tuple(rank for turn in turns for rank in turn)


@lru_cache(maxsize=64)
def pipeline_order(schedule: Schedule, ranks: int, micro_batches: int, chunks: int | None = None) -> Order:
    """What each of `ranks` ranks computes, in order; waits are not part of it, the simulator finds them.

    Raises:
        ConfigError: torch's schedule refuses these numbers; its reason is given.
    """
    if ranks < 1 or micro_batches < 1:
        raise ConfigError(f"a pipeline needs 1 or more stages and micro-batches, not {ranks} and {micro_batches}")
    num_chunks = chunks_of(schedule, chunks)
    if schedule in _SINGLE:
        return _single(schedule, ranks, micro_batches)
    from torch.distributed.pipelining.schedules import get_schedule_class

    # Schedules look at these fields of a stage only; the real object would need a process group and a module.
    stages: list[Any] = [
        SimpleNamespace(
            group_rank=0,
            group_size=ranks,
            num_stages=ranks * num_chunks,
            stage_index=chunk * ranks,
            submod=None,
            has_backward=True,
            stage_index_to_group_rank=None,
        )
        for chunk in range(num_chunks)
    ]
    schedule_class: Any = get_schedule_class(_TORCH[schedule])
    try:
        order = schedule_class(stages, micro_batches).pipeline_order
    except ValueError as error:
        raise ConfigError(
            f"schedule {schedule} cannot run {micro_batches} micro-batches over {ranks} ranks: {error}"
        ) from None
    return tuple(_works(order[rank]) for rank in range(ranks))


def _single(schedule: Schedule, ranks: int, micro_batches: int) -> Order:
    """The order that torch's one-chunk schedules run.

    Their `_step_microbatches` has it in code; the list that torch 2.13 gives for 1F1B is off by one on the last rank.
    """
    if micro_batches < ranks and schedule == "1f1b":
        raise ConfigError(
            f"schedule 1f1b needs as many micro-batches as ranks or more, not {micro_batches} for {ranks}; "
            "raise the micro-batches or lower the stages"
        )
    orders = []
    for rank in range(ranks):
        ahead = micro_batches if schedule == "gpipe" else ranks - rank
        works = [Work(rank, "F", m) for m in range(ahead)]
        for m in range(micro_batches):
            works.append(Work(rank, "B", m))
            if ahead + m < micro_batches:
                works.append(Work(rank, "F", ahead + m))
        orders.append(tuple(works))
    return tuple(orders)


def _works(actions: list[Any]) -> tuple[Work, ...]:
    works: list[Work] = []
    for action in actions:
        if action is None:  # a wait
            continue
        name = action.computation_type.name
        if name == "OVERLAP_F_B":
            forward, backward = action.sub_actions
            works += [Work(forward.stage_index, "F", forward.microbatch_index, True), *_works([backward])]
        elif name in _KINDS:
            works.append(Work(action.stage_index, _KINDS[name], action.microbatch_index))
    return tuple(works)
