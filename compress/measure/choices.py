"""Multiple-choice questions from local JSONL files, in the forms of lm-eval's tasks
(https://github.com/EleutherAI/lm-evaluation-harness), and the text that lm-eval makes of them.

| form | fields of a line | context |
|---|---|---|
| plain | `query`, `choices` (texts), `gold` (a place in them, from 0) | the query |
| ARC | `question`, `choices` (`text` and `label`, lists), `answerKey` (a label) | "Question: …", "Answer:" |
| HellaSwag | `ctx_a` and `ctx_b`, or `ctx`; `activity_label`; `endings`; `label` (a place) | label, ":", context |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penjing.core.errors import InputError, no_json


@dataclass(frozen=True)
class Question:
    """A text, what may follow it (a space between the two), and the place of what is right."""

    context: str
    choices: tuple[str, ...]
    gold: int


def read_questions(path: Path, setting: str) -> list[tuple[int, Question]]:
    """The questions of a JSONL file with their lines' numbers, from 1.

    Args:
        setting: whom errors name.

    Raises:
        InputError: the file cannot be read or has no question; or names the line that is none, and why.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not at U+2028, which a question may hold
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{setting}: {path} cannot be read as UTF-8 text ({error}); name a .jsonl file") from error
    found = [(number, _question(line, f"{setting}: {path}, line {number}")) for number, line in _filled(lines)]
    if not found:
        raise InputError(f"{setting}: {path} has no question; a line is an object with query, choices and gold")
    return found


def _filled(lines: list[str]) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _question(line: str, where: str) -> Question:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({no_json(error)})") from None
    forms = [read for name, read in _FORMS.items() if isinstance(values, dict) and name in values]
    if not forms:
        raise InputError(f"{where}: an object with {', '.join(_FORMS)} is needed, not {line[:60]!r}")
    try:
        question = forms[0](values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{where}: a field is missing or of another kind ({type(error).__name__}: {error})") from None
    texts = (question.context, *question.choices)
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise InputError(f"{where}: the context and each choice must be texts that are not empty")
    if len(question.choices) < 2 or not 0 <= question.gold < len(question.choices):
        raise InputError(
            f"{where}: the right choice is {question.gold} (from 0) of {len(question.choices)}; two choices or more "
            "are needed, of which one is right"
        )
    return question


def _plain(values: dict[str, Any]) -> Question:
    return Question(values["query"], tuple(values["choices"]), int(values["gold"]))


def _arc(values: dict[str, Any]) -> Question:
    choices = values["choices"]
    labels = [str(label) for label in choices["label"]]
    gold = labels.index(str(values["answerKey"]))
    if len(labels) != len(choices["text"]):
        raise ValueError(f"{len(labels)} labels for {len(choices['text'])} texts")
    return Question(f"Question: {values['question']}\nAnswer:", tuple(choices["text"]), gold)


def _hellaswag(values: dict[str, Any]) -> Question:
    context = f"{values['ctx_a']} {values['ctx_b'].capitalize()}" if "ctx_a" in values else values["ctx"]
    if "activity_label" in values:
        context = f"{values['activity_label']}: {context}"
    return Question(_cleaned(context), tuple(map(_cleaned, values["endings"])), int(values["label"]))


def _cleaned(text: str) -> str:
    """Without WikiHow's marks, as lm-eval takes them out."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


_FORMS: dict[str, Callable[[dict[str, Any]], Question]] = {
    "query": _plain,
    "question": _arc,
    "endings": _hellaswag,
}
"""A field that only this form has → how the line is read."""
