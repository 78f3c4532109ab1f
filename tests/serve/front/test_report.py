"""`/reports/NAME`: what of an artifact's report clients see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penjing.core.artifact.base import REPORT_FILE
from penjing.serve.access.keys import add_key
from penjing.serve.gate.errors import ApiError
from penjing.serve.site.app import Front
from penjing.serve.site.report import stages
from tests.serve.front.asking import Fronted
from tests.serve.front.test_openapi import front_job, get

QUALITY = {"name": "perplexity", "value": 13.3, "low": 11.3, "high": 15.5}
STAGE = {
    "name": "00-model",
    "kind": "model",
    "record": {"from": "/home/somebody"},
    "quality": QUALITY | {"samples": 24},
    "size": {"parameters": 3, "bytes": 12, "macs": None},
}


def test_it_has_the_stages_and_no_path(tmp_path: Path) -> None:
    report = {"stages": [STAGE], "command": "penjing compress /home/x"}
    (tmp_path / REPORT_FILE).write_text(json.dumps(report))
    shown = {"name": "00-model", "parameters": 3, "bytes": 12, "quality": QUALITY}
    assert stages(tmp_path, "a") == {"model": "a", "stages": [shown]}


@pytest.mark.parametrize(
    "report",
    ["{", "[]", {}, {"stages": []}, {"stages": 3}, {"stages": [{}]}, {"stages": [STAGE | {"quality": 1}]}, None],
)
def test_a_report_that_is_none_is_not_found(tmp_path: Path, report: Any) -> None:
    if report is not None:
        (tmp_path / REPORT_FILE).write_text(report if isinstance(report, str) else json.dumps(report))
    with pytest.raises(ApiError, match="report of a") as raised:
        stages(tmp_path, "a")
    assert (raised.value.status, raised.value.code) == (404, "no_report")
    assert str(tmp_path) not in str(raised.value)


def test_it_asks_for_a_key(tmp_path: Path) -> None:
    add_key(tmp_path / "keys.toml", "a", {})
    assert get(Front(front_job(tmp_path, keys=tmp_path / "keys.toml")), "/reports/a")[0] == 401


@pytest.mark.server
@pytest.mark.xdist_group("front")
def test_a_front_answers_for_what_it_serves_alone(front: Fronted) -> None:
    for name, code in (("tiny", "no_report"), ("nothing", "model_not_found")):
        answer = front.ask(f"/reports/{name}")
        assert (answer.status, answer.error["code"]) == (404, code)
