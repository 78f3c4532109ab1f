"""The front's log: a line of JSON for each request, without its text, in a file of its owner's that stays small."""

from __future__ import annotations

import json
import logging
import logging.handlers
import time
from pathlib import Path

from penjing.serve.gate.guard import ALWAYS_OPEN, Exchange, Message

FILE_BYTES, FILES = 5_000_000, 3

log = logging.getLogger("penjing.front")


def open_log(path: Path) -> None:
    """Write to `path`; a disk that is full costs lines and nothing else."""
    logging.raiseExceptions = False
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=FILE_BYTES, backupCount=FILES, delay=True)
    handler.setFormatter(_Lines())
    for name in ("penjing.front", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    log.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def log_exchange(scope: Message, exchange: Exchange) -> None:
    """A line for a request that has ended; none for a probe that went well."""
    if exchange.status == 200 and scope["path"] in ALWAYS_OPEN:
        return
    facts = {
        "request": exchange.request_id,
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": exchange.status,
        "reason": exchange.reason,
        "key": exchange.key,
        "model": exchange.model,
        "seconds": round(time.monotonic() - exchange.started, 4),
        "first_token": None if exchange.first_token is None else round(exchange.first_token, 4),
        "prompt_tokens": exchange.prompt_tokens,
        "completion_tokens": exchange.completion_tokens,
    }
    log.info("request", extra={"facts": {name: value for name, value in facts.items() if value not in ("", None)}})


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = {"time": round(record.created, 3), "level": record.levelname, "message": record.getMessage()}
        facts |= getattr(record, "facts", {})
        if record.exc_info:
            facts["traceback"] = self.formatException(record.exc_info)
        return json.dumps(facts)
