"""Which status a client of the front sees for what our own client raised."""

from __future__ import annotations

from typing import Any

import pytest

from penjing.core.errors import OverloadedError, PenjingError, RequestError, ServerError, UnavailableError
from penjing.serve.client.errors import refused
from penjing.serve.gate.errors import translated


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (RequestError("top_p must be more"), 400, None),
        (OverloadedError("too much"), 429, "1"),
        (refused("RESOURCE_EXHAUSTED: 9 sequences wait; retry in 7 s").error, 429, "7"),
        (UnavailableError("no server answers"), 503, "5"),
        (refused("UNAVAILABLE: the engine takes no requests: it is shutting down").error, 503, "5"),
        (refused("Request for unknown model: 'llm' has no available versions").error, 503, "5"),
        (ServerError("the connection to a broke after 2 tokens; ask again"), 503, "5"),
        (ServerError("it broke"), 500, None),
    ],
)
def test_overload_is_429_and_absence_503_with_a_time_to_try_again(
    error: PenjingError, status: int, retry_after: Any
) -> None:
    found = translated(error, {})
    assert (found.status, found.headers.get("retry-after")) == (status, retry_after)


def test_a_model_that_is_not_there_is_told_with_the_way_to_those_that_are() -> None:
    error = refused("Request for unknown model: 'llm' is not found").error
    assert isinstance(error, ServerError)
    assert str(error).endswith(
        "'llm' is not found; a model of another name or kind is served there, and "
        "'penjing server status' shows what runs; Client(ADDRESS, model=NAME) asks it by its name"
    )
