import io
import re

from rich.console import Console

from penjing.core.cli import guarded
from penjing.core.errors import InputError
from penjing.core.progress import (
    PlainProgress,
    TerminalProgress,
    _flatten,
    clock,
    count,
    megabytes,
    plural,
    print_table,
    printable,
    time_left,
    volume,
)


def test_plain_progress_prints_one_line_a_task(capsys):
    progress = PlainProgress()
    progress.start("import", 3)
    for _ in range(3):
        progress.advance()
    progress.start("hash", 1)
    progress.note("kept")
    progress.finish()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["import", "kept", "hash"]


def test_plain_progress_shows_a_status_now_and_then_and_the_last(capsys):
    progress = PlainProgress(every_s=1000.0)
    progress.start("training", 3)
    for step in range(3):
        progress.advance()
        progress.status(f"step {step + 1}/3")
    progress.finish()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["step 1/3", "step 3/3"]
    assert lines[2].startswith("training: ")


def test_a_terminal_shows_the_status_in_place_of_the_time_to_go():
    progress = TerminalProgress()
    progress.start("training", 10)
    progress.advance(4)
    progress.status("step 4/10 left 0:06 loss 1.2345")
    shown = io.StringIO()
    Console(file=shown, width=100).print(progress.bar.get_renderable())
    assert re.search(r"training .*40%.* 0:00 step 4/10 left 0:06 loss 1.2345", shown.getvalue())


def test_the_time_to_go_is_known_where_a_part_takes_longer_than_rich_looks_back():
    now = [0.0]
    progress = TerminalProgress()
    progress.bar.get_time = lambda: now[0]
    progress.start("loading", 4)
    assert time_left(progress.bar.tasks[0]) == "-:--"
    for _ in range(2):
        now[0] += 60.0
        progress.advance()
    assert time_left(progress.bar.tasks[0]) == "2:00"


def test_sizes_for_messages():
    sizes = [0, 3_400, 99_900, 100_000, 538_060_032, 14_200_000_000]
    assert [megabytes(size) for size in sizes] == [
        "0 kB",
        "3.4 kB",
        "99.9 kB",
        "0.10 MB",
        "538 MB",
        "14.2 GB",
    ]


def test_numbers_that_round_up_have_the_next_unit():
    assert [count(number) for number in (999, 999.4, 999.6, 99_950, 999_700_000, 1e9)] == [
        "999",
        "999",
        "1 k",
        "100 k",
        "1 G",
        "1 G",
    ]
    assert volume(999_751_680) == "1 GB"


def test_brackets_of_names_are_shown(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    print_table({"model [a]": "runs/[bold]x[/bold] :smile:", "b": {"[dim 0]": "[/]"}})
    progress = TerminalProgress()
    progress.start("loading [a]", 10)
    progress.note("steps.[b] [/x] :smile:")
    progress.bar.console.print(progress.bar.get_renderable())
    shown = capsys.readouterr().err
    for text in (
        "model [a]",
        "runs/[bold]x[/bold] :smile:",
        "b.[dim 0]",
        "[/]",
        "loading [a]",
        "steps.[b] [/x] :smile:",
    ):
        assert text in shown, text


def test_clock():
    assert [clock(seconds) for seconds in (7.9, 754, 3723)] == ["0:07", "12:34", "1:02:03"]


def test_tables_go_to_standard_error(capsys):
    print_table({"a": {"b": 1234.5678}, "c": "x"})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "1,235" in captured.err
    assert dict(_flatten({"a": {"b": 1}, "c": 2})) == {"a.b": 1, "c": 2}
    assert dict(_flatten({"a": [{"b": 1}, {"b": 2}], "c": [3], "d": []})) == {"a.1.b": 1, "a.2.b": 2, "c": [3]}


def test_what_stands_in_data_cannot_steer_a_terminal(capsys):
    hostile = "a\x1b[2J\x1b]0;title\x07\r\x9b31m\u202egnp\ttab\nline é \udcff"
    shown = "a\\x1b[2J\\x1b]0;title\\x07\\r\\x9b31m\\u202egnp\ttab\nline é \\udcff"
    assert printable(hostile) == shown
    PlainProgress().note(hostile)
    assert capsys.readouterr().err == shown + "\n"
    print_table({"name\x1b[0m": "value\x1b[0m"})
    assert "\x1b" not in capsys.readouterr().err


def test_an_error_cannot_steer_a_terminal(capsys):
    def work():
        raise InputError("a\x1b[2J.txt is damaged")

    assert guarded(work) == InputError.exit_code
    assert capsys.readouterr().err == "error: a\\x1b[2J.txt is damaged\n"


def test_one_of_a_thing_is_not_called_by_its_plural() -> None:
    assert [plural(number, "step") for number in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]
    assert plural(1, "process", "processes") == "1 process"
    assert plural(2, "process", "processes") == "2 processes"
