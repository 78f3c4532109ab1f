"""From a recipe to a checkpoint: prepares data, joins the world, checks memory, builds the trainer, resumes, trains,
exports."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn

from penjing.core.config import load_recipe
from penjing.core.errors import ConfigError, InputError, PenjingError
from penjing.core.files import publish_folder, writing
from penjing.core.models.moe import keep_out_of_graphs
from penjing.core.progress import Progress, Silent
from penjing.train.alarms import Alarms
from penjing.train.batch_size import fastest_micro_batch
from penjing.train.checkpoint import Checkpoints, ShardedCheckpoints
from penjing.train.data.prefetch import Prefetched
from penjing.train.flops import forward_flops, peak_flops
from penjing.train.gradients import GradientNorms
from penjing.train.loop import Evaluation, Trainer
from penjing.train.loss_scale import LossScale, initial_scale
from penjing.train.memory import MemoryEstimate, check_memory, estimate_memory, memory_limit
from penjing.train.monitor import Monitor, open_sinks
from penjing.train.optimizer import AveragedWeights, build_optimizer
from penjing.train.parallel.apply import check_recipe, form_mesh, gather, parallelize, share_of
from penjing.train.parallel.mesh import MeshWorld
from penjing.train.precision import (
    Precision,
    apply_environment,
    check_hardware,
    for_device,
    multiplies_bfloat16,
    slow_modes,
)
from penjing.train.profile import profiling
from penjing.train.recipe import RunRecipe, TrainRecipe, parse_size
from penjing.train.recompute import apply_recompute
from penjing.train.state import Tree
from penjing.train.summary import summary
from penjing.train.tasks import Task, build_task
from penjing.train.world import World, join_world


def train(
    recipe_path: Path,
    overrides: list[str] | None = None,
    *,
    resume: str = "never",
    force: bool = False,
    profile: bool = False,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Train as the recipe says and write its checkpoint; under torchrun, with all its processes.

    Args:
        overrides: `section.key=value` changes of the recipe.
        resume: "never", "auto" (the newest intact checkpoint of the run, if any) or the path of a training checkpoint.
        force: replace an existing output and run.
        profile: record a few steps with torch's profiler, under the run folder.

    Returns:
        The last evaluation: name → mean over the held-out data.

    Raises:
        PenjingError: see `core.errors`; one line that names the setting.
    """
    recipe = load_recipe(TrainRecipe, recipe_path, overrides)
    recipe = recipe.model_copy(update={"precision": apply_environment(recipe.precision)})
    return train_task(
        recipe,
        lambda progress: build_task(recipe, progress),
        resume=resume,
        force=force,
        profile=profile,
        progress=progress,
        command=f"penjing train {recipe_path}",
    )


def train_task(
    recipe: RunRecipe,
    build: Callable[[Progress], Task],
    *,
    command: str,
    resume: str = "never",
    force: bool = False,
    profile: bool = False,
    progress: Progress | None = None,
) -> dict[str, float]:
    """`train` for a task of the caller's own: distillation and quantization-aware training run the same loop.

    Args:
        build: makes the task, and its data, before processes join.
        command: what the exported checkpoint says made it.

    Returns:
        The last evaluation; the checkpoint lies in `recipe.output`.
    """
    began = time.perf_counter()
    is_main = os.environ.get("RANK", "0") == "0"
    progress = progress if progress is not None and is_main else Silent()
    try:
        _check_output(recipe, resume, force)
        check_recipe(recipe, int(os.environ.get("WORLD_SIZE", "1")))
        task = build(progress)
        with join_world(recipe.device) as world, _stop_signals() as stop_requested:
            run = _Run(recipe, task, form_mesh(world, recipe.parallel, progress), progress)
            return run.train(resume, force, profile, stop_requested, began, command)
    except PenjingError:
        if not is_main:
            time.sleep(20)  # the main process says the same first, and torchrun then ends this one
        raise


