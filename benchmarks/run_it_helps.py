"""Measure whether a curated corpus trains a better small model than the raw text that it was made of; appends rows.

    python benchmarks/run_it_helps.py --work build/it-helps   # an hour of one core; fetches 80 MB of Debian's packages
    python benchmarks/run_it_helps.py --steps 1200            # as `recipes/decoder-tiny.toml` has it
    python benchmarks/run_it_helps.py --prepare               # all but the training, which a later call does

`raw` is what the sources of `recipes/corpus-docs.toml` say, read and not filtered: pages that stand several times, in
seven languages, some of them tables or lists. `curated` is what the recipe's steps keep of it; `english` is what is
English of that. Clusters of near duplicates are split first: a few of them are held out of all three. Each seed draws
documents of its own of each arm, as many characters, and `decoder-tiny` learns from them for as many tokens, with one
tokenizer for all, which was trained on raw text and curated text in equal parts.

`ARM/TEXT` is the mean perplexity over seeds (geometric), on texts that no arm saw: `corpus`, what the recipe's steps
keep of the held-out clusters, which favours the arms that were made by the same steps; and `news`, `essays`, `sayings`
and `french`, which nobody filtered here. Baseline is the raw arm on the same text, and `ARM/TEXT_change` the change in
percent with the ends of its 95 % interval over seeds (Student's t of the paired logarithms). Steps are counted, not
seconds, so that a busy machine does no harm. What is complete in the folder of `--work` is not done again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from lib.models import say
from lib.paired import paired_rows
from lib.rows import RESULTS, append
from lib.texts import SOURCES
from run_generalisation import qualities

from penjing.compress.samples.text import spread
from penjing.core.cli import guarded
from penjing.core.config import inline_toml, load_recipe
from penjing.core.files import atomic_write_text
from penjing.core.progress import Silent
from penjing.core.text.tokenizer import Tokenizer
from penjing.curate.documents.document import Document, stored_documents
from penjing.curate.documents.settings import SourceConfig
from penjing.curate.recipe import CurateRecipe
from penjing.curate.run import curate_recipe
from penjing.curate.steps.dedup import DedupStep
from penjing.train.data.pack import prepare_tokens
from penjing.train.run import train

ROOT = RESULTS.parents[1]
BENCHMARK, RAW, CURATED, ENGLISH = "it_helps", "raw", "curated", "english"
ARMS = (RAW, CURATED, ENGLISH)
SHARE, HELD_OUT = 0.25, 0.01  # of the clusters of near duplicates: those that are looked at, and of all, held out
TEXTS = ("news", "essays", "sayings", "french")
VOCABULARY, WINDOW = 4096, 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 9), metavar="1…8")
    parser.add_argument("--steps", type=int, default=400, help="of 2048 tokens")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--windows", type=int, default=128, help=f"of {WINDOW} tokens of each text")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "it-helps")
    parser.add_argument("--prepare", action="store_true", help="end before the first training")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    work: Path = arguments.work
    corpora(work)
    tokenizer = trained_tokenizer(work)
    windows = held_out_windows(work, tokenizer, arguments.windows)
    arms = (RAW, *(each for each in arguments.arms if each != RAW))
    if arguments.prepare:
        for seed in range(arguments.seeds):
            for arm in arms:
                lesson(work, arm, seed)
        return 0
    losses: dict[tuple[str, int], dict[str, float]] = {}
    for seed in range(arguments.seeds):
        for arm in arms:
            losses[arm, seed] = judged(work, arm, seed, arguments.steps, tokenizer, windows)
            said = ", ".join(f"{text} {math.exp(loss):.1f}" for text, loss in losses[arm, seed].items())
            say(f"{arm}, seed {seed}: {said}")
    append(BENCHMARK, paired_rows(BENCHMARK, losses, arguments.seeds, RAW, "the raw text"), arguments.results)
    return 0


def corpora(work: Path) -> None:
    """The raw documents, a share of them by cluster, those that are held out, and what the recipe keeps of both."""
    recipe = load_recipe(CurateRecipe, ROOT / "recipes" / "corpus-docs.toml")
    everything = work / "raw"
    if not everything.exists():
        say("reading the sources")
        marked = {"output": everything, "work": None, "workers": 1, "steps": (DedupStep(kind="dedup", keep="all"),)}
        curate_recipe(recipe.model_copy(update=marked), "benchmarks/run_it_helps.py")
    for name, wanted in (("sample", lambda at: HELD_OUT <= at < SHARE), ("held-out", lambda at: at < HELD_OUT)):
        path = work / f"{name}.jsonl"
        if not path.exists():
            found = (each for each in corpus(everything) if wanted(place(each.cluster)))
            write(path, found)
        if not (kept := work / f"{name}-curated").exists():
            say(f"curating the {name}")
            source = SourceConfig(name="raw", path=path, form="records")
            again = {"output": kept, "work": None, "workers": 1, "sources": (source,)}
            curate_recipe(recipe.model_copy(update=again), "benchmarks/run_it_helps.py")


def corpus(folder: Path) -> Iterator[Document]:
    for path in sorted((folder / "shards").glob("*.parquet")):
        yield from stored_documents(path)


def place(name: str) -> float:
    """A number in [0, 1) that follows from `name`."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def write(path: Path, documents: Iterator[Document]) -> None:
    lines = (json.dumps({"text": each.text, "domain": each.domain}, ensure_ascii=False) for each in documents)
    atomic_write_text(path, "\n".join(lines) + "\n")


