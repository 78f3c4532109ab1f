"""What `penjing keys` prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from penjing.core.progress import print_table
from penjing.serve.access.keys import add_key, read_keys, revoke_key


def add_to_terminal(path: Path, name: str, limits: dict[str, object]) -> None:
    """Print the secret, alone on standard output; nobody can see it again."""
    secret = add_key(path, name, limits)
    print(secret)
    print(f"this is the only time that the key of {name!r} is shown; {path} holds its hash", file=sys.stderr)


def list_to_terminal(path: Path) -> None:
    """Names, dates and limits."""
    table: dict[str, Any] = {}
    for key in read_keys(path).key:
        values = key.model_dump(exclude={"name", "sha256"}, exclude_defaults=True)
        name = key.name if key.revoked is None else f"{key.name}, revoked {key.revoked}"
        table[name] = values
    print_table(table or {"keys": "none"})


def revoke_to_terminal(path: Path, name: str) -> None:
    """Refuse a key from now on."""
    revoke_key(path, name)
    print(f"the key of {name!r} is refused from now on; running servers have read that", file=sys.stderr)
