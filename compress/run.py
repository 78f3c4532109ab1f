"""`penjing compress`: a checkpoint → what the steps of a recipe make of it, and a report.

Each step's checkpoint is kept in the work folder beside the output until the run is published; a killed run goes on
after the last one that is complete. Decisions follow from kept results alone, so that a second run repeats them.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from penjing.compress.families.base import family_at
from penjing.compress.guard import advice, decision, judge, loss_said
from penjing.compress.outcome import answered_stages, measured_stages, report_of, write_reports
from penjing.compress.plan import Planned, milder, plan, stretches
from penjing.compress.preflight import check_fit, input_hashes, preflight
from penjing.compress.recipe import Recipe, load_recipe, recipe_toml
from penjing.compress.report.text import answer_line, summary_line
from penjing.compress.results import SCHEMA, Result, Results, num_complete
from penjing.compress.steps.base import Context
from penjing.core.artifact.base import RECIPE_FILE, REPORT_PAGE
from penjing.core.config import key_of
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text, publish_folder
from penjing.core.manifest import MANIFEST_NAME, read_manifest, verify, write_manifest
from penjing.core.progress import Progress, Silent, typed
from penjing.core.work import WorkFolder, already_made, link_or_copy
from penjing.train.sources.tensors import calling_once

STEPS_FOLDER = "steps"  # of a result: what each step recorded
DECISIONS_FILE = "decisions.jsonl"  # in the work folder: what a run that was stopped had decided


@calling_once()
def run_recipe(
    source: Path | dict[str, Any],
    overrides: list[str] | None = None,
    *,
    out: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
    command: str | None = None,
) -> Path:
    """Do the steps of a recipe, and publish what the last one made with a report.

    Args:
        source: a TOML recipe, or its values (`recipe.Recipe`).
        overrides: "steps.0.ratio=0.2", as after `--set`.
        out: replaces the recipe's output folder.
        force: replace what another recipe or input made.
        command: what was typed, for the report; None: `penjing compress` with the recipe.

    Returns:
        The output folder; it appears only when it is complete. The same recipe and input give what is there.

    Raises:
        ConfigError: the recipe is wrong or does not fit the model.
        InputError: the model is damaged or of another kind; the output holds something else; the guard's budget cannot
            be kept; an artifact fails its parity gate.
        SetupError: too little memory or disk, no permission, another process works on the same output.
    """
    progress = progress or Silent()
    recipe = load_recipe(source, overrides)
    if out is not None:
        recipe = recipe.model_copy(update={"output": out})
    context = Context(recipe.model, family_at(recipe.model), recipe.data, progress)
    hashes = input_hashes(recipe, context)
    check_fit(recipe, context)
    code = f"{version('penjing')}/{SCHEMA}"
    key = key_of(recipe.settings(), hashes, code)
    if already_made(recipe.output, key, force, verify, progress):
        return recipe.output
    if command is None:
        said = [*(f"--set {typed(text)}" for text in overrides or []), *([f"--out {typed(out)}"] if out else [])]
        command = " ".join(["penjing compress", "recipe.toml" if isinstance(source, dict) else typed(source), *said])
    with WorkFolder(recipe.output, key_of(hashes["model"], code)) as work:
        preflight(recipe, context, work.path)
        if complete := num_complete(work):
            progress.note(
                f"{complete} complete steps of an earlier run lie in {work.path.name}; those that fit are kept"
            )
        run = _Run(recipe, context, Results(recipe, context, hashes, work), work, progress)
        run.all_stretches()
        _publish(run, command, key, force)
        work.remove()
    return recipe.output


def quantize_to_folder(
    source: Path, out: Path, target: str | None, overrides: list[str], *, force: bool, progress: Progress
) -> Path:
    """Run the recipe that only quantizes the checkpoint `source`, into `out`.

    Args:
        target: the engine that will run it, of families that have several.
        overrides: "key=value" of the step, or "section.key=value" of another section of a recipe.

    Raises:
        PenjingError: as `run_recipe`.
    """
    step: dict[str, Any] = {"kind": "quantize"} | ({} if target is None else {"target": target})
    quantizer = family_at(source).quantizer
    if quantizer is not None and quantizer.fitting is not None:
        step |= quantizer.fitting(source)
    recipe = {"model": str(source), "output": str(out), "steps": [step]}
    sections = tuple(f"{name}." for name in Recipe.model_fields)
    given = [text if text.startswith(sections) else f"steps.0.{text}" for text in overrides]
    said = [f"--target {target}"] * (target is not None) + [f"--set {typed(text)}" for text in overrides]
    command = " ".join(["penjing compress quantize", typed(source), typed(out), *said])
    return run_recipe(recipe, given, force=force, progress=progress, command=command)


@dataclass
class _Run:
    """The stretches of one run, in order."""

    recipe: Recipe
    context: Context
    results: Results
    work: WorkFolder
    progress: Progress
    kept: list[Result] = field(default_factory=list)  # the model, then what leads to the last one
    decisions: list[dict[str, Any]] = field(default_factory=list)

    def all_stretches(self) -> None:
        model = self.results.model()
        self.progress.note(f"{self.recipe.model}: {_said(model)}")
        self.kept = [model]
        reference = model
        for stretch in stretches(plan(self.recipe.steps)):
            self.kept += self._stretch(stretch, reference)
            if stretch[-1].guarded and self.recipe.guard.against == "previous":
                reference = self.kept[-1]

    def _stretch(self, stretch: list[Planned], reference: Result) -> list[Result]:
        """The results of a stretch that keeps its budget; none if it is left out.

        Raises:
            InputError: it breaks the budget, and the recipe says to stop then.
        """
        guard, attempt = self.recipe.guard, 1
        made = self._attempt(stretch)
        while stretch[-1].guarded:
            qualities = (reference.quality, made[-1].quality)
            verdict = judge(*qualities, guard, self.recipe.evaluate)
            if verdict.within:
                self._decide(decision(stretch, attempt, qualities, verdict, "kept"))
                break
            weaker = milder(stretch, guard) if attempt <= guard.retries else None
            if weaker is not None:
                self._decide(decision(stretch, attempt, qualities, verdict, "repeated milder", weaker))
                try:
                    made = self._attempt(weaker)
                    stretch, attempt = weaker, attempt + 1
                    continue
                except ConfigError as error:  # the rounding of widths leaves nothing to remove
                    self.progress.note(f"no milder prune is possible: {error}")
            outcome = "left out" if guard.otherwise == "skip" else "stopped"
            self._decide(decision(stretch, attempt, qualities, verdict, outcome))
            if outcome == "left out":
                return []
            raise InputError(
                f"{stretch[-1].name} loses too much: {verdict}; attempts: {attempt}; nothing is published. To go on, "
                f"{advice(stretch)}, or set guard.otherwise='skip'; the steps so far are kept in {self.work.path}"
            )
        return made

    def _attempt(self, stretch: list[Planned]) -> list[Result]:
        made: list[Result] = []
        for planned in stretch:
            result = self.results.make(planned, made[-1] if made else self.kept[-1])
            self.progress.note(f"{planned.name}: {_said(result)}")
            made.append(result)
        return made

    def _decide(self, entry: dict[str, Any]) -> None:
        self.decisions.append(entry)
        self.progress.note(_decision_line(entry))
        lines = "".join(json.dumps(each) + "\n" for each in self.decisions)
        atomic_write_text(self.work.path / DECISIONS_FILE, lines)


def _publish(run: _Run, command: str, key: str, force: bool) -> None:
    recipe, last = run.recipe, run.kept[-1]
    take = link_or_copy if len(run.kept) > 1 else shutil.copyfile  # the user's own files are never shared
    family = run.context.family
    measured = measured_stages(family, run.kept, recipe.measure, run.work, run.progress)
    answers = answered_stages(run.results, run.kept)
    report = report_of(recipe, family, run.kept, measured, answers, run.decisions, command, run.work)
    with publish_folder(recipe.output, replace=force) as partial:
        for path in sorted(last.folder.rglob("*")):
            name = path.relative_to(last.folder)
            if path.is_file() and name.parts[0] not in (MANIFEST_NAME, STEPS_FOLDER):
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                take(path, partial / name)
        for result in run.kept:
            if result.record is not None:
                text = json.dumps(asdict(result.record) | {"quality": asdict(result.quality)}, indent=2)
                atomic_write_text(partial / STEPS_FOLDER / f"{result.label}.json", text + "\n")
        atomic_write_text(partial / RECIPE_FILE, recipe_toml(recipe))
        write_reports(partial, report)
        created_by = {"command": command, "penjing": version("penjing"), "model": str(recipe.model)}
        write_manifest(
            partial,
            _kind(last),
            created_by,
            _extra(last) | {"key": key},
        )
    for figure in report.last.answers:
        run.progress.note(answer_line(figure))
    run.progress.note(f"wrote {recipe.output}; {recipe.output / REPORT_PAGE} says what each step gained and cost")
    run.progress.note(summary_line(report))


def _extra(result: Result) -> dict[str, Any]:
    """What the last step's own manifest says beside hashes."""
    return read_manifest(result.folder).extra if (result.folder / MANIFEST_NAME).exists() else {}


def _kind(result: Result) -> Literal["checkpoint", "artifact"]:
    manifest = read_manifest(result.folder) if (result.folder / MANIFEST_NAME).exists() else None
    return "artifact" if manifest is not None and manifest.kind == "artifact" else "checkpoint"


def _said(result: Result) -> str:
    quality = result.quality
    digits = {"accuracy": ".2%", "agreement": ".2%", "similarity": ".4f", "perplexity": ".4g", "score": ".4g"}[
        quality.name
    ]
    return f"{quality.name} {quality.value:{digits}} ({quality.low:{digits}} … {quality.high:{digits}})"


def _decision_line(entry: dict[str, Any]) -> str:
    """What a decision says on the terminal."""
    then = f": {entry['prunes']} → {entry['prunes_next']}" if entry["prunes_next"] else ""
    said, interval = loss_said(entry["loss"], entry["loss_low"], entry["loss_high"], entry["unit"])
    return (
        f"guard after {entry['steps'][-1]}, attempt {entry['attempt']}: {said} ({interval}), "
        f"budget {entry['budget']:g} → {entry['outcome']}{then}"
    )
