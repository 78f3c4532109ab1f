"""A run that is asked to stop says so, and is stopped at once by a second Ctrl-C."""

from __future__ import annotations

import os
import signal

import pytest

from penjing.train.processes.stop import InterruptedRunError, stop_signals


@pytest.mark.parametrize(("rank", "said"), [("0", True), ("1", False)])
def test_the_first_ctrl_c_is_answered_and_the_second_ends(
    rank: str, said: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    with stop_signals() as stop_requested:
        assert not stop_requested()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_requested()
        assert ("Ctrl-C again ends the run at once" in capfd.readouterr().err) == said
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_termination_is_not_spoken_of(capfd: pytest.CaptureFixture[str]) -> None:
    with stop_signals() as stop_requested:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_requested()
    assert capfd.readouterr().err == ""


def stopped_by(*signals: signal.Signals) -> int:
    """The exit code of a run that is stopped as `signals` ask, or as another process was asked."""
    with stop_signals():
        for number in signals:
            os.kill(os.getpid(), number)
        raise InterruptedRunError("stopped as asked")


@pytest.mark.parametrize(("signals", "code"), [((signal.SIGINT,), 130), ((signal.SIGTERM,), 143), ((), 143)])
def test_the_exit_code_is_that_of_the_signal(signals: tuple[signal.Signals, ...], code: int) -> None:
    with pytest.raises(InterruptedRunError) as stopped:
        stopped_by(*signals)
    assert stopped.value.exit_code == code
