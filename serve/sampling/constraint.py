"""Holds answers to a form: a matcher of llguidance says after each token which ones may follow."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from penjing.core.errors import RequestError, SetupError
from penjing.core.text.tokenizer import Tokenizer
from penjing.serve.sampling.guided import CALL_BEGIN, Guided

MAX_SAMPLES = 100_000  # times of masks, kept until they are taken; older ones go first
MAX_REASON = 300  # characters of the library's own words in an error


class Constraint:
    """One answer's form and how far it is; belongs to the engine's thread."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self.mask = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        """A bit for each token that may come next, after `fill`."""

    def fork(self) -> Constraint:
        """The same state, for another answer of the request."""
        return Constraint(self._matcher.deep_copy(), 32 * len(self.mask))

    def fill(self) -> None:
        """Bring `mask` up to date; takes microseconds, at times a millisecond, without Python's lock.

        Raises:
            RequestError: the form is too complex for the library's limits.
        """
        self._matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
        self._raise_error()

    def push(self, token_id: int) -> bool:
        """Take the token that was chosen; whether the answer is complete, so that none may follow.

        Raises:
            RequestError: the form is too complex for the library's limits.
        """
        self._matcher.consume_token(token_id)
        self._raise_error()
        return self._matcher.is_stopped()

    def forced(self) -> list[int]:
        """The tokens that follow in any case, as the tokenizer would cut them; often none."""
        return list(self._matcher.compute_ff_tokens())

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of `token_ids` may follow, one after the other."""
        return int(self._matcher.validate_tokens(token_ids))

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"guided: the answer cannot be held to its form: {_reason(self._matcher)}")


class Constraints:
    """Makes constraints for one model, and computes their masks on a thread beside the step."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._special = tokenizer.token_to_id(CALL_BEGIN) in tokenizer.special_ids
        self._lock = threading.Lock()
        self._words: Any = None  # llguidance's tokenizer; most of a second to make, so only when needed
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="penjing-masks")
        self._seconds: deque[float] = deque(maxlen=MAX_SAMPLES)

    def make(self, guided: Guided) -> Constraint:
        """Compile `guided`; any thread may call it.

        Raises:
            RequestError: the form is not valid, not supported or too complex.
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
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._words, guided.grammar(self._special), log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(f"sampling parameter guided: this {guided.kind} is refused: {_reason(matcher)}")
        return Constraint(matcher, self._vocab_size)

    def start(self, constraints: Sequence[Constraint]) -> Future[list[RequestError | None]]:
        """Compute the masks of a step on another thread, as one piece of work: to hand over each by itself costs more
        than half of them do. The result tells what was wrong with each."""
        return self._pool.submit(lambda: [self._fill(constraint) for constraint in constraints])

    def take_seconds(self) -> list[float]:
        """What each mask since the last call has taken."""
        return [self._seconds.popleft() for _ in range(len(self._seconds))]

    def _fill(self, constraint: Constraint) -> RequestError | None:
        started = time.perf_counter()
        try:
            constraint.fill()
        except RequestError as error:
            return error
        self._seconds.append(time.perf_counter() - started)
        return None


def _reason(matcher: Any) -> str:
    if matcher.get_error().startswith("NoExtension"):
        return "no text has this form"
    lines = [line.strip() for line in matcher.get_error().splitlines()]
    return " ".join(line for line in lines if line and set(line) != {"^"})[:MAX_REASON]


def allowed(mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """(V,) bool of a bit mask; tokens beyond it are not allowed."""
    return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(bool)
