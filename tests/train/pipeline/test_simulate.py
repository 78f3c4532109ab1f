"""The simulator against closed formulas of the papers, and its orders against what torch's schedules really run."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

from penjing.core.errors import ConfigError
from penjing.train.pipeline.schedules import SCHEDULES, Work, known_schedule, pipeline_order, stage_ranks
from penjing.train.pipeline.simulate import StageTimes, Timeline, run_order, simulate
from penjing.train.plan.formulas import closed_bubble

TIME = st.floats(0.1, 4.0)


def equal(schedule, ranks, micro_batches, times, chunks=None, overlap=0.0, send=0.0) -> Timeline:
    stages = len(stage_ranks(schedule, ranks, chunks))
    f, i, w = ((time,) * stages for time in times)
    made = StageTimes(f, i, w, overlap=overlap, send=send)
    return simulate(schedule, ranks, made, [1.0] * micro_batches, chunks=chunks)


def relative_bubble(line: Timeline) -> float:
    """Makespan ÷ the busiest rank's work − 1: what the papers state, (p − 1)/m for equal stages of 1F1B."""
    return line.makespan / max(line.busy) - 1


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 9), st.integers(0, 12), TIME, TIME, TIME)
def test_gpipe_and_1f1b_leave_p_minus_1_over_m(schedule, ranks, more, f, i, w):
    micro_batches = ranks + more
    line = equal(schedule, ranks, micro_batches, (f, i, w))
    assert relative_bubble(line) == pytest.approx((ranks - 1) / micro_batches, abs=1e-9)
    idle = line.makespan - max(line.busy)
    assert idle == pytest.approx(closed_bubble(schedule, ranks, f, i, w), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4), TIME, TIME, TIME)
def test_interleaved_leaves_p_minus_1_over_v_m(ranks, rounds, chunks, f, i, w):
    line = equal("interleaved", ranks, rounds * ranks, (f, i, w), chunks)
    assert relative_bubble(line) == pytest.approx((ranks - 1) / (chunks * rounds * ranks), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(2, 4), st.integers(2, 3), TIME, TIME, TIME)
def test_zero_bubble_leaves_f_plus_i_minus_w(ranks, rounds, chunks, f, i, w):
    w = min(f, i, w)
    line = equal("zb", ranks, rounds * ranks, (f, i, w), chunks)
    idle = line.makespan - max(line.busy)
    assert idle == pytest.approx(closed_bubble("zb", ranks, f, i, w), abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.integers(0, 9), TIME)
def test_zbv_has_no_bubble_where_the_three_parts_are_equal(ranks, more, time):
    line = equal("zbv", ranks, 2 * ranks + more, (time,) * 3)
    assert line.longest_span - max(line.busy) == pytest.approx(0.0, abs=1e-9)
    assert line.makespan - line.longest_span == pytest.approx((ranks - 1) * time, abs=1e-9)  # the ranks begin in turn


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(0, 9), TIME, st.floats(0.0, 1.0), st.sampled_from([0.0, 1e-9, 0.3, 1.0]))
def test_dualpipev_leaves_what_its_authors_state(ranks, more, f, share, overlap):
    w = f * share
    line = equal("dualpipev", ranks, 2 * ranks + more, (f, f, w), overlap=overlap)
    idle = line.makespan - min(line.busy)
    assert idle == pytest.approx(closed_bubble("dualpipev", ranks, f, f, w, overlap), abs=1e-6)


def test_a_formula_is_refused_where_none_holds():
    with pytest.raises(ConfigError, match="no closed formula"):
        closed_bubble("zbv", 4, 1.0, 2.0, 1.0)


class RecordingStage(SimpleNamespace):
    """What torch's one-chunk schedules call on a stage: it writes down each piece of work."""

    def forward_one_chunk(self, index, *_, **__):
        self.seen.append(Work(self.stage_index, "F", index))

    def backward_one_chunk(self, index, **_):
        self.seen.append(Work(self.stage_index, "B", index))

    def _nothing(self, *_):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = clear_runtime_states = _nothing
    perform_reduce_grad = _nothing


