"""When a server is silent because its model is."""

from __future__ import annotations

from penjing.serve.supervisor.process import ServeConfig
from penjing.serve.supervisor.vigil import Vigil


def test_the_server_is_silent_while_the_model_is() -> None:
    vigil = Vigil(ServeConfig(freeze_after=0.7, hang_timeout=5.0))

    def silent(now: float, beat_age: float, stopped: bool = False) -> bool:
        return vigil.should_be_silent(now, beat_age, stopped)

    assert [silent(t, 0.05) for t in (1, 2, 3)] == [False] * 3
    assert silent(4.0, 0.1, stopped=True)  # at once
    assert silent(6.0, 2.1, stopped=True)
    assert not silent(6.1, 2.2)  # continued: it may need the server to show life
    assert not silent(6.5, 2.6)
    assert silent(6.7, 2.8)  # it did not
    assert not silent(6.9, 3.0)  # a moment half way
    assert silent(7.5, 3.6)
    assert silent(8.5, 4.6)
    assert not silent(8.6, 0.0)
    assert silent(10.0, 0.8)
