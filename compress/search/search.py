"""`penjing compress search`: from a search recipe to the front, measured, and a recipe for each of its points."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penjing.compress.families.base import family_at
from penjing.compress.preflight import input_hashes
from penjing.compress.recipe import Recipe, load_recipe
from penjing.compress.report.search_page import search_page
from penjing.compress.samples.own import WRITER
from penjing.compress.samples.text import CALIBRATE
from penjing.compress.search.base import Changes
from penjing.compress.search.draw import near_front, scattered
from penjing.compress.search.families import RayDivergences, open_trials
from penjing.compress.search.front import Front, Table, evenly_spread, pareto_front
from penjing.compress.search.heal import Healer, fit_recovery, left_out
from penjing.compress.search.latency import TIMING, Clock, fit_latency, time_network
from penjing.compress.search.points import point_recipe
from penjing.compress.search.predict import Prediction, fit
from penjing.compress.search.recipe import JointRecipe
from penjing.compress.search.result import SCHEMA, Choice, Kind, Measured, Row
from penjing.compress.sensitivity.cells import Remaining, already_published
from penjing.compress.steps.base import Context
from penjing.core.config import dump_toml, inline_toml, key_of, parse_config, read_recipe
from penjing.core.errors import ConfigError
from penjing.core.files import atomic_write_text, publish_folder
from penjing.core.info import processor, versions
from penjing.core.progress import Progress, Silent, plural, typed
from penjing.core.recipes import check_stage
from penjing.core.work import WorkFolder

RESULT_FILE, PAGE_FILE = "search.json", "report.html"
NEAR_FRONT = 1 / 3  # of the combinations


def run_joint_search(
    path: Path, overrides: list[str] | None = None, *, force: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Search as the recipe says, or go on with a search that was killed.

    Args:
        overrides: "key=value" changes of the search recipe.
        force: replace what another recipe or model made.

    Returns:
        The content of search.json: `variables` [{name, kind, options}], `rows` [{kind, choice, cost, share, divergence,
        predicted}], with healed, round and foretold where points were healed, `front` (numbers of rows, each with its
        `recipe`), `prediction`, `baselines`, and what made it.

    Raises:
        ConfigError: a recipe is wrong, the space lacks the network as it is, the budget is below the cheapest choice.
        InputError: the model is damaged; the output holds something else, such as a search of another model.
        SetupError: no permission, no space, another process works on the same output.
    """
    progress = progress or Silent()
    given = read_recipe(path, overrides)
    check_stage(given, str(path), "compress-search")
    search = parse_config(JointRecipe, given, str(path))
    fixed = [f"{key}={inline_toml(value)}" for key, value in search.settings.items()]
    values = read_recipe(search.base, fixed)
    check_stage(values, str(search.base), "compress")
    recipe = load_recipe(values)
    _check_held_out(recipe, search.base)
    family = family_at(recipe.model)
    context = Context(recipe.model, family, recipe.data, progress)
    hashes = input_hashes(recipe, context)
    code = f"{version('penjing')}/{SCHEMA}"
    code_of_result = f"{code}/{TIMING}" if search.cost == "latency" else code
    key = key_of(search.model_dump(mode="json", exclude={"output", "ray"}), recipe.settings(), hashes, code_of_result)
    if (done := already_published(search.output, RESULT_FILE, key, force)) is not None:
        progress.note(f"{search.output} is already done: kept (--force makes it again)")
        return done
    trials = open_trials(recipe, search.space, family, progress)
    healer = Healer(search.heal, trials, values, context, hashes) if search.heal is not None else None
    # Another cost, or other steps that heal, change no measurement: what was measured before a kill is kept then too.
    measured = {name: hashes[name] for name in ("model", CALIBRATE, WRITER) if name in hashes}
    with WorkFolder(search.output, key_of(trials.decides, measured, code)) as work:
        away = None
        if search.ray is not None:
            away = RayDivergences(search.ray, values, search.space, work.path)
        run = _Search(search, trials, work, progress, away, healer)
        result = run.run() | {
            "model": str(recipe.model),
            "base": str(search.base),
            "input": hashes["model"],
            "settings": search.model_dump(mode="json"),
            "versions": versions(),
            "device": processor(),
            "key": key,
        }
        with publish_folder(search.output, replace=force, marker=RESULT_FILE) as partial:
            for entry in result["front"]:
                row = result["rows"][entry["row"]]
                steps = trials.point(values, row["choice"])
                made = point_recipe(values, steps, search.output, entry["recipe"])
                load_recipe(made)
                after = f", {row['healed']:.4g} after the search's" if "healed" in row else ""
                head = (
                    f"# {search.base} at {100 * row['share']:.1f} % of its {search.cost}, divergence "
                    f"{row['divergence']:.4g} before healing{after}.\n"
                )
                atomic_write_text(partial / entry["recipe"], head + dump_toml(made))
            atomic_write_text(partial / RESULT_FILE, json.dumps(result, indent=1) + "\n")
            atomic_write_text(partial / PAGE_FILE, search_page(result))
        work.remove()
    progress.note(_said(result, search.output))
    return result


