"""What `penjing models` prints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penjing.serve.fleet import commands


def test_the_list_says_where_each_model_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {
        "a": {"grpc_port": 1, "share": 1.0, "folder": "build/a"},
        "b:2": {"grpc_port": 3, "share": 0.5, "folder": "build/b"},
    }
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(commands, "found_fleet", lambda port: SimpleNamespace(models=models, command="penjing serve"))
    monkeypatch.setattr(
        commands.state, "read_state", lambda port: SimpleNamespace(state="ready") if port == 1 else None
    )
    monkeypatch.setattr(commands, "print_table", shown.append)
    commands.show_models(1)
    assert shown == [
        {
            "a": {"state": "ready", "gRPC": 1, "folder": "build/a"},
            "b:2": {"state": "starting", "share": "50.0%", "gRPC": 3, "folder": "build/b"},
        }
    ]
