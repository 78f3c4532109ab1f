"""Problems of reasoning-gym (https://github.com/open-thought/reasoning-gym), which computes questions without end and
has a scorer for the answers to each kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.train.align.prompts import Answer, Prompt
from penjing.train.chat.rows import Row
from penjing.train.recipe.align import PromptConfig

_SEED = 0  # a task has the same problems in every run, unless its settings name another


class ReasoningTasks:
    """The tasks that [prompts] names, and the scorer of answers to their problems.

    Raises:
        SetupError: the package is not installed.
        ConfigError: a task or one of its settings is unknown, or has a wrong value.
    """

    def __init__(self, config: PromptConfig) -> None:
        self._gym = _package()
        whole = sum(config.tasks.values())
        self._sizes = {name: max(1, round(config.count * share / whole)) for name, share in config.tasks.items()}
        self._tasks = {
            name: self._task(name, {"seed": _SEED} | config.settings.get(name, {}) | {"size": size})
            for name, size in self._sizes.items()
        }

    def _task(self, name: str, settings: dict[str, Any]) -> Any:
        known = self._gym.factory.DATASETS
        if name not in known:
            near = get_close_matches(name, known, 3) or sorted(known)
            raise ConfigError(f"prompts.tasks: reasoning-gym has no task {name!r}; it has {', '.join(near)}")
        fields = known[name][1].__dataclass_fields__
        if unknown := [key for key in settings if key not in fields]:
            settable = ", ".join(key for key in fields if key != "size")
            raise ConfigError(f"prompts.settings.{name}: {unknown[0]!r} is unknown; it has {settable}")
        try:
            return self._gym.create_dataset(name, **settings)
        except Exception as error:  # each task checks its settings in its own way
            raise ConfigError(f"prompts.settings.{name}: {error or type(error).__name__}; change them") from error

    def rows(self) -> Iterator[tuple[str, Row]]:
        """(Where, the row) of each problem: its `prompt`, its `answer`, its `task` and its `place` in it.

        Raises:
            InputError: the package fails to compute one.
        """
        for name, task in self._tasks.items():
            for place in range(self._sizes[name]):
                try:
                    found = task[place]
                except Exception as error:  # as above
                    raise InputError(f"reasoning-gym fails at problem {place} of {name!r}: {error!r}") from error
                row = {"prompt": found["question"], "answer": found["answer"], "task": name, "place": place}
                yield f"{name}, problem {place}", row

    def wrong(self, row: Row) -> None:
        """See `Scorer`: every problem has a scorer."""

    def __call__(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float]:
        """See `Scorer`: from 0 to 1, of what stands between <answer> and </answer>, or of the whole answer.

        Raises:
            InputError: the task's scorer fails.
        """
        name, place = prompt.row["task"], prompt.row["place"]
        task = self._tasks[name]
        problem, scores = task[place], list[float]()
        for answer in answers:
            text = self._gym.utils.extract_answer(answer.text) or answer.text.strip()
            try:
                scores.append(float(task.score_answer(answer=text, entry=problem)))
            except Exception as error:  # as above
                raise InputError(
                    f"the scorer of reasoning-gym's task {name!r} fails at the answer {text!r:.80} to problem {place}: "
                    f"{error!r}; leave the task out"
                ) from error
        return scores


def _package() -> ModuleType:
    try:
        import reasoning_gym  # an optional dependency, which imports sympy
        import reasoning_gym.factory
        import reasoning_gym.utils
    except ModuleNotFoundError as error:
        raise SetupError(
            f"prompts.kind = 'reasoning-gym' needs the package {error.name}: pip install 'penjing[reasoning]'"
        ) from None
    return reasoning_gym
