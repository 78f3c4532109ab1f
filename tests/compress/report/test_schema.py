"""`report.json`: a round trip, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from penjing.compress.report.schema import parse_report, read_report, write_report
from penjing.core.errors import InputError
from tests.compress.report.reports import made_up_int8, made_up_report

Damage = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize("values", [made_up_report(), *map(made_up_int8, ("classifier", "encoder", "decoder"))])
def test_a_report_is_written_and_read(tmp_path: Path, values: dict[str, Any]) -> None:
    write_report(tmp_path, parse_report(values, "x"))
    assert json.loads((tmp_path / "report.json").read_text()) == values
    assert read_report(tmp_path) == read_report(tmp_path / "report.json") == parse_report(values, "x")


def test_what_a_stage_lost_is_against_the_first(tmp_path: Path) -> None:
    report = parse_report(made_up_report(), "x")
    assert [stage.name for stage in report.stages] == ["00-model", "01-prune", "02-distill"]
    change = report.lost(report.stages[1])
    assert change is not None
    assert change.value == pytest.approx(0.06)
    assert change.low < 0.06 < change.high


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda v: v.update(stages=[]), r"stages: .*at least 1"),
        (lambda v: v.pop("command"), "command: Field required"),
        (lambda v: v.pop("family"), "family: Field required"),
        (lambda v: v["stages"][1]["quality"].update(value=float("nan")), r"stages\.1\.quality\.value: .*finite"),
        (lambda v: v["stages"][1]["quality"].update(name="beauty"), r"stages\.1\.quality\.name"),
        (lambda v: v["stages"][1]["quality"].update(record="AA"), "the record of accuracy is damaged"),
        (lambda v: v["stages"][2]["size"].update(bytes=0), r"stages\.2\.size\.bytes: .*greater than 0"),
        (lambda v: v["stages"][2]["latency"][0].update(seconds="fast"), r"stages\.2\.latency\.0\.seconds"),
        (lambda v: v["decisions"][0].pop("loss"), r"decisions\.0\.loss: Field required"),
        (
            lambda v: v.update(schema_version=1),
            "report.json has schema_version 1, this penjing reads 2; run the recipe",
        ),
        (lambda v: v.update(schema_version=3), "has schema_version 3, this penjing reads 2; upgrade penjing"),
        (lambda v: v.update(schema_version="one"), "has schema_version 'one', this penjing reads 2"),
        (lambda v: v.pop("schema_version"), "has no schema_version, this penjing reads 2; run the recipe again"),
    ],
)
def test_damage_is_one_clear_error(tmp_path: Path, damage: Damage, message: str) -> None:
    values = deepcopy(made_up_report())
    damage(values)
    text = json.dumps(values)
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_report(tmp_path)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "report.json").read_text() == text


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    report = parse_report(made_up_report(), "x")
    stage = report.last.model_copy(update={"seconds": float("nan")})
    with pytest.raises(InputError, match=r"stages\.0\.seconds"):
        write_report(tmp_path, report.model_copy(update={"stages": (stage,)}))
    assert not list(tmp_path.iterdir())


def test_what_is_no_report_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no report\.json"):
        read_report(tmp_path)
    (tmp_path / "report.json").write_text('{"half')
    with pytest.raises(InputError, match="not valid JSON"):
        read_report(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        read_report(tmp_path / "missing")
