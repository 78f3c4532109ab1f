"""Before the first step: what a run will read and write, and about how much memory, disk and time it takes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from penjing.compress.measure.cost import size_of
from penjing.compress.measure.data import open_data
from penjing.compress.recipe import FlowRecipe, Planned, Prune, plan
from penjing.compress.steps.distill import TrainingStep
from penjing.core.errors import SetupError
from penjing.core.memory import available_bytes
from penjing.core.progress import Progress, clock, megabytes
from penjing.train.monitor.flops import peak_flops

USE = 0.4  # of the rate of a large matrix product: training reached 0.3 to 0.6 of it, SmolLM2 with its teacher 0.6
TRAINING, FORWARD = 3, 1  # passes' worth of multiply-accumulates


@dataclass(frozen=True)
class Needs:
    """Estimates from shapes: bytes, and multiply-accumulates by what they are for."""

    memory_bytes: int
    disk_bytes: int
    training_macs: int
    evaluation_macs: int

    def seconds(self, flops: float) -> float:
        """Time at a share `USE` of `flops` (floating-point operations a second; a multiply-accumulate is two)."""
        return 2 * (self.training_macs + self.evaluation_macs) / (USE * flops)


def estimate(recipe: FlowRecipe, planned: list[Planned]) -> Needs:
    """What the steps take if none is repeated; pruned networks are counted at full size.

    Memory: weights, gradients and two moments of the student in float32, and the teacher's weights; activations come
    on top. Disk: every step's checkpoint and the training state of the step that runs. Time: samples × passes ×
    multiply-accumulates of the model.
    """
    size = size_of(recipe.model)["size"]
    weights = 4 * size["parameters"]
    trains = [each.step for each in planned if not isinstance(each.step, Prune)]
    teachers = sum(step.kind == "distill" for step in trains)
    passes = sum(_samples(step, size["macs_per"]) * (TRAINING + (step.kind == "distill") * FORWARD) for step in trains)
    evaluated = recipe.evaluate.images
    if size["macs_per"] == "token":
        evaluated = recipe.evaluate.prose_tokens + recipe.evaluate.code_tokens
    return Needs(
        memory_bytes=weights * (4 + bool(teachers) if trains else 2),
        disk_bytes=len(planned) * size["bytes"] + (4 * weights if trains else 0),
        training_macs=passes * size["macs"],
        evaluation_macs=(len(planned) + 1) * evaluated * size["macs"],
    )


def _samples(step: TrainingStep, unit: str) -> int:
    """Images or tokens that a training step sees."""
    return step.steps * step.batch_size * (step.sequence_length if unit == "token" else 1)


def flow_preflight(recipe: FlowRecipe, work: Path, progress: Progress) -> None:
    """Say what will happen, and refuse what cannot end well.

    Raises:
        ConfigError: the calibration windows do not fit the model.
        InputError: the calibration images do not fit it.
        SetupError: too little memory or disk; the images cannot be fetched.
    """
    if any(isinstance(step, Prune) and step.needs_data() for step in recipe.steps):
        open_data(recipe.model, recipe.calibrate, progress)  # now, and not after an hour of training
    planned = plan(recipe.steps)
    needs = estimate(recipe, planned)
    parent = work.parent
    while not parent.exists():
        parent = parent.parent
    disk, memory = shutil.disk_usage(parent).free, available_bytes()
    held = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    flops, _ = peak_flops(torch.device("cpu"), torch.float32)
    names, checks = ([each.name for each in planned if each.guarded or not only] for only in (False, True))
    progress.note(
        f"{recipe.model} → {', '.join(names)} → {recipe.output}; the checkpoint of each step is kept in {work.name} "
        "beside it until the end"
    )
    progress.note(f"guard after {', '.join(checks) or 'no step'}: {_budget(recipe)}")
    progress.note(
        f"needs about {megabytes(needs.memory_bytes)} of memory and the activations ({megabytes(memory)} available), "
        f"{megabytes(needs.disk_bytes)} of disk ({megabytes(disk)} free; as much again for each repeat), and "
        f"{clock(needs.seconds(flops))} without repeats: multiply-accumulates of all passes at {USE:.0%} of the "
        f"{flops / 1e9:.0f} GFLOP/s that a matrix product reached just now"
    )
    if disk + held < needs.disk_bytes:
        raise SetupError(
            f"{parent} has {megabytes(disk)} free, the steps need {megabytes(needs.disk_bytes)}; free some space or "
            "set another output"
        )
    if 0 < memory < needs.memory_bytes:
        raise SetupError(
            f"{megabytes(memory)} of memory are available, the steps need about {megabytes(needs.memory_bytes)}; end "
            "other programs, or take a smaller model"
        )


def _budget(recipe: FlowRecipe) -> str:
    guard = recipe.guard
    against = "the model" if guard.against == "model" else "the result before"
    return (
        f"at most {guard.accuracy_points:g} accuracy points or {guard.perplexity_ratio:g} times the perplexity of "
        f"{against}, {guard.retries} milder repeats, then {guard.otherwise}"
    )
