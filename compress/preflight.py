"""Before the first step: the folders are whole, the steps fit them, and memory, disk and time suffice."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch

from penjing.compress.distill.training import TrainingSettings
from penjing.compress.families.base import Asker, Needs, family_at
from penjing.compress.measure.answers import CHOICES, PROMPTS
from penjing.compress.measure.cost import sizes_of
from penjing.compress.plan import Planned, plan, step_key
from penjing.compress.quantize.bits import sensitivity_file
from penjing.compress.recipe import Recipe
from penjing.compress.samples.named import calibration_files, code_file, learnt_files, row_files
from penjing.compress.samples.text import CALIBRATE, EVALUATE
from penjing.compress.steps.base import Context, Step
from penjing.core.errors import ConfigError, SetupError
from penjing.core.files import sha256_file
from penjing.core.memory import available_bytes
from penjing.core.progress import clock, megabytes, plural
from penjing.core.text.documents import text_files
from penjing.train.monitor.flops import peak_flops
from penjing.train.sources.open import fingerprint

USE = 0.4  # of the rate of a large matrix product: training reached 0.3 to 0.6 of it, SmolLM2 with its teacher 0.6


def input_hashes(recipe: Recipe, context: Context) -> dict[str, dict[str, str]]:
    """SHA-256 of the files of the model ("model"), of each other teacher (its path), of what writes text in its place
    ("data.own_texts.writer"), of the user's own texts and code ("data.calibrate", "evaluate.own", "measure.prompts",
    "measure.choices"), and of what each step names beside ("steps.0"); tensors' names and shapes are checked on the
    way.

    Raises:
        ConfigError: a teacher of another family, a writer that is no decoder; a text that is calibrated on and
            evaluated.
        InputError: missing, damaged, or quantized already.
    """
    found = {"model": context.family.hashes(recipe.model)}
    for place, step in enumerate(recipe.steps):
        teacher = step.teacher_of(recipe.model)
        if teacher is None or teacher == recipe.model:
            continue
        if (other := family_at(teacher)).name != context.family.name:
            raise ConfigError(
                f"steps.{place}.teacher={teacher} is {other.said}, {recipe.model} is {context.family.said}; name a "
                "teacher of the same kind"
            )
        found[str(teacher)] = other.hashes(teacher)
    found |= calibration_files(recipe.data)
    evaluate = recipe.evaluate
    own = {str(file): sha256_file(file) for path in evaluate.own.values() for file in text_files(path, EVALUATE)}
    _check_unseen(own, found.get(CALIBRATE, {}))
    own |= row_files(evaluate.questions, evaluate.question_images, "evaluate.questions")
    if evaluate.source is not None:
        own |= fingerprint(evaluate)
    if own := own | code_file(evaluate.metric):
        found[EVALUATE] = own
    for setting, paths in ((PROMPTS, recipe.measure.prompts), (CHOICES, recipe.measure.choices)):
        if paths:
            found[setting] = {str(file): sha256_file(file) for path in paths for file in text_files(path, setting)}
    for place, step in enumerate(recipe.steps):
        if beside := _named_files(step, step_key(place), context.family.sees):
            found[step_key(place)] = beside
    return found


def _named_files(step: Step, setting: str, sees: bool) -> dict[str, str]:
    """The files that a step's settings name, beside checkpoints."""
    found = code_file(getattr(step, "loss", ""))
    if isinstance(step, TrainingSettings):
        found |= learnt_files(step.sources, step.images if sees else None, f"{setting}.sources")
    sensitivity = getattr(step, "sensitivity", None)
    if sensitivity is not None and (path := sensitivity_file(sensitivity)).is_file():
        found[str(path)] = sha256_file(path)
    return found


def _check_unseen(judged: dict[str, str], calibrated: dict[str, str]) -> None:
    """Refuse to judge by what is calibrated on; both are file name → SHA-256."""
    seen = {sha256: file for file, sha256 in calibrated.items()}
    for file, sha256 in judged.items():
        if sha256 in seen:
            raise ConfigError(
                f"{EVALUATE}: {file} is calibrated on ({CALIBRATE}: {seen[sha256]}), and would be judged too well; "
                "name other text in one of them"
            )


