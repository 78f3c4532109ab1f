"""From a recipe to a corpus: plan, stages, completeness, report, and a folder that appears when all of it is there."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from penjing.core.config import parse_config, read_recipe
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_bytes, check_replaceable, publish_folder, writing
from penjing.core.manifest import MANIFEST_NAME, read_json_object, write_manifest
from penjing.core.progress import Progress, Silent
from penjing.core.recipes import check_stage
from penjing.core.text.records import arrow_module
from penjing.core.text.source_files import SHARDS
from penjing.curate.alone import alone_in
from penjing.curate.clusters import join_clusters
from penjing.curate.learned.facts import FACTS, Learned
from penjing.curate.plan import PLAN_FILE, Plan, Stage, make_plan
from penjing.curate.ray_tasks import run_tasks_on_ray
from penjing.curate.recipe import CurateRecipe
from penjing.curate.report import CorpusReport, corpus_report, report_page
from penjing.curate.sample import sampled
from penjing.curate.slurm_tasks import run_tasks_on_slurm
from penjing.curate.steps.base import LearningStep, StepConfig
from penjing.curate.steps.dedup import DedupStep
from penjing.curate.steps.quality import LABELS_FILE
from penjing.curate.task import COUNTS, DAMAGED, DOCUMENTS, DROPPED, READ, Counts, mask_of, run_task, task_folder
from penjing.curate.workers import run_tasks

QUARANTINE, REPORT, PAGE, DROPPED_FOLDER = "quarantine.jsonl", "report.json", "report.html", "dropped"


def curate(
    recipe_path: Path,
    overrides: list[str] | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> CorpusReport:
    """Make the corpus of a recipe. A run that was ended goes on with the tasks that are left.

    Args:
        overrides: `section.key=value` changes of the recipe.
        force: replace an existing output.

    Returns:
        What was kept and dropped; the corpus lies in the recipe's `output`.

    Raises:
        PenjingError: see `core.errors`; one line that names the setting or file.
    """
    values = read_recipe(recipe_path, overrides)
    check_stage(values, str(recipe_path), "curate")
    return curate_recipe(
        parse_config(CurateRecipe, values, str(recipe_path)),
        f"penjing curate {recipe_path}",
        force=force,
        progress=progress,
    )


def curate_recipe(
    recipe: CurateRecipe, command: str, *, force: bool = False, progress: Progress | None = None
) -> CorpusReport:
    """`curate` of a recipe in memory; `command`: what the corpus says made it."""
    progress = progress or Silent()
    check_replaceable(recipe.output, force, MANIFEST_NAME)  # before hours of work
    work = recipe.work_folder
    with alone_in(work):
        plan = make_plan(recipe, progress)
        with writing(work):
            plan.save(work / PLAN_FILE)
        counts = Counts()
        for number, stage in enumerate(plan.stages):
            _run_stage(plan, number, stage, counts, progress)
        report = corpus_report(plan, counts, _learned(plan))
        progress.start("writing the corpus", 1)
        with publish_folder(recipe.output, replace=force) as partial:
            _write(plan, report, command, partial)
        progress.advance()
        shutil.rmtree(work)
    progress.note(report.summary())
    progress.note(f"wrote {recipe.output}; {recipe.output / PAGE} says what was kept and dropped, and why")
    return report


def _run_stage(plan: Plan, number: int, stage: Stage, counts: Counts, progress: Progress) -> None:
    """Do what is left of a stage, see that all of it is there, and add what it counted to `counts`."""
    tasks = range(len(plan.tasks))
    with writing(stage.folder):
        stage.folder.mkdir(parents=True, exist_ok=True)
        for place in stage.steps:
            step, folder = plan.recipe.steps[place], stage.folder / f"step-{place}"
            assert isinstance(step, StepConfig)
            if not folder.exists():
                with publish_folder(folder) as partial:
                    if isinstance(step, LearningStep):
                        documents = sampled(plan.stages[number - 1], len(tasks), step.sample, step.domains)
                        facts = step.learn(partial, documents, plan.recipe.work_folder, progress)
                        (partial / FACTS).write_text(facts.model_dump_json(), encoding="utf-8")
                    else:
                        step.prepare(partial)
    kinds = [plan.recipe.steps[place].kind for place in stage.steps]
    progress.start(", ".join([*(["reading"] if number == 0 else []), *kinds]) or "collecting", len(tasks))
    left = [task for task in tasks if not task_folder(stage, task).exists()]
    progress.advance(len(tasks) - len(left))
    plan_file = plan.recipe.work_folder / PLAN_FILE

    def done(_: int) -> None:
        progress.advance()

    if plan.recipe.ray is not None and left:
        run_tasks_on_ray(plan_file, number, left, plan.recipe.ray, done)
    elif plan.recipe.slurm is not None and left:
        run_tasks_on_slurm(plan_file, number, left, plan.recipe.slurm, done)
    elif plan.recipe.workers == 1 or len(left) < 2:
        for task in left:
            run_task(plan, number, task)
            progress.advance()
    else:
        run_tasks(plan_file, number, left, plan.recipe.workers, done)
    if missing := [task for task in tasks if not task_folder(stage, task).exists()]:
        raise InputError(f"tasks {missing} of stage {number} left no result; run again, they are done first")
    for task in tasks:
        counts.add(json.loads((task_folder(stage, task) / COUNTS).read_text(encoding="utf-8")))
    _check_damage(plan, stage, counts)
    if stage.after is not None:
        step = plan.recipe.steps[stage.after]
        assert isinstance(step, DedupStep)
        progress.start(f"dedup ({step.method})", 1)
        with writing(stage.folder):
            join_clusters(stage, len(plan.tasks), step)
        progress.advance()


def _learned(plan: Plan) -> list[Learned]:
    """What the steps that learn have learned."""
    return [
        parse_config(Learned, read_json_object(path) | {"step": f"{place}: {plan.recipe.steps[place].kind}"}, str(path))
        for stage in plan.stages
        for place in stage.steps
        if (path := stage.folder / f"step-{place}" / FACTS).exists()
    ]


def _check_damage(plan: Plan, stage: Stage, counts: Counts) -> None:
    """Stop where more is damaged than the recipe allows; the first case is named, and all are listed in a file."""
    met = sum(documents for key, (documents, _) in counts.after.items() if key.startswith(f"{READ}\t"))
    whole = met + counts.num_made + counts.num_damaged - counts.num_failed
    if counts.num_damaged <= plan.recipe.most_damaged * whole:
        return
    listed = plan.recipe.work_folder / QUARANTINE
    found = b"".join((task_folder(stage, task) / DAMAGED).read_bytes() for task in range(len(plan.tasks)))
    atomic_write_bytes(listed, found)
    first = json.loads(found.partition(b"\n")[0])
    raise InputError(
        f"{counts.num_damaged:,} of {whole:,} documents are damaged, more than most_damaged = "
        f"{plan.recipe.most_damaged:g}; the first is {first['id']}: {first['reason']}. All are listed in {listed}: "
        "mend them, or allow more"
    )


def _masked_labels(path: Path, masked: Callable[[str], str]) -> str:
    """Lines of labels whose texts `masked` has taken personal data out of."""
    # not splitlines: texts keep line separators such as U+2028 within a line of JSON
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return "".join(json.dumps({**row, "text": masked(row["text"])}, ensure_ascii=False) + "\n" for row in rows)


def _write(plan: Plan, report: CorpusReport, command: str, folder: Path) -> None:
    stages, tasks = plan.stages, range(len(plan.tasks))
    (folder / SHARDS).mkdir()
    (folder / DROPPED_FOLDER).mkdir()
    for task in tasks:
        path = task_folder(stages[-1], task) / DOCUMENTS
        if arrow_module("parquet", path).read_metadata(path).num_rows:
            shutil.copyfile(path, folder / SHARDS / f"{task:05d}.parquet")
    with open(folder / QUARANTINE, "wb") as file:
        for stage in stages:
            for task in tasks:
                file.write((task_folder(stage, task) / DAMAGED).read_bytes())
    for number, stage in enumerate(stages):
        with gzip.open(folder / DROPPED_FOLDER / f"stage-{number}.jsonl.gz", "wb") as file:
            for task in tasks:
                with gzip.open(task_folder(stage, task) / DROPPED, "rb") as part:
                    shutil.copyfileobj(part, file)
    masked = mask_of(plan)
    for stage in stages:
        for place in stage.steps:
            labels = stage.folder / f"step-{place}" / LABELS_FILE
            if labels.exists():  # they cost money and time, and serve the next run as a file
                (folder / "labels").mkdir(exist_ok=True)
                name = f"{place}-{plan.recipe.steps[place].kind}.jsonl"
                (folder / "labels" / name).write_text(_masked_labels(labels, masked), encoding="utf-8")
    (folder / REPORT).write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    (folder / PAGE).write_text(report_page(report), encoding="utf-8")
    created_by = {"command": command, "recipe": plan.recipe.model_dump(mode="json")}
    write_manifest(folder, "corpus", created_by, {"documents": report.kept.documents, "chars": report.kept.chars})
