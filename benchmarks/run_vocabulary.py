"""What a decoder loses with fewer tokens, on texts that it was not made for, and how much faster it answers.

    python benchmarks/run_vocabulary.py build/gemma3                        # keeps 0.84 of the tokens: a tenth smaller
    python benchmarks/run_vocabulary.py build/gemma3 --keep 0.84 0.6 --rounds 0
    python benchmarks/run_vocabulary.py build/gemma3 --keep 0.6 --script latin              # for texts of one script
    python benchmarks/run_vocabulary.py build/gemma3 --int8 recipes/gemma3-int8.toml        # … and then in INT8
    python benchmarks/run_vocabulary.py build/smollm2 --keep 0.5 --stage healed=build/smollm2-healed   # judged too

Rows are MODEL/SHARE/TEXT_rise in percent of perplexity, counted over the tokens of the whole vocabulary, with the ends
of the 95 % interval, and TEXT_longer, by how many percent the text has more tokens; worst_rise is the largest.
…/NAME/… is of --stage, …/int8/… of the artifact, both beside the whole network in FP32. …/decode is the speed of greedy
answers in our engine in FP32, the two networks taking turns, and …/int8/decode that of both in INT8: a token of the
smaller one stands for less text by TEXT_longer. Folders are made under --work and are not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lib.rows import RESULTS, Row, append, new_row
from lib.texts import LATER, SOURCES
from run_generalisation import text_windows
from run_prune_decoder import decode_row

from penjing.compress.measure.evaluate import EvaluateSettings
from penjing.compress.run import run_recipe
from penjing.compress.vocabulary.scripts import foreign_tokens
from penjing.compress.vocabulary.smaller import Cost, costs, open_whole, tokens_of, write_smaller
from penjing.core.cli import guarded
from penjing.core.config import read_recipe
from penjing.core.files import publish_folder
from penjing.core.manifest import MANIFEST_NAME, read_manifest
from penjing.core.progress import Progress, progress_bar
from penjing.core.text.tokenizer import Tokenizer

ROOT = RESULTS.parents[1]
BENCHMARK = "vocabulary"
TENTH = 0.84  # of Gemma 3 270M's tokens: a tenth of its parameters leaves with the others


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--keep", nargs="+", type=float, default=[TENTH], metavar="SHARE")
    parser.add_argument("--script", nargs="+", default=[], help="writing systems; tokens of others leave first")
    parser.add_argument("--texts", nargs="+", default=list(SOURCES), choices=[*SOURCES, *LATER])
    parser.add_argument("--windows", type=int, default=8, help="of 512 tokens of each text")
    parser.add_argument("--stage", action="append", default=[], metavar="NAME=FOLDER", help="made of the smaller one")
    parser.add_argument("--int8", type=Path, metavar="RECIPE", help="also quantize by this recipe")
    parser.add_argument("--rounds", type=int, default=5, help="of timing; 0 leaves it out")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "vocabulary")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    missing: list[Row] = []
    windows, versions = text_windows(arguments.model, arguments.texts, arguments.windows, missing)
    read = Tokenizer.from_folder(arguments.model).decode
    texts = {name: [read(ids, skip_special=False) for ids in part.tolist()] for name, part in windows.items()}
    whole = arguments.model
    with progress_bar() as progress:
        for share in arguments.keep:
            named = "-".join([str(share), *arguments.script])
            name, out = f"{whole.name}/{named}", arguments.work / f"{whole.name}-{named}"
            small = smaller(whole, share, out, arguments.script)
            rows = [size_row(name, small), *cost_rows(name, measured(whole, small, texts, progress), versions)]
            if arguments.rounds:
                rows.append(timed(name, [whole, small], arguments.rounds, "the whole network"))
            append(BENCHMARK, rows, arguments.results)
            for stage, _, folder in (each.partition("=") for each in arguments.stage):
                found = measured(whole, Path(folder), texts, progress)
                append(BENCHMARK, cost_rows(f"{name}/{stage}", found, versions), arguments.results)
            if arguments.int8:
                one, other = (in_int8(folder, arguments.int8, arguments.work, progress) for folder in (whole, small))
                rows = cost_rows(f"{name}/int8", measured(whole, other, texts, progress), versions)
                if arguments.rounds:
                    rows.append(timed(f"{name}/int8", [one, other], arguments.rounds, "the whole network in INT8"))
                append(BENCHMARK, rows, arguments.results)
    return 0


def smaller(whole: Path, share: float, out: Path, scripts: Sequence[str] = ()) -> Path:
    """The network with a share of its tokens, made where it is not there."""
    if not (out / MANIFEST_NAME).exists():
        checkpoint = open_whole(whole)
        room, last = (
            tokens_of(share, checkpoint.config.vocab_size),
            foreign_tokens(Tokenizer.from_folder(whole), scripts),
        )
        with publish_folder(out) as partial:
            write_smaller(checkpoint, room, {}, partial, last)
    return out


def in_int8(folder: Path, recipe: Path, work: Path, progress: Progress) -> Path:
    """The artifact that a recipe makes of a checkpoint, made where it is not there; nothing of it is judged."""
    out = work / f"{folder.name}-int8"
    if not (out / MANIFEST_NAME).exists():
        values = read_recipe(recipe, []) | {"model": str(folder), "output": str(out), "measure": {"rounds": 0}}
        values |= {"evaluate": {"prose_tokens": 512, "code_tokens": 0}, "guard": {"perplexity_ratio": 10.0}}
        run_recipe(values, progress=progress)
    return out


def measured(whole: Path, other: Path, texts: dict[str, list[str]], progress: Progress) -> dict[str, Cost]:
    return costs(whole, other, texts, EvaluateSettings(), progress)


def timed(name: str, folders: list[Path], rounds: int, beside: str) -> Row:
    return decode_row(name, folders, rounds).model_copy(update={"baseline": beside})


def size_row(name: str, small: Path) -> Row:
    """Parameters that left."""
    fewer = read_manifest(small).created_by["parameters_fewer"]
    return new_row(BENCHMARK, f"{name}/parameters_fewer", fewer, "parameters", runs=1)


def cost_rows(name: str, found: dict[str, Cost], versions: dict[str, str]) -> list[Row]:
    """Of each text the rise of perplexity with its interval, and by how much it is longer; and the largest rise."""
    rows = [
        new_row(BENCHMARK, f"{name}/{text}_{what}", 100 * value, "%", runs=1, more_versions=versions)
        for text, cost in found.items()
        for what, value in (
            ("rise", cost.rise.value),
            ("rise_low", cost.rise.low),
            ("rise_high", cost.rise.high),
            ("longer", cost.longer),
        )
    ]
    worst = max(cost.rise.value for cost in found.values())
    return [*rows, new_row(BENCHMARK, f"{name}/worst_rise", 100 * worst, "%", runs=1, more_versions=versions)]


if __name__ == "__main__":
    raise SystemExit(guarded(main))
