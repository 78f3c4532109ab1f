"""A small recipe and the artifact it makes of the tiny checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penjing.compress.run import run_recipe
from tests.figures import figures_without_ink  # noqa: F401

WriteRecipe = Callable[[Path, Path], Path]


class Notes:
    """A Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tasks: list[str] = []

    def start(self, task: str, total: int) -> None:
        self.tasks.append(task)

    def advance(self, parts: int = 1) -> None: ...

    def finish(self) -> None: ...

    def status(self, text: str) -> None: ...

    def note(self, message: str) -> None:
        self.lines.append(message)


@pytest.fixture
def notes() -> Notes:
    return Notes()


def write_recipe(folder: Path, model: Path, output: Path) -> Path:
    """A recipe in `folder` with texts of a few hundred tokens. It ends with the quantize step, so that lines that are
    added to the file are settings of that step."""
    path = folder / "recipe.toml"
    path.write_text(
        f'model = "{model}"\noutput = "{output}"\n[data]\ntokens = 256\nwindow = 64\n'
        "[evaluate]\nprose_tokens = 128\ncode_tokens = 64\nwindow = 64\n[measure]\nrounds = 0\n"
        '[[steps]]\nkind = "quantize"\n'
    )
    return path


@pytest.fixture(scope="session")
def tiny_int8(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """The tiny checkpoint in INT8, everything quantized. Read only."""
    folder = tmp_path_factory.mktemp("tiny-int8")
    return run_recipe(write_recipe(folder, tiny_checkpoint, folder / "tiny-int8"))