@pytest.mark.parametrize(("name", "schedule_class"), [("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 2), (4, 4), (4, 9)])
def test_one_chunk_orders_are_what_torch_runs(monkeypatch, name, schedule_class, ranks, micro_batches):
    for rank, expected in enumerate(pipeline_order(name, ranks, micro_batches)):
        stage = RecordingStage(
            seen=[],
            stage_index=rank,
            num_stages=ranks,
            group_size=ranks,
            group_rank=rank,
            submod=None,
            has_backward=True,
            is_first=rank == 0,
            is_last=False,
        )
        made = schedule_class(stage, micro_batches)
        monkeypatch.setattr(made, "_initialize_stage", lambda *_: None)
        made._step_microbatches([()] * micro_batches, [{}] * micro_batches)
        assert tuple(stage.seen) == expected


@pytest.mark.parametrize(
    ("name", "torch_name", "chunks"),
    [
        ("interleaved", "Interleaved1F1B", 3),
        ("zb", "InterleavedZeroBubble", 2),
        ("zbv", "ZBVZeroBubble", 2),
        ("dualpipev", "DualPipeV", 2),
    ],
)
def test_orders_of_many_chunks_are_torchs(name, torch_name, chunks):
    actions = get_schedule_ops(torch_name, 4, 8, chunks)
    for expected, works in zip(actions, pipeline_order(name, 4, 8, None if chunks == 2 else chunks), strict=True):
        flat = [part for action in expected if action for part in (action.sub_actions or [action])]
        kinds = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
        assert [(a.stage_index, kinds[a.computation_type.name], a.microbatch_index) for a in flat] == [
            work[:3] for work in works
        ]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(2, 4),
    st.lists(st.floats(0.1, 3.0), min_size=8, max_size=12),
    st.lists(st.floats(0.05, 2.0), min_size=8, max_size=8),
    st.floats(0.0, 0.5),
)
def test_uneven_timelines_keep_order_and_dependencies(schedule, ranks, scales, costs, send):
    home = stage_ranks(schedule, ranks)
    scales = scales[: len(scales) - len(scales) % ranks]
    if len(scales) < len(home):
        scales = [*scales, *scales]
    scales = scales[: len(scales) - len(scales) % ranks]
    times = StageTimes.of_costs((costs * 2)[: len(home)], send=send)
    line = simulate(schedule, ranks, times, scales)
    ends = {(s.work.stage, s.work.kind.replace("B", "I"), s.work.micro_batch): s for s in line.spans}
    for rank in range(ranks):
        mine = [span for span in line.spans if span.rank == rank]
        assert all(before.end <= after.start + 1e-12 for before, after in pairwise(mine))
    for (stage, kind, micro_batch), span in ends.items():
        assert span.rank == home[stage]
        if kind == "F" and stage:
            assert span.start >= ends[stage - 1, "F", micro_batch].end - 1e-12
        if kind == "I":
            assert span.start >= ends[stage, "F", micro_batch].end - 1e-12
            if stage + 1 < len(home):
                away = send * scales[micro_batch] if home[stage + 1] != span.rank else 0.0
                assert span.start >= ends[stage + 1, "I", micro_batch].end + away - 1e-9
    work = sum(3 * cost * scale for cost in times.forward for scale in scales)
    assert sum(line.busy) == pytest.approx(work)
    assert 0 <= line.bubble < 1


def test_peak_activations_are_the_published_ones():
    assert equal("gpipe", 4, 8, (1, 1, 1)).peak_live == (8, 8, 8, 8)
    assert equal("1f1b", 4, 8, (1, 1, 1)).peak_live == (4, 3, 2, 1)
    assert equal("zbv", 4, 8, (1, 1, 1)).peak_live[0] == 2 * 4  # halves of a rank's layers: as 1f1b
    assert max(equal("dualpipev", 4, 8, (1, 1, 1)).peak_live) == 2 * 4 + 1  # PP + 1


def test_sends_lengthen_the_way_through():
    free, paid = equal("gpipe", 4, 1, (1, 1, 1)), equal("gpipe", 4, 1, (1, 1, 1), send=0.5)
    assert paid.makespan - free.makespan == pytest.approx(2 * 3 * 0.5)


def test_wrong_numbers_are_one_line():
    with pytest.raises(ConfigError, match="unknown; choose one of gpipe, 1f1b"):
        known_schedule("2f2b")
    with pytest.raises(ConfigError, match="as many micro-batches as ranks"):
        pipeline_order("1f1b", 8, 4)
    with pytest.raises(ConfigError, match="multiple of the number of rounds"):
        pipeline_order("interleaved", 4, 11)
    with pytest.raises(ConfigError, match="has 2 chunks a rank, not 3"):
        pipeline_order("zbv", 4, 8, 3)
    with pytest.raises(ConfigError, match="8 stages here, but 4"):
        simulate("zbv", 4, StageTimes.of_costs([1.0] * 4), [1.0] * 8)
    with pytest.raises(ConfigError, match="not be negative"):
        StageTimes.of_costs([-1.0])
    with pytest.raises(ConfigError, match="waits for itself"):
        run_order(((Work(0, "B", 0), Work(0, "F", 0)),), [0], StageTimes.of_costs([1.0]), [1.0])
