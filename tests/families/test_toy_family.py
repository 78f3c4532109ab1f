"""A family of a package outside penjing, found by its entry point, goes through every stage by the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penjing.core.artifact.parity import SERVED

Result = subprocess.CompletedProcess[str]
Run = Callable[..., Result]
MAIN = "from penjing.core.cli import main; main()"
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
def pruned(place: Path) -> Path:
    return prune(place, "pruned", "taylor", rounds=1)


@pytest.fixture(scope="module")
def int8(place: Path, pruned: Path) -> Path:
    penjing(
        place, "compress", "quantize", pruned, place / "int8", "--set", "measure.rounds=1", "--set", "data.images=64"
    )
    return place / "int8"


def python(place: Path, *arguments: str, fails: bool = False) -> Result:
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(place / "packages"), *([inherited] if inherited else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=place, check=False
    )
    assert (result.returncode != 0) == fails, result.stderr
    return result


def penjing(place: Path, *arguments: str | Path, fails: bool = False) -> Result:
    """Run `penjing` in a process of its own, which finds the family by itself."""
    return python(place, "-c", MAIN, *map(str, arguments), fails=fails)


def prune(place: Path, name: str, method: str, rounds: int = 0) -> Path:
    recipe = place / f"{name}.toml"
    recipe.write_text(RECIPE.format(model=place / "toy", output=place / name, method=method, rounds=rounds))
    penjing(place, "compress", recipe)
    return place / name


def widths(folder: Path) -> list[int]:
    return json.loads((folder / "config.json").read_text())["widths"]


def test_it_is_inspected(place: Path) -> None:
    shown = penjing(place, "compress", "inspect", place / "toy", "--json", place / "inspect.json").stderr
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


def test_runs_are_compared(place: Path, pruned: Path, int8: Path) -> None:
    shown = penjing(place, "report", pruned, int8, "--out", place / "runs.html").stderr
    assert "accuracy" in shown
    assert "accuracy" in (place / "runs.html").read_text()


def test_it_is_exported(place: Path, int8: Path) -> None:
    penjing(place, "export", int8, place / "toy.onnx", "--to", "onnx")
    assert (place / "toy.onnx").read_bytes() == (int8 / "model.onnx").read_bytes()
    assert json.loads((place / "toy.onnx.json").read_text())["artifact"] == "int8"
    penjing(place, "export", int8, place / "models", "--to", "model-repository")
    assert "points" in (place / "models" / "toy" / "config.pbtxt").read_text()


def test_what_it_cannot_do_is_one_clear_error(place: Path, int8: Path) -> None:
    shown = penjing(place, "export", int8, place / "toy.gguf", "--to", "gguf", fails=True).stderr
    assert shown.strip() == f"error: {int8} is a toy, which is not written as gguf; onnx is its only form"
    recipe = place / "finetune.toml"
    recipe.write_text(
        f'model = "{place / "toy"}"\noutput = "{place / "tuned"}"\n[[steps]]\nkind = "finetune"\nsteps = 4\n'
    )
    shown = penjing(place, "compress", recipe, fails=True).stderr
    assert "error: steps.0: a toy cannot be trained" in shown
    shown = penjing(place, "serve", place / "toy", fails=True).stderr
    assert f"{place / 'toy'} is the checkpoint of a toy" in shown


@pytest.mark.server
@pytest.mark.xdist_group("triton")
def test_it_is_served_and_verified(place: Path, int8: Path) -> None:
    penjing(place, "compress", "verify", int8, "--served", "--json", place / "verified.json")
    found = json.loads((place / "verified.json").read_text())
    assert found["family"] == "toy"
    assert found["same_bits"] is True
    assert [each["between"][1] for each in found["differences"]].count(SERVED) == 2
    assert (int8 / f"parity_{SERVED}.json").is_file()
