"""What bodies ask of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from penjing.serve.front.bodies import ChatBody
from penjing.serve.gate.errors import ApiError
from penjing.serve.sampling.guided import Guided


def body_with(*names: str, **values: Any) -> ChatBody:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return ChatBody.model_validate(
        {"model": "a", "messages": [{"role": "user", "content": "a"}], "tools": tools} | values
    )


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("name", ["auto", "required", "none", "run"])
def test_a_tool_that_is_not_offered_cannot_be_chosen_whatever_its_name(name: str) -> None:
    with pytest.raises(ApiError, match=f"no tool '{name}'") as caught:
        body_with("look", tool_choice=named(name)).guided()
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("name", ["auto", "required", "none", "run"])
def test_a_tool_that_is_chosen_is_called_once_whatever_its_name(name: str) -> None:
    found = body_with("look", name, tool_choice=named(name)).guided()
    assert found is not None
    assert found["value"] == {"tools": [named(name)], "choice": "required", "parallel": False}
    Guided.model_validate(found)


def test_without_a_choice_the_model_calls_what_it_likes() -> None:
    for choice in ("auto", None):
        found = body_with("look", "run", tool_choice=choice).guided()
        assert found is not None
        assert (found["value"]["choice"], found["value"]["parallel"]) == ("auto", True)
        assert [tool["function"]["name"] for tool in found["value"]["tools"]] == ["look", "run"]
