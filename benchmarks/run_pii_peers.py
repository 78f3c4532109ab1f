"""Measure the curation step `pii` beside presidio's recognisers and detect-secrets, on the same texts.

    pip install faker
    bash benchmarks/peers/presidio.sh        # an environment of their own
    python benchmarks/run_pii_peers.py       # five minutes; appends rows; fetches 40 MB of Debian's packages

The texts are those of `run_pii.py`: Faker's sentences with its values between them, in seven languages; and sentences
with keys of twelve services, made by lot in the forms that these services document. A value is found where nothing of
it is left outside of what was found (of a key: where any of it was found, since detect-secrets tells a part of some).
`recall_KIND` is the share of values that ours finds, beside theirs as the ratio. `alarms` are finds in a thousand
paragraphs of CPython's manual, in which there is nothing personal, and `alarms_tables` those in a thousand paragraphs
of the Linux kernel's that hold ten digits or more, where a few addresses and numbers are real; `_theirs` those of both
peers, without the signs `::` of markup, which presidio takes for an address and whoever uses it would leave out.
`presidio_agrees` is the share of what presidio finds in the planted texts that ours finds too. Speeds are of one
thread's processor time, over the kernel's paragraphs.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

from lib.models import say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row
from run_pii import KERNEL, LOCALES, MORE, values_of

from penjing.core.cli import guarded
from penjing.core.errors import InputError
from penjing.core.progress import Silent
from penjing.core.text.records import Record
from penjing.curate.documents.document import Document
from penjing.curate.documents.read import read_source, source_files
from penjing.curate.steps.personal import KINDS, find_personal
from penjing.curate.steps.pii import regions_of
from penjing.train.data.corpora import documents

PEERS = Path(__file__).parent / "peers"
PYTHON = PEERS.parents[1] / "build" / "peers" / "presidio" / "venv" / "bin" / "python"
PRESIDIO, SECRETS = "presidio 2.2.366, patterns", "detect-secrets 1.5.0, forms"
Found = list[tuple[str, int, int]]
LETTERS = string.ascii_letters + string.digits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=150, help="of each language, and with keys")
    parser.add_argument("--paragraphs", type=int, default=2000, help="of each kind")
    parser.add_argument("--show", type=int, default=0, help="print so many of the values that only they find")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    if not PYTHON.exists():
        raise InputError(f"{PYTHON} is missing; make it: bash benchmarks/peers/presidio.sh")
    warn_if_busy()
    groups = {
        "planted": planted(arguments.texts),
        "manual": [(text, [], "en") for text in manual(arguments.paragraphs)],
        "tables": [(text, [], "en") for text in tables(arguments.paragraphs)],
    }
    ours = {name: [found_by_us(text, language) for text, _, language in group] for name, group in groups.items()}
    theirs = {name: found_by_them(group) for name, group in groups.items()}
    rows = recall_rows(groups["planted"], ours["planted"], theirs["planted"], arguments.show)
    for name, metric in (("manual", "alarms"), ("tables", "alarms_tables")):
        for (text, *_), (found, *_) in zip(groups[name], theirs[name], strict=True):
            found[:] = [each for each in found if text[each[1] : each[2]] != "::"]
        counts = [sum(len(found) for found, *_ in each[name]) for each in (ours, theirs)]
        per, number = (1000 * count / len(groups[name]) for count in counts), len(groups[name])
        mine, peer = per
        kinds = [dict(Counter(kind for found, *_ in each[name] for kind, _, _ in found)) for each in (ours, theirs)]
        say(f"{name}: {number} paragraphs, ours {counts[0]} {kinds[0]}, theirs {counts[1]} {kinds[1]}")
        rows += [row(metric, mine, "a thousand"), row(f"{metric}_theirs", peer, "a thousand")]
    megabytes = sum(len(text.encode()) for text, _, _ in groups["tables"] + groups["manual"]) / 1e6
    timed = [
        (one[1], two[1], two[2])
        for name in ("tables", "manual")
        for one, two in zip(ours[name], theirs[name], strict=True)
    ]
    seconds = [sum(each) for each in zip(*timed, strict=True)]
    speeds = [megabytes / each for each in seconds]
    say(f"{megabytes:.2f} MB: ours {speeds[0]:.2f} MB/s, presidio {speeds[1]:.3f}, detect-secrets {speeds[2]:.3f}")
    rows.append(row("peers_speed", speeds[0], "MB/s", PRESIDIO, speeds[1]))
    rows.append(row("peers_speed_keys", speeds[0], "MB/s", SECRETS, speeds[2]))
    append("pii", rows, arguments.results)
    return 0


def row(metric: str, value: float, unit: str, baseline: str | None = None, other: float | None = None) -> Row:
    """A row of one run."""
    name = metric if metric.startswith("peers") else f"peers_{metric}"
    return new_row(
        "pii", name, value, unit, runs=1, baseline=baseline, baseline_value=other or None, more_versions=MORE
    )


def recall_rows(group: list[Any], ours: list[Any], theirs: list[Any], show: int) -> list[Row]:
    """What is found of planted values, and of what presidio finds."""
    total: Counter[str] = Counter()
    hits: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    agreed = judged = shown = 0
    for (text, spans, language), (mine, *_), (peer, *_) in zip(group, ours, theirs, strict=True):
        for kind, begin, end in spans:
            total[kind] += 1
            found = [covered(kind, begin, end, text, each) for each in (mine, peer)]
            for counter, hit in zip(hits, found, strict=True):
                counter[kind] += hit
            if found == [False, True] and shown < show:
                shown += 1
                say(f"{language} {kind}: {text[max(0, begin - 16) : end + 8]!r}")
        for kind, begin, end in peer:
            if kind != "key":
                judged += 1
                agreed += covered(kind, begin, end, text, mine)
    rows = []
    for kind in KINDS:
        shares = [100 * counter[kind] / total[kind] for counter in hits]
        say(f"{kind}: {total[kind]} planted, ours {shares[0]:.1f} %, theirs {shares[1]:.1f} %")
        rows.append(row(f"recall_{kind}", shares[0], "%", SECRETS if kind == "key" else PRESIDIO, shares[1]))
    return [*rows, row("presidio_agrees", 100 * agreed / judged, "%")]


def covered(kind: str, begin: int, end: int, text: str, found: Found) -> bool:
    """Whether nothing of text[begin:end] is left, whatever kind it was taken for; of a key, any of it."""
    if kind == "key":
        return any(max(begin, first) < min(end, last) for _, first, last in found)
    left = {place for place in range(begin, end) if text[place].isalnum()}
    for _, first, last in found:
        left.difference_update(range(first, last))
    return not left


def planted(texts: int) -> list[tuple[str, Found, str]]:
    """(Text, where its values are, language)."""
    faker = import_module("faker")
    found = []
    for language, locale in LOCALES.items():
        fake, dice = faker.Faker(locale), random.Random(1)
        fake.seed_instance(1)
        found += [with_values(fake, values_of(fake, language, dice), language) for _ in range(texts)]
    fake, dice = faker.Faker("en_US"), random.Random(2)
    fake.seed_instance(2)
    for _ in range(texts):
        values = [("key", dice.choice(("", "token =", "key:")), make(dice)) for make in dice.sample(MAKERS, 3)]
        found.append(with_values(fake, values, "en"))
    return found


def with_values(fake: Any, values: list[tuple[str, str, str]], language: str) -> tuple[str, Found, str]:
    """Sentences with `values` between them."""
    text, spans = "", []
    for kind, label, value in values:
        text += f"{fake.sentence()} {label} "
        spans.append((kind, len(text), len(text) + len(value)))
        text += f"{value}. " if kind != "key" else f"{value}\n"
    return text + fake.sentence(), spans, language


def _of(dice: random.Random, count: int, letters: str = LETTERS) -> str:
    return "".join(dice.choices(letters, k=count))


MAKERS = [
    lambda dice: f"AKIA{_of(dice, 16, string.ascii_uppercase + '234567')}",
    lambda dice: f"ghp_{_of(dice, 36)}",
    lambda dice: f"glpat-{_of(dice, 20)}",
    lambda dice: f"xoxb-{_of(dice, 12, string.digits)}-{_of(dice, 12, string.digits)}-{_of(dice, 24)}",
    lambda dice: f"sk_live_{_of(dice, 24)}",
    lambda dice: f"SG.{_of(dice, 22)}.{_of(dice, 43)}",
    lambda dice: f"SK{_of(dice, 32, '0123456789abcdef')}",
    lambda dice: f"npm_{_of(dice, 36)}",
    lambda dice: f"pypi-AgEIcHlwaS5vcmc{_of(dice, 140)}",
    lambda dice: f"sk-{_of(dice, 20)}T3BlbkFJ{_of(dice, 20)}",
    lambda dice: f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiI{_of(dice, 10, string.digits)}In0.{_of(dice, 43)}",
    lambda dice: (
        "-----BEGIN RSA PRIVATE KEY-----\n"
        + "\n".join(_of(dice, 64, f"{LETTERS}+/") for _ in range(6))
        + "\n-----END RSA PRIVATE KEY-----"
    ),
]


def manual(most: int) -> list[str]:
    """Paragraphs of CPython's manual, which names nobody."""
    texts = [each.text or "" for each in documents("builtin:prose") if isinstance(each, Record)]
    return chosen([part for text in texts for part in text.split("\n\n") if len(part) > 60 and "@" not in part], most)


