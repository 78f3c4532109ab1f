"""`penjing report`: rows of several runs, the page, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penjing.compress.report.compare import comparison, comparison_page, print_comparison, read_runs
from penjing.compress.report.schema import parse_report, write_report
from penjing.core import cli
from penjing.core.errors import InputError
from tests.compress.report.reports import made_up_int8, made_up_report


def write(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    write_report(folder, parse_report(values, "x"))
    return folder


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [
        write(tmp_path / "mild", made_up_report()),
        write(tmp_path / "strong", made_up_report(right=(190, 120, 180))),
    ]


def test_rows_are_against_each_runs_first_stage(two: list[Path]) -> None:
    rows = comparison(read_runs(two))
    assert [(row["run"], row["stage"]) for row in rows[2:4]] == [("mild", "02-distill"), ("strong", "00-model")]
    last = rows[-1]
    assert last["bytes_ratio"] == pytest.approx(200 / 280)
    assert last["macs_ratio"] == pytest.approx(5 / 8)
    assert last["speedup"]["onnxruntime, batch 64"] == 1.4
    assert last["lost"]["value"] == pytest.approx(0.05)
    assert json.loads(json.dumps(rows)) == rows


def test_equal_names_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    folders = [write(tmp_path / parent / "out", made_up_report()) for parent in "ab"]
    assert [run.name for run in read_runs(folders)] == [str(folder) for folder in folders]
    assert [run.name for run in read_runs([folders[0] / "report.json"])] == ["out"]


def test_the_page_of_several_runs(two: list[Path]) -> None:
    page = comparison_page(read_runs(two))
    assert page.count("<svg") == 2
    assert "http" not in page
    for said in ("mild", "strong", "02-distill", "1.40×", "+5.00 points", "penjing compress recipes/pruned.toml"):
        assert said in page
    for row in (values := made_up_report())["stages"]:
        row["latency"] = []
    folder = write(two[0].parent / "untimed", values)
    assert comparison_page(read_runs([*two, folder])).count("<svg") == 1


def test_runs_of_different_qualities_form_groups(two: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    decoder = write(two[0].parent / "decoder", made_up_int8("decoder"))
    runs = read_runs([two[0], decoder, two[1]])
    page = comparison_page(runs)
    assert page.count("<svg") == 4
    assert page.index("<h2>Accuracy</h2>") < page.index("<h2>Perplexity</h2>")
    print_comparison(runs)
    shown = capsys.readouterr().err
    assert shown.index("strong") < shown.index("decoder")
    assert [row["family"] for row in comparison(runs)] == ["classifier"] * 3 + ["decoder"] * 2 + ["classifier"] * 3


def test_nothing_and_old_reports_are_refused(two: list[Path]) -> None:
    with pytest.raises(InputError, match="nothing to compare"):
        read_runs([])
    path = two[1] / "report.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 1}))
    with pytest.raises(InputError, match=r"strong/report\.json has schema_version 1, this penjing reads 2"):
        read_runs(two)


def test_the_command(two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "rows.json", tmp_path / "page.html"
    assert cli._run(["report", *map(str, two), "--json", str(out), "--out", str(page)]) == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert "strong" in shown
    assert len(json.loads(out.read_text())) == 6
    assert page.read_text().startswith("<!doctype html>")
    (two[1] / "report.json").write_text("{}")
    assert cli._run(["report", *map(str, two)]) == InputError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert "strong/report.json" in line
    print_comparison(read_runs(two[:1]))
