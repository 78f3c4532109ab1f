"""What the served model takes beside text, through a real Triton server: forms, prompts of ids, keys; and scores."""

from __future__ import annotations

import re

import pytest

from penjing.core.errors import RequestError
from tests.serve.triton.serving import Served

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("triton")]


def test_forms_scores_and_prompts_of_ids_go_through_the_server(server: Served) -> None:
    asked = {"key": "alice", "priority": -1, "seed": 3, "max_tokens": 60}
    pattern = "[0-9]{3}(-[a-c]{2}){2}"
    with server.client() as client:
        held = client.generate("A tree", guided={"kind": "regex", "value": pattern}, **asked)
        assert re.fullmatch(pattern, held.text)
        assert held.finish_reason == "stop"
        ids = [5, 6, 7, 8, 9]
        scored = client.generate(ids, prompt_logprobs=1, **asked)
        assert scored.num_input_tokens == len(ids)
        assert scored.prompt_logprobs is not None
        first, *rest = scored.prompt_logprobs
        assert first is None
        assert [str(token) in (entry or {}) for token, entry in zip(ids[1:], rest, strict=True)] == [True] * 4
        with pytest.raises(RequestError, match="this json_schema is refused: Invalid type: foo"):
            client.generate("a", guided={"kind": "json_schema", "value": {"type": "foo"}})
        with pytest.raises(RequestError, match="no text has this form"):  # found while the answer is written
            client.generate("a", guided={"kind": "json_schema", "value": {"$ref": "#"}})
