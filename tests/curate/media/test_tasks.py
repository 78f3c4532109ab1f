"""`penjing curate media` on several processes, and ended in the midst: the same bytes come out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penjing.core.errors import InputError, SetupError
from penjing.core.manifest import verify
from penjing.curate.media import run, tasks
from penjing.curate.media.run import curate_media
from penjing.curate.media.tasks import MediaFile
from tests.curate.media.test_media import lines, photo, sound, stored

pytest.importorskip("pyarrow.parquet")
pytest.importorskip("imagehash")
pytest.importorskip("soundfile")
TASK_MB = 0.02  # three or four photographs
KILLED = """
import os, signal, sys
from pathlib import Path
from penjing.curate.media import run

real, left = run.run_media_task, int(sys.argv[3])

def task(plan, number):
    global left
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    real(plan, number)

run.run_media_task = task
run.curate_media(Path(sys.argv[1]), Path(sys.argv[2]), task_mb=float(sys.argv[4]), most_damaged=0.5)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve photographs, a smaller and an equal copy of some, a recording, and broken files of each kind."""
    folder = tmp_path_factory.mktemp("media") / "in"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02d}.jpg").write_bytes(stored(photo(number)))
        (folder / f"{number:02d}.txt").write_text(f"picture {number}")
    for number in (2, 9):
        (folder / f"{number + 20}.jpg").write_bytes(stored(photo(number).resize((97, 75)), quality=80))
        (folder / f"{number + 40}.jpg").write_bytes(stored(photo(number)))
    (folder / "60.wav").write_bytes(sound())
    (folder / "61.png").write_bytes(b"<html>")
    (folder / "62.png").write_bytes(b"")
    (folder / "63.png").write_bytes(b"<html>")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = {each.relative_to(folder).as_posix(): each for each in folder.rglob("*") if each.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name != "penjing.json"}


def test_any_number_of_processes_and_tasks_gives_the_same_bytes(tmp_path: Path, source: Path) -> None:
    report = curate_media(source, tmp_path / "whole", most_damaged=0.5)
    assert report == {
        "files": 20, "image": 12, "audio": 1, "with text": 12, "equal file": 2, "looks alike": 2, "damaged": 3
    }  # fmt: skip
    expected = contents(tmp_path / "whole")
    assert {"images/00000.tar", "audio/00000.tar", "records.parquet"} < set(expected)
    for workers in (1, 2, 4):
        out = tmp_path / f"of-{workers}"
        assert curate_media(source, out, most_damaged=0.5, task_mb=TASK_MB, workers=workers) == report
        assert contents(out) == expected
        assert not out.with_name(f"{out.name}-work").exists()
        assert verify(out).kind == "corpus"


def test_a_run_that_was_killed_goes_on(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, work = tmp_path / "out", tmp_path / "out-work"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(source), str(out), "2", str(TASK_MB)], check=False)
    assert ended.returncode == -9
    assert not out.exists()
    assert len(list(work.glob("task-*"))) == 2
    done, real = [], run.run_media_task
    monkeypatch.setattr(run, "run_media_task", lambda plan, task: (done.append(task), real(plan, task)))
    curate_media(source, out, most_damaged=0.5, task_mb=TASK_MB)
    assert done[0] == 2
    curate_media(source, tmp_path / "whole", most_damaged=0.5)
    assert contents(out) == contents(tmp_path / "whole")
    assert not list(tmp_path.glob(".*"))  # what the killed run left


def test_only_what_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for number in range(4):
        (source / f"{number}.jpg").write_bytes(stored(photo(number)) if number != 2 else b"<html>")
    done, real = [], run.run_media_task
    monkeypatch.setattr(run, "run_media_task", lambda plan, task: (done.append(task), real(plan, task)))
    with pytest.raises(InputError, match="1 of 4 files are broken"):
        curate_media(source, out, task_mb=0.0001)
    assert done == [0, 1, 2, 3]
    (source / "2.jpg").write_bytes(stored(photo(2)))
    (source / "0.txt").write_text("said later")
    assert curate_media(source, out, task_mb=0.0001)["with text"] == 1
    assert done == [0, 1, 2, 3, 2]
    with pytest.raises(InputError, match="already exists"):
        curate_media(source, out)
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_results_of_other_settings_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    (source / "large.png").write_bytes(stored(photo(1), "PNG"))
    with pytest.raises(InputError, match="1 of 1 files are broken"):
        curate_media(source, out, max_pixels=100)
    (old,) = (tmp_path / "out-work").glob("task-*")
    real = run.run_media_task

    def task(plan: tasks.MediaPlan, number: int) -> None:
        assert not old.exists()
        real(plan, number)

    monkeypatch.setattr(run, "run_media_task", task)
    assert curate_media(source, out)["image"] == 1


def test_a_file_that_changes_between_plan_and_reading_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jpg").write_bytes(stored(photo(1)))
    real = MediaFile.read

    def read(file: MediaFile) -> bytes:
        content = real(file)
        Path(file.path).write_bytes(stored(photo(2)))
        return content

    monkeypatch.setattr(MediaFile, "read", read)
    with pytest.raises(InputError, match=r"a.jpg was changed while it was read; run again"):
        curate_media(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_process_that_is_killed_twice_is_told_of(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "sitecustomize.py"  # in the workers alone: this process has begun
    script.write_text(
        "import os, signal\n"
        "import penjing.curate.media.tasks as tasks\n"
        "tasks.read_picture = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(SetupError, match=r"ended its process twice \(killed by signal 9\)"):
        curate_media(source, tmp_path / "out", task_mb=TASK_MB, workers=2)
    assert not (tmp_path / "out").exists()


def test_what_is_broken_keeps_its_order(tmp_path: Path, source: Path) -> None:
    curate_media(source, tmp_path / "out", most_damaged=0.5, task_mb=TASK_MB)
    assert [row["id"] for row in lines(tmp_path / "out" / "quarantine.jsonl")] == ["61.png", "62.png", "63.png"]
