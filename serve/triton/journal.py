"""The log of a served model's process: lines of text, and one of JSON for each request, with the client's own id."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from penjing.serve.engine.request import RequestOutput, Stages

REQUEST = "penjing.request"
MAX_ID_LENGTH = 64  # of a client's name for a request, as it is logged
_requests = logging.getLogger(REQUEST)


def log_to_server() -> None:
    """Write to standard error, which Triton server's log is."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s: %(message)s")
    if not _requests.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_Line())
        _requests.addHandler(handler)
        _requests.propagate = False


def log_request(facts: dict[str, Any]) -> None:
    """A line for a request that has ended, if its client has named it: the supervisor's own are many. It has no text of
    prompt or answer."""
    if facts.get("request"):
        _requests.info("request", extra={"facts": facts})


def client_id(request: Any) -> str:
    """What the client of a Triton server request calls it, for the log."""
    return str(request.request_id())[:MAX_ID_LENGTH]


class Journal:
    """What the log says of one request: when its tokens came, how many, how its answers ended, and where the first one
    spent its time in the engine."""

    def __init__(self) -> None:
        self._arrived = time.monotonic()
        self._first_token: float | None = None
        self._prompt_tokens = self._completion_tokens = self._cached_tokens = 0
        self._reasons: list[str] = []
        self._stages: Stages | None = None

    def add(self, outputs: list[RequestOutput]) -> None:
        """Note what a step gave."""
        for output in outputs:
            self._prompt_tokens, self._cached_tokens = output.num_prompt_tokens, output.num_cached_tokens
            self._completion_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self._reasons.append(output.finish_reason)
            if output.index == 0 and output.stages is not None:
                self._stages = output.stages
        if self._first_token is None and self._completion_tokens:
            self._first_token = time.monotonic() - self._arrived

    def facts(self, client_id: str, refused: str | None = None) -> dict[str, Any]:
        """Fields of a line of JSON; `refused`: the code of the error that answered it."""
        facts = {
            "request": client_id,
            "refused": refused,
            "seconds": round(time.monotonic() - self._arrived, 4),
            "first_token": None if self._first_token is None else round(self._first_token, 4),
            **({} if self._stages is None else {name: round(took, 4) for name, took in self._stages._asdict().items()}),
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached_tokens,
            "completion_tokens": self._completion_tokens,
            "finish_reasons": self._reasons,
        }
        return {name: value for name, value in facts.items() if value not in ("", None, [])}


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = {"time": round(record.created, 3), "message": record.getMessage()}
        return json.dumps(facts | getattr(record, "facts", {}))
