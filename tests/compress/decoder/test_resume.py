"""A run that makes a decoder's artifact: killed anywhere it goes on layer by layer, and what is there is respected."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penjing.compress.decoder import artifact as module
from penjing.compress.decoder.artifact import make_weights
from penjing.compress.decoder.settings import Int8Settings
from penjing.compress.run import run_recipe
from penjing.compress.samples.data import DataSettings, token_samples
from penjing.core.artifact.decoder import open_decoder_artifact
from penjing.core.errors import InputError, SetupError
from penjing.core.manifest import read_manifest
from penjing.core.progress import Silent
from penjing.core.work import Tasks
from tests.compress.conftest import Notes, write_recipe

# Runs `penjing compress` and writes how many flushes to disk that took; every file the run writes is flushed. Then it
# runs another recipe for each line that it reads, in a child that is killed at the flush of that number, and writes how
# that ended. The children have imported what the first run did.
KILLED = """
import os, signal, sys
from pathlib import Path
from penjing.compress.run import run_recipe
flush, done, last = os.fsync, [0], [0]
def fsync(descriptor):
    done[0] += 1
    if done[0] == last[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    flush(descriptor)
os.fsync = fsync
run_recipe(Path(sys.argv[1]))
print(done[0], flush=True)
for line in sys.stdin:
    if (child := os.fork()) == 0:
        done[0], last[0] = 0, int(line)
        run_recipe(Path(sys.argv[2]))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_killed_run_leaves_nothing_under_the_name_and_goes_on(
    tiny_int8: Path, tiny_checkpoint: Path, tmp_path: Path, notes: Notes
) -> None:
    wanted = read_manifest(tiny_int8).sha256["model.safetensors"]
    (tmp_path / "counted").mkdir()
    whole = write_recipe(tmp_path / "counted", tiny_checkpoint, tmp_path / "counted/out")
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "out")
    command = [sys.executable, "-c", KILLED, str(whole), str(recipe)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdin is not None
        assert killed.stdout is not None
        flushes = int(killed.stdout.readline())
        assert flushes > 20
        # The first kill early in the layers, the second while the artifact is published.
        for left, complete in ((14, False), (flushes - 24, True)):
            killed.stdin.write(f"{left}\n")
            killed.stdin.flush()
            assert killed.stdout.readline() == f"{-signal.SIGKILL}\n"
            assert not (tmp_path / "out").exists()
            work = tmp_path / ".out.work"
            assert bool(list(work.glob("01-quantize-????????????.json"))) == complete
            assert bool(list(work.glob("01-quantize-*.scratch/int8/layer_000.json"))) != complete
    run_recipe(recipe, progress=notes)
    assert "1 complete steps of an earlier run lie in .out.work; those that fit are kept" in notes.lines
    assert not {"perplexity on held-out text", "compressing layers"} & set(notes.tasks)
    artifact = open_decoder_artifact(tmp_path / "out")
    assert artifact.manifest.sha256["model.safetensors"] == wanted
    assert not list(tmp_path.glob(".*"))


def test_layers_that_are_complete_are_not_made_again(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows_WT = token_samples(tiny_checkpoint, DataSettings(tokens=256, window=64), Silent()).windows
    original, made = module.compress_layer, []

    def make(name: str) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        return make_weights(tiny_checkpoint, Int8Settings(), windows_WT, Tasks(tmp_path / name), Silent())[0]

    def dying(stream: Any, layer: int, *arguments: Any) -> Any:
        made.append(layer)
        if made == [0, 1]:
            raise KeyboardInterrupt
        return original(stream, layer, *arguments)

    whole = (make("whole") / "model.safetensors").read_bytes()
    monkeypatch.setattr(module, "compress_layer", dying)
    with pytest.raises(KeyboardInterrupt):
        make("killed")
    assert (make("killed") / "model.safetensors").read_bytes() == whole
    assert made == [0, 1, 1]


def test_a_full_disk_is_one_clear_error_and_the_run_goes_on_later(
    tiny_checkpoint: Path, tmp_path: Path, notes: Notes
) -> None:
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "out")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # else the signal ends the process before EFBIG is seen
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(SetupError, match=r"cannot write .*file-size limit"):
            run_recipe(recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not (tmp_path / "out").exists()
    run_recipe(recipe, progress=notes)
    assert any("going on with what an earlier run left" in line for line in notes.lines)


def test_a_second_run_keeps_the_artifact_and_says_so(tiny_int8: Path, notes: Notes) -> None:
    before = (tiny_int8 / "penjing.json").stat().st_mtime_ns
    run_recipe(tiny_int8 / "recipe.toml", progress=notes)
    assert notes.lines == [f"{tiny_int8} is already done: kept (--force makes it again)"]
    assert not notes.tasks
    assert (tiny_int8 / "penjing.json").stat().st_mtime_ns == before


def test_another_recipe_needs_force(tiny_int8: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(tiny_int8, out)
    with pytest.raises(InputError, match="was made from another recipe, input or version; replace it with --force"):
        run_recipe(tiny_int8 / "recipe.toml", ["steps.0.lm_head=keep"], out=out)
    run_recipe(tiny_int8 / "recipe.toml", ["steps.0.lm_head=keep"], out=out, force=True)
    artifact = open_decoder_artifact(out)
    assert artifact.checkpoint.dtype("lm_head.weight") == "F16"
    assert artifact.checkpoint.config_json["quantization_config"]["ignore"] == ["lm_head"]


def test_a_folder_of_someone_else_is_never_replaced(tiny_int8: Path, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(InputError, match="is no penjing folder, so it is not replaced"):
            run_recipe(tiny_int8 / "recipe.toml", out=tmp_path, force=force)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_damaged_artifact_is_not_taken_for_done(tiny_int8: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(tiny_int8, out)
    with open(out / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    with pytest.raises(InputError, match=r"model.safetensors has SHA-256"):
        run_recipe(tiny_int8 / "recipe.toml", out=out)


def test_too_little_disk_is_refused_before_work_starts(
    tiny_int8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # pyright: ignore
    with pytest.raises(SetupError, match=r"has 1 kB free, the steps need .*; free some space"):
        run_recipe(tiny_int8 / "recipe.toml", out=tmp_path / "out")


def test_too_little_memory_is_refused_before_work_starts(
    tiny_int8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penjing.compress.preflight.available_bytes", lambda: 1000)
    with pytest.raises(SetupError, match="of memory are available, the steps need about"):
        run_recipe(tiny_int8 / "recipe.toml", out=tmp_path / "out")


def test_preflight_says_what_will_be_written_where(tiny_int8: Path, tmp_path: Path, notes: Notes) -> None:
    run_recipe(tiny_int8 / "recipe.toml", out=tmp_path / "out", progress=notes)
    assert re.search(r"→ 01-quantize → .*/out; the result of each step is kept in \.out\.work", notes.lines[0])
    needs = next(line for line in notes.lines if line.startswith("needs about"))
    assert "of memory" in needs
    assert "of disk" in needs
