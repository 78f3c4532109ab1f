"""A family of a package outside penjing, found by its entry point, goes through every stage by the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penjing.core.artifact.parity import SERVED

pytestmark = pytest.mark.xdist_group("toy-family")  # one run for all
Penjing = Callable[..., str]
MAIN = "from penjing.core.cli import main; main()"
SERIES = """
import contextlib, io, json, sys
from penjing.core.cli import _run
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = _run(json.loads(line))
    print(json.dumps([code, said.getvalue()]), file=answers, flush=True)
"""
RECIPE = """
model = "{model}"
output = "{output}"
[data]
images = 256
[evaluate]
images = 500
[measure]
rounds = {rounds}
[guard]
accuracy_points = 20
[[steps]]
kind = "prune"
ratio = 0.25
method = "{method}"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `packages`, as an installation makes it, and `toy`, a checkpoint."""
    folder = tmp_path_factory.mktemp("toys")
    shutil.copytree(Path(__file__).parent / "toy_family", folder / "packages" / "toy_family")
    facts = folder / "packages" / "toy_family-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: toy_family\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[penjing.families]\ntoy = toy_family\n")
    python(folder, "-m", "toy_family.network", str(folder / "toy"))
    return folder


@pytest.fixture(scope="module")
def penjing(place: Path) -> Iterator[Penjing]:
    """Runs `penjing` with arguments and gives what it said, command after command in one other process: there the
    family is found, and starting Python and torch anew takes longer than most of them."""
    command = [sys.executable, "-c", SERIES]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(place), cwd=place
    ) as process:
        asked, answers = process.stdin, process.stdout
        assert asked is not None
        assert answers is not None

        def run(*arguments: str | Path, fails: bool = False) -> str:
            print(json.dumps([str(each) for each in arguments]), file=asked, flush=True)
            answer = answers.readline()
            assert answer, "the process ended"
            code, said = json.loads(answer)
            assert (code != 0) == fails, said
            return said

        yield run
        process.kill()  # it waits for a command; one that hangs is ended, too


@pytest.fixture(scope="module")
def pruned(place: Path, penjing: Penjing) -> Path:
    recipe = place / "pruned.toml"
    recipe.write_text(RECIPE.format(model=place / "toy", output=place / "pruned", method="taylor", rounds=1))
    penjing("compress", recipe)
    return place / "pruned"


@pytest.fixture(scope="module")
def int8(place: Path, pruned: Path, penjing: Penjing) -> Path:
    penjing("compress", "quantize", pruned, place / "int8", "--set", "measure.rounds=1", "--set", "data.images=64")
    return place / "int8"


def environment(place: Path) -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(place / "packages"), *([inherited] if inherited else [])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}


def python(place: Path, *arguments: str | Path) -> str:
    """What a process of its own wrote to standard error."""
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(place), cwd=place, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr


def widths(folder: Path) -> list[int]:
    return json.loads((folder / "config.json").read_text())["widths"]


def test_it_is_inspected(place: Path, penjing: Penjing) -> None:
    shown = penjing("compress", "inspect", place / "toy", "--json", place / "inspect.json")
    assert "MACs per point" in shown
    found = json.loads((place / "inspect.json").read_text())
    assert found["macs"] == 8 * 32 + 32 * 24 + 24 * 3
    assert [group["units"] for group in found["groups"]] == [32, 24]


def test_it_is_pruned(place: Path, pruned: Path) -> None:
    assert widths(place / "toy") == [8, 32, 24, 3]
    assert widths(pruned) == [8, 24, 24, 3]  # widths stay multiples of 8
    report = json.loads((pruned / "report.json").read_text())
    assert report["family"] == "toy"
    before, after = report["stages"]
    assert before["quality"]["value"] > 0.9
    assert after["quality"]["value"] > 0.7
    assert after["size"]["parameters"] < before["size"]["parameters"]
    assert [row["unit"] for row in after["latency"]] == ["points"]
    assert "accuracy" in (pruned / "report.html").read_text()


def test_it_is_quantized(pruned: Path, int8: Path) -> None:
    report = json.loads((int8 / "report.json").read_text())
    assert [stage["kind"] for stage in report["stages"]] == ["model", "quantize"]
    assert abs(report["stages"][1]["quality"]["value"] - report["stages"][0]["quality"]["value"]) < 0.02
    assert report["stages"][1]["quantized"]["agreement"] > 0.95
    assert widths(int8) == widths(pruned)


def test_runs_are_compared(place: Path, pruned: Path, int8: Path, penjing: Penjing) -> None:
    shown = penjing("report", pruned, int8, "--out", place / "runs.html")
    assert "accuracy" in shown
    assert "accuracy" in (place / "runs.html").read_text()


def test_it_is_exported(place: Path, int8: Path, penjing: Penjing) -> None:
    penjing("export", int8, place / "toy.onnx", "--to", "onnx")
    assert (place / "toy.onnx").read_bytes() == (int8 / "model.onnx").read_bytes()
    assert json.loads((place / "toy.onnx.json").read_text())["artifact"] == "int8"
    penjing("export", int8, place / "models", "--to", "model-repository")
    assert "points" in (place / "models" / "toy" / "config.pbtxt").read_text()


def test_what_it_cannot_do_is_one_clear_error(place: Path, int8: Path, penjing: Penjing) -> None:
    shown = penjing("export", int8, place / "toy.gguf", "--to", "gguf", fails=True)
    assert shown.strip() == f"error: {int8} is a toy, which is not written as gguf; onnx or model-repository is"
    recipe = place / "finetune.toml"
    recipe.write_text(
        f'model = "{place / "toy"}"\noutput = "{place / "tuned"}"\n[[steps]]\nkind = "finetune"\nsteps = 4\n'
    )
    shown = penjing("compress", recipe, fails=True)
    assert "error: steps.0: a toy cannot be trained" in shown
    shown = penjing("serve", place / "toy", fails=True)
    assert f"{place / 'toy'} is the checkpoint of a toy" in shown


@pytest.mark.server
@pytest.mark.xdist_group("triton")
def test_it_is_served_and_verified(place: Path, int8: Path) -> None:
    python(place, "-c", MAIN, "compress", "verify", int8, "--served", "--json", place / "verified.json")
    found = json.loads((place / "verified.json").read_text())
    assert found["family"] == "toy"
    assert found["same_bits"] is True
    assert [each["between"][1] for each in found["differences"]].count(SERVED) == 2
    assert (int8 / f"parity_{SERVED}.json").is_file()


def test_the_door_opens_it(place: Path, int8: Path) -> None:
    code = (
        "import sys, penjing\n"
        "for folder in sys.argv[1:]: print(type(penjing.load(folder)).__name__, file=sys.stderr)\n"
        "try: penjing.load(sys.argv[2], device='cuda')\n"
        "except penjing.core.errors.ConfigError as error: print(error, file=sys.stderr)\n"
    )
    said = python(place, "-c", code, place / "toy", int8)
    assert said.splitlines() == ["Mlp", "ToyArtifact", "device 'cuda': a toy in INT8 runs on the CPU"]
