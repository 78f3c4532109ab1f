"""What compression costs a decoder in answers: greedy continuations beside those of the model that the run began with,
and multiple choice by log-likelihood, as lm-eval scores it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penjing.compress.measure.bootstrap import interval, resampled_means
from penjing.compress.measure.choices import Question, read_questions
from penjing.compress.measure.cost import MeasureSettings, check_memory
from penjing.compress.measure.evaluate import EvaluateSettings
from penjing.compress.measure.generate import continue_greedily, log_likelihoods, next_choices
from penjing.compress.measure.perplexity import evaluation_windows, own_windows
from penjing.compress.samples.text import spread
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Progress
from penjing.core.text.documents import Documents
from penjing.core.text.tokenizer import Tokenizer

PROMPTS, CHOICES = "measure.prompts", "measure.choices"  # the settings that name files
BEGINNING = 32  # tokens of a prompt that is made of an evaluation text
Tokens = list[int]


@dataclass(frozen=True)
class Score:
    """A figure of one stage of a run.

    Attributes:
        task: "greedy", or the name of a file of questions.
        measure: what was counted.
        unit: of the value: a "share", or "tokens".
        low, high: 95 % bootstrap interval over the samples, which are prompts or questions.
        lost: how much less the value is than the first stage's, on the same samples, with its interval; None where it
            is a comparison with the first stage by itself.
    """

    task: str
    measure: str
    unit: Literal["share", "tokens"]
    value: float
    low: float
    high: float
    samples: int
    lost: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Asked:
    """A question in tokens: each choice behind the context, and how many tokens are context."""

    question: Question
    texts: tuple[tuple[Tokens, int], ...]


@dataclass(frozen=True)
class Questions:
    """Everything that a model is asked, in its own tokens; `choices` by the names of files."""

    prompts: tuple[Tokens, ...]
    tokens: int
    choices: dict[str, tuple[Asked, ...]]


def questions_for(folder: Path, settings: MeasureSettings, evaluate: EvaluateSettings) -> Questions:
    """What `settings` ask the decoder in `folder`.

    Raises:
        ConfigError: more prompts than there are, or two files of one name.
        InputError: a file cannot be read, a line is no question, or a text is longer than the model's context.
    """
    context = open_checkpoint(folder).config.max_position_embeddings
    prompts = _prompts(folder, settings, evaluate) if settings.greedy else []
    for prompt in prompts:
        if len(prompt) + settings.greedy_tokens > context:
            raise InputError(
                f"{PROMPTS}: a prompt of {len(prompt)} tokens and greedy_tokens={settings.greedy_tokens} exceed the "
                f"context of {context} tokens of {folder}; shorten one of them"
            )
    names = [path.stem for path in settings.choices]
    if len(set(names)) < len(names):
        raise ConfigError(f"{CHOICES}: two files have the same name ({', '.join(names)}); rename one of them")
    tokenizer = Tokenizer.from_folder(folder)
    choices = {path.stem: _asked(tokenizer, path, context) for path in settings.choices}
    return Questions(tuple(prompts), settings.greedy_tokens, choices)


def _prompts(folder: Path, settings: MeasureSettings, evaluate: EvaluateSettings) -> list[Tokens]:
    """As many of the user's as are asked for, evenly spread over them, or beginnings of the evaluation texts."""
    wanted = settings.greedy
    if settings.prompts:
        given = Documents(folder).prompts(settings.prompts, PROMPTS)
        if len(given) < wanted:
            raise ConfigError(f"measure.greedy={wanted}, {PROMPTS} has {len(given)}; ask for fewer, or give more")
        return [given[index * len(given) // wanted] for index in range(wanted)]
    tokenizer = Tokenizer.from_folder(folder)
    texts = evaluation_windows(tokenizer, evaluate.prose_tokens, evaluate.code_tokens, evaluate.window)
    texts |= own_windows(folder, evaluate.own, evaluate.own_tokens, evaluate.window)
    counts = [len(range(place, wanted, len(texts))) for place in range(len(texts))]
    found: list[Tokens] = []
    first = list(tokenizer.begin)
    for count, windows in zip(counts, texts.values(), strict=True):
        text = windows[:, len(first) :].flatten().tolist()
        found += spread(tokenizer, text, count, len(first) + BEGINNING).tolist() if count else []
    if len(found) < wanted:
        raise ConfigError(
            f"measure.greedy={wanted}: the texts of [evaluate] have {len(found)} beginnings of {BEGINNING} tokens "
            "for it; ask for fewer, or evaluate on more"
        )
    return found


def _asked(tokenizer: Tokenizer, path: Path, context: int) -> tuple[Asked, ...]:
    found = []
    for number, question in read_questions(path, CHOICES):
        texts = tuple(_continued(tokenizer, question.context, choice) for choice in question.choices)
        where = f"{CHOICES}: {path}, line {number}"
        if (longest := max(len(ids) for ids, _ in texts)) > context:
            raise InputError(f"{where} has {longest} tokens, the model's context {context}; shorten or leave it out")
        if any(len(ids) <= before for ids, before in texts):
            raise InputError(f"{where}: a choice has no token of its own behind its context; write it otherwise")
        found.append(Asked(question, texts))
    return tuple(found)


def _continued(tokenizer: Tokenizer, context: str, choice: str) -> tuple[Tokens, int]:
    """Both in tokens, and how many are context. Spaces at its end belong to the choice, as lm-eval has it."""
    before = tokenizer.encode(context.rstrip(), allow_special=False)
    return tokenizer.encode(f"{context} {choice}", allow_special=False), len(before)


def answered(folder: Path, questions: Questions, first: dict[str, Any] | None, progress: Progress) -> dict[str, Any]:
    """What the decoder or INT8 artifact in `folder` answers, JSON-ready.

    Args:
        first: what the model answered that the run began with; None: this is that model.

    Raises:
        InputError: the folder is damaged.
        SetupError: too little memory for the whole model.
    """
    check_memory([folder])
    loaded = load_model(folder)
    total = len(questions.prompts) + sum(map(len, questions.choices.values()))
    progress.start(f"questions to {folder.name}", total)
    stops = frozenset(loaded.tokenizer.eos_token_ids)
    greedy = continue_greedily(loaded.model, questions.prompts, questions.tokens, stops, progress.advance)
    reference = greedy if first is None else first["greedy"]
    likelihoods: dict[str, list[list[float]]] = {}
    for name, asked in questions.choices.items():
        likelihoods[name] = []
        for each in asked:
            likelihoods[name].append(log_likelihoods(loaded.model, each.texts))
            progress.advance()
    return {
        "greedy": greedy,
        "next": [
            next_choices(loaded.model, prompt, answer)
            for prompt, answer in zip(questions.prompts, reference, strict=True)
        ],
        "likelihoods": likelihoods,
    }


def scores(
    questions: Questions, own: dict[str, Any], first: dict[str, Any] | None, settings: EvaluateSettings
) -> list[Score]:
    """The figures of what one stage answered, `own`, beside what the first stage did; None where it is that stage.

    Raises:
        InputError: the model computes NaN.
    """

    def score(
        task: str, measure: str, values: Sequence[float], unit: Literal["share", "tokens"] = "share", before: Any = None
    ) -> Score:
        outcomes = np.asarray(values, np.float64)
        bounds = {"resamples": settings.resamples, "seed": settings.seed}
        ends, lost = interval(resampled_means([outcomes], **bounds)), None
        if before is not None:
            differences = np.asarray(before, np.float64) - outcomes
            lost = (float(differences.mean()), *interval(resampled_means([differences], **bounds)))
        return Score(task, measure, unit, float(outcomes.mean()), *ends, len(outcomes), lost)

    found: list[Score] = []
    if questions.prompts and first is not None:
        pairs = list(zip(first["greedy"], own["greedy"], strict=True))
        nexts = list(zip(first["greedy"], own["next"], strict=True))
        found += [
            score("greedy", "equal tokens", [_equal(*pair) for pair in pairs]),
            score("greedy", "common beginning", [_common(*pair) for pair in pairs], "tokens"),
            score("greedy", "answers equal as a whole", [float(one == other) for one, other in pairs]),
            score("greedy", "next token equal, given the model's answer so far", [_equal(*pair) for pair in nexts]),
        ]
    for name, asked in questions.choices.items():
        chosen = [_choices(each, values) for each, values in zip(asked, own["likelihoods"][name], strict=True)]
        before = chosen
        if first is not None:
            before = [_choices(each, values) for each, values in zip(asked, first["likelihoods"][name], strict=True)]
        for place, measure in enumerate(("accuracy", "accuracy, likelihoods by bytes")):
            right, was = (
                [float(each[place] == one.question.gold) for each, one in zip(which, asked, strict=True)]
                for which in (chosen, before)
            )
            found.append(score(name, measure, right, before=None if first is None else was))
        if first is not None:
            same = [float(one[0] == other[0]) for one, other in zip(before, chosen, strict=True)]
            found.append(score(name, "same choice as the model", same))
    return found


def _equal(one: Tokens, other: Tokens) -> float:
    """The share of places with the same token, of the longer one's."""
    return sum(a == b for a, b in zip(one, other, strict=False)) / max(len(one), len(other))


def _common(one: Tokens, other: Tokens) -> float:
    """How many tokens both begin with."""
    equal = [a == b for a, b in zip(one, other, strict=False)]
    return float(equal.index(False) if False in equal else len(equal))


def _choices(asked: Asked, likelihoods: list[float]) -> tuple[int, int]:
    """The likeliest choice, and the likeliest a byte of its text."""
    values = np.asarray(likelihoods)
    if not np.isfinite(values).all():
        raise InputError("the model computes NaN or infinity: it is damaged, or its training diverged")
    sizes = np.array([len(choice.encode()) for choice in asked.question.choices])
    return int(values.argmax()), int((values / sizes).argmax())
