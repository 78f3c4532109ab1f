"""What answers are worth: a verifier compares them with the row's own answer, a reward model scores them, or a function
of the user does."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Protocol

import torch

from penjing.core.checkpoint.reward import load_reward
from penjing.core.errors import ConfigError, InputError, RequestError
from penjing.core.text.tokenizer import read_backend
from penjing.train.align.prompts import Answer, Prompt
from penjing.train.align.user_reward import UserReward
from penjing.train.chat.rows import Row, RowError
from penjing.train.chat.tokens import ChatTokens
from penjing.train.recipe.align import RewardConfig

_WORD = re.compile(r"\d+|[^\W\d]+")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_TOGETHER = 8  # answers in one pass of a reward model


class Scorer(Protocol):
    """Gives each answer to a prompt its worth."""

    def wrong(self, row: Row) -> str | None:
        """Why answers to the prompt of `row` could not be scored, or None."""
        ...

    def __call__(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float]:
        """A number for each."""
        ...


@dataclass(frozen=True)
class Verifier:
    """1 for an answer that is the row's `answer`, else 0. `check`: see `RewardConfig`.

    With "number" an answer that only says a piece of the prompt again, of several numbers, is worth nothing: "0+4" does
    not answer "0+4=?", though it ends with the sum, and a model soon learns that saying it again pays.
    """

    check: str

    def wrong(self, row: Row) -> str | None:
        """See `Scorer`."""
        wanted = row.get("answer")
        if not isinstance(wanted, str | int | float) or isinstance(wanted, bool):
            return '"answer", a text or a number, is needed to verify what the model answers'
        if self.check == "number" and number(str(wanted)) is None:
            return 'the "answer" holds no number, which reward.check = "number" looks for'
        if self.check == "regex":
            try:
                re.compile(str(wanted))
            except re.error as error:
                return f'the "answer" is no regular expression ({error})'
        return None

    def __call__(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float]:
        """See `Scorer`."""
        wanted = str(prompt.row["answer"])
        echoes = [self.check == "number" and is_echo(answer.text, prompt.text) for answer in answers]
        return [
            float(not echo and self._right(answer.text, wanted)) for answer, echo in zip(answers, echoes, strict=True)
        ]

    def _right(self, text: str, wanted: str) -> bool:
        if self.check == "number":
            return number(text) == number(wanted)
        if self.check == "regex":
            return re.search(wanted, text) is not None
        return text.strip() == wanted.strip()


def number(text: str) -> Decimal | None:
    """The last number of a text, whose thousands may be parted by commas; exact, also of hundreds of digits."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def is_echo(answer: str, prompt: str) -> bool:
    """Whether an answer is a piece of the prompt with more than one number, whatever stands between the words.

    A single number is none, since it may be what is asked: which of 3 and 5 is larger.
    """
    said, asked = (_WORD.findall(text.lower()) for text in (answer, prompt))
    if sum(word.isdecimal() for word in said) < 2:
        return False
    return any(asked[begin : begin + len(said)] == said for begin in range(len(asked) - len(said) + 1))


