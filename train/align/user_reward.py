"""A reward function of the user, in a process of its own: it may raise, hang or end, and the run says so.

The code is the user's own and is trusted: a process is no protection from it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

from penjing.core.cluster.start import room_for_process
from penjing.core.errors import InputError
from penjing.train.align.prompts import Answer, Prompt
from penjing.train.chat.rows import Row

_START_S = 300.0  # until the file's own imports are done


class UserReward:
    """See the module. `spec`: "file.py:function", which is called as function(prompt, answer, row) and returns a
    number; the prompt is a text or messages, as the row has it.

    Raises:
        InputError: there is no such function, or its file raises.
        SetupError: the machine has no room for another process.
    """

    def __init__(self, spec: str, timeout: float) -> None:
        self._spec, self._timeout = spec, timeout
        with room_for_process():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penjing.train.align.worker", spec],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        self._pending = b""
        weakref.finalize(self, _end, self._process)
        self._read(_START_S, "its file")

    def wrong(self, row: Row) -> None:
        """See `Scorer`: every prompt will do."""

    def __call__(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float]:
        """See `Scorer`.

        Raises:
            InputError: the function raises, takes too long, ends its process, or returns no number.
        """
        asked = prompt.row.get("prompt", prompt.row.get("messages"))
        return [self._ask({"prompt": asked, "answer": answer.text, "row": prompt.row}) for answer in answers]

    def _ask(self, question: dict[str, Any]) -> float:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question, default=str).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:  # it has ended: `_read` says so
            pass
        about = f"the answer {question['answer']!r:.80}"
        value = self._read(self._timeout, about).get("reward")
        if not isinstance(value, int | float):
            raise InputError(f"reward.kind = {self._spec!r} returned no number for {about}; return a single float")
        return float(value)

    def _read(self, timeout: float, about: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        until, output = time.monotonic() + timeout, self._process.stdout.fileno()
        while b"\n" not in self._pending:
            ready, _, _ = select.select([output], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                self._process.kill()
                raise InputError(
                    f"reward.kind = {self._spec!r} took longer than {timeout:g} s for {about}; mend the function, or "
                    "raise reward.timeout"
                )
            part = os.read(output, 1 << 16)
            if not part:
                raise InputError(
                    f"reward.kind = {self._spec!r}: its process ended with code {self._process.wait()} at {about}; "
                    "mend what ended it"
                )
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        said = json.loads(line)
        if "error" in said:
            raise InputError(f"reward.kind: {said['error']}")
        return said


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
