"""Further documents made of those there are: synonyms, or translation there and back. Each changed sentence is checked,
and what is made is marked, so that training never judges by it."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from penjing.core.packages import fetch_package
from penjing.core.progress import Silent
from penjing.curate.augment.check import Checker
from penjing.curate.augment.sentences import one_line, overlap, sentences_of
from penjing.curate.augment.synonyms import with_synonyms
from penjing.curate.augment.translate import Apertium, CTranslate2, Translator, apertium_folders, translator_files
from penjing.curate.augment.wordnet import FILES, WordNet, load_wordnet, wordnet_folder
from penjing.curate.documents.document import Document
from penjing.curate.learned.encoder import DocumentEncoder, encoder_files
from penjing.curate.steps.base import Making, StepConfig
from penjing.curate.steps.language import LID, detect, language_model

_LANGUAGES = ("en",)  # that MiniLM was trained on, and WordNet is of
_OF_A_METHOD = {
    "wordnet": "synonyms", "share": "synonyms", "copies": "synonyms",
    "translator": "back translation", "pair": "back translation", "there": "back translation",
    "back": "back translation",
}  # fmt: skip


class AugmentStep(StepConfig):
    """Further documents that say the same in other words."""

    kind: Literal["augment"] = Field(description="Further documents out of those there are.")
    method: Literal["synonyms", "back translation"] = Field(
        description="Words replaced by WordNet's synonyms, or sentences translated into another language and back."
    )
    documents: float = Field(
        default=1.0, gt=0, le=1, description="Share of the documents that further ones are made of."
    )
    copies: int = Field(default=1, ge=1, le=8, description='For "synonyms": documents made of each.')
    share: float = Field(
        default=0.7, gt=0, le=1, description='For "synonyms": share of the words that have one which are replaced.'
    )
    wordnet: Path | None = Field(
        default=None,
        description="For \"synonyms\": the folder of WordNet's files; by default Debian's wordnet-base, fetched once.",
    )
    translator: Literal["apertium", "ctranslate2"] = Field(
        default="apertium",
        description='For "back translation": apertium with Debian\'s packages, or models of yours by CTranslate2.',
    )
    pair: str = Field(
        default="eng-spa",
        description="For apertium: the language of the documents and another one, as Debian's packages are called.",
    )
    there: Path | None = Field(
        default=None, description="For CTranslate2: the folder of the model into the other language."
    )
    back: Path | None = Field(default=None, description="For CTranslate2: the folder of the model that leads back.")
    encoder: Path = Field(
        default=Path("build/minilm-int8"),
        description="The artifact of a text encoder, as recipes/minilm-int8.toml makes it.",
    )
    least: float = Field(
        default=0.85, gt=0, lt=1, description="The cosine of its vector that a changed sentence must keep."
    )
    most_alike: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="A document that shares more of its runs of five words with its original is not made.",
    )

    @model_validator(mode="after")
    def _settings_are_of_the_method(self) -> AugmentStep:
        for setting, method in _OF_A_METHOD.items():
            if method != self.method and getattr(self, setting) != type(self).model_fields[setting].default:
                raise ValueError(f'{setting} is of method = "{method}", not of "{self.method}": leave it out')
        models = self.translator == "ctranslate2"
        if models != (self.there is not None) or models != (self.back is not None):
            raise ValueError('there and back belong to translator = "ctranslate2": give both with it, or neither')
        return self

    def files(self) -> tuple[Path, ...]:
        """See `StepConfig`."""
        own = [self.wordnet / name for name in FILES] if self.wordnet and wordnet_folder(self.wordnet) else []
        models = [path for folder in (self.there, self.back) if folder for path in translator_files(folder)]
        return (*encoder_files(self.encoder), *own, *models)

    def prepare(self, folder: Path) -> None:
        """See `StepConfig`."""
        fetch_package(LID, Silent())
        if self.method == "synonyms":
            wordnet_folder(self.wordnet)
        elif self.translator == "apertium":
            apertium_folders(self.pair)

    def filter(self, folder: Path) -> Augment:
        """See `StepConfig`."""
        return Augment(self)

    def translators(self) -> tuple[Translator, Translator]:
        """There and back."""
        if self.there is not None and self.back is not None:
            return CTranslate2(self.there), CTranslate2(self.back)
        first, _, second = self.pair.partition("-")
        return Apertium(self.pair, self.pair), Apertium(self.pair, f"{second}-{first}")


class Augment(Making):
    """See `AugmentStep`."""

    def __init__(self, config: AugmentStep) -> None:
        super().__init__()
        self._config = config
        model = language_model()
        self._check = Checker(DocumentEncoder(config.encoder, 1), lambda text: detect(model, text)[0], config.least)
        self._wordnet: WordNet | None = None
        self._translators: tuple[Translator, Translator] | None = None
        if config.method == "synonyms":
            self._wordnet = load_wordnet(config.wordnet)
        else:
            self._translators = config.translators()

    def apply(self, document: Document) -> str | None:
        """See `Filter`; what is made carries the cluster of its original, which has one from here on."""
        document.cluster = document.cluster or document.id
        return None

    def made(self, document: Document) -> list[Document]:
        """See `Making`."""
        if document.made or (document.language and document.language not in _LANGUAGES):
            self.decided["left alone: made itself, or in another language"] += 1
            return []
        if _dice(document.id, "chosen").random() >= self._config.documents:
            self.decided["left alone: not chosen"] += 1
            return []
        spans = sentences_of(document.text)
        if not spans:
            self.decided["left alone: no prose"] += 1
            return []
        found: list[Document] = []
        for copy in range(self._config.copies):
            text = self._changed(document, spans, copy)
            others = [document.text, *(each.text for each in found)]
            if any(overlap(text, other) > self._config.most_alike for other in others):
                self.decided["not made: too like another"] += 1
            elif self._check.language(text) != self._check.language(document.text):
                self.decided["not made: another language"] += 1
            else:
                self.decided["made"] += 1
                mark = f"{document.id}, {self._config.method} {copy + 1}"
                changed = [*document.changed, f"augment: {self._config.method}"]
                found.append(replace(document, id=mark, text=text, changed=changed, made=self._config.method))
        return found

    def _changed(self, document: Document, spans: list[tuple[int, int]], copy: int) -> str:
        sentences = [one_line(document.text[begin:end]) for begin, end in spans]
        parts, last, counts = [], 0, Counter[str]()
        for (begin, end), sentence, made in zip(spans, sentences, self._said(document, sentences, copy), strict=True):
            reason = self._check.wrong(sentence, made)
            counts[f"sentences kept: {reason}" if reason else "sentences changed"] += 1
            parts += [document.text[last:begin], document.text[begin:end] if reason else made]
            last = end
        self.decided += counts
        return "".join([*parts, document.text[last:]])

    def _said(self, document: Document, sentences: list[str], copy: int) -> list[str]:
        """The sentences in other words; as they are where no translation came back."""
        if self._wordnet is not None:
            dice = _dice(document.id, str(copy))
            return [with_synonyms(each, self._wordnet, self._config.share, dice) for each in sentences]
        assert self._translators is not None
        there, back = self._translators
        other = there(sentences)
        home = None if other is None else back(other)
        if home is None:
            self.decided["translations lost: sentences joined, split or too long"] += 1
            return sentences
        return home


def _dice(*parts: str) -> np.random.Generator:
    """Chance that hangs on `parts` alone: the same on any number of tasks and processes."""
    digest = hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))
