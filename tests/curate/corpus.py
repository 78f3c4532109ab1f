"""Small dirty sources, and what a run keeps of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from penjing.core.config import parse_config
from penjing.curate.documents.document import stored_documents
from penjing.curate.recipe import CurateRecipe
from penjing.curate.run import curate_recipe

WORDS = [a + b for a in ("ba", "de", "ki", "lo", "mu", "ni", "po", "ra") for b in ("bin", "dor", "gul", "nis", "tev")]


def prose(seed: int, words: int = 80) -> str:
    """Made-up words, the same for a seed."""
    return " ".join(np.random.default_rng(seed).choice(WORDS, words)) + "."


def write_lines(path: Path, texts: list[str], bad: int = 0) -> None:
    """A .jsonl file of texts, and `bad` lines that are none."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + "{oops\n" * bad)


def family(seed: int, copies: int) -> list[str]:
    """Near duplicates: each differs from the others in one word of 80."""
    words = prose(500 + seed).split()
    return [" ".join([*words[: 10 * copy], f"other{copy}", *words[10 * copy + 1 :]]) for copy in range(copies)]


def sources(folder: Path, files: int = 7) -> Path:
    """Files of single texts, families of near duplicates (also across files) and equal texts."""
    folder.mkdir()
    for number in range(files):
        texts = [prose(1000 * number + seed) for seed in range(10)]
        texts += [family(seed, files)[number] for seed in range(5)]
        texts += ["the same in every file " * 10]
        write_lines(folder / f"{number}.jsonl", texts)
    return folder


def recipe(folder: Path, path: Path, **values: Any) -> CurateRecipe:
    """A recipe of one source that writes to `folder`/corpus."""
    defaults = {
        "output": str(folder / "corpus"),
        "sources": [{"name": "s", "path": str(path), "domain": "made"}],
        "steps": [{"kind": "clean"}, {"kind": "dedup"}],
    }
    return parse_config(CurateRecipe, defaults | values, "test")


def kept(made: CurateRecipe) -> dict[str, str]:
    """Id → text of what a run of the recipe kept."""
    curate_recipe(made, "test")
    return corpus_of(made.output)


def corpus_of(output: Path) -> dict[str, str]:
    """Id → text of a corpus."""
    return {
        document.id: document.text
        for path in sorted((output / "shards").glob("*.parquet"))
        for document in stored_documents(path)
    }
