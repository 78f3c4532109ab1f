"""The whole of a run: the same corpus however it is cut, gone on with after a kill, and never half of one."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.core.manifest import verify
from penjing.core.progress import Silent
from penjing.core.text.records import Record
from penjing.curate import run as running
from penjing.curate import workers
from penjing.curate.documents.document import Document
from penjing.curate.recipe import CurateRecipe
from penjing.curate.run import curate_recipe
from penjing.curate.steps.clean import Clean
from penjing.curate.why import explain
from penjing.train.data.corpora import documents
from tests.curate.corpus import corpus_of, kept, prose, recipe, sources, write_lines

pytest.importorskip("pyarrow")
pytest.importorskip("ftfy")


def test_a_recipe_of_another_stage_is_named_with_its_command() -> None:
    with pytest.raises(ConfigError, match="decoder-tiny is a recipe of 'penjing train', not of 'penjing curate'"):
        running.curate(Path("decoder-tiny"))


def test_one_of_each_cluster_is_kept_the_first(tmp_path: Path) -> None:
    made = recipe(tmp_path, sources(tmp_path / "in"))
    found = kept(made)
    assert len(found) == 7 * 10 + 5 + 1
    assert [name for name in found if name.startswith("s/0.jsonl")] == [f"s/0.jsonl, line {n}" for n in range(1, 17)]
    report = json.loads((made.output / "report.json").read_text())
    assert [(row["step"], row["documents"]) for row in report["funnel"]] == [
        ("read", 7 * 16), ("0: clean", 7 * 16), ("1: dedup", 76),
    ]  # fmt: skip
    assert report["rules"][0]["documents"] == 36
    assert verify(made.output).kind == "corpus"
    page = (made.output / "report.html").read_text()
    assert "near duplicate" in page
    assert "http" not in page
    assert not made.work_folder.exists()


def test_a_run_says_what_was_left_and_where_it_lies(tmp_path: Path) -> None:
    class Notes(Silent):
        lines: ClassVar[list[str]] = []

        def note(self, message: str) -> None:
            self.lines.append(message)

    made = recipe(tmp_path, sources(tmp_path / "in"))
    report = curate_recipe(made, "test", progress=Notes())
    said = [line.split() for line in report.summary().splitlines()]
    assert [words[-4:] for words in said[:3]] == [
        [f"{row.documents:,}", "documents", f"{row.chars:,}", "characters"] for row in report.funnel
    ]
    assert Notes.lines[-2:] == [
        report.summary(),
        f"wrote {made.output}; {made.output}/report.html says what was kept and dropped, and why",
    ]


@pytest.mark.parametrize(("task_mb", "workers_"), [(0.005, 1), (0.02, 1), (0.01, 2)])
def test_the_corpus_is_the_same_however_it_is_cut(tmp_path: Path, task_mb: float, workers_: int) -> None:
    path = sources(tmp_path / "in")
    whole = kept(recipe(tmp_path, path))
    cut = recipe(tmp_path, path, output=str(tmp_path / "cut"), task_mb=task_mb, workers=workers_)
    assert kept(cut) == whole


def test_training_reads_the_corpus_and_its_clusters(tmp_path: Path) -> None:
    made = recipe(tmp_path, sources(tmp_path / "in"), steps=[{"kind": "dedup", "keep": "all"}])
    curate_recipe(made, "test")
    records = [record for record in documents(str(made.output)) if isinstance(record, Record)]
    assert {record.text for record in records} == set(corpus_of(made.output).values())
    assert len(records) == 7 * 16
    assert len({record.fields["cluster"] for record in records}) == 76
    assert {record.fields["domain"] for record in records} == {"made"}


class Ended(Silent):
    """A run that is ended when so many tasks are done."""

    def __init__(self, tasks: int) -> None:
        self.left = tasks

    def advance(self, parts: int = 1) -> None:
        self.left -= parts
        if self.left < 0:
            raise KeyboardInterrupt


def test_a_run_goes_on_where_it_was_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sources(tmp_path / "in")
    whole = kept(recipe(tmp_path, path))
    made = recipe(tmp_path, path, output=str(tmp_path / "again"), task_mb=0.001)
    with pytest.raises(KeyboardInterrupt):
        curate_recipe(made, "test", progress=Ended(4))
    assert not made.output.exists()
    done: list[tuple[int, int]] = []
    run_task = running.run_task
    monkeypatch.setattr(
        running, "run_task", lambda plan, stage, task: (done.append((stage, task)), run_task(plan, stage, task))
    )
    assert kept(made) == whole
    assert [task for stage, task in done if stage == 0] == [5, 6]


def test_another_rule_never_takes_the_results_of_the_first(tmp_path: Path) -> None:
    path = sources(tmp_path / "in")
    made = recipe(tmp_path, path, task_mb=0.001)
    with pytest.raises(KeyboardInterrupt):
        curate_recipe(made, "test", progress=Ended(6))
    steps = [{"kind": "clean", "shortest": 10_000}]
    other = made.model_copy(
        update={"steps": parse_config(CurateRecipe, made.model_dump() | {"steps": steps}, "").steps}
    )
    assert kept(other) == {}


def test_a_worker_that_is_killed_is_replaced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, pathlib, signal, sys\n"
        "for line in sys.stdin:\n"
        "    task = line.split()[1]\n"
        f"    mark = pathlib.Path({str(tmp_path)!r}) / f'tried-{{task}}'\n"
        "    if task in ('1', sys.argv[1][-1]) and (task != '1' or not mark.exists()):\n"
        "        mark.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    print(json.dumps({'task': int(task)}), flush=True)\n"
    )
    monkeypatch.setattr(workers, "_PYTHON", (sys.executable,))
    done: list[int] = []
    workers.run_tasks(Path("none"), 0, [0, 1, 2, 3], 2, done.append, str(script))
    assert sorted(done) == [0, 1, 2, 3]
    with pytest.raises(SetupError, match=r"task 3 ended its process twice \(killed by signal 9\)"):
        workers.run_tasks(Path("always-3"), 0, [0, 1, 2, 3], 2, lambda task: None, str(script))


def test_what_a_library_prints_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written in C it goes to the descriptor, whatever `sys.stdout` is: the run then waited without an end."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import os\n"
        "from penjing.curate.workers import answer_tasks\n"
        "print('imported')\n"
        "os.write(1, b'3 warnings\\n3\\nand no end')\n"
        "answer_tasks(lambda *task: (print('a warning'), os.write(1, b'a warning\\n')))\n"
    )
    done: list[int] = []
    monkeypatch.setattr(workers, "_PYTHON", (sys.executable,))
    workers.run_tasks(Path("none"), 0, [0, 1, 2], 1, done.append, str(script))
    assert done == [0, 1, 2]


def test_errors_of_workers_are_their_own(tmp_path: Path) -> None:
    path = sources(tmp_path / "in")
    made = recipe(tmp_path, path, task_mb=0.001, workers=2)
    real = running.make_plan

    def changed(*arguments: object) -> object:
        plan = real(*arguments)  # type: ignore[arg-type]
        write_lines(path / "3.jsonl", ["changed"])
        return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "make_plan", changed)
        with pytest.raises(InputError, match=r"3.jsonl was changed or removed while the sources were read; run again"):
            curate_recipe(made, "test")
    assert not made.output.exists()


def test_damage_is_listed_and_too_much_of_it_stops(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [prose(seed) for seed in range(150)], bad=1)
    whole = gzip.compress("".join(json.dumps({"text": prose(seed)}) + "\n" for seed in range(500, 900)).encode())
    (folder / "b.jsonl.gz").write_bytes(whole[: len(whole) * 3 // 4])
    made = recipe(tmp_path, folder)
    found = kept(made)
    assert 150 < len(found) < 150 + 400
    listed = [json.loads(line) for line in (made.output / "quarantine.jsonl").read_text().splitlines()]
    assert [entry["id"] for entry in listed] == ["s/a.jsonl, line 151", "s/b.jsonl.gz"]
    assert "cut off or damaged" in listed[1]["reason"]
    write_lines(folder / "a.jsonl", [prose(seed) for seed in range(50)], bad=20)
    with pytest.raises(
        InputError, match=r"documents are damaged, more than most_damaged = 0.01; the first is s/a.jsonl, l"
    ):
        curate_recipe(made, "test", force=True)
    assert len(corpus_of(made.output)) == len(found)  # the old corpus stays


def test_a_document_that_a_step_fails_on_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Clean, document: Document) -> str | None:
        raise ValueError("no")

    monkeypatch.setattr(Clean, "apply", fails)
    folder = tmp_path / "in"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [prose(seed) for seed in range(3)], bad=1)
    made = recipe(tmp_path, folder, most_damaged=0.9)
    with pytest.raises(
        InputError, match=r"^4 of 4 documents are damaged, more than most_damaged = 0.9; the first"
    ) as caught:
        curate_recipe(made, "test")
    listed = made.work_folder / "quarantine.jsonl"
    assert f"All are listed in {listed}: mend them" in str(caught.value)
    assert len(listed.read_text().splitlines()) == 4


def test_labels_with_line_separators_are_masked_too(tmp_path: Path) -> None:
    rows = [{"text": f"one{sign}two", "label": 3.0, "language": "en"} for sign in "\u2028\u2029\x85\n"]
    path = tmp_path / "labels.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    masked = running._masked_labels(path, str.upper)
    assert [json.loads(line)["text"] for line in masked.split("\n")[:-1]] == [row["text"].upper() for row in rows]


def test_why(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [prose(1), prose(1), "short", f"{prose(2)}  \r\n"])
    made = recipe(tmp_path, folder, steps=[{"kind": "clean", "shortest": 20}, {"kind": "dedup", "method": "exact"}])
    curate_recipe(made, "test")
    assert explain("a.jsonl, line 1", made.output) == [
        "s/a.jsonl, line 1: kept, domain made, language not told, unchanged"
    ]
    assert "dropped by step 1: dedup: equal text of s/a.jsonl, line 1, which" in explain("line 2", made.output)[0]
    assert "dropped by step 0: clean: too short; it began 'short'" in explain("line 3", made.output)[0]
    assert "changed by clean" in explain("line 4", made.output)[0]
    with pytest.raises(InputError, match="knows no document 'line 9'"):
        explain("line 9", made.output)
    with pytest.raises(InputError, match="is no corpus"):
        explain("line 9", folder)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"sources.s: .*nowhere does not exist"):
        curate_recipe(recipe(tmp_path, tmp_path / "nowhere"), "test")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty holds no text that is read: .* 'penjing curate media'"):
        curate_recipe(recipe(tmp_path, tmp_path / "empty"), "test")
    with pytest.raises(ConfigError, match="several sources are called a"):
        recipe(tmp_path, tmp_path, sources=[{"name": "a", "path": "x"}] * 2)
    with pytest.raises(ConfigError, match="needs a path, packages or an address"):
        recipe(tmp_path, tmp_path, sources=[{"name": "a"}])
    made = recipe(tmp_path, sources(tmp_path / "in"))
    curate_recipe(made, "test")
    with pytest.raises(InputError, match="already exists; replace it with --force"):
        curate_recipe(made, "test")
    (file := tmp_path / "file").write_text("x")
    for output, says in ((file, "is a file; choose another"), (file / "corpus", "is a file, so .* cannot lie in it")):
        with pytest.raises(InputError, match=says):
            curate_recipe(recipe(tmp_path, tmp_path / "in", output=str(output)), "test")


def test_sources_elsewhere_give_the_same_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    here = sources(tmp_path / "in")
    (here / "empty.jsonl").touch()
    for path in here.iterdir():
        with fsspec.open(f"memory://bucket/in/{path.name}", "wb") as file:
            file.write(path.read_bytes())
    expected = kept(recipe(tmp_path, here))
    away = {"name": "s", "address": "memory://bucket/in", "domain": "made"}
    made = recipe(tmp_path / "away", here, sources=[away])
    assert kept(made) == expected
    with pytest.raises(InputError, match=r"sources.s: of the 8 files of memory://bucket/in none is read here"):
        kept(recipe(tmp_path / "none", here, sources=[away | {"files": ["*.html"]}]))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"address": "bucket/in"}, "is no address such as s3://bucket"),
        ({"address": "s3://b/in", "path": "in"}, "has an address beside a path"),
        ({"path": "s3://b/in"}, "is an address; give it by `address`"),
        ({}, "needs a path, packages or an address"),
    ],
)
def test_addresses_and_paths_are_told_apart(tmp_path: Path, source: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe(tmp_path, tmp_path, sources=[{"name": "s", **source}])
