"""What the distribution holds: every package of the tree, the door, the recipes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STAGES = ("kernels", "core", "train", "compress", "curate", "serve", "model_repository", "recipes")


def setuptools() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def test_every_folder_of_modules_is_listed_in_both_places() -> None:
    folders = {path.parent for stage in STAGES for path in (ROOT / stage).rglob("__init__.py")}
    expected = {"penjing." + ".".join(path.relative_to(ROOT).parts): str(path.relative_to(ROOT)) for path in folders}
    assert setuptools()["package-dir"] == expected | {"penjing": "api"}
    assert sorted(setuptools()["packages"]) == sorted([*expected, "penjing"])


def test_files_beside_the_modules_are_packed() -> None:
    data = setuptools()["package-data"]
    assert data["penjing"] == ["py.typed"]
    assert data["penjing.recipes"] == ["*.toml"]


def test_the_door_is_one_folder_without_folders() -> None:
    """The links that type checkers and tests follow are made file by file."""
    names = {path.name for path in (ROOT / "api").iterdir()} - {"__pycache__"}
    assert names == {"__init__.py", "arguments.py", "batches.py", "calls.py", "graphs.py", "networks.py", "py.typed"}


def test_the_image_gets_every_package() -> None:
    listed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{folder}" for folder in (*STAGES, "api")} <= set(listed)
