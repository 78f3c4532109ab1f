"""Personal data and secrets are replaced by what they were: `<EMAIL_1>`, `<PHONE_2>`; the numbers are counted, and what
was found is written down nowhere."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from penjing.core.errors import InputError
from penjing.curate.documents.document import Document
from penjing.curate.documents.needs import needed
from penjing.curate.steps.base import StepConfig
from penjing.curate.steps.personal import KINDS, Finding, Kind, find_personal

_REGIONS = {
    "en": ("US", "GB"), "de": ("DE", "AT", "CH"), "fr": ("FR", "BE", "CH"), "es": ("ES", "MX"), "it": ("IT",),
    "pt": ("BR", "PT"), "nl": ("NL", "BE"), "pl": ("PL",), "ru": ("RU",), "ja": ("JP",), "zh": ("CN",), "sv": ("SE",),
    "da": ("DK",), "cs": ("CZ",), "tr": ("TR",), "ko": ("KR",), "uk": ("UA",), "": ("US", "GB"),
}  # fmt: skip
_KEY_BYTES = 16


def regions_of(language: str) -> tuple[str, ...]:
    """Countries whose telephone numbers are looked for in texts of a language; "" for one that is not known."""
    return _REGIONS.get(language, ())


class PiiStep(StepConfig):
    """Replace personal data and secrets."""

    kind: Literal["pii"] = Field(description="Personal data replaced.")
    kinds: tuple[Kind, ...] = Field(
        default=KINDS, min_length=1, description="What is looked for: of these all, or fewer."
    )
    regions: tuple[str, ...] | None = Field(
        default=None,
        description='Countries whose telephone numbers are found as they are written there, such as ["DE"]; by default '
        "those of the document's language (where a language step comes before), else US and GB. Numbers with + and "
        "a country's code are always found.",
    )
    replace: Literal["numbered", "hashed"] = Field(
        default="numbered",
        description='"numbered": `<EMAIL_1>`, the same within a document for the same value; "hashed": <EMAIL_3f9a…>, '
        "the same in all documents, by a keyed hash.",
    )
    key_file: Path | None = Field(
        default=None,
        description=f'The secret of "hashed": a file of {_KEY_BYTES} bytes or more, which is yours to keep.',
    )

    @field_validator("regions")
    @classmethod
    def _known_regions(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value:
            known = needed("phonenumbers").SUPPORTED_REGIONS
            if wrong := [each for each in value if each not in known]:
                raise ValueError(f"{', '.join(wrong)}: no countries of ISO 3166 in capitals, such as DE or US")
        return value

    @model_validator(mode="after")
    def _has_key(self) -> PiiStep:
        if (self.replace == "hashed") != (self.key_file is not None):
            raise ValueError('key_file and replace = "hashed" need each other: give both or neither')
        return self

    def files(self) -> tuple[Path, ...]:
        """See `StepConfig`."""
        return () if self.key_file is None else (self.key_file,)

    def filter(self, folder: Path) -> Pii:
        """See `StepConfig`.

        Raises:
            InputError: the key is missing or short.
        """
        if self.key_file is None:
            return Pii(self, None)
        try:
            key = self.key_file.read_bytes().strip()
        except OSError as error:
            raise InputError(f"steps.key_file: cannot read {self.key_file}: {error.strerror}") from error
        if len(key) < _KEY_BYTES:
            raise InputError(
                f"steps.key_file: {self.key_file} has {len(key)} bytes, {_KEY_BYTES} are needed, else values can be "
                f"guessed; make one: head -c 32 /dev/urandom | base64 > {self.key_file}"
            )
        return Pii(self, key)


class Pii:
    """See `PiiStep`.

    Attributes: replaced: kind → (values that were replaced, documents that had any), of all that it was given.
    """

    def __init__(self, config: PiiStep, key: bytes | None) -> None:
        for module in ("phonenumbers", "stdnum"):
            needed(module)  # before the first document: an exception there would cost the document
        self._config, self._key = config, key
        self.replaced: dict[str, tuple[int, int]] = {}

    def apply(self, document: Document) -> str | None:
        """See `Filter`."""
        text, found = self._replaced(document.text, document.language)
        if found:
            document.text = text
            document.changed.append(f"pii: {', '.join(f'{count} {kind}' for kind, count in sorted(found.items()))}")
            for kind, count in found.items():
                values, documents = self.replaced.get(kind, (0, 0))
                self.replaced[kind] = values + count, documents + 1
        return None

    def masked(self, text: str) -> str:
        """`text` as it may be shown."""
        return self._replaced(text, "")[0]

    def _replaced(self, text: str, language: str) -> tuple[str, Counter[str]]:
        given = self._config.regions
        regions = regions_of(language) if given is None else given
        names: dict[tuple[str, str], str] = {}
        counts: Counter[str] = Counter()
        parts, end = [], 0
        for finding in find_personal(text, self._config.kinds, regions):
            parts += [text[end : finding.begin], self._name(finding, names)]
            end = finding.end
            counts[finding.kind] += 1
        return "".join([*parts, text[end:]]), counts

    def _name(self, finding: Finding, names: dict[tuple[str, str], str]) -> str:
        kind, value = finding.kind, finding.value
        if self._key is not None:
            digest = hashlib.blake2b(f"{kind}\0{value}".encode(), key=self._key[:64], digest_size=6).hexdigest()
            return f"<{kind.upper()}_{digest}>"
        if (kind, value) not in names:
            number = sum(each == kind for each, _ in names) + 1
            names[kind, value] = f"<{kind.upper()}_{number}>"
        return names[kind, value]