def check_fit(recipe: Recipe, context: Context) -> None:
    """What a later step would refuse after hours of earlier ones.

    Raises:
        ConfigError: the output would replace the model, a step does not fit the model, or [measure] asks what the
            model's family cannot answer.
        InputError: a folder that a step reads is damaged, or a file of questions.
    """
    if recipe.output.resolve() == recipe.model.resolve():
        raise ConfigError(f"output = {recipe.output} is the model itself; choose another output")
    for name, given in (("data.rows", recipe.data.rows), ("evaluate.questions", recipe.evaluate.questions)):
        if given and not context.family.sees:
            raise ConfigError(f"{name} = {list(given)}: {recipe.model} is {context.family.said}; leave it out")
    if shared := sorted(set(recipe.data.rows) & set(recipe.evaluate.questions)):
        raise ConfigError(f"{shared[0]} would calibrate (data.rows) and judge (evaluate.questions); name other rows")
    for place, step in enumerate(recipe.steps):
        try:
            step.check(context)
        except ConfigError as error:
            raise ConfigError(f"steps.{place}: {error}") from None
    if recipe.measure.asks:
        asker: Asker = context.family.need("asker", "asked questions")
        asker.questions(recipe.model, recipe.measure, recipe.evaluate)


def estimate(recipe: Recipe, planned: list[Planned], context: Context) -> Needs:
    """What the steps take if none is repeated; pruned networks are counted at full size.

    Memory is that of the step that takes most; disk holds every step's result and what the largest step keeps while it
    runs; multiply-accumulates are those of training and of evaluation.
    """
    size = sizes_of(recipe.model, context.family.skeleton(recipe.model))["size"]
    each = [one.step.needs(size, context) for one in planned]
    evaluated = (len(planned) + 1) * context.family.held_out(recipe.evaluate) * size["macs"]
    return Needs(
        memory=max(one.memory for one in each),
        disk=sum(one.disk for one in each),
        scratch=max(one.scratch for one in each),
        macs=sum(one.macs for one in each) + evaluated,
    )


def preflight(recipe: Recipe, context: Context, work: Path) -> None:
    """Say what will happen, and refuse what cannot end well.

    Raises:
        ConfigError: the calibration windows do not fit the model.
        InputError: the calibration images do not fit it.
        SetupError: too little memory or disk; the images cannot be fetched.
    """
    progress = context.progress
    if any(step.needs_data() for step in recipe.steps):
        context.samples(recipe.model)  # now, and not after an hour of training
    planned = plan(recipe.steps)
    needs = estimate(recipe, planned, context)
    needs = replace(needs, disk=needs.disk + needs.scratch)
    parent = work.parent
    while not parent.exists():
        parent = parent.parent
    disk, memory = shutil.disk_usage(parent).free, available_bytes()
    held = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    flops, _ = peak_flops(torch.device("cpu"), torch.float32)
    seconds = 2 * needs.macs / (USE * flops)
    names, checks = ([each.name for each in planned if each.guarded or not only] for only in (False, True))
    progress.note(
        f"{recipe.model} → {', '.join(names)} → {recipe.output}; the result of each step is kept in {work.name} "
        "beside it until the end"
    )
    progress.note(f"guard after {', '.join(checks) or 'no step'}: {_budget(recipe, context)}")
    progress.note(
        f"needs about {megabytes(needs.memory)} of memory and the activations ({megabytes(memory)} available), "
        f"{megabytes(needs.disk)} of disk ({megabytes(disk)} free; as much again for each repeat), and "
        f"{clock(seconds)} for training and evaluation without repeats: multiply-accumulates of all passes at "
        f"{USE:.0%} of the {flops / 1e9:.0f} GFLOP/s that a matrix product reached here"
    )
    if disk + held < needs.disk:
        raise SetupError(
            f"{parent} has {megabytes(disk)} free, the steps need {megabytes(needs.disk)}; free some space or set "
            "another output"
        )
    if 0 < memory < needs.memory:
        raise SetupError(
            f"{megabytes(memory)} of memory are available, the steps need about {megabytes(needs.memory)}; end other "
            "programs, or take a smaller model"
        )


def _budget(recipe: Recipe, context: Context) -> str:
    guard = recipe.guard
    few = "" if guard.accuracy_points == 1 else "s"
    points, cosine = f"{guard.accuracy_points:g} accuracy point{few}", f"a mean cosine {guard.similarity_loss:g}"
    said = {
        "accuracy": f"{points} less than",
        "agreement": f"{guard.accuracy_points:g} point{few} of agreement less than",
        "perplexity": f"{guard.perplexity_ratio:g} times the perplexity of",
        "similarity": f"{cosine} below that of",
        "score": f"a score {guard.score_loss:g} below that of",
    }
    metric = recipe.evaluate.metric
    quality = "accuracy" if recipe.evaluate.questions else context.family.quality
    most = said[quality if metric == "auto" else "score" if ".py:" in metric else metric]
    if metric == "auto" and quality == "similarity" and recipe.evaluate.source is not None:
        most = f"{points} (without classes {cosine}) below that of"
    against = "the model" if guard.against == "model" else "the result before"
    repeats = f", {plural(guard.retries, 'milder repeat')}"
    return (
        f"at most {most} {against}"
        + (repeats if any(step.weakens() for step in recipe.steps) else "")
        + f", otherwise {guard.otherwise}"
    )
