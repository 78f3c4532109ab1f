from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import results_page
from lib.rows import Row, append, new_row
from results_page import BEGIN, END, HEADLINES, amount, newest, number, update

from penjing.core.errors import ConfigError, InputError


def row(
    metric="one_stream", value: float | None = 180.0, unit="tok/s", day=1, device="EPYC", benchmark="engine", **more
):
    command = more.pop("command", "python benchmarks/run_engine.py")
    made = new_row(benchmark, metric, value, unit, runs=3, **more)
    date = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=day)
    return made.model_copy(update={"date": date, "device": device, "cores": 2, "command": command})


def page(folder: Path, *rows: Row) -> str:
    for made in rows:
        append(made.benchmark, [made], folder)
    update(folder, folder / "results.md", folder / "README.md")
    return (folder / "results.md").read_text()


def headlines(folder: Path) -> None:
    for _, benchmark, start, metrics in HEADLINES:
        for metric in metrics.split():
            append(
                benchmark, [row(start + metric, 2.0, benchmark=benchmark, baseline="peer", baseline_value=1.0)], folder
            )


def test_the_newest_row_is_shown_wherever_it_stands_in_the_file(tmp_path: Path):
    text = page(tmp_path, row(value=200.0, day=3), row(value=100.0, day=2))
    assert "200 tok/s" in text
    assert "100 tok/s" not in text
    assert "All 2 rows are in [engine.jsonl](../benchmarks/results/engine.jsonl)" in text


def test_of_equal_dates_the_last_row_counts():
    first, last = row(value=1.0), row(value=2.0)
    assert newest([first, last]) == [last]


def test_each_baseline_has_its_row_and_a_newer_version_replaces_an_older_one():
    old = row(baseline="llama.cpp 11434 Q8_0", baseline_value=90.0)
    other = row(baseline="vLLM CPU 0.32.0 W8A8", baseline_value=60.0, command="python x.py --peers vllm")
    new = row(day=2, baseline="llama.cpp 11500 Q8_0", baseline_value=90.0)
    assert newest([old, other, new]) == [other, new]


def test_a_baseline_that_the_same_command_no_longer_appends_is_left_out():
    renamed = row(day=2, baseline="FP32, fused", baseline_value=90.0)
    assert newest([row(baseline="FP32", baseline_value=90.0), renamed]) == [renamed]


def test_device_and_date_stand_once_above_a_table_and_other_devices_are_folded(tmp_path: Path):
    text = page(tmp_path, row(value=50.0, device="old machine"), row(day=2), row("streams_16", day=2))
    above, _, folded = text.partition("<details")
    assert "It was measured on EPYC, 2 cores, on 2026-01-03." in above
    assert "| Metric | Value | Runs |" in above
    assert "| one_stream | 50.0 tok/s | 3 | old machine, 2 cores | 2026-01-02 |" in folded


def test_a_gpu_stands_beside_a_processor(tmp_path: Path):
    text = page(tmp_path, row(), row(value=9000.0, day=2, device="NVIDIA H200"))
    assert "<details" not in text
    assert "| one_stream | 9,000 tok/s | 3 | NVIDIA H200, 2 cores | 2026-01-03 |" in text


def test_what_no_device_measured_is_collected_with_its_reason(tmp_path: Path):
    rows = [row(f"gpu_{i}", None, reason="not measured: no CUDA device") for i in range(5)]
    text = page(tmp_path, row(), row(value=None, day=2, reason="busy"), *rows)
    assert "180 tok/s" in text
    assert "busy" not in text  # an older row has the value
    assert "`gpu_0`, `gpu_1`, `gpu_2` and 2 more | no CUDA device |" in text


def test_spreads_stand_beside_their_value(tmp_path: Path):
    text = page(
        tmp_path,
        *(row(name, value, "%") for name, value in {"rise": 0.25, "rise_low": -0.05, "rise_high": 0.45}.items()),
        *(row(name, value, "%") for name, value in {"accuracy": 90.0, "accuracy_sd": 0.2}.items()),
    )
    assert "| rise | 0.250 % (-0.0500 to 0.450) |" in text
    assert "| accuracy | 90.00 % ± 0.200 |" in text
    assert "rise_low" not in text


def test_metrics_that_are_not_shown_are_folded(tmp_path: Path):
    text = page(tmp_path, *(row(f"step_{tokens}", benchmark="attention") for tokens in (1024, 16384)))
    assert text.index("| step_16384") < text.index("<summary>Further metrics: 1</summary>") < text.index("| step_1024")


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (2129.0, "tok/s", "2,130 tok/s"),
        (9.996, "tok/s", "10.0 tok/s"),
        (1.921e8, "bytes", "192 MB"),
        (512.0, "B", "512 B"),
        (0.9302, "share", "93.02 %"),
        (0.00174, "share of step", "0.174 % of step"),
        (0.004824, "s", "4.82 ms"),
        (1.179e8, "parameters", "118 million parameters"),
        (8.293, "perplexity", "8.293 perplexity"),
        (0.0, "share", "0 %"),
    ],
)
def test_amounts_are_readable(value, unit, said):
    assert amount(value, unit) == said


def test_numbers_keep_their_digits():
    assert [number(value) for value in (1234567.0, 0.0457, -0.02019, 7.6e-6)] == [
        "1,230,000",
        "0.0457",
        "-0.0202",
        "7.6e-06",
    ]


def test_a_damaged_line_is_an_error_that_names_file_and_line(tmp_path: Path):
    with append("engine", [row()], tmp_path).open("a") as file:
        file.write("{\n")
    with pytest.raises(ConfigError, match=r"engine\.jsonl, line 2: not JSON"):
        update(tmp_path, tmp_path / "results.md", tmp_path / "README.md")
    assert not (tmp_path / "results.md").exists()


def test_a_check_writes_nothing_and_names_the_stale_page(tmp_path: Path):
    pages = tmp_path / "results.md", tmp_path / "README.md"
    append("engine", [row()], tmp_path)
    assert update(tmp_path, *pages, check=True) == [pages[0]]
    assert not pages[0].exists()
    assert update(tmp_path, *pages) == [pages[0]]
    assert update(tmp_path, *pages, check=True) == []
    append("engine", [row(value=200.0, day=2)], tmp_path)
    assert update(tmp_path, *pages, check=True) == [pages[0]]


def test_the_readmes_table_stands_between_its_markers(tmp_path: Path):
    headlines(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(f"# before\n{BEGIN}\nold\n{END}\nafter\n")
    assert readme in update(tmp_path, tmp_path / "results.md", readme)
    text = readme.read_text()
    assert text.startswith(f"# before\n{BEGIN}\n| ")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert text.count("2.00 × peer") >= len(HEADLINES)
    assert update(tmp_path, tmp_path / "results.md", readme) == []


def test_a_readme_without_markers_stays_and_one_marker_is_an_error(tmp_path: Path):
    append("engine", [row()], tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text("# penjing\n")
    assert readme not in update(tmp_path, tmp_path / "results.md", readme)
    readme.write_text(f"{END}\n{BEGIN}\n")
    with pytest.raises(InputError, match="<!-- /results -->"):
        update(tmp_path, tmp_path / "results.md", readme)


def test_a_missing_headline_is_an_error_that_names_it(tmp_path: Path):
    append("engine", [row()], tmp_path)
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    with pytest.raises(InputError, match=r"prefill_512 in .*engine\.jsonl"):
        update(tmp_path, tmp_path / "results.md", tmp_path / "README.md")


def test_the_committed_pages_are_current(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["results_page.py", "--check"])
    assert results_page.main() == 0, capsys.readouterr().err