class _Run:
    def __init__(self, recipe: RunRecipe, task: Task, world: World, progress: Progress) -> None:
        self.recipe = recipe.model_copy(update={"precision": for_device(recipe.precision, world.device)})
        self.task = task
        self.world = world
        self.progress = progress
        check_hardware(recipe.precision, world.device)
        if slow := slow_modes(recipe.precision, world.device):
            progress.note(slow)

    def train(
        self, resume: str, force: bool, profile: bool, stop_requested: Callable[[], bool], began: float, command: str
    ) -> dict[str, float]:
        recipe, world = self.recipe, self.world
        checkpoints = Checkpoints(recipe.run_folder / "checkpoints", recipe.checkpoint.keep)
        if isinstance(world, MeshWorld):
            checkpoints = ShardedCheckpoints(checkpoints.folder, checkpoints.keep, world)
        if world.is_main and force and resume == "never" and recipe.run_folder.exists():
            shutil.rmtree(recipe.run_folder)
        world.barrier()
        saved = self._find(checkpoints, resume)
        micro_batch = self._micro_batch(None if saved is None else saved[1]["run"]["micro_batch"])
        model = self._model()
        if saved is None:
            self.task.initialize(model)
        model = model.to(world.device)
        if recipe.compile:
            keep_out_of_graphs()
            model.compile()
        with ExitStack() as stack:
            trainer = self._trainer(
                model, micro_batch, checkpoints, stop_requested, stack, 0 if saved is None else saved[0]
            )
            if saved is not None:
                trainer.load_state_dict(saved[1])
                seconds = time.perf_counter() - began
                self.progress.note(
                    f"resumed from {checkpoints.path(saved[0])} (step {saved[0]}); recovered in {seconds:.1f} s"
                )
            if profile:
                step = stack.enter_context(profiling(recipe.run_folder / "profile", world, self.progress))
                trainer.after_update = (*trainer.after_update, step)
            results = trainer.fit()
        if trainer.average is not None:
            trainer.average.exchange()
        self._export(trainer.model, force or resume != "never", command, results)
        world.barrier()
        seconds = time.perf_counter() - began
        self.progress.note(
            summary(
                recipe.output,
                recipe.run_folder,
                recipe.steps,
                seconds,
                trainer.monitor,
                self.task.unit,
                results,
                self.task.next_command(recipe.output),
            )
        )
        return results

    def _trainer(
        self,
        model: nn.Module,
        micro_batch: int,
        checkpoints: Checkpoints,
        stop_requested: Callable[[], bool],
        stack: ExitStack,
        first_step: int,
    ) -> Trainer:
        recipe, world, task = self.recipe, self.world, self.task
        stream = Prefetched(task.stream(micro_batch, world.data), recipe.data.prefetch, pin=world.device.type == "cuda")
        stack.callback(stream.close)
        evaluation = None
        if recipe.evaluation.every:
            every = recipe.evaluation.every
            evaluation = Evaluation(lambda: task.held_out(micro_batch, world.data), task.objective.evaluation(), every)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        scale = recipe.precision.loss_scale or initial_scale(num_parameters)
        monitor = self._monitor(model, first_step)
        stack.callback(monitor.close)
        spread = parallelize(model, world)
        model, data_size = spread.model, world.data.size
        self.progress.note(
            f"{num_parameters:,} parameters, {world.size} process{'es' if world.size > 1 else ''} on "
            f"{world.device.type}, "
            f"batch {recipe.data.batch_size} = {data_size} × {micro_batch} × "
            f"{recipe.data.batch_size // (micro_batch * data_size)} accumulated, {recipe.precision.mode}"
        )
        return Trainer(
            model=model,
            objective=task.objective,
            stream=stream,
            optimizer=build_optimizer(model, recipe.optimizer, recipe.learning_rate.peak),
            steps=recipe.steps,
            rate=recipe.learning_rate,
            accumulation=recipe.data.batch_size // (micro_batch * data_size),
            seed=recipe.seed,
            world=world,
            precision=Precision(model, recipe.precision, world.device),
            norms=GradientNorms(recipe.clip),
            loss_scale=LossScale(scale, recipe.precision.loss_scale_window, enabled=False),
            average=None if recipe.average is None else AveragedWeights(model, recipe.average),
            checkpoints=checkpoints,
            checkpoint_every=recipe.checkpoint.every,
            monitor=monitor,
            evaluation=evaluation,
            pipeline=spread.pipeline,
            after_backward=spread.after_backward,
            after_update=task.after_update(model, world),
            stop_requested=stop_requested,
            settings={"micro_batch": micro_batch},
        )

    def _monitor(self, model: nn.Module, first_step: int) -> Monitor:
        recipe, world = self.recipe, self.world
        if not world.is_main:
            # Only the main process may stop the run for what it alone sees; losses are the same everywhere.
            same = recipe.alarms.model_copy(update={"gpu_use": "off", "memory": "off", "io_wait": "off"})
            return Monitor(Alarms(same), every=recipe.monitor.every, device=world.device, unit=self.task.unit)
        example = {name: tensor.to(world.device) for name, tensor in self.task.example(1).items()}
        # Of the plain objective: a teacher's passes are no work of this model.
        flops = forward_flops(model, self.task.objective.evaluation(), example) / self.task.objective.count(example)
        # Without instructions for 16 bits the ceiling is float32's, and measuring the other would take a minute.
        half = recipe.precision.mode in ("bf16", "fp16", "hybrid") and multiplies_bfloat16(world.device)
        peak, origin = peak_flops(world.device, torch.bfloat16 if half else torch.float32)
        self.progress.note(
            f"MFU counts {3 * flops:.3g} FLOP/{self.task.unit[:-1]} against {peak:.3g} FLOP/s ({origin})"
        )
        with writing(recipe.run_folder):
            recipe.run_folder.mkdir(parents=True, exist_ok=True)
        return Monitor(
            Alarms(recipe.alarms),
            open_sinks(recipe.run_folder, recipe.monitor, first_step),
            every=recipe.monitor.every,
            activations_every=recipe.monitor.activations_every,
            device=world.device,
            unit=self.task.unit,
            flops_per_unit=flops,
            peak_flops=peak * world.size,
            progress=self.progress,
        )

    def _find(self, checkpoints: Checkpoints, resume: str) -> tuple[int, Tree] | None:
        if resume == "never":
            return None
        if resume == "auto":
            return checkpoints.load_newest(self.progress.note)
        return Checkpoints.load(Path(resume))

    def _model(self) -> nn.Module:
        model = self.task.build_model()
        apply_recompute(model, self.recipe.memory.recompute, self.recipe.memory.recompute_rules)
        return model

    def _estimate(self, micro_batch: int) -> MemoryEstimate:
        recipe, world = self.recipe, self.world

        def build() -> nn.Module:
            with world.device:  # tensors without data cannot be moved
                model = self._model()
            Precision(model, recipe.precision, world.device)
            return model

        estimate = estimate_memory(
            build,
            self.task.objective,
            {name: tensor.to(world.device) for name, tensor in self.task.example(micro_batch).items()},
            optimizer=recipe.optimizer.name,
            averaged=recipe.average is not None,
            replicated=world.size > 1,
        )
        return share_of(estimate, world)

    def _micro_batch(self, saved: int | None) -> int:
        """The micro-batch of the run, once for all processes; refuses what cannot fit."""
        recipe, world = self.recipe, self.world
        parts = world.data.size
        if recipe.data.batch_size % parts:
            sharing = f"{parts} processes" if parts == world.size else f"{parts} groups of processes (parallel.dp)"
            raise ConfigError(
                f"data.batch_size={recipe.data.batch_size} is not a multiple of the {sharing}; "
                f"take {recipe.data.batch_size // parts * parts or parts}"
            )
        share = recipe.data.batch_size // parts
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        limit = parse_size(recipe.memory.limit) if recipe.memory.limit else memory_limit(world.device, num_local)
        wanted = recipe.data.micro_batch
        if wanted == "auto" and saved is None:
            micro_batch = fastest_micro_batch(
                self.task, self._model, self._estimate, share, limit, recipe, world, self.progress
            )
        else:
            micro_batch = saved if wanted == "auto" and saved is not None else int(wanted or share)
        estimate = self._estimate(min(micro_batch, share))
        self.progress.note(str(estimate))
        check_memory(estimate, limit)
        return micro_batch

    def _export(self, model: nn.Module, replace: bool, command: str, results: dict[str, float]) -> None:
        if isinstance(self.world, MeshWorld):
            model = gather(model, self.world, self.task.build_model if self.world.is_main else None)
        if not self.world.is_main:
            return
        created_by = {
            "command": command,
            "recipe": self.recipe.model_dump(mode="json"),
            "evaluation": results,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }
        with publish_folder(self.recipe.output, replace=replace) as partial:
            self.task.export(model, partial, created_by)


def _check_output(recipe: RunRecipe, resume: str, force: bool) -> None:
    if resume == "never" and not force:
        if (recipe.output / "penjing.json").exists():
            raise InputError(
                f"output {recipe.output} already exists; replace it with --force, or choose another output"
            )
        if any((recipe.run_folder / "checkpoints").glob("step-*")):
            raise InputError(
                f"{recipe.run_folder} holds checkpoints of an earlier run; "
                "go on with --resume auto, or start again with --force"
            )


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Turn the first SIGTERM or SIGINT into a request that the loop sees; a second SIGINT interrupts at once."""
    asked: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