def texts_of(work: Path, arm: str) -> list[str]:
    if arm == RAW:
        lines = (work / "sample.jsonl").read_text(encoding="utf-8").split("\n")  # texts keep U+2028 and its like
        return [json.loads(line)["text"] for line in lines if line]
    found = corpus(work / "sample-curated")
    return [each.text for each in found if arm == CURATED or each.language == "en"]


def drawn(texts: Sequence[str], seed: int, most: int) -> list[str]:
    """Documents in an order of the seed, until they have `most` characters."""
    found, size = [], 0
    for at in np.random.default_rng(seed).permutation(len(texts)):
        found.append(texts[at])
        size += len(texts[at])
        if size >= most:
            break
    return found


def stored(path: Path, texts: Sequence[str]) -> Path:
    atomic_write_text(path, "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    return path


def trained_tokenizer(work: Path) -> Path:
    """A folder with a tokenizer of raw and curated text."""
    path = work / "tokenizer.jsonl"
    if not path.exists():
        stored(path, [text for arm in (RAW, CURATED) for text in drawn(texts_of(work, arm), 99, 3_000_000)])
    return prepare_tokens((str(path),), VOCABULARY, held_out=0.01)


def held_out_windows(work: Path, tokenizer: Path, count: int) -> dict[str, torch.Tensor]:
    encode = Tokenizer.from_folder(tokenizer)
    texts: dict[str, Callable[[], str]] = {
        "corpus": lambda: "\n\n".join(each.text for each in corpus(work / "held-out-curated"))
    }
    texts |= {name: SOURCES[name].text for name in TEXTS}
    return {
        name: spread(encode, encode.encode(text(), allow_special=False), count, WINDOW) for name, text in texts.items()
    }


def lesson(work: Path, arm: str, seed: int) -> Path:
    """What `arm` learns from with `seed`."""
    data = work / f"{arm}-{seed}.jsonl"
    return data if data.exists() else stored(data, drawn(texts_of(work, arm), seed, 8_000_000))


def judged(
    work: Path, arm: str, seed: int, steps: int, tokenizer: Path, windows: dict[str, torch.Tensor]
) -> dict[str, float]:
    """The mean loss on each text, in nats, of a model that learned from `arm`; kept in `work`."""
    name = f"{arm}-{seed}-{steps}"
    result = work / f"{name}.json"
    if not result.exists():
        changes: dict[str, object] = {
            "output": str(work / name), "seed": seed, "steps": steps, "data.sources": [str(lesson(work, arm, seed))],
            "data.tokenizer": str(tokenizer), "data.held_out": 0.01, "evaluation.every": 0, "checkpoint.every": 100,
        }  # fmt: skip
        if not (work / name).exists():
            overrides = [f"{key}={inline_toml(value)}" for key, value in changes.items()]
            train(Path("decoder-tiny"), overrides, resume="auto")
        found = {text: math.log(each.value) for text, each in qualities(work / name, windows, Silent()).items()}
        atomic_write_text(result, json.dumps(found))
    return json.loads(result.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(guarded(main))
