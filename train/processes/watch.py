"""Watches over the processes of a run, so that one that dies or hangs ends all of them with one clear error.

A thread in each process tells a store, which the main process (rank 0) serves, what the process is doing, and looks

at the next rank     has it died (seen at once on the same machine), or been silent for `timeout_s`: stopped, or its
                     machine lost?
at all (rank 0)      did none get further for `timeout_s`, and are those that are furthest behind idle? Who works, or
                     waits for a disk, is given ten times as long: a first compiled step, a large file
for a verdict        of whoever met or found an error first. Rank 0 says it; all end with its exit code, rank 0 first
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from penjing.core.errors import PenjingError, SetupError
from penjing.train.processes.system import Activity, has_ended, machine

WORK_FACTOR = 10  # a process that works may be without progress for so many times as long as an idle one
_UNEXPECTED, _INTERRUPTED, _TERMINATED = 70, 130, 143  # exit codes, as the command line has them
_GRACE_S = 3.0  # for rank 0 to meet the error that all meet, for the others to see a verdict
_PATIENCE = 1.5  # times parallel.timeout, for a verdict that nobody gets further while one of them is silent
_PEER_S = 8.0  # for the watch to find out whose end made a collective fail
_LEAVE_S = 10.0  # for the others to end, once all is said or done
_DONE = "done"


@dataclass(frozen=True)
class Verdict:
    """Why a run ends: `rank` met the error `message` itself (`raised`), or is accused; `gone`: it cannot hear that."""

    rank: int
    message: str
    exit_code: int
    raised: bool
    gone: bool = False


class Watch:
    """This process's watch over the others; see the module.

    Args:
        store: of this start of the run alone, served by rank 0.
        timeout_s: how long a process may be silent, or all be idle.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self.store, self.rank, self.size, self.timeout_s = store, rank, size, timeout_s
        self._own: Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # a connection of its own: on the other, calls may be waiting
        self._own.set_timeout(timedelta(seconds=WORK_FACTOR * timeout_s))
        self._doing, self._position, self._marks, self._beat = "its start", 0, 0, 0
        self._work = Activity()
        self._answers = 0  # of the store
        self._silence = (0, 0.0)  # the next rank's beat, and for how long it has been that
        self._progress, self._stuck_s, self._idle_s = (0, 0), 0.0, 0.0
        self._beats: list[int] = []  # of all ranks, when rank 0 last looked
        self._failure: str | None = None
        self._failed, self._wake, self._stopped = threading.Event(), threading.Event(), threading.Event()
        self._asked_at = math.inf
        self._tell()
        self._main: dict[str, Any] = json.loads(self._own.get(_key(0)))
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        if rank:
            threading.Thread(target=self._guard, name="guard", daemon=True).start()

    def at(self, doing: str, *, everywhere: bool = True) -> None:
        """This process begins with `doing`, which is progress; `everywhere`: all processes say so equally often."""
        self._doing = doing
        self._marks += 1
        self._position += everywhere

    def group_store(self) -> Store:
        """For the process group."""
        return PrefixStore("group", self.store)

    def meet(self) -> None:
        """Wait until all processes are here: as long as it takes, while the watch finds them at work."""
        self.at("the start of others")
        self.store.add("met", 1)
        while int(self.store.add("met", 0)) < self.size:
            time.sleep(0.2)

    def stop(self) -> None:
        """Somebody wants this process to end, perhaps since another has: it does, once that has been told."""
        self._asked_at = time.monotonic()

    def close(self) -> None:
        """This process's work is done."""
        self.at(_DONE)
        self._stopped.set()
        self._wake.set()
        self._thread.join()

    def fail(self, error: BaseException) -> None:
        """This process ends by `error`, and so do the others; returns in rank 0, and only if the user is to be told
        just that."""
        known = isinstance(error, PenjingError)
        if isinstance(error, RuntimeError):  # most often torch's, as another has ended: the watch says that better
            self._thread.join(_PEER_S)
        if not known and self.rank and os.environ.get("PENJING_DEBUG", "0") != "0":
            sys.excepthook(type(error), error, error.__traceback__)
        text = str(error) or type(error).__name__
        if known or self.rank == 0:
            message = text
        else:
            message = (
                f"{_name(self._status())} failed at {self._doing}: {type(error).__name__}: {text} "
                "(PENJING_DEBUG=1 shows where)"
            )
        unknown = _UNEXPECTED
        if isinstance(error, KeyboardInterrupt):
            message, unknown = "interrupted", _INTERRUPTED
        self._failure = message
        self._failed.set()
        self._judge(Verdict(self.rank, message, error.exit_code if known else unknown, raised=True))
        self._wake.set()
        self._thread.join()

    @property
    def _interval(self) -> float:
        return min(1.0, self.timeout_s / 10)

    def _run(self) -> None:
        clock, verdict = _Clock(), None
        try:
            while not self._stopped.is_set():
                self._tell()
                if (verdict := self._verdict()) is not None:
                    self._stopped.set()
                    return self._end(verdict)
                passed = clock.passed(self._interval)
                self._look_at_next(passed)
                if self.rank == 0:
                    self._look_at_all(passed)
                if time.monotonic() - self._asked_at > _GRACE_S:
                    _exit(_TERMINATED)
                self._answers += 1
                self._wake.wait(self._interval)
                self._wake.clear()
            self._leave()
        except RuntimeError:  # of the store: rank 0, which served it, has ended
            if verdict is not None:
                _exit(verdict.exit_code)
            if not self._stopped.is_set():
                self._end_without_main(f"ended: {_KILLED}")

    def _guard(self) -> None:
        """Calls of a store that was stopped never return: end this process when they do not."""
        clock, answers, silent_s = _Clock(), 0, 0.0
        while not self._stopped.wait(self._interval):
            passed = clock.passed(self._interval)
            answers, silent_s = self._answers, silent_s + passed if answers == self._answers else 0.0
            if silent_s > self.timeout_s:
                self._end_without_main(f"has not answered for {self.timeout_s:g} s (parallel.timeout): {_LOST}")

    def _status(self) -> dict[str, Any]:
        return {
            "rank": self.rank, "host": socket.gethostname(), "pid": os.getpid(), "parent": os.getppid(),
            "machine": machine(), "beat": self._beat, "doing": self._doing, "position": self._position,
            "marks": self._marks,
        }  # fmt: skip

    def _tell(self) -> None:
        self._beat += 1
        self._own.set(_key(self.rank), json.dumps(self._status() | {"idle": self._work.idle()}))

    def _read(self, ranks: list[int]) -> list[dict[str, Any]]:
        """What all of `ranks` said last; nothing until all have."""
        keys = [_key(rank) for rank in ranks]
        return [json.loads(value) for value in self._own.multi_get(keys)] if self._own.check(keys) else []

    def _verdict(self) -> Verdict | None:
        return Verdict(**json.loads(self._own.get("verdict"))) if self._own.check(["verdict"]) else None

    def _judge(self, verdict: Verdict) -> None:
        self._own.compare_set("verdict", "", json.dumps(verdict.__dict__))  # the first counts

    def _accuse(self, rank: int, message: str, *, gone: bool = True) -> None:
        self._judge(Verdict(rank, f"{message}; {_NEXT_STEP}", SetupError.exit_code, raised=False, gone=gone))

    def _look_at_next(self, passed: float) -> None:
        rank = (self.rank + 1) % self.size
        status = next(iter(self._read([rank])), None)
        beat = 0 if status is None else int(status["beat"])
        silent_s = self._silence[1] + passed if beat == self._silence[0] else 0.0
        self._silence = (beat, silent_s)
        if status is None:
            if silent_s > WORK_FACTOR * self.timeout_s:
                self._accuse(rank, f"rank {rank} of {self.size} has not come for {silent_s:.0f} s ({_TEN_TIMES})")
        elif status["doing"] == _DONE:
            return
        elif _is_near(status) and has_ended(status["pid"]):
            if status in self._read([rank]) and self._verdict() is None:  # it may have had a last word
                self._accuse(rank, f"{_name(status)} ended at {status['doing']}: {_KILLED}")
        elif silent_s > self.timeout_s:
            self._accuse(rank, f"{_name(status)} has not answered for {self.timeout_s:g} s (parallel.timeout), last "
                         f"seen at {status['doing']}: {_LOST}")  # fmt: skip

    def _look_at_all(self, passed: float) -> None:
        statuses = self._read(list(range(self.size)))
        if not statuses or any(status["doing"] == _DONE for status in statuses):
            return  # still coming, or leaving: others look at that
        least = min(status["position"] for status in statuses)
        behind = [status for status in statuses if status["position"] == least]
        progress = (least, sum(status["marks"] for status in statuses))
        if progress != self._progress:
            self._progress, self._stuck_s, self._idle_s = progress, 0.0, 0.0
        self._stuck_s += passed
        self._idle_s = self._idle_s + passed if all(status["idle"] for status in behind) else 0.0
        # who is silent makes all others idle: whoever looks at it gets to say so first
        beats, answered = [int(status["beat"]) for status in statuses], len(self._beats) == self.size
        answered = answered and all(now != before for now, before in zip(beats, self._beats, strict=True))
        self._beats = beats
        idle = self._idle_s > (self.timeout_s if answered else _PATIENCE * self.timeout_s)
        if not idle and self._stuck_s <= WORK_FACTOR * self.timeout_s:
            return
        first, limit = behind[0], "parallel.timeout" if idle else _TEN_TIMES
        if len(behind) == self.size:
            message = f"no process got further than {first['doing']} for {self._stuck_s:.0f} s ({limit})"
        else:
            message = (
                f"{_name(first)} hangs at {first['doing']}: others wait for it since {self._stuck_s:.0f} s ({limit})"
            )
        self._accuse(int(first["rank"]), message, gone=False)

    def _leave(self) -> None:
        """Tell that this process is done; the one that serves the store stays until all are."""
        self._tell()
        deadline = time.monotonic() + _LEAVE_S
        everyone = list(range(self.size))
        while self.rank == 0 and any(status["doing"] != _DONE for status in self._read(everyone)):
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def _end(self, verdict: Verdict) -> None:
        """End this process as all do; in rank 0 it returns when its own error says the same."""
        self._own.add("seen", 1)
        own = self.rank == 0 and verdict.raised and self._failed.wait(_GRACE_S) and self._failure == verdict.message
        if self.rank == 0 and not own:
            print(f"error: {verdict.message}", file=sys.stderr, flush=True)
        deadline = time.monotonic() + (_LEAVE_S if self.rank else _GRACE_S)
        expected = self.size - (verdict.gone and verdict.rank != self.rank)
        # Rank 0 goes when all have seen the verdict, the others when it has gone and its store fails.
        while time.monotonic() < deadline and (self.rank or int(self._own.add("seen", 0)) < expected):
            self._own.check(["verdict"])
            time.sleep(0.02)
        if own:
            return
        if self.rank == 0 and int(self._own.add("seen", 0)) < self.size:
            for accused in self._read([verdict.rank]):
                _kill_sibling(accused)
        _exit(verdict.exit_code)

    def _end_without_main(self, found: str) -> None:
        """Rank 0 and its store are gone: one process of each machine says so."""
        beside_main = os.environ.get("GROUP_RANK", "0") == "0"
        if int(os.environ.get("LOCAL_RANK", str(self.rank))) == int(beside_main):
            print(f"error: {_name(self._main)} {found}; {_NEXT_STEP}", file=sys.stderr, flush=True)
            _kill_sibling(self._main)
        else:
            time.sleep(_GRACE_S)  # torchrun would end the other before it has said so
        _exit(SetupError.exit_code)


