"""Measure how much personal data the curation step `pii` finds, and what it takes for some that is none.

    pip install faker                        # makes the values and the sentences around them
    python benchmarks/run_pii.py             # five minutes; appends rows; fetches 40 MB of Debian's packages

Faker writes, for each language, sentences with values of its own making planted between them: e-mail addresses,
telephone numbers as its country writes them (of those that libphonenumber calls possible: half of Faker's American ones
have no such area), cards of lengths that are issued, accounts (IBAN) and addresses of the internet; half of them after
a word that says what they are, half of them bare.
`recall_KIND` is the share of planted values of which nothing is left, over all languages;
`recall_KIND_bare` of the bare ones; `recall_LANGUAGE` that of a language over all kinds. `precision` is the share of
what is taken out of these texts that was planted. `found_KIND_…` is what is found in a million characters of documents:
CPython's, whose only personal data are addresses of authors, and the Linux kernel's, which hold addresses and some
telephone numbers too, so that not all of these are false. `speed` is of one thread, in seconds of processor time.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from lib.models import say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row

from penjing.core.cli import guarded
from penjing.core.progress import Silent
from penjing.core.text.records import Record
from penjing.curate.documents.document import Document
from penjing.curate.documents.read import read_source, source_files
from penjing.curate.documents.settings import SourceConfig
from penjing.curate.steps.personal import KINDS, find_personal
from penjing.curate.steps.pii import PiiStep
from penjing.train.data.corpora import documents

LOCALES = {"en": "en_US", "de": "de_DE", "fr": "fr_FR", "es": "es_ES", "it": "it_IT", "pl": "pl_PL", "ja": "ja_JP"}
LABELS = {
    "en": "Phone:", "de": "Telefon:", "fr": "Tél.", "es": "Teléfono:", "it": "Telefono:", "pl": "tel.", "ja": "電話",
}  # fmt: skip
CARDS = (
    "visa16",
    "mastercard",
    "amex",
    "discover",
    "diners",
    "maestro",
    "jcb16",
)  # no 13 digits of Visa, nor 15 of JCB
KERNEL = SourceConfig(
    name="kernel", packages=("linux-doc-6.1",), path=Path("usr/share/doc"), files=("*/Documentation/*/*.rst.gz",)
)
MORE = {"phonenumbers": version("phonenumbers"), "python-stdnum": version("python-stdnum")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=150, help="of each language")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    warn_if_busy()
    rows = planted_rows(arguments.texts) + clean_rows(arguments.rounds)
    append("pii", rows, arguments.results)
    return 0


def planted_rows(texts: int) -> list[Row]:
    """What is found of planted values."""
    faker = import_module("faker")
    more = MORE | {"Faker": faker.VERSION}
    planted: Counter[tuple[str, str, str]] = Counter()
    hit: Counter[tuple[str, str, str]] = Counter()
    taken = right = 0
    for language, locale in LOCALES.items():
        fake, dice = faker.Faker(locale), random.Random(1)
        fake.seed_instance(1)
        step = PiiStep(kind="pii").filter(Path())
        for _ in range(texts):
            values = values_of(fake, language, dice)
            text = "".join(f"{fake.sentence()} {label} {value}. " for _, label, value in values) + fake.sentence()
            document = Document("d", text, "s", "d", language=language)
            step.apply(document)
            for kind, label, value in values:
                form = kind if label else f"{kind}_bare"
                planted[language, kind, form] += 1
                hit[language, kind, form] += value not in document.text
        found = sum(values for values, _ in step.replaced.values())
        mine = sum(count for key, count in hit.items() if key[0] == language)
        total = sum(count for key, count in planted.items() if key[0] == language)
        taken, right = taken + found, right + min(mine, found)
        say(f"{language}: {mine} of {total} found, {found} taken out")
    kinds = [kind for kind in KINDS if kind != "key"]
    rows = [
        new_row("pii", f"recall_{name}", 100 * share(hit, planted, place, name), "%", runs=1, more_versions=more)
        for place, names in ((1, kinds), (2, [f"{kind}_bare" for kind in kinds]), (0, list(LOCALES)))
        for name in names
    ]
    return [*rows, new_row("pii", "precision", 100 * right / taken, "%", runs=1, more_versions=more)]


def share(hit: Counter[tuple[str, str, str]], planted: Counter[tuple[str, str, str]], place: int, name: str) -> float:
    """Of the planted values whose key has `name` at `place`, how many were found."""
    total = sum(count for key, count in planted.items() if key[place] == name)
    return sum(count for key, count in hit.items() if key[place] == name) / total


def values_of(fake: Any, language: str, dice: random.Random) -> list[tuple[str, str, str]]:
    """(Kind, words before it, value)."""
    named = dice.random() < 0.5
    return [
        ("email", "e-mail" if named else "", f"{fake.user_name()}@{fake.domain_name()}"),
        ("phone", LABELS[language] if named else "", possible_phone(fake, LOCALES[language][-2:])),
        ("card", "card" if named else "", fake.credit_card_number(dice.choice(CARDS))),
        ("iban", "IBAN" if named else "", fake.iban()),
        ("ip", "IP" if named else "", fake.ipv4_public() if dice.random() < 0.7 else fake_v6(dice)),
    ]


def possible_phone(fake: Any, country: str) -> str:
    """A telephone number that its country may give."""
    library = import_module("phonenumbers")
    while True:
        number = fake.phone_number()
        try:
            if library.is_valid_number(library.parse(number, country)):
                return number
        except library.NumberParseException:
            continue


def fake_v6(dice: random.Random) -> str:
    """An address of 2000::/3; Faker's own are of any network."""
    parts = [0x2600 + dice.randrange(256), *(dice.randrange(1 << 16) for _ in range(7))]
    return ":".join(f"{part:x}" for part in parts)


def clean_rows(rounds: int) -> list[Row]:
    """What is found in documents, and how fast."""
    records = [each for name in ("builtin:prose", "builtin:code") for each in documents(name)]
    python = [each.text or "" for each in records if isinstance(each, Record)]
    files = source_files(0, KERNEL, Silent())
    kernel = [each.text for file in files for each in read_source(file, KERNEL) if isinstance(each, Document)]
    rows: list[Row] = []
    for name, texts in (("python", python), ("kernel", kernel)):
        million = sum(map(len, texts)) / 1e6
        found = Counter(each.kind for text in texts for each in find_personal(text, regions=("US", "GB")))
        say(f"{name}: {len(texts):,} documents, {million:.1f} M characters: {dict(found)}")
        rows += [
            new_row("pii", f"found_{kind}_{name}", found[kind] / million, "a million", runs=1, more_versions=MORE)
            for kind in KINDS
        ]
    megabytes, seconds = sum(len(text.encode()) for text in kernel) / 1e6, []
    for _ in range(rounds):
        began = time.process_time()
        for text in kernel:
            find_personal(text, regions=("US", "GB"))
        seconds.append(time.process_time() - began)
    return [*rows, new_row("pii", "speed", megabytes / median(seconds), "MB/s", runs=rounds, more_versions=MORE)]


if __name__ == "__main__":
    sys.exit(guarded(main))
