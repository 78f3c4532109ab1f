import json
from pathlib import Path

import pytest
from lib import rows as bench_rows
from lib.rows import append, kind, latest, new_row, read

from penjing.core.errors import ConfigError, InputError


def row(metric="one_stream", value: float | None = 180.0, **more):
    return new_row("engine", metric, value, "tok/s", runs=3, **more)


def test_a_row_says_what_was_measured_against_what_and_where():
    made = row(value=171.23456, baseline="llama.cpp 11434 Q8_0", baseline_value=171.23456 / 2)
    assert made.value == 171.2
    assert made.ratio == 2.0
    assert made.cores >= 1
    assert made.device
    assert {"python", "torch", "penjing"} <= made.versions.keys()
    assert made.command.startswith("python ")
    assert made.date.utcoffset() is not None


def test_what_was_not_measured_has_a_reason_and_only_that():
    assert row(value=None, reason="no GPU here").reason == "no GPU here"
    with pytest.raises(ConfigError, match="either a value or the reason"):
        row(value=None)
    with pytest.raises(ConfigError, match="either a value or the reason"):
        row(reason="measured all the same")


def test_a_ratio_needs_its_baseline():
    with pytest.raises(ConfigError, match="needs the baseline"):
        row(baseline_value=90.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_is_a_number(value):
    with pytest.raises(ConfigError, match="row engine/one_stream"):
        row(value=value)


def test_appended_rows_come_back_in_order(tmp_path: Path, capsys):
    first, second = row(), row("streams_16", 400.0, baseline="vLLM CPU 0.32.0 W8A8", baseline_value=413.0)
    append("engine", [first], tmp_path)
    path = append("engine", [second, row("all", None, reason="it failed")], tmp_path)
    assert read("engine", tmp_path)[:2] == [first, second]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 3
    design = "benchmark metric value unit baseline ratio share_of_limit device cores versions runs command date"
    assert list(lines[0]) == design.split()
    assert lines[2]["value"] is None
    assert lines[2]["reason"] == "it failed"
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert last["rows"][0]["metric"] == "streams_16"
    assert last["rows"][0]["ratio"] == pytest.approx(0.9685, abs=1e-4)


def test_the_table_shows_ratio_and_reason(capsys):
    bench_rows.show([row(baseline="x", baseline_value=60.0), row("all", None, reason="it failed")])
    table = capsys.readouterr().out
    assert "180 tok/s" in table
    assert "3.00×" in table
    assert "not measured: it failed" in table


def test_no_rows_is_an_error(tmp_path: Path):
    with pytest.raises(InputError, match="no rows"):
        append("engine", [], tmp_path)
    assert read("engine", tmp_path) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 2: not JSON"), ('{"benchmark": "engine"}', "line 2"), ('{"speed": 1}', "speed")],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path: Path, line, message):
    path = append("engine", [row()], tmp_path)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=message):
        read("engine", tmp_path)


def test_the_newest_row_of_each_kind_counts():
    old = row(value=100.0, baseline="llama.cpp 11434 Q8_0", baseline_value=50.0)
    new = row(value=120.0, baseline="llama.cpp 11500 Q8_0", baseline_value=50.0)
    other = row(value=110.0, baseline="vLLM CPU 0.32.0 W8A8", baseline_value=50.0)
    assert latest([old, other, new]) == [other, new]
    assert kind("transformers 5.23.0 FP32 eager") == "transformers FP32 eager"


def test_committed_results_are_rows():
    for path in bench_rows.RESULTS.glob("*.jsonl"):
        assert read(path.stem), path
