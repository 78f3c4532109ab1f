"""From a search recipe to the best settings: draws trials, runs them rung by rung, keeps what is measured."""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from penjing.core.config import dump_toml, inline_toml, key_of, parse_config, read_recipe
from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.core.files import atomic_write_text, writing
from penjing.core.progress import Progress, Silent, duration, plural
from penjing.core.recipes import check_stage
from penjing.train.processes.stop import InterruptedRunError, stop_signals
from penjing.train.recipe.load import load_train_recipe
from penjing.train.search.halving import cost, rungs, survivors
from penjing.train.search.page import search_page
from penjing.train.search.ray_trials import RayTrials
from penjing.train.search.recipe import SearchRecipe
from penjing.train.search.space import Drawer, Settings, starting_point, with_whole_ranges
from penjing.train.search.state import SearchState, Trial, read_search
from penjing.train.search.trial import Outcome, Runs, Trials

STATE_NAME, PAGE_NAME, BEST_NAME = "search.json", "report.html", "best.toml"
POLL_SECONDS = 0.5


def run_search(
    path: Path, overrides: list[str] | None = None, *, force: bool = False, progress: Progress | None = None
) -> SearchState:
    """Search as the recipe says, or go on with a search that was ended.

    Args:
        overrides: `key=value` changes of the search recipe.
        force: delete an earlier search of this output.

    Returns:
        The state with its winner; `output` holds search.json, report.html, best.toml and trials/NUMBER, of which the
        winner's has its checkpoint.

    Raises:
        ConfigError: a recipe is wrong, the space lacks the base recipe's values, or a trial's settings are refused.
        InputError: the output holds another search, or every trial of a rung has failed.
        SetupError: optuna or a Ray cluster is missing, another process works on the search, or a file cannot be
            written.
        InterruptedRunError: a stop was requested; the same command goes on.
    """
    given = read_recipe(path, overrides)
    check_stage(given, str(path), "search")
    recipe = parse_config(SearchRecipe, given, str(path))
    fixed = [f"{key}={inline_toml(value)}" for key, value in recipe.settings.items()]
    base = load_train_recipe(recipe.base, fixed)
    if not base.steps or not base.evaluation.every:
        raise ConfigError(
            f"{recipe.base}: a search needs steps, not epochs, and evaluation.every above 0; set them by [settings]"
        )
    values = base.model_dump(mode="json")
    start = starting_point(recipe, values)
    recipe = with_whole_ranges(recipe, start)
    drawer = Drawer(recipe, start)
    plan = rungs(drawer.num_trials, recipe.first, recipe.factor, base.steps, recipe.finalists)
    key = key_of(recipe.model_dump(mode="json", exclude={"workers", "output", "ray"}), values)
    with _locked(recipe.output):
        state = _open(recipe.output, key, force) or SearchState(
            key=key,
            base=str(recipe.base),
            metric=recipe.metric,
            goal=recipe.goal,
            rungs=[(each.steps, each.trials) for each in plan],
        )
        search = _Search(recipe, fixed, drawer, state, progress or Silent())
        return search.run()