class _Search:
    def __init__(
        self,
        search: JointRecipe,
        trials: Changes,
        work: WorkFolder,
        progress: Progress,
        away: RayDivergences | None,
        healer: Healer | None,
    ) -> None:
        self.search, self.trials, self.space, self.work, self.progress = search, trials, trials.space, work, progress
        self.away, self.healer = away, healer
        self.healing: dict[str, Any] = {}
        self.clock: Clock | None = None
        self.timing: dict[str, Any] = {}
        if search.cost == "latency":
            self.clock = trials.clock(search.workload)
            latency = fit_latency(self.space, self.clock, search.workload, search.seed, work, progress)
            self.space, self.timing = self.space.timed(latency.tables), latency.record | {"start": latency.start}
        self.rows: dict[Choice, Row] = {self.space.start: Row("start", self.space.start, 0.0)}
        self.whole = float(self._costs([self.space.start])[0])
        self.tables = self.space.tables(search.cost)
        self.cheapest = self._check_budget()

    def run(self) -> dict[str, Any]:
        search, space = self.search, self.space
        self.trials.prepare(self.work, self.progress)
        near = round(NEAR_FRONT * search.combinations)
        singles = [_changed(space.start, place, option) for place, option in self._options()]
        axes = search.space.widths, search.space.bits, (np.inf, *search.space.windows)
        uniform = [space.uniform(*each) for each in product(*axes)]
        uniform = [each for each in dict.fromkeys(uniform) if each != space.start]
        total = len(singles) + search.combinations + 2 * len(uniform) + search.points
        self.progress.note(
            f"{len(space.variables)} choices, {int(np.prod([float(size) for size in space.sizes])):.2e} combinations; "
            f"about {total} are measured on {self.trials.count} samples each, kept in {self.work.path.name}"
        )
        self.progress.start("measuring", total)
        self.left = Remaining(total)
        self._measure("single", singles)
        first = scattered(space.sizes, search.combinations - near, search.seed)
        self._measure("combination", first)
        later = near_front(self._front(self._fit(first)).choices, space.sizes, near, search.seed, self.rows)
        self._measure("near the front", later)
        prediction = self._fit([*first, *later])
        self._measure("uniform", uniform)
        front = self._front(prediction)
        beside = self._beside(front, uniform)
        spread = [_choice(front.choices[place]) for place in evenly_spread(front.cost, search.points)]
        chosen = [*dict.fromkeys([*spread, *beside])]
        self._measure("front", chosen)
        if self.healer is not None:
            self._heal(self.healer, prediction, front, chosen, uniform)
        held_out = [*dict.fromkeys([*chosen, *uniform])]
        result = Measured(search, self.trials, self.rows, self._costs([*self.rows]), self._allowed)
        return (
            result.said(prediction, front, held_out, uniform)
            | {"cheapest": self.cheapest}
            | ({"healing": self.healing} if self.healer else {})
            | ({"latency": self._timed(result, uniform)} if self.clock else {})
        )

    def _beside(self, front: Front, uniform: Sequence[Choice]) -> list[Choice]:
        """The front's best within the cost of each uniform choice."""
        places = [int((front.cost <= cost).sum()) - 1 for cost in self._costs(uniform) if cost >= front.cost[0]]
        return [_choice(front.choices[place]) for place in places]

    def _heal(
        self,
        healer: Healer,
        prediction: Prediction,
        front: Front,
        chosen: Sequence[Choice],
        uniform: Sequence[Choice],
    ) -> None:
        """Heal points of the front, beside those of `chosen` that have nothing to train, and then points of the front
        that these foretell."""
        heal = self.search.heal
        assert heal is not None
        changed = np.array([healer.changes(_choice(each)) for each in front.choices])
        costs, choices = front.cost[changed], front.choices[changed]
        within = [each for each in uniform if heal.uniform and self._allowed(self._costs([each]))[0]]
        spread = [_choice(choices[place]) for place in evenly_spread(costs, heal.points)]
        beside = [each for each in self._beside(front, within) if any(each)]
        as_they_are = [each for each in chosen if any(each) and not healer.changes(each)]
        first = [*dict.fromkeys([*spread, *as_they_are, *within, *beside])]
        self._measure("front", first)
        self._healed(healer, first, 1)
        kinds = [each.kind for each in self.space.variables]
        taught = [each for each in first if healer.changes(each)]  # the others say nothing of training
        second: list[Choice] = []
        factors: dict[str, float] = {}
        if taught:
            foretold = left_out(prediction, kinds, np.array(taught), self._losses(taught))
            for choice, value in zip(taught, foretold, strict=True):
                self.rows[choice].foretold = None if np.isnan(value) else float(value)
            recovery = fit_recovery(prediction, kinds, np.array(taught), self._losses(taught))
            after = recovery.applied(prediction)
            later = self._front(after)
            known = {*first, self.space.start}
            second = [each for each in self._beside(later, within) if each not in known and heal.second]
            second += near_front(later.choices, self.space.sizes, heal.second, self.search.seed + 1, known)
            second = [each for each in dict.fromkeys(second) if self._allowed(self._costs([each]))[0]]
            self._measure("second round", second)
            self._healed(healer, second, 2)
            again = [each for each in second if healer.changes(each)]
            for choice, value in zip(again, after.of(np.array(again)) if again else [], strict=True):
                self.rows[choice].foretold = float(value)
            every = [*taught, *again]
            factors = fit_recovery(prediction, kinds, np.array(every), self._losses(every)).factors
        self.healing = {
            "steps": healer.trained,
            "first": len(first),
            "second": len(second),
            "left": factors,
            "power": prediction.power,
        }

    def _losses(self, choices: Sequence[Choice]) -> NDArray[np.float64]:
        """After healing."""
        return np.array([self.rows[each].healed for each in choices], np.float64)

    def _healed(self, healer: Healer, choices: Sequence[Choice], number: Literal[1, 2]) -> None:
        """Heal combinations that were measured; where there is nothing to train they are healed as they are."""
        wanted = [each for each in choices if healer.changes(each)]
        kept = sum(self.work.record(healer.name(each)) is not None for each in wanted)
        steps = " + ".join(map(str, healer.trained))
        self.progress.note(
            f"healing {len(wanted)} of {len(choices)} points with {steps} steps each; {kept} are kept from before"
        )
        left = Remaining(len(wanted))
        for choice in choices:
            row = self.rows[choice]
            row.round = number
            if choice not in wanted:
                row.healed = row.divergence
                continue
            with left.timed(is_kept=self.work.record(healer.name(choice)) is not None):
                row.healed = healer.divergence(choice, self.work)
            self.progress.note(
                f"{left.done} of {len(wanted)} healed: {row.divergence:.4g} → {row.healed:.4g} {self.trials.unit}, "
                f"left {left}"
            )

    def _timed(self, found: Measured, uniform: Sequence[Choice]) -> dict[str, Any]:
        """How long the front's points and the uniform choices take, none of which the sum was fitted to.

        Returns:
            What the sum is made of, with `points` [{row, seconds, predicted}] and `error`, the median of how far
            predictions are from them.
        """
        assert self.clock is not None
        fitted = {tuple(each["choice"]) for each in self.timing["fitted"]}
        wanted = dict.fromkeys([*found.front, *(found.places[each] for each in uniform)])
        places = [each for each in wanted if found.rows[each].choice not in fitted]
        self.progress.start("timing the front", len(places))
        points = []
        for place in places:
            timed = time_network(self.clock, found.rows[place].choice, self.search.workload, self.work)
            seconds = timed["ratio"] * self.timing["start"]
            points.append({"row": place, "seconds": seconds, "predicted": float(found.costs[place])})
            self.progress.advance()
        errors = [abs(each["predicted"] / each["seconds"] - 1) for each in points]
        return self.timing | {"points": points, "error": median(errors) if errors else None}

    def _options(self) -> Iterable[tuple[int, int]]:
        for place, size in enumerate(self.space.sizes):
            for option in range(1, size):
                yield place, option

    def _measure(self, kind: Kind, choices: Sequence[Choice]) -> None:
        if self.away is not None:
            missing = [each for each in choices if each not in self.rows and self.work.record(_name(each)) is None]
            for done, (choice, value) in enumerate(self.away.of(missing), 1):
                self.work.run(_name(choice), lambda own=value: {"divergence": own})
                self.progress.status(f"{done} of {len(missing)} measured on the cluster")
        for choice in choices:
            name = _name(choice)
            with self.left.timed(is_kept=choice in self.rows or self.work.record(name) is not None):
                if choice not in self.rows:
                    found = self.work.run(name, lambda own=choice: {"divergence": self.trials.divergence(own)}).result
                    self.rows[choice] = Row(kind, choice, found["divergence"])
            self.progress.advance()
            self.progress.status(f"{self.left.done} measured, left {self.left}")

    def _fit(self, combinations: Sequence[Choice]) -> Prediction:
        singles = [np.zeros(size) for size in self.space.sizes]
        for place, option in self._options():
            singles[place][option] = self.rows[_changed(self.space.start, place, option)].divergence
        measured = np.array([self.rows[each].divergence for each in combinations])
        return fit(singles, self.space.pairs(), np.array(combinations), measured)

    def _front(self, prediction: Prediction) -> Front:
        """The exact front of the fitted sum, within the budget."""
        front = pareto_front(self.space.sizes, [*self.tables, *prediction.tables()])
        if not front.exact:
            self.progress.note("the front is longer than is kept: of nearly equal costs the better choice is taken")
        within = self._allowed(front.cost)
        if not (within & front.choices.any(axis=1)).any():
            raise ConfigError(
                f"no change of the network costs between floor={self.search.floor:g} and "
                f"{self._budget() / self.whole:g} of the network; lower floor, or raise budget"
            )
        return Front(front.cost[within], front.loss[within], front.choices[within], front.exact)

    def _budget(self) -> float:
        return self.whole * (1.0 if self.search.budget is None else self.search.budget)

    def _allowed(self, costs: NDArray[np.float64]) -> NDArray[np.bool_]:
        return (costs <= self._budget() * (1 + 1e-12)) & (costs >= self.search.floor * self.whole)

    def _check_budget(self) -> float:
        """The cheapest combination.

        Raises:
            ConfigError: it is above the budget.
        """
        least = pareto_front(self.space.sizes, [Table(each.scope, each.cost, each.cost) for each in self.tables])
        cheapest = float(least.cost[0])
        if cheapest > self._budget():
            raise ConfigError(
                f"budget={self.search.budget:g} is below the cheapest choice of the space, which costs "
                f"{cheapest / self.whole:.3f} of the network; raise it, or give smaller widths"
            )
        return cheapest

    def _costs(self, choices: Sequence[Choice]) -> NDArray[np.float64]:
        return self.space.costs(
            self.search.cost, np.array(choices, np.int64).reshape(len(choices), len(self.space.variables))
        )


