"""Holds answers to a form: a matcher of llguidance says after each token which ones may follow.

Its time is bounded, since everybody's step waits for the slowest form. Each token of an answer to an ambiguous grammar
takes longer than the one before, and a few patterns that shall hold for one text can take hours to be read.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from penjing.core.errors import OverloadedError, RequestError, SetupError
from penjing.core.text.tokenizer import Tokenizer
from penjing.serve.sampling.guided import MARKS, Guided

T = TypeVar("T")

MAX_SAMPLES = 100_000  # times of masks, kept until they are taken; older ones go first
MAX_REASON = 300  # characters of the library's own words in an error
SECONDS_A_TOKEN = 0.005  # of processor time; a text with `maxLength` takes a tenth at 49,000 tokens of vocabulary
SECONDS_AT_ONCE = 1.0  # of a request, where its tokens took less before
WATCHED = 16  # times that something is done for a form, behind one that was slow
READING_SECONDS = 10.0  # until a form is refused that is still read; 9,000 texts of an enumeration take 0.3
MOST_UNREAD = 8  # forms that are refused and still read, for nothing can stop that
LAST = 19  # nice: of a thread that gets what all others leave


class _Account:
    """Processor time that the form of one request may still take, all its answers together."""

    def __init__(self) -> None:
        self._left = SECONDS_AT_ONCE
        self._num_watched = 0

    @property
    def is_used_up(self) -> bool:
        return self._left < 0

    def earn(self) -> None:
        """A token has come."""
        self._left = min(self._left + SECONDS_A_TOKEN, SECONDS_AT_ONCE)

    def spend(self, work: Callable[[], T]) -> T:
        """Do `work`. To ask for processor time costs more than most of it does, so only what comes behind something
        slow is counted; that the machine was busy then does not count."""
        started = time.perf_counter()
        used = time.thread_time() if self._num_watched else None
        done = work()
        if used is not None:
            self._left -= time.thread_time() - used
        is_slow = time.perf_counter() - started > SECONDS_A_TOKEN
        self._num_watched = WATCHED if is_slow else max(0, self._num_watched - 1)
        return done


class Constraint:
    """One answer's form and how far it is; belongs to the engine's thread."""

    def __init__(self, matcher: Any, vocab_size: int, seconds: deque[float], account: _Account | None = None) -> None:
        self._matcher, self._seconds, self._account = matcher, seconds, account or _Account()
        self.mask = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        """A bit for each token that may come next, after `fill`."""

    def fork(self) -> Constraint:
        """The same state, for another answer of the request."""
        return Constraint(self._matcher.deep_copy(), 32 * len(self.mask), self._seconds, self._account)

    def fill(self) -> None:
        """Bring `mask` up to date; takes microseconds, at times a millisecond, without Python's lock; that is noted.

        Raises:
            RequestError: the form is too complex for the library's limits, or has taken too much time.
        """
        started = time.perf_counter()
        self._account.spend(lambda: self._matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes))
        self._raise_error()
        self._seconds.append(time.perf_counter() - started)

    def push(self, token_id: int) -> bool:
        """Take the token that was chosen; whether the answer is complete, so that none may follow.

        Raises:
            RequestError: the form is too complex for the library's limits, or has taken too much time.
        """
        self._account.earn()
        self._account.spend(lambda: self._matcher.consume_token(token_id))
        self._raise_error()
        return self._matcher.is_stopped()

    def forced(self) -> list[int]:
        """The tokens that follow in any case, as the tokenizer would cut them; often none."""
        return list(self._account.spend(self._matcher.compute_ff_tokens))

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of `token_ids` may follow, one after the other."""
        return int(self._account.spend(lambda: self._matcher.validate_tokens(token_ids)))

    def _raise_error(self) -> None:
        if self._account.is_used_up:
            raise RequestError(
                "guided: the answer cannot be held to its form, which takes too long: others wait for each of its "
                "tokens; ask for shorter answers, or write it so that a text can be read in one way only"
            )
        if self._matcher.is_error():
            raise RequestError(f"guided: the answer cannot be held to its form: {_reason(self._matcher)}")


