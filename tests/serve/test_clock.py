"""A clock that jumps changes no patience, no limit and no figure: durations are of the monotonic clock alone."""

from __future__ import annotations

import re
from pathlib import Path

import penjing.serve

WALL = re.compile(r"\btime\.time(?:_ns)?\(|\bdatetime\.now\(|\bdate\.today\(")
SHOWN = {
    "access/keys.py": 1,  # the day a key was made
    "dialects/response_writer.py": 2,  # `created_at`, `completed_at`
    "front/backend.py": 1,  # `created` of the models
    "front/chat.py": 1,
    "front/completions.py": 1,
    "gate/traces.py": 1,  # when a span began, for collectors
    "supervisor/state.py": 1,  # lines of the log
}
"""Where the time of day is shown to somebody; nothing is computed with it."""


def test_the_time_of_day_is_only_shown() -> None:
    root = Path(penjing.serve.__path__[0])
    found = {
        str(path.relative_to(root)): len(WALL.findall(path.read_text(encoding="utf-8"))) for path in root.rglob("*.py")
    }
    assert {name: count for name, count in found.items() if count} == SHOWN