def _changed(choice: Choice, place: int, option: int) -> Choice:
    return (*choice[:place], option, *choice[place + 1 :])


def _name(choice: Choice) -> str:
    """Of the task that measures it."""
    return f"point_{key_of(choice)[:20]}"


def _choice(values: NDArray[np.integer]) -> Choice:
    return tuple(int(each) for each in values)


def _check_held_out(recipe: Recipe, base: Path) -> None:
    """Refuse to choose by what the result is evaluated on.

    Raises:
        ConfigError: [data] and [evaluate] look at the same samples.
    """
    data, evaluate = recipe.data, recipe.evaluate
    if data.source is not None and evaluate.source == data.source and data.held_out == 0:
        raise ConfigError(
            f"{base}: data.held_out=0 leaves nothing of {data.source} that the search does not look at; set it to 0.1, "
            "or give [evaluate] a source of its own"
        )


def _said(result: dict[str, Any], output: Path) -> str:
    cheapest = result["rows"][result["front"][0]["row"]]
    dearest = result["rows"][result["front"][-1]["row"]]
    healed = ""
    if (healing := result.get("healing")) is not None:
        healed = f"{healing['first']} + {healing['second']} points were healed; "
    return (
        f"{plural(len(result['front']), 'recipe')} in {output}, from {100 * cheapest['share']:.1f} to "
        f"{100 * dearest['share']:.1f} % of the {result['cost']}; predictions rank left-out combinations with a "
        f"correlation of {result['prediction']['rank']:.2f} (plain sums {result['prediction']['plain_rank']:.2f}); "
        f"{healed}"
        f"next: penjing compress {typed(output / result['front'][0]['recipe'])}"
    )
