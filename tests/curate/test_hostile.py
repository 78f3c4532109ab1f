"""What a hostile user, source or machine does to a run: it costs the document, or is refused by name; never a crash, a
wait without end, a wrong corpus or a message that steers the terminal."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import printable
from penjing.curate import alone
from penjing.curate import run as running
from penjing.curate.recipe import CurateRecipe
from penjing.curate.run import curate_recipe
from penjing.curate.why import explain
from tests.curate.corpus import corpus_of, kept, prose, recipe, sources, write_lines
from tests.disk import run_in

pytest.importorskip("pyarrow")
pytest.importorskip("ftfy")


def quarantine(output: Path) -> list[tuple[str, str]]:
    lines = (output / "quarantine.jsonl").read_text().splitlines()
    return [(row["id"], row["reason"]) for row in map(json.loads, lines)]


def test_a_worker_ends_with_its_caller_in_the_midst_of_a_task(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from penjing.curate.workers import answer_tasks\n"
        "answer_tasks(lambda *task: (print('begun', flush=True), time.sleep(3600)))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "plan"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write("0 0\n")
        process.stdin.flush()
        assert process.stderr.readline() == "begun\n"  # what a task prints is no answer
        process.stdin.close()
        process.wait(timeout=300)


KILLED = """
import os, signal, sys
from pathlib import Path
import penjing.curate.task as task
from penjing.core.config import load_recipe
from penjing.curate import run as running
from penjing.curate.recipe import CurateRecipe

counts, place = {"calls": 0}, int(sys.argv[2])

def counted(work):
    def call(*arguments, **named):
        counts["calls"] += 1
        if counts["calls"] == place:
            os.kill(os.getpid(), signal.SIGKILL)
        return work(*arguments, **named)
    return call

for module, name in ((task, "atomic_write_text"), (running, "join_clusters"), (running, "_write"), (os, "rename"),
                     (running, "publish_folder"), (task, "read_source"), (os, "fsync"), (running.shutil, "rmtree")):
    setattr(module, name, counted(getattr(module, name)))
