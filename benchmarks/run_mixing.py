"""Measure what the ways to mix domains do to a small decoder's perplexity on each of them; appends rows.

    python benchmarks/run_mixing.py --work build/it-helps   # an hour of one core; fetches 80 MB of Debian's packages
    python benchmarks/run_mixing.py --kinds fixed perplexity --seeds 1 --steps 60

The data is a quarter of what `recipes/corpus-docs.toml` keeps, made as by `run_it_helps.py`: domains of unlike size
(kernel, python, perl, manual pages, a reference), of which some clusters of near duplicates are held out.
`decoder-tiny` learns from them for the same number of steps with each `data.mixing.kind`, with an evaluation every ten
steps, and three seeds. `KIND/DOMAIN` is the perplexity on the held-out documents of a domain, where there are any,
`KIND/mean` over all domains alike and `KIND/worst` that of the worst. Baseline is `fixed`, which takes domains by their
size. `perplexity` is the rule with its guard against noise, `perplexity-any` the rule as it was published
(`min_rise = 0`), and `…/raised` how often a run raised a domain. Steps are counted, not seconds. What is complete in
`--work` is not done again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from itertools import pairwise
from pathlib import Path

import torch
from lib.models import say
from lib.paired import paired_rows
from lib.rows import RESULTS, append, new_row
from run_generalisation import qualities
from run_it_helps import ROOT, WINDOW, corpora, corpus, trained_tokenizer

from penjing.compress.samples.text import spread
from penjing.core.cli import guarded
from penjing.core.config import inline_toml
from penjing.core.files import atomic_write_text
from penjing.core.progress import Silent
from penjing.core.text.tokenizer import Tokenizer
from penjing.train.run import train

BENCHMARK = "mixing"
ANY = "perplexity-any"
KINDS = ("fixed", "temperature", "stratified", "perplexity", ANY, "odm")
EVERY, SAMPLES = 10, 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 9), metavar="1…8")
    parser.add_argument("--steps", type=int, default=300, help="of 2048 tokens")
    parser.add_argument("--windows", type=int, default=48, help=f"of {WINDOW} tokens of each domain")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "it-helps")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    work: Path = arguments.work
    corpora(work)
    tokenizer = trained_tokenizer(work)
    windows = windows_by_domain(work, tokenizer, arguments.windows)
    kinds = ("fixed", *(kind for kind in arguments.kinds if kind != "fixed"))
    losses: dict[tuple[str, int], dict[str, float]] = {}
    raised: dict[str, list[float]] = {}
    for seed in range(arguments.seeds):
        for kind in kinds:
            found = judged(work, kind, seed, arguments.steps, tokenizer, windows)
            raised.setdefault(kind, []).append(found.pop("raised"))
            losses[kind, seed] = found | {"mean": sum(found.values()) / len(found), "worst": max(found.values())}
            said = ", ".join(f"{text} {math.exp(loss):.1f}" for text, loss in losses[kind, seed].items())
            say(f"{kind}, seed {seed}: {said}")
    rows = paired_rows(BENCHMARK, losses, arguments.seeds, "fixed", "domains by their size")
    for kind in ("perplexity", ANY):
        if times := raised.get(kind):
            rows.append(new_row(BENCHMARK, f"{kind}/raised", sum(times) / len(times), "times a run", runs=len(times)))
    append(BENCHMARK, rows, arguments.results)
    return 0


def windows_by_domain(work: Path, tokenizer: Path, count: int) -> dict[str, torch.Tensor]:
    """Domain → (windows, `WINDOW`) int64 tokens of its held-out documents."""
    texts: dict[str, list[str]] = {}
    for each in corpus(work / "held-out-curated"):
        texts.setdefault(each.domain, []).append(each.text)
    encode = Tokenizer.from_folder(tokenizer)
    found = {}
    for domain, documents in sorted(texts.items()):
        tokens = encode.encode("\n\n".join(documents), allow_special=False)
        found[domain] = spread(encode, tokens, count, WINDOW)
    return found


def judged(
    work: Path, kind: str, seed: int, steps: int, tokenizer: Path, windows: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Domain → mean loss in nats of a model that learned by `kind`, and `raised`: how often a weight rose.

    It is kept in `work`.
    """
    name = f"mixing-{kind}-{seed}-{steps}"
    result = work / f"{name}.json"
    if not result.exists():
        mixing = {"kind": "perplexity", "min_rise": 0.0} if kind == ANY else {"kind": kind}
        changes: dict[str, object] = {
            "output": str(work / name), "seed": seed, "steps": steps,
            "data.sources": [str(work / "sample-curated")], "data.tokenizer": str(tokenizer), "data.held_out": 0.02,
            "data.mixing": mixing, "evaluation.every": EVERY, "evaluation.samples": SAMPLES,
            "checkpoint.every": 100,
        }  # fmt: skip
        if not (work / name).exists():
            overrides = [f"{key}={inline_toml(value)}" for key, value in changes.items()]
            train(Path("decoder-tiny"), overrides, resume="auto")
        found = {text: math.log(each.value) for text, each in qualities(work / name, windows, Silent()).items()}
        atomic_write_text(result, json.dumps(found | {"raised": float(rises(work / f"{name}-run"))}))
    return json.loads(result.read_text(encoding="utf-8"))


def rises(folder: Path) -> int:
    """How often the log of a run shows a domain whose share of the mixture rose."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    shares = [{key: value for key, value in line.items() if key.startswith("mixing/")} for line in lines]
    told = [each for each in shares if each]
    return sum(any(after[key] > before[key] + 1e-9 for key in before) for before, after in pairwise(told))


if __name__ == "__main__":
    sys.exit(guarded(main))
