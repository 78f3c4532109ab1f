"""Rules of published corpora: Gopher's repetition and quality rules (https://arxiv.org/abs/2112.11446), C4's
(https://jmlr.org/papers/v21/20-074.html) and FineWeb's (https://arxiv.org/abs/2406.17557), as datatrove has them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from penjing.curate.documents.document import Document
from penjing.curate.documents.needs import needed
from penjing.curate.steps.base import StepConfig

RuleSet = Literal["gopher-repetition", "gopher-quality", "c4", "fineweb"]
_CLASSES = {
    "gopher-repetition": "GopherRepetitionFilter",
    "gopher-quality": "GopherQualityFilter",
    "c4": "C4QualityFilter",
    "fineweb": "FineWebQualityFilter",
}
SPACELESS_LANGUAGES = frozenset({"zh", "ja", "th", "lo", "wuu", "yue", "km", "my"})


class RulesStep(StepConfig):
    """Drop documents by the rules of published corpora."""

    kind: Literal["rules"] = Field(description="Rules of published corpora.")
    sets: tuple[RuleSet, ...] = Field(
        default=("gopher-repetition", "gopher-quality"),
        description='Which: "c4" also takes out lines; "c4" and "fineweb" are for prose of the web.',
    )
    limits: dict[str, float] = Field(
        default={},
        description="Other limits than the published ones, by datatrove's names, such as {min_doc_words = 20}; those "
        "of runs of words, top_n_grams and dup_n_grams, by the length of the run, such as {dup_5_grams = 0.3}. A limit "
        "of 0 leaves a rule of Gopher out.",
    )

    @model_validator(mode="after")
    def _known_limits(self) -> RulesStep:
        if not self.limits:
            return self
        known = {name for each in self.sets for name in _limits_of(each)}
        if wrong := sorted(set(self.limits) - known):
            raise ValueError(f"limits: {', '.join(wrong)} unknown; these sets have {', '.join(sorted(known))}")
        return self

    def filter(self, folder: Path) -> Rules:
        """See `StepConfig`."""
        return Rules(self)


class Rules:
    """See `RulesStep`."""

    def __init__(self, config: RulesStep) -> None:
        self._config = config
        self._document = needed("datatrove.data").Document
        self._words = needed("penjing.curate.documents.words").WORDS
        self._made: dict[str, list[tuple[str, Any]]] = {}

    def apply(self, document: Document) -> str | None:
        """See `Filter`."""
        if not document.text.strip():
            return "empty"
        theirs = self._document(text=document.text, id=document.id)
        for name, each in self._filters(document.language):
            kept = each.filter(theirs)
            if kept is not True:
                return f"{name}: {kept[1] if isinstance(kept, tuple) else 'broken'}"
        if theirs.text != document.text:
            document.text = theirs.text
            document.changed.append("rules: took out lines")
        return None

    def _filters(self, language: str) -> list[tuple[str, Any]]:
        """Some limits hold for English, or for scripts with spaces, alone."""
        of = "en" if language in ("en", "") else "spaceless" if language in SPACELESS_LANGUAGES else "other"
        if of not in self._made:
            self._made[of] = [(name, self._build(name, of)) for name in self._config.sets]
        return self._made[of]

    def _build(self, name: str, of: str) -> Any:
        limits: dict[str, Any] = {}
        if name == "gopher-quality" and of != "en":
            limits["min_stop_words"] = None  # the list is English
        if name == "gopher-quality" and of == "spaceless":
            limits |= {"min_avg_word_length": None, "max_avg_word_length": None}
        if name == "c4" and of == "spaceless":
            limits |= {"min_words_per_line": -1, "filter_no_terminal_punct": False}
        given = self._config.limits
        for parameter, value in _defaults(name).items():
            if not isinstance(value, tuple):
                limits |= {parameter: given[parameter]} if parameter in given else {}
                continue
            shares = [(size, given.get(_of_size(parameter, size), share)) for size, share in value]
            limits[parameter] = tuple((size, share) for size, share in shares if share)
        return _class(name)(language=self._words, **limits)


def _class(name: str) -> Any:
    return getattr(needed("datatrove.pipeline.filters"), _CLASSES[name])


def _defaults(name: str) -> dict[str, Any]:
    """datatrove's limits of a set: numbers, and ((words, share), …) of the limits of runs of words."""
    parameters = inspect.signature(_class(name).__init__).parameters
    return {key: each.default for key, each in parameters.items() if isinstance(each.default, int | float | tuple)}


def _limits_of(name: str) -> set[str]:
    """What a recipe calls them."""
    named = [
        [_of_size(key, size) for size, _ in value] if isinstance(value, tuple) else [key]
        for key, value in _defaults(name).items()
    ]
    return {each for names in named for each in names}


def _of_size(parameter: str, size: int) -> str:
    return parameter.replace("_n_", f"_{size}_")
