"""Buckets with a clock of their own."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penjing.serve.access.keys import Key
from penjing.serve.access.limits import Account, Accounts, Refusal


def key(**limits: Any) -> Key:
    return Key(name="a", sha256="0" * 64, created="", **limits)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_a_minute() -> None:
    clock = Clock()
    account = Account(key(requests_per_minute=3), clock)
    assert [account.begin() for _ in range(3)] == [None] * 3
    assert account.begin() == Refusal("requests a minute", 3, 20)
    clock.now += 20
    assert account.begin() is None
    assert account.begin() is not None
    assert account.headers() == {"x-ratelimit-limit-requests": "3", "x-ratelimit-remaining-requests": "0"}


def test_tokens_are_owed() -> None:
    clock = Clock()
    account = Account(key(tokens_per_minute=60), clock)
    assert account.begin() is None
    account.spend(200)
    assert account.begin() == Refusal("tokens a minute", 60, 141)
    clock.now += 141
    assert account.begin() is None


def test_at_once() -> None:
    account = Account(key(max_concurrent=2))
    assert [account.begin(), account.begin()] == [None, None]
    assert account.begin() == Refusal("requests at once", 2, 1)
    account.end()
    assert account.begin() is None


def test_no_limits() -> None:
    account = Account(key())
    assert all(account.begin() is None for _ in range(1000))
    assert account.headers() == {}


def test_changed_limits_count_at_once_and_keep_what_runs() -> None:
    accounts = Accounts()
    first = accounts.of(key(max_concurrent=5))
    first.begin()
    assert accounts.of(key(max_concurrent=5)) is first
    assert accounts.of(key(max_concurrent=1)).begin() is not None


def test_what_runs_while_its_key_changes_gives_its_place_back_and_pays_from_the_new_tokens() -> None:
    accounts = Accounts()
    running = accounts.of(key(max_concurrent=1))
    assert running.begin() is None
    changed = key(max_concurrent=1, tokens_per_minute=10)
    assert accounts.of(changed).begin() == Refusal("requests at once", 1, 1)
    running.spend(20)
    running.end()
    refusal = accounts.of(changed).begin()
    assert refusal is not None
    assert refusal.what == "tokens a minute"
    assert accounts.of(key(max_concurrent=1)).begin() is None


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 500)), max_size=60), st.integers(1, 1000))
def test_over_time_no_key_uses_more_than_its_share(uses: list[tuple[float, int]], per_minute: int) -> None:
    clock = Clock()
    account = Account(key(tokens_per_minute=per_minute), clock)
    spent = last = 0
    for pause, tokens in uses:
        clock.now += pause
        if account.begin() is None:
            account.spend(tokens)
            spent, last = spent + tokens, tokens
    assert spent - last <= per_minute * (1 + (clock.now - 100.0) / 60) + 1e-6
