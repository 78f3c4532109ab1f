"""Reads lines {"text", "regions"}, prints for each what presidio and detect-secrets find, and their processor time.

    build/peers/presidio/venv/bin/python benchmarks/peers/bench_presidio.py texts.jsonl > found.jsonl

Presidio runs as its AnalyzerEngine, with its recognisers of e-mail, cards, accounts, addresses of the internet and
telephone numbers, the latter of the regions that a line names; its words of context are English. It gets spaCy's blank
English in place of a model, which its recognisers of patterns do not need and which would take ten times as long.
Detect-secrets runs with the plugins that know a form of key, without those that go by entropy and by words.
"""

from __future__ import annotations

import json
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import spacy  # pyright: ignore[reportMissingImports]
import tldextract.tldextract as domains  # pyright: ignore[reportMissingImports]
from detect_secrets.core.scan import scan_line  # pyright: ignore[reportMissingImports]
from detect_secrets.settings import get_plugins, transient_settings  # pyright: ignore[reportMissingImports]
from presidio_analyzer import AnalyzerEngine, RecognizerRegistry  # pyright: ignore[reportMissingImports]
from presidio_analyzer.nlp_engine import SpacyNlpEngine  # pyright: ignore[reportMissingImports]
from presidio_analyzer.predefined_recognizers import (  # pyright: ignore[reportMissingImports]
    CreditCardRecognizer,
    EmailRecognizer,
    IbanRecognizer,
    IpRecognizer,
    PhoneRecognizer,
)

KINDS = {
    "EMAIL_ADDRESS": "email", "PHONE_NUMBER": "phone", "CREDIT_CARD": "card", "IBAN_CODE": "iban", "IP_ADDRESS": "ip",
}  # fmt: skip
FORMS = (
    "AWSKeyDetector", "AzureStorageKeyDetector", "DiscordBotTokenDetector", "GitHubTokenDetector",
    "GitLabTokenDetector", "JwtTokenDetector", "MailchimpDetector", "NpmDetector", "OpenAIDetector",
    "PrivateKeyDetector", "PypiTokenDetector", "SendGridDetector", "SlackDetector", "SquareOAuthDetector",
    "StripeDetector", "TelegramBotTokenDetector", "TwilioKeyDetector",
)  # fmt: skip


class Blank(SpacyNlpEngine):
    """spaCy without a model."""

    def __init__(self) -> None:
        super().__init__(models=[{"lang_code": "en", "model_name": "blank"}])
        self.nlp = {"en": spacy.blank("en")}
        self.nlp["en"].max_length = 1 << 30

    def load(self) -> None:
        """There is none."""


@lru_cache(maxsize=64)
def engine(regions: tuple[str, ...]) -> Any:
    """An analyzer whose telephone numbers are of `regions`."""
    found = [CreditCardRecognizer(), EmailRecognizer(), IbanRecognizer(), IpRecognizer()]
    registry = RecognizerRegistry(recognizers=[*found, PhoneRecognizer(supported_regions=regions)])
    return AnalyzerEngine(registry=registry, nlp_engine=ENGINE, supported_languages=["en"])


def keys_of(text: str) -> list[tuple[str, int, int]]:
    """What detect-secrets finds, line by line; where a plugin tells a part of a key, that part."""
    found, begin = [], 0
    for line in text.splitlines(keepends=True):
        for secret in scan_line(line):
            place = line.find(secret.secret_value)
            if place >= 0:
                found.append(("key", begin + place, begin + place + len(secret.secret_value)))
        begin += len(line)
    return found


def main() -> None:
    domains.TLD_EXTRACTOR = domains.TLDExtract(suffix_list_urls=())  # its own list: nothing is fetched
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    with transient_settings({"plugins_used": [{"name": name} for name in FORMS]}):
        assert len(list(get_plugins())) == len(FORMS)
        for row in rows[:3]:  # what is loaded once
            engine(tuple(row["regions"])).analyze(row["text"], language="en")
            keys_of(row["text"])
        for row in rows:
            analyzer = engine(tuple(row["regions"]))
            began = time.process_time()
            found = [
                (KINDS[each.entity_type], each.start, each.end) for each in analyzer.analyze(row["text"], language="en")
            ]
            middle = time.process_time()
            keys = keys_of(row["text"])
            seconds = middle - began, time.process_time() - middle
            print(json.dumps({"found": found + keys, "presidio": seconds[0], "detect_secrets": seconds[1]}))


ENGINE = Blank()
if __name__ == "__main__":
    main()
