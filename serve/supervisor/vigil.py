"""When a server shall be silent because the model behind it is, and when what it sees with has failed."""

from __future__ import annotations

from penjing.serve.supervisor.process import EYES_PROCESS, ServeConfig
from penjing.serve.triton.hang_clock import HangClock
from penjing.serve.triton.pulse import Phase, Pulse

SPEAK_SECONDS = 0.5


class Vigil:
    """Decides when the server shall be silent because the model's process is.

    The two processes share locks. A process that was stopped, and goes on, may need one that the silenced server holds;
    only with the server's help it gets so far as to show life. So the server may speak for a moment when the process
    leaves its stop, and every few seconds of a silence of another kind.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._freeze_after = config.freeze_after
        self._half_way = (config.freeze_after + config.hang_timeout) / 2
        self._speak_until = 0.0
        self._was_stopped = False
        self._num_spoken = 0

    def should_be_silent(self, now: float, beat_age: float, stopped: bool) -> bool:
        """Judge by the age of the last beat (s) and by whether a signal has stopped the process."""
        if beat_age <= self._freeze_after and not stopped:
            self._num_spoken, self._was_stopped = 0, False
            return False
        if self._was_stopped and not stopped:
            self._speak_until = now + SPEAK_SECONDS
        elif beat_age > self._half_way * (self._num_spoken + 1) and not stopped:
            self._num_spoken, self._speak_until = int(beat_age / self._half_way), now + SPEAK_SECONDS
        self._was_stopped = stopped
        return stopped or now > self._speak_until


class EyesVigil:
    """Watches the process of what a decoder sees with. The server is not silenced for it: texts need it not."""

    def __init__(self, config: ServeConfig, pulse: Pulse) -> None:
        self._pulse, self._step_timeout = pulse, config.step_timeout
        self._clock = HangClock(config.hang_timeout, config.starve_timeout)

    def failure(self, now: float) -> str | None:
        """What is wrong with it, in words; to be called often. `now`: of `time.monotonic`."""
        pulse = self._pulse
        if pulse.phase is Phase.FAILED:
            return f"{EYES_PROCESS} gave up (see the log)"
        if (failure := self._clock.verdict(pulse.stub_pid, now, pulse.beat_age())) is not None:
            return f"{EYES_PROCESS} {failure}"
        if (age := pulse.loop_age()) > self._step_timeout:
            return f"a batch of images has taken {age:.0f} s"
        return None
