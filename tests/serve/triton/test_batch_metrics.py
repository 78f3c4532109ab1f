"""What the metrics say of a batched model: its queue, its batches, what it refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.serve.triton.classifiers import pixels
from tests.serve.triton.serving import wait_until
from tests.serve.triton.test_repository import Gate, Request, artifact, gate, gated_adapter

__all__ = ["artifact", "gate"]


def test_queue_batches_and_refusals_are_shown(artifact: Path, gate: Gate) -> None:
    adapter = gated_adapter(artifact, gate, max_batch_size=4, max_queue_size=3)
    metrics = adapter._pb_utils.metrics
    first = Request(pixels=pixels(1))
    adapter.execute([first])
    wait_until(lambda: gate.rows == [1], 10, "the first batch")
    behind = Request(pixels=pixels(4))
    adapter.execute([behind])
    wait_until(lambda: len(adapter._waiting) == 0, 10, "the second batch")
    adapter.execute(
        [Request(pixels=pixels(2)), Request(pixels=pixels(1)[:0]), Request(pixels=pixels(1), microseconds=1)]
    )
    refused = Request(pixels=pixels(1))
    waiting = [Request(pixels=pixels(4)) for _ in range(2)]
    wait_until(lambda: len(adapter._waiting) == 1, 10, "the end of the late one")
    adapter.execute([*waiting, refused])
    assert refused.sender.done.wait(10)
    assert "the queue is full: 3 requests wait; retry in 1 s" in str(refused.sender.error())
    wait_until(lambda: metrics["penjing:num_requests_waiting"].value == 3, 10, "the gauge")
    assert metrics["penjing:num_requests_running"].value == 2
    time.sleep(0.05)
    gate.release(5)
    assert all(request.sender.done.wait(10) for request in (first, behind, *waiting))
    wait_until(lambda: metrics["penjing:request_successstop"].value == 5, 10, "the counter")
    assert [metrics[f"penjing:requests_refused{reason}"].value for reason in ("invalid", "overloaded", "timeout")] == [
        1, 1, 1,
    ]  # fmt: skip
    assert metrics["penjing:batch_rows"].samples == [1, 4, 2, 4, 4]
    assert len(metrics["penjing:batch_time_seconds"].samples) == 5
    queued = metrics["penjing:request_queue_time_seconds"].samples
    assert len(queued) == 5
    assert min(queued) >= 0
    assert max(queued) >= 0.05 > queued[0]
    adapter.finalize()
    assert not adapter._shower.is_alive()


def test_a_request_with_a_name_has_a_line_in_the_log(
    artifact: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[dict[str, object]] = []
    monkeypatch.setattr("penjing.serve.triton.batch_adapter.log_request", lines.append)
    adapter = gated_adapter(artifact, gate, max_batch_size=4, max_queue_size=3)
    good, wrong = Request(name="good", pixels=pixels(2)), Request(name="wrong", pixels=pixels(1)[:0])
    gate.release(1)
    adapter.execute([good, wrong])
    assert good.sender.done.wait(10)
    adapter.finalize()
    refused, answered = sorted(lines, key=len)
    assert refused == {"request": "wrong", "refused": "INVALID_ARGUMENT"}
    assert (answered["request"], answered["rows"]) == ("good", 2)
    assert 0 <= float(str(answered["queue"])) <= float(str(answered["seconds"]))


def test_without_metrics_it_serves_all_the_same(artifact: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.serve.triton.stand_in import Module

    class Closed(Module):
        @property
        def MetricFamily(self) -> object:  # noqa: N802
            raise RuntimeError("metrics are off")

        @MetricFamily.setter
        def MetricFamily(self, value: object) -> None:  # noqa: N802
            pass

    monkeypatch.setattr("tests.serve.triton.test_repository.Module", Closed)
    adapter = gated_adapter(artifact, gate)
    request = Request(pixels=pixels(1))
    gate.release(1)
    adapter.execute([request])
    assert request.sender.done.wait(10)
    adapter.finalize()