running.curate(Path(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "places", [(9, 31), pytest.param(range(1, 60, 3), marks=pytest.mark.full)], ids=["twice", "often"]
)
def test_a_run_that_is_killed_anywhere_ends_with_the_same_corpus(tmp_path: Path, places: Sequence[int]) -> None:
    path = sources(tmp_path / "in", 3)
    whole = kept(recipe(tmp_path, path))
    output = tmp_path / "killed"
    text = (
        f'output = "{output}"\ntask_mb = 0.001\nsources = [{{name = "s", path = "{path}", domain = "made"}}]\n'
        'steps = [{kind = "clean"}, {kind = "dedup"}]\n'
    )
    (tmp_path / "recipe.toml").write_text(text)
    killed = 0
    for place in places:
        command = [sys.executable, "-c", KILLED, str(tmp_path / "recipe.toml"), str(place)]
        ended = subprocess.run(command, timeout=300, capture_output=True)
        assert ended.returncode in (-9, 0), ended.stderr
        killed += ended.returncode == -9
        assert output.exists() or ended.returncode
        if output.exists():  # all of it, also where the kill came behind it
            assert corpus_of(output) == whole
            shutil.rmtree(output)
    assert killed >= 2
    assert kept(recipe(tmp_path, path, output=str(output), task_mb=0.001)) == whole
    assert not [each.name for each in tmp_path.iterdir() if "partial" in each.name or "work" in each.name]


def test_two_runs_are_never_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(tmp_path, sources(tmp_path / "in", 2))
    real = running.make_plan
    said: list[str] = []

    def second(*arguments: Any) -> Any:
        try:
            curate_recipe(made, "second")
        except InputError as error:
            said.append(str(error))
        return real(*arguments)

    monkeypatch.setattr(running, "make_plan", second)
    curate_recipe(made, "first")
    assert said == [f"{made.work_folder} is worked in by another process; wait for it, or choose another output"]


def test_a_lock_in_a_folder_that_was_removed_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, real, left = tmp_path / "work", fcntl.flock, [True]

    def removed_before(lock: int, how: int) -> None:
        if left.pop() if left else False:
            shutil.rmtree(work)
        real(lock, how)

    monkeypatch.setattr(alone.fcntl, "flock", removed_before)
    with alone.alone_in(work), pytest.raises(InputError, match="worked in by another"), alone.alone_in(work):
        pass


def test_a_folder_of_others_is_not_worked_in(tmp_path: Path) -> None:
    path = sources(tmp_path / "in")
    made = recipe(tmp_path, path, work=tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="mine holds files that are not of a run of this command"):
        curate_recipe(made, "test")
    assert os.listdir(tmp_path / "mine") == ["letter.txt"]


DISK = """
import sys
from pathlib import Path
from penjing.core.errors import SetupError
from tests.curate.corpus import prose, recipe, write_lines

folder, source = Path(sys.argv[1]), Path(sys.argv[2])
try:
    from penjing.curate.run import curate_recipe
    curate_recipe(recipe(folder, source, workers=int(sys.argv[3]), task_mb=0.1), "test")
except SetupError as error:
    print(error)
print(sorted(each.name for each in folder.iterdir()))
"""


@pytest.mark.parametrize("place", ["tiny disk", "limit"])
def test_a_full_disk_is_said_and_leaves_no_half(tmp_path: Path, place: str) -> None:
    source, folder = tmp_path / "in", tmp_path / "disk"
    source.mkdir()
    folder.mkdir()
    for number in range(2):  # little of it can be packed
        write_lines(source / f"{number}.jsonl", [os.urandom(400).hex() for _ in range(500)])
    said, left = run_in(place, 100_000, folder, DISK, str(source), "1")
    assert said.startswith(f"cannot write {folder}/corpus-work/")
    assert ("disk is full" if place == "tiny disk" else "file-size limit") in said
    assert left == "['corpus-work']"


def test_files_that_are_no_files_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [prose(1)])
    os.mkfifo(folder / "pipe.txt")
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "dangling.txt").symlink_to("nowhere")
    (folder / "round").symlink_to(folder, target_is_directory=True)
    (folder / "null.txt").symlink_to("/dev/zero")
    assert list(kept(recipe(tmp_path, folder))) == ["s/a.jsonl, line 1"]
    for path in (folder / "pipe.txt", folder / "loop.txt", Path("/dev/zero")):
        with pytest.raises(InputError, match=r"sources.s"):
            curate_recipe(recipe(tmp_path, path, output=str(tmp_path / "no")), "test")


def test_a_corpus_is_no_source_of_itself(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [prose(1), prose(2)])
    made = recipe(tmp_path, tmp_path, steps=[])
    (made.work_folder / "stage-0-old" / "task-00000").mkdir(parents=True)
    write_lines(made.work_folder / "stage-0-old" / "task-00000" / "damaged.jsonl", ["left of a killed run"])
    (made.work_folder / ".lock").touch()
    assert len(kept(made)) == 2
    curate_recipe(made, "test", force=True)
    assert len(corpus_of(made.output)) == 2