class _Clock:
    """Seconds between calls that should be `interval_s` apart: while this process or its whole machine was stopped,
    others cannot be blamed for silence."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def passed(self, interval_s: float) -> float:
        """Since the last call, but at most two intervals."""
        now = time.monotonic()
        passed, self._last = min(now - self._last, 2 * interval_s), now
        return passed


_NEXT_STEP = "all processes end; --resume auto goes on from the newest checkpoint"
_TEN_TIMES = f"{WORK_FACTOR} × parallel.timeout"
_KILLED = "it was killed, or crashed; perhaps the memory was full (memory.limit)"
_LOST = "it was stopped, or its machine or network is lost"


def _key(rank: int) -> str:
    return f"process-{rank}"


def _name(status: dict[str, Any]) -> str:
    return f"rank {status['rank']} ({status['host']}, process {status['pid']})"


def _is_near(status: dict[str, Any]) -> bool:
    return bool(machine()) and status["machine"] == machine()


def _kill_sibling(status: dict[str, Any]) -> None:
    """End a process that hangs, if it was started by who started this one: a stopped one would hold that up for half
    a minute."""
    if _is_near(status) and status["parent"] == os.getppid() and not has_ended(status["pid"]):
        os.kill(status["pid"], signal.SIGKILL)


def _exit(code: int) -> None:
    # The main thread may be inside a collective that never ends.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_before_start(found: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {found} (MASTER_ADDR, MASTER_PORT); choose another port", file=sys.stderr, flush=True)
    _exit(SetupError.exit_code)


@contextmanager
def watching(timeout_s: float) -> Iterator[Watch | None]:
    """A watch over the processes that torchrun started (None without it); an exception inside ends all of them.

    Raises:
        SetupError: the other processes cannot be reached, or a port is in use.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size == 1:
        yield None
        return
    meeting, store = _open_store(rank, size, timeout_s)
    watch = Watch(store, rank, size, timeout_s)
    # torchrun ends the others at once when one has ended: they must live to say why.
    before = signal.signal(signal.SIGTERM, lambda *_: watch.stop())
    try:
        yield watch
        watch.close()
    except BaseException as error:
        watch.fail(error)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    del meeting  # rank 0 may serve it


