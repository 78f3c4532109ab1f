"""A decoder's parity through a server that is started for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penjing.compress.run import run_recipe
from penjing.core.artifact.decoder import INT8_RUNTIME, recorded_answers
from penjing.core.artifact.parity import SERVED, read_parity
from penjing.core.cli import _run
from penjing.serve.supervisor import state
from tests.compress.conftest import write_recipe

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("triton")]


def test_a_decoder_answers_through_a_temporary_server_as_it_did(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = run_recipe(write_recipe(tmp_path, tiny_checkpoint, tmp_path / "tiny-int8"))
    before = state.running_ports()
    assert _run(["compress", "verify", str(folder), "--served", "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())["differences"][-1]
    assert found["between"] == [INT8_RUNTIME, SERVED]
    assert found["same"] == 1
    assert found["largest"] < 1e-4
    parity = read_parity(folder)
    assert [len(each.token_ids) for each in recorded_answers(parity, SERVED)] == [
        len(each.token_ids) for each in recorded_answers(parity, INT8_RUNTIME)
    ]
    assert state.running_ports() == before