def test_names_fields_and_pages_of_any_kind_cost_themselves_alone(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_lines(folder / "good.jsonl", [prose(seed) for seed in range(300)])
    Path(os.fsdecode(os.fsencode(folder) + b"/n\xe4me.txt")).write_text(prose(401))
    (folder / "clear\x1b[2J.txt").write_text(prose(402))
    rows = [
        {"text": prose(403), "domain": "half \ud800"},
        {"messages": [{"role": "user", "content": "half \ud800"}]},
        {"text": prose(404), "domain": "a\x1b[31mb\tc\nd"},
        {"text": prose(405), "domain": {"a": [1]}},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = recipe(tmp_path, folder, steps=[{"kind": "clean"}, {"kind": "dedup"}])
    found = kept(made)
    assert found["s/n\\xe4me.txt"] == prose(401)
    assert found["s/clear\x1b[2J.txt"] == prose(402)
    assert found["s/rows.jsonl, line 4"] == prose(405)
    half = "holds half a surrogate pair, which is no character"
    assert quarantine(made.output) == [("s/rows.jsonl, line 1", half), ("s/rows.jsonl, line 2", half)]
    assert "\x1b" not in printable("\n".join(explain(".txt", made.output)))


def test_a_page_that_the_library_fails_on_costs_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(page: str) -> str:
        if "broken" in page:
            raise RecursionError("too deep")
        return page

    monkeypatch.setattr("penjing.curate.documents.read.html_text", fails)
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.html").write_text("broken" if number == 1 else prose(number))
    made = recipe(tmp_path, folder, most_damaged=0.5)
    assert sorted(kept(made)) == ["s/0.html", "s/2.html"]
    assert quarantine(made.output) == [("s/1.html", "cannot be read as html: RecursionError: too deep")]


def test_text_is_shown_and_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    script = "<script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}</code></table>"
    write_lines(folder / "<b onclick=x>.jsonl", [script, "x" * 3_000_000 + script], bad=1)
    made = recipe(
        tmp_path, folder, most_damaged=0.5, steps=[{"kind": "clean", "longest": 20}],
        sources=[{"name": "<script>s", "path": str(folder), "domain": "<script>d", "licence": "<script>l"}],
    )  # fmt: skip
    assert kept(made) == {}
    page = (made.output / "report.html").read_text()
    assert "<script" not in page
    assert "<img" not in page
    assert "<b onclick" not in page
    assert "{{ 7 * 7 }}" in page
    assert len(page) < 100_000


@pytest.mark.parametrize("steps", [[], [{"kind": "dedup"}], [{"kind": "dedup", "keep": "all"}, {"kind": "clean"}]])
def test_sources_without_text_give_an_empty_corpus(tmp_path: Path, steps: list[dict[str, Any]]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n\n\n")
    (folder / "b.txt").write_text(" \n")
    made = recipe(tmp_path, folder, steps=steps)
    assert kept(made) == {}
    assert "0 documents" in (made.output / "report.html").read_text()
    with pytest.raises(InputError, match="knows no document"):
        explain("a", made.output)


def test_many_reasons_make_a_short_summary(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.jsonl.gz").write_bytes(b"no gzip")
    write_lines(folder / "good.jsonl", [prose(1)])
    # Fields may be as many as lines, and people: they are no reasons of their own.
    lines = "".join(json.dumps({f"{number}@firm.org": 1}) + "\n" for number in range(40))
    (folder / "odd.jsonl").write_text(lines)
    made = recipe(tmp_path, folder, most_damaged=0.99)
    report = curate_recipe(made, "test")
    needed = 'an object with "text" or "messages" is needed'
    assert report.reasons == {needed: 40, "cannot be read": 30}
    many = report.model_copy(update={"reasons": {f"reason {number}": 1 for number in range(9)}})
    assert many.summary().endswith("reason 4: 1 and 4 more reasons)")


GOOD = {"output": "out", "sources": [{"name": "s", "path": "x"}], "steps": [{"kind": "clean"}]}
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "name", "path", "a"]), inner),
    max_leaves=6,
)


@given(key=st.sampled_from(["output", "work", "workers", "task_mb", "most_damaged", "sources", "steps"]), value=ODD)
@settings(max_examples=150, deadline=None)
def test_a_recipe_with_wrong_values_is_refused_by_name(key: str, value: object) -> None:
    said = ""
    try:
        parse_config(CurateRecipe, GOOD | {key: value}, "recipe")
    except ConfigError as error:
        said = str(error)
    assert not said or key in said


@pytest.mark.parametrize("key", ["output", "work"])
def test_a_folder_to_make_needs_a_name(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: .* is no name of a folder of its own"):
        parse_config(CurateRecipe, GOOD | {key: ""}, "recipe")