def _open_store(rank: int, size: int, timeout_s: float) -> tuple[Store, Store]:
    """torchrun's store, and one of this start of the run alone, served by rank 0: torchrun's keeps what earlier
    starts have said."""
    host = os.environ.get("MASTER_ADDR", "")
    address = f"{host}:{os.environ.get('MASTER_PORT')}"
    deadline = time.monotonic() + WORK_FACTOR * timeout_s
    # torch waits for ever where something else than a store listens.
    end = threading.Timer(1.2 * timeout_s, _end_before_start, [f"rank {rank} of {size} gets no answer from {address}"])
    end.daemon = True
    end.start()
    try:
        meeting, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout_s)))
        end.cancel()
        if rank == 0:
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            start = secrets.token_hex(8)
            store.set("start", start)
            meeting.set("penjing", json.dumps({"port": store.port, "start": start}))
            return meeting, store
        while True:
            meeting.wait(["penjing"], timedelta(seconds=WORK_FACTOR * timeout_s))
            told = json.loads(meeting.get("penjing"))
            try:
                socket.create_connection((host, told["port"]), timeout_s).close()
            except ConnectionError:  # an earlier start's, which has ended
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
                continue
            store = TCPStore(host, told["port"], is_master=False, timeout=timedelta(seconds=timeout_s))
            if store.check(["start"]) and store.get("start").decode() == told["start"]:
                return meeting, store
    except (ValueError, RuntimeError, OSError) as error:
        end.cancel()
        reason = str(error).partition("\n")[0]
        raise SetupError(
            f"rank {rank} of {size} cannot join the others at {address} (MASTER_ADDR, MASTER_PORT) within "
            f"{timeout_s:g} s (parallel.timeout): {reason}; start all with torchrun, or choose another port"
        ) from error
