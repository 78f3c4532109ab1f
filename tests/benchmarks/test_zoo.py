import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import run_zoo
from lib.rows import Row, new_row, read
from lib.zoo import names
from lib.zoo_cells import COLUMNS, NEEDS, OURS, UNITS, Cell, Entry, cells
from lib.zoo_table import counts, every_cell

NOWHERE = Path("/nonexistent")


def zoo_row(metric: str, value: float | None, reason: str | None = None) -> Row:
    made = new_row("zoo", metric, value, "of the parameters", runs=1, reason=reason)
    return made.model_copy(update={"date": datetime(2026, 1, 1, tzinfo=UTC)})


@pytest.mark.parametrize("name", [pytest.param("own/unet", marks=pytest.mark.full), "own/lstm_tagger"])
def test_small_networks_go_the_whole_way(tmp_path: Path, name: str):
    found = list(cells(Entry(name, tmp_path, NOWHERE, NOWHERE), list(OURS)))
    assert [(cell.column, cell.reason) for cell in found] == [(column, None) for column in OURS]
    values = {cell.column: cell.value for cell in found}
    assert values["prune"] is not None
    assert values["prune"] < 1


def test_what_a_cell_needs_and_did_not_get_is_its_reason(tmp_path: Path, monkeypatch):
    def refuse(_: Entry) -> float:
        raise ValueError("too round")

    monkeypatch.setattr(Entry, "do_import", refuse)
    found = {cell.column: cell.reason for cell in cells(Entry("own/unet", tmp_path, NOWHERE, NOWHERE), ["train"])}
    assert found == {"import": "ValueError: too round", "prune": "no import", "train": "no prune"}


def run(monkeypatch, folder: Path, found, *more: str) -> list[Row]:
    monkeypatch.setattr(run_zoo, "names", lambda: ["own/one", "own/two"])
    monkeypatch.setattr(run_zoo, "IMPORTED", ())
    monkeypatch.setattr(run_zoo, "packages_from", lambda _: None)
    monkeypatch.setattr(run_zoo, "cells", found)
    monkeypatch.setattr("sys.argv", ["run_zoo.py", "--results", str(folder), "--columns", "import", "prune", *more])
    assert run_zoo.main() == 0
    return read("zoo", folder)


def test_rows_are_written_once_and_a_process_that_ends_leaves_its_reason(tmp_path: Path, monkeypatch):
    def found(entry: Entry, columns):
        yield Cell("import", 7.0, None, 0.1)
        if entry.name == "own/two":
            raise SystemExit(3)
        yield Cell("prune", 0.5, None, 0.1)

    rows = run(monkeypatch, tmp_path, found)
    assert [(row.metric, row.value, row.reason) for row in rows] == [
        ("own/one/import", 7.0, None),
        ("own/one/prune", 0.5, None),
        ("own/two/import", 7.0, None),
        ("own/two/prune", None, "its process ended with 3"),
    ]
    assert run(monkeypatch, tmp_path, found) == rows
    assert len(run(monkeypatch, tmp_path, found, "--again", "--only", "one")) == 6


def test_what_a_peer_drops_into_the_current_folder_does_not_stay(tmp_path: Path, monkeypatch):
    def found(entry: Entry, columns):
        Path("weights.data").write_bytes(b"large")
        yield Cell(columns[0], float(Path("weights.data").absolute().is_relative_to(entry.place)), None, 0.1)

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    rows = run(monkeypatch, Path("../rows"), found, "--only", "one")
    assert [row.value for row in rows] == [1.0, None]
    assert list((tmp_path / "here").iterdir()) == []


def test_a_network_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch):
    def found(entry: Entry, columns):
        yield Cell("import", 7.0, None, 0.1)
        time.sleep(60)

    rows = run(monkeypatch, tmp_path, found, "--seconds", "1", "--only", "one")
    assert [row.reason for row in rows] == [None, "takes longer than 1 s"]


def test_tables_count_what_has_a_value_and_say_reasons():
    rows = [
        zoo_row("own/a/import", None, "an old reason"),
        zoo_row("own/a/import", 3.0),
        zoo_row("own/a/prune", None, "a | b"),
        zoo_row("own/b/prune", 0.5),
        zoo_row("own/a/nncf_int8", None, "no"),
    ]
    table = counts(rows)
    assert "| comes in | 1 of 1 | – | – | – |" in table
    assert "| pruned by 30 % | 1 of 2 | – | – | – |" in table
    assert "| INT8 in ONNX Runtime | – | – | 0 of 1 | – |" in table
    every = every_cell(rows)
    assert "| own/a | ✓ | a \\| b |" in every
    assert "old reason" not in every


def test_the_zoo_is_large_and_each_column_has_a_unit():
    assert len([name for name in names() if not name.startswith("onnx/")]) >= 40
    assert len([name for name in names() if name.startswith("onnx/")]) >= 8
    assert len(set(names())) == len(names())
    assert set(NEEDS) | set(NEEDS.values()) <= set(COLUMNS) == set(UNITS)
