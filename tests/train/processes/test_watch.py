"""A process that dies, hangs or fails ends all, soon, with one line that says which it was."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forking import Forked

pytestmark = pytest.mark.xdist_group("watched")  # one run for all
SCRIPT = Path(__file__).with_name("watched.py")
ENDED = r"error: rank {} \(\S+, process \d+\) ended at step 5: it was killed, .*--resume auto goes on"
SILENT = r"error: rank {} \(\S+, process \d+\) has not answered for 2 s \(parallel.timeout\)"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("watched")
    # C++ prints a stack for each connection that breaks, unless told not to: as penjing/train/__main__.py does
    environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    assert Forked([sys.executable, SCRIPT, folder], env=environment).wait(120) == 0
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize(
    ("scenario", "codes", "says"),
    [
        ("killed", [6, -9, 6], ENDED.format(1)),
        ("main killed", [-9, 6, 6], r"error: rank 0 \(\S+, process \d+\) ended: it was killed"),
        ("stopped", [6, -9, 6], SILENT.format(1)),
        ("main stopped", [-9, 6, 6], SILENT.format(0)),
        ("terminated", [6, 143, 6], r"error: rank 1 .* ended at step 5"),
        ("one raises", [70, 70, 70], r"error: rank 2 \(.*\) failed at step 5: ValueError: what nobody thought of"),
        ("all raise", [2, 2, 2], "error: data.batch_size=7 is wrong"),
        ("others follow", [6, -9, 6], r"error: rank 1 \(.*\) ended at "),
        ("one hangs", [6, 6, 6], r"error: rank 1 \(.*\) hangs at step 3, reading its data: others wait"),
        ("all hang", [6, 6, 6], r"error: no process got further than step 3 for \d+ s \(parallel.timeout\)"),
        ("interrupted", [130, 130, 130], "error: interrupted"),
        ("port in use", [6, 6, 6], r"error: rank 0 of 3 cannot join .*MASTER_PORT.*already in use.*another port"),
    ],
)  # fmt: skip
def test_all_end_with_one_error(results: dict[str, dict[str, Any]], scenario: str, codes: list[int], says: str) -> None:
    result = results[scenario]
    assert result["codes"] == codes, result["said"]
    assert re.match(says, result["said"]), result["said"]
    assert result["said"].count("\n") == 1
    assert result["seconds"] < 60


@pytest.mark.parametrize("scenario", ["one works", "one prepares", "one is late"])
def test_who_works_or_comes_late_is_left_alone(results: dict[str, dict[str, Any]], scenario: str) -> None:
    assert results[scenario]["codes"] == [0, 0, 0], results[scenario]["said"]
    assert results[scenario]["said"] == ""
