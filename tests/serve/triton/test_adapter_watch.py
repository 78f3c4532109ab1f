"""What can be seen of an adapter from outside, and what it obeys: pulse, commands, deadlines, metrics."""

from __future__ import annotations

from penjing.serve.triton.metrics import COUNTERS, GAUGES, HISTOGRAMS, REASONS
from penjing.serve.triton.pulse import Command, Phase
from tests.serve.triton.serving import wait_until
from tests.serve.triton.stand_in import GREEDY, Adapted, Gate


def test_a_request_whose_time_is_up_is_ended(slow: Adapted) -> None:
    sender = slow.ask(text_input="a", timeout_us=200_000, sampling_parameters={"max_tokens": 2000, **GREEDY})
    assert sender.done.wait(60)
    assert sender.error().code == "unavailable"
    wait_until(lambda: slow.engine.stats().num_blocks_used == 0, 60, "the end of the request")


def test_the_pulse_tells_life_and_takes_commands(adapted: Adapted, gate: Gate) -> None:
    pulse = adapted.pulse
    wait_until(lambda: pulse.phase is Phase.SERVING, 60, "serving")
    assert pulse.stub_pid > 0
    assert pulse.beat_age() < 2
    assert pulse.loop_age() < 2
    assert adapted.ask(parameters={"ping": True}).error() is None
    sender = adapted.ask(text_input="a", stream=True, sampling_parameters={"max_tokens": 20, **GREEDY})
    wait_until(lambda: pulse.unanswered == 1, 60, "the count of what is owed")
    pulse.command = Command.DRAIN
    wait_until(lambda: adapted.ask(parameters={"ping": True}).error() is not None, 60, "the refusal of pings")
    assert adapted.ask(text_input="late").error().code == "unavailable"
    assert pulse.phase is not Phase.DRAINED
    gate.open()
    assert sender.done.wait(60)
    assert sender.responses[-1].error is None  # not truncated
    wait_until(lambda: pulse.phase is Phase.DRAINED, 60, "drained")


def test_abort_ends_what_runs(slow: Adapted) -> None:
    sender = slow.ask(text_input="a", stream=True, sampling_parameters={"max_tokens": 2000, **GREEDY})
    slow.pulse.command = Command.ABORT
    assert sender.done.wait(60)
    assert sender.error().code == "unavailable"
    assert "shuts down" in str(sender.error())
    wait_until(lambda: slow.pulse.phase is Phase.DRAINED, 60, "drained")


def test_every_metric_is_registered_and_follows_the_engine(adapted: Adapted) -> None:
    metrics = adapted.module.metrics
    names = {*GAUGES, *COUNTERS, *HISTOGRAMS} | {f"request_success{reason}" for reason in ("stop", "length", "abort")}
    assert {f"penjing:{name}" for name in names} <= set(metrics)
    assert metrics["penjing:generation_tokens"].value == 0  # the canary does not count
    assert adapted.adapter._loop is not None
    assert metrics["penjing:max_model_len"].value == adapted.adapter._loop.engine.config.max_model_len
    assert adapted.ask(text_input="ab", sampling_parameters={"max_tokens": 5, **GREEDY}).done.wait(60)
    steps = metrics["penjing:iteration_tokens_total"].samples  # the last that is brought up to date
    wait_until(lambda: len(steps) == 5, 60, "the metrics")
    assert metrics["penjing:generation_tokens"].value == 5
    assert metrics["penjing:prompt_tokens"].value == 2
    assert len(metrics["penjing:time_to_first_token_seconds"].samples) == 1
    assert len(metrics["penjing:time_per_output_token_seconds"].samples) == 4
    assert steps == [2, 1, 1, 1, 1]


def test_refusals_are_counted_by_reason(adapted: Adapted) -> None:
    metrics = adapted.module.metrics
    for wrong in ({"top_p": 0}, {"temperature": -1}):
        assert adapted.ask(text_input="a", sampling_parameters=wrong).done.wait(60)
    late = adapted.ask(text_input="a", sampling_parameters={"max_tokens": 4000, **GREEDY}, timeout_us=1000)
    assert late.done.wait(60)
    adapted.pulse.command = Command.DRAIN
    wait_until(lambda: adapted.adapter._refusing, 60, "the drain")
    adapted.adapter._metrics.update(  # type: ignore[union-attr] # from a drain on it is not brought up to date by itself
        adapted.adapter._loop.stats(),  # type: ignore[union-attr]
        {},
        adapted.adapter._refusals.snapshot(),
    )
    assert adapted.ask(text_input="a").done.wait(60)
    counts = adapted.adapter._refusals.snapshot()
    assert counts == {"invalid": 2, "timeout": 1, "unavailable": 1}
    shown = {name: metrics[f"penjing:requests_refused{name}"].value for name in REASONS}
    assert shown == {"invalid": 2, "overloaded": 0, "unavailable": 0, "error": 0, "timeout": 1}
