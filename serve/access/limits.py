"""What a key may still ask for: requests and tokens a minute, as buckets that fill steadily, and requests at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from penjing.serve.access.keys import Key

MINUTE = 60.0
MAX_WAIT = 3600


class Refusal(NamedTuple):
    """Why a request may not begin now."""

    what: str
    limit: int
    retry_after: int
    """Whole seconds."""


class Bucket:
    """Fills with `per_minute` a minute up to `per_minute`; may be owed to."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._at = float(per_minute), now

    def level(self, now: float) -> float:
        """What is in it."""
        self._level = min(self.per_minute, self._level + max(0.0, now - self._at) * self.per_minute / MINUTE)
        self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take out, even what is not there: what comes next waits for it."""
        self._level = self.level(now) - amount

    def wait(self, amount: float, now: float) -> int:
        """Whole seconds until `amount` is there; 0 if it is."""
        missing = min(amount, self.per_minute) - self.level(now)
        return 0 if missing <= 0 else min(MAX_WAIT, math.ceil(missing * MINUTE / self.per_minute))


class Account:
    """One key's use. Tokens are paid as they come: a request begins while any are left, and what it uses beyond them
    is owed, so that over time no key has more than its share whatever its answers' lengths."""

    def __init__(self, key: Key, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.running = 0
        self.change(key)

    def change(self, key: Key) -> None:
        """Other limits from now on: the minute begins anew, and what runs goes on and is counted here when it ends."""
        self.key, now = key, self._clock()
        self._requests = None if key.requests_per_minute is None else Bucket(key.requests_per_minute, now)
        self._tokens = None if key.tokens_per_minute is None else Bucket(key.tokens_per_minute, now)

    def begin(self) -> Refusal | None:
        """Count a request that begins, unless it may not; `end` is to follow."""
        key, now = self.key, self._clock()
        if key.max_concurrent is not None and self.running >= key.max_concurrent:
            return Refusal("requests at once", key.max_concurrent, 1)
        if self._tokens is not None and (seconds := self._tokens.wait(1, now)):
            return Refusal("tokens a minute", self._tokens.per_minute, seconds)
        if self._requests is not None:
            if seconds := self._requests.wait(1, now):
                return Refusal("requests a minute", self._requests.per_minute, seconds)
            self._requests.take(1, now)
        self.running += 1
        return None

    def spend(self, tokens: int) -> None:
        """Pay for tokens that have come."""
        if self._tokens is not None:
            self._tokens.take(tokens, self._clock())

    def end(self) -> None:
        """The request has its answer, or is gone."""
        self.running -= 1

    def headers(self) -> dict[str, str]:
        """OpenAI's headers of what is left."""
        found, now = {}, self._clock()
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level(now))))
        return found


class Accounts:
    """Of all keys, by name: one account each, which running requests hold while the key's entry changes."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def of(self, key: Key) -> Account:
        """The account of a key."""
        found = self._accounts.get(key.name)
        if found is None:
            found = self._accounts[key.name] = Account(key)
        elif found.key != key:
            found.change(key)
        return found
