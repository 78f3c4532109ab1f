from penjing.core.progress import PlainProgress, _flatten, print_table


def test_plain_progress_prints_one_line_a_task(capsys):
    progress = PlainProgress()
    progress.start("import", 3)
    for _ in range(3):
        progress.advance()
    progress.start("hash", 1)
    progress.note("kept")
    progress.finish()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["import", "hash", "kept"]


def test_tables_go_to_standard_error(capsys):
    print_table({"a": {"b": 1234.5678}, "c": "x"})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "1,235" in captured.err
    assert dict(_flatten({"a": {"b": 1}, "c": 2})) == {"a.b": 1, "c": 2}