def tables(most: int) -> list[str]:
    """Paragraphs of the kernel's documents with many digits."""
    texts = [
        each.text for file in source_files(0, KERNEL, Silent()) for each in read_source(file, KERNEL)
        if isinstance(each, Document)
    ]  # fmt: skip
    parts = [part for text in texts for part in text.split("\n\n")]
    return chosen([part for part in parts if sum(map(str.isdigit, part)) >= 10 and len(part) < 4000], most)


def chosen(paragraphs: list[str], most: int) -> list[str]:
    """`most` of them, by lot."""
    return random.Random(3).sample(paragraphs, min(most, len(paragraphs)))


def found_by_us(text: str, language: str) -> tuple[Found, float]:
    """What the step takes out, and its processor time."""
    began = time.process_time()
    found = find_personal(text, regions=regions_of(language))
    seconds = time.process_time() - began
    return [(each.kind, each.begin, each.end) for each in found], seconds


def found_by_them(group: list[tuple[str, Found, str]]) -> list[tuple[Found, float, float]]:
    """What both find in each text; processor time of presidio, and of detect-secrets."""
    lines = "".join(json.dumps({"text": text, "regions": regions_of(language)}) + "\n" for text, _, language in group)
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / "texts.jsonl").write_text(lines, encoding="utf-8")
        command = [str(PYTHON), str(PEERS / "bench_presidio.py"), str(path)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [([tuple(each) for each in one["found"]], one["presidio"], one["detect_secrets"]) for one in rows]


if __name__ == "__main__":
    sys.exit(guarded(main))