class _Search:
    def __init__(
        self, recipe: SearchRecipe, fixed: list[str], drawer: Drawer, state: SearchState, progress: Progress
    ) -> None:
        self.recipe, self.fixed, self.drawer, self.state, self.progress = recipe, fixed, drawer, state, progress
        self.lowest = recipe.goal == "lowest"
        if recipe.ray is None:
            self.trials: Runs = Trials(max(len(os.sched_getaffinity(0)) // recipe.workers, 1))
        else:
            self.trials = RayTrials(recipe.ray, recipe.output / "trials")
        self._lock = threading.Lock()

    def run(self) -> SearchState:
        plan, began = self.state.plan, time.monotonic()
        total = cost(plan)
        self.progress.start("searching", total)
        self.progress.note(
            f"{plural(plan[0].trials, 'trial')}, "
            + ", ".join(f"{each.trials} to step {each.steps}" for each in plan)
            + f": {plural(total, 'step')}, {total / plan[-1].steps:.1f} whole runs"
        )
        reached, chosen, best = 0, list(range(plan[0].trials)), [0]
        with stop_signals() as stop_requested:
            for rung in plan:
                if reached:
                    chosen = survivors(self._results(reached), rung.trials, lowest=self.lowest)
                    self._forget(set(range(len(self.state.trials))) - set(chosen))
                self._climb(chosen, reached, rung.steps, stop_requested)
                best = survivors(self._results(rung.steps), 1, lowest=self.lowest)
                if not best:
                    raise InputError(f"every trial failed before step {rung.steps}; {self._first_reason()}")
                self.progress.note(f"step {rung.steps}: {self._told(best[0], rung.steps)}")
                reached = rung.steps
        self._finish(best[0], time.monotonic() - began)
        return self.state

    def _climb(self, chosen: list[int], reached: int, steps: int, stop_requested: Callable[[], bool]) -> None:
        """Bring all chosen trials to `steps`, `workers` at a time."""
        left = [number for number in chosen if not self._is_done(number, steps)]
        self.progress.advance((len(chosen) - len(left)) * (steps - reached))
        running: set[Future[None]] = set()
        with ThreadPoolExecutor(self.recipe.workers) as pool:
            try:
                while left or running:
                    while left and len(running) < self.recipe.workers:
                        running.add(pool.submit(self._bring, self._drawn(left.pop(0)), steps))
                    done, running = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                    for each in done:
                        each.result()
                        self.progress.advance(steps - reached)
                    if stop_requested():
                        raise InterruptedRunError("the search was stopped as asked; the same command goes on with it")
            finally:
                if running:
                    self.trials.stop()

    def _is_done(self, number: int, steps: int) -> bool:
        trials = self.state.trials
        return number < len(trials) and (steps in trials[number].evaluations or trials[number].reason != "")

    def _drawn(self, number: int) -> int:
        """The trial `number`, after drawing its settings if it is new.

        Raises:
            ConfigError: training refuses the settings.
        """
        with self._lock:
            if number == len(self.state.trials):
                known = self._results(self.recipe.first)
                settings = self.drawer.draw(
                    [(trial.settings, known.get(n)) for n, trial in enumerate(self.state.trials)]
                )
                load_train_recipe(self.recipe.base, [*self.fixed, *_overrides(settings)])
                self._keep([*self.state.trials, Trial(settings=settings)])
        return number

    def _bring(self, number: int, steps: int) -> None:
        folder = self.folder(number)
        trial = self.state.trials[number]
        own = [f"output={inline_toml(str(folder / 'checkpoint'))}", f"run={inline_toml(str(folder / 'run'))}"]
        own += ["checkpoint.keep=1", "evaluation.best=false", "evaluation.patience=0"]
        began = time.monotonic()
        changes = [*self.fixed, *_overrides(trial.settings), *own]
        outcome = self.trials.run(self.recipe.base, changes, steps, folder)
        if outcome is None:
            return
        if outcome.reason:
            self.progress.note(f"trial {number} failed: {outcome.reason} ({folder / 'log.txt'})")
        with self._lock:
            trial = _with(trial, outcome, steps, time.monotonic() - began)
            trial.value(steps, self.recipe.metric)  # an unknown metric ends the search at its first trial
            self._keep([trial if place == number else each for place, each in enumerate(self.state.trials)])

    def _keep(self, trials: list[Trial]) -> None:
        self.state = self.state.model_copy(update={"trials": trials})
        self.state.write(self.recipe.output / STATE_NAME)

    def _results(self, steps: int) -> dict[int, float]:
        return {
            number: trial.value(steps, self.recipe.metric)
            for number, trial in enumerate(self.state.trials)
            if trial.reason or steps in trial.evaluations
        }

    def _forget(self, numbers: set[int]) -> None:
        """Delete the training states of trials that do not go on; their logs and metrics stay."""
        for number in numbers:
            with writing(self.folder(number)):
                shutil.rmtree(self.folder(number) / "run" / "checkpoints", ignore_errors=True)

    def folder(self, number: int) -> Path:
        return self.recipe.output / "trials" / f"{number:0{len(str(self.drawer.num_trials - 1))}}"

    def _told(self, number: int, steps: int) -> str:
        trial = self.state.trials[number]
        return f"{self.recipe.metric} {trial.value(steps, self.recipe.metric):.4f} with {_shown(trial.settings)}"

    def _first_reason(self) -> str:
        return next((f"trial {number}: {each.reason}" for number, each in enumerate(self.state.trials) if each.reason),
                    f"{self.recipe.metric} is no number in any of them")  # fmt: skip

    def _finish(self, winner: int, seconds: float) -> None:
        output, steps = self.recipe.output, self.state.plan[-1].steps
        settings = self.state.trials[winner].settings
        best = read_recipe(self.recipe.base, [*self.fixed, *_overrides(settings)])
        head = f"# {self.recipe.base} with the settings that a search found best: {self._told(winner, steps)}.\n"
        atomic_write_text(output / BEST_NAME, head + dump_toml(best))
        self.state = self.state.model_copy(update={"winner": winner})
        self.state.write(output / STATE_NAME)
        atomic_write_text(output / PAGE_NAME, search_page(self.state))
        self.progress.note(
            f"{output / BEST_NAME}: {self._told(winner, steps)}; {duration(seconds)}, "
            f"checkpoint {self.folder(winner) / 'checkpoint'}, all trials in {output / PAGE_NAME}"
        )


def _with(trial: Trial, outcome: Outcome, steps: int, seconds: float) -> Trial:
    found = {name: value if math.isfinite(value) else None for name, value in outcome.values.items()}
    evaluations = trial.evaluations if outcome.reason else {**trial.evaluations, steps: found}
    return trial.model_copy(
        update={"evaluations": evaluations, "seconds": trial.seconds + seconds, "reason": outcome.reason}
    )


def _overrides(settings: Settings) -> list[str]:
    return [f"{key}={inline_toml(value)}" for key, value in settings.items()]


def _shown(settings: Settings) -> str:
    return ", ".join(
        f"{key} = {value:.4g}" if isinstance(value, float) else f"{key} = {value}" for key, value in settings.items()
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SetupError(
                f"another process works on the search in {folder}; wait for it, or choose another output"
            ) from None
        yield
    finally:
        os.close(lock)


def _open(folder: Path, key: str, force: bool) -> SearchState | None:
    """The search that the folder, locked, holds, if it is this one; `force` deletes what is there."""
    known = (STATE_NAME, PAGE_NAME, BEST_NAME, "trials")
    for begun in (path for name in known for path in folder.glob(f".{name}.partial-*")):
        begun.unlink(missing_ok=True)  # a process was killed while it wrote this
    if force:
        with writing(folder):
            for name in known:
                path = folder / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if strangers := sorted(path.name for path in folder.iterdir() if path.name not in known):
        raise InputError(f"{folder} holds {strangers[0]}, which is no part of a search; choose another output")
    if not (folder / STATE_NAME).exists():
        return None
    state = read_search(folder / STATE_NAME)
    if state.key != key:
        raise InputError(
            f"{folder} holds a search with another recipe; start this one with --force, or choose another output"
        )
    return state