class Constraints:
    """Makes constraints for one model, and computes masks that are needed in any case on a thread beside the step."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._control = {mark for mark in MARKS if tokenizer.token_to_id(mark) in tokenizer.special_ids}
        self._lock = threading.Lock()
        self._unread: list[threading.Thread] = []
        self._words: Any = None  # llguidance's tokenizer; most of a second to make, so only when needed
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="penjing-masks")
        self._seconds: deque[float] = deque(maxlen=MAX_SAMPLES)

    def make(self, guided: Guided) -> Constraint:
        """Compile `guided`; any thread may call it.

        Raises:
            RequestError: the form is not valid, not supported or too complex.
            OverloadedError: others that are too complex are still read.
            SetupError: llguidance is not installed.
        """
        try:
            from llguidance import LLMatcher, LLParserLimits, LLTokenizer
        except ImportError:
            raise SetupError("structured answers need llguidance: pip install llguidance") from None
        with self._lock:
            if self._words is None:
                eos = list(self._tokenizer.eos_token_ids) or None
                self._words = LLTokenizer(self._tokenizer.backend.to_str(), n_vocab=self._vocab_size, eos_token=eos)
        limits, grammar = LLParserLimits(verbose_errors=False), guided.grammar(self._control)
        matcher = self._read(lambda: LLMatcher(self._words, grammar, log_level=0, limits=limits))
        if matcher.is_error():
            if guided.thought is not None:  # what is wrong with the form itself is told in its own lines
                self.make(guided.model_copy(update={"thought": None}))
            raise RequestError(f"sampling parameter guided: this {guided.kind} is refused: {_reason(matcher)}")
        return Constraint(matcher, self._vocab_size, self._seconds)

    def _read(self, work: Callable[[], Any]) -> Any:
        """What `work` gives, on a thread of its own: one that takes too long goes on behind all others, and holds
        up nobody."""
        with self._lock:
            self._unread = [thread for thread in self._unread if thread.is_alive()]
            if len(self._unread) >= MOST_UNREAD:
                raise OverloadedError("forms that take too long are still read, and no other one is; retry in 10 s")
        read: Future[Any] = Future()

        def run() -> None:
            try:
                read.set_result(work())
            except BaseException as error:  # whoever waits is told
                read.set_exception(error)

        thread = threading.Thread(target=run, name="penjing-form", daemon=True)
        thread.start()
        try:
            return read.result(READING_SECONDS)
        except TimeoutError:
            with self._lock:
                self._unread.append(thread)
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, LAST)
            raise RequestError(
                f"sampling parameter guided: to read this form takes more than {READING_SECONDS:.0f} s; let fewer "
                "patterns hold for one text, and numbers be multiples of smaller or rounder ones"
            ) from None

    def start(self, constraints: Sequence[Constraint]) -> Future[list[RequestError | None]]:
        """Compute the masks of a step on another thread, as one piece of work: to hand over each by itself costs more
        than half of them do. The result tells what was wrong with each."""
        return self._pool.submit(lambda: [_fill(constraint) for constraint in constraints])

    def take_seconds(self) -> list[float]:
        """What each mask since the last call has taken."""
        return [self._seconds.popleft() for _ in range(len(self._seconds))]


def _fill(constraint: Constraint) -> RequestError | None:
    try:
        constraint.fill()
    except RequestError as error:
        return error
    return None


def _reason(matcher: Any) -> str:
    if matcher.get_error().startswith("NoExtension"):
        return "no text has this form"
    lines = [line.strip() for line in matcher.get_error().splitlines()]
    return " ".join(line for line in lines if line and set(line) != {"^"})[:MAX_REASON]


def allowed(mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """(V,) bool of a bit mask; tokens beyond it are not allowed."""
    return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(bool)