class ModelReward:
    """The score that a reward model gives to a prompt and its answer, behind what its template writes at the end of an
    answer: there it has learnt to score.

    Args:
        folder: its checkpoint.
        tokenizer: the folder of the tokenizer that prompts are written in.

    Raises:
        ConfigError: it has another tokenizer.
        InputError: it is missing, damaged, or no reward model.
    """

    def __init__(self, folder: Path, tokenizer: Path, device: torch.device) -> None:
        if not (folder / "config.json").exists():
            raise InputError(f"reward.folder = {folder} is no checkpoint; train one with objective.kind = 'reward'")
        self._model = load_reward(folder).eval().to(device)
        theirs, ours = (read_backend(each / "tokenizer.json").to_str() for each in (folder, tokenizer))
        if theirs != ours:
            raise ConfigError(
                f"reward.folder = {folder} has another tokenizer than initial = {tokenizer}, so that its tokens mean "
                "something else; train a reward model from a checkpoint of the same one"
            )
        try:
            self._behind = ChatTokens.from_folder(folder).behind_answer()
        except (RowError, RequestError) as error:
            raise InputError(f"reward.folder = {folder}: its chat template writes no answer: {error}") from error
        self._device = device

    def wrong(self, row: Row) -> None:
        """See `Scorer`: every prompt will do."""

    def __call__(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float]:
        """See `Scorer`."""
        ended = [self._behind if answer.sampled.ended else [] for answer in answers]
        return self.of(
            [prompt.tokens + answer.sampled.tokens + more for answer, more in zip(answers, ended, strict=True)]
        )

    @torch.no_grad()
    def of(self, texts: Sequence[list[int]]) -> list[float]:
        """The score behind the last token of each text."""
        scores = list[float]()
        width = max(map(len, texts))
        for begin in range(0, len(texts), _TOGETHER):
            some = texts[begin : begin + _TOGETHER]
            tokens = torch.tensor([text + [0] * (width - len(text)) for text in some], device=self._device)
            last = torch.tensor([place * width + len(text) - 1 for place, text in enumerate(some)], device=self._device)
            scores += self._model(tokens, last).tolist()
        return scores


class NoReward:
    """0 for every answer, where a teacher is learnt from alone."""

    def wrong(self, row: Row) -> None:
        """See `Scorer`: every prompt will do."""

    def __call__(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float]:
        """See `Scorer`."""
        return [0.0] * len(answers)


class Rewards:
    """The rewards that a recipe asks for: `scorer`'s, but for answers that do not end.

    Attributes:
        gold: what is recorded beside them, and not learnt.
        known: whether there are any, and not 0 for every answer.
    """

    def __init__(self, scorer: Scorer, unended: float | None, name: str, gold: Verifier | None = None) -> None:
        self.scorer, self.gold, self._unended, self._name = scorer, gold, unended, name
        self.known = not isinstance(scorer, NoReward)

    def wrong(self, row: Row) -> str | None:
        """Why answers to the prompt of `row` could not be judged, or None."""
        return self.scorer.wrong(row) or (None if self.gold is None else self.gold.wrong(row))

    def __call__(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float]:
        """A finite number for each answer to `prompt`.

        Raises:
            InputError: the scorer gives another, or fails.
        """
        found = self.scorer(prompt, answers)
        for answer, value in zip(answers, found, strict=True):
            if not math.isfinite(value):
                raise InputError(
                    f"reward.kind = {self._name!r} gives {value} for the answer {answer.text!r:.80} to "
                    f"{prompt.text!r:.80}; rewards are finite numbers"
                )
        if self._unended is None:
            return found
        return [value if answer.sampled.ended else self._unended for answer, value in zip(answers, found, strict=True)]


def make_rewards(
    config: RewardConfig | None, tokenizer: Path, device: torch.device, tasks: Scorer | None = None
) -> Rewards:
    """What `config` asks for; `NoReward` without one.

    Args:
        tasks: the scorer of computed problems, where these are asked.

    Raises:
        ConfigError: `tasks` are wanted, and there are none; or see `ModelReward`.
        InputError: see `ModelReward` and `UserReward`.
    """
    if config is None:
        return Rewards(NoReward(), None, "none")
    if config.kind == "verifier":
        check = config.check or ("number" if tasks is None else "task")
        if check == "task" and tasks is None:
            raise ConfigError("reward.check = 'task' is of prompts.kind = 'reasoning-gym'; use another check")
        scorer: Scorer = tasks if check == "task" and tasks is not None else Verifier(check)
    elif config.kind == "model":
        assert config.folder is not None, "the recipe is checked"
        scorer = ModelReward(config.folder, tokenizer, device)
    else:
        scorer = UserReward(config.kind, config.timeout)
    gold = None if config.gold is None else Verifier(config.gold)
    return Rewards(scorer, None if config.unended == "scored" else float(config.unended), config.kind, gold)
