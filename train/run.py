"""From a recipe to a checkpoint: prepares data, joins the world, checks memory, builds the trainer, resumes, trains,
exports."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from penjing.core.files import publish_folder, writing
from penjing.core.progress import Progress, Silent
from penjing.core.work import empty
from penjing.train.batch_size import Cut, fastest_micro_batch, recut, repeats
from penjing.train.checks import check_machine, check_schedule, claimed_output, with_steps
from penjing.train.data.prefetch import Prefetched
from penjing.train.families.base import KeepingTask, MixedTask, ShowingTask, Task, build_task
from penjing.train.loop import Evaluation, Trainer
from penjing.train.monitor.alarms import Alarms
from penjing.train.monitor.flops import model_flops, peak_flops
from penjing.train.monitor.gpu import gpu_use
from penjing.train.monitor.memory import memory_limit
from penjing.train.monitor.monitor import Monitor, open_sinks
from penjing.train.monitor.summary import summary
from penjing.train.numerics.compiled import compile_model
from penjing.train.numerics.precision import (
    Precision,
    apply_environment,
    for_devices,
    multiplies_bfloat16,
    slow_modes,
)
from penjing.train.numerics.recompute import apply_recompute
from penjing.train.objective.objective import Batch
from penjing.train.optim.clip import GradientNorms
from penjing.train.optim.loss_scale import LossScale, initial_scale
from penjing.train.optim.optimizer import AveragedWeights, build_optimizer, freeze
from penjing.train.parallel.mesh import MeshWorld
from penjing.train.parallel.profile import profiling
from penjing.train.parallel.shard import gather_in
from penjing.train.parallelize import Parallelized, form_mesh, gather, measured, parallelize
from penjing.train.plan.estimate import MemoryEstimate, check_memory, estimate_memory, share_of
from penjing.train.plan.preflight import check_run
from penjing.train.processes.devices import can_pin, with_buffers_on
from penjing.train.processes.marks import Marked
from penjing.train.processes.stop import stop_signals
from penjing.train.processes.watch import watching
from penjing.train.processes.world import World, join_world
from penjing.train.recipe.load import load_train_recipe
from penjing.train.recipe.recipe import RunRecipe, parse_size
from penjing.train.shares import unlike_shares
from penjing.train.state.best import Best
from penjing.train.state.checkpoint import Checkpoints, ShardedCheckpoints
from penjing.train.state.initial import fill_weights, materialize, without_data
from penjing.train.state.resume import find_state
from penjing.train.state.state import Tree


def train(
    recipe_path: Path,
    overrides: list[str] | None = None,
    *,
    resume: str = "never",
    accept_changes: bool = False,
    force: bool = False,
    profile: bool = False,
    until: int | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Train as the recipe says and write its checkpoint; under torchrun, with all its processes.

    Args:
        overrides: `section.key=value` changes of the recipe.
        resume: "never", "auto" (the newest intact checkpoint of the run, if any) or the path of a training checkpoint.
        accept_changes: resume although the recipe's settings are not those of the state (see state/resume.py).
        force: replace an existing output and run.
        profile: record a few steps with torch's profiler, under the run folder.
        until: pause after this step, evaluated and saved, for `resume` to go on from; no checkpoint is written then.

    Returns:
        The last evaluation: name → mean over the held-out data.

    Raises:
        PenjingError: see `core.errors`; one line that names the setting.
    """
    recipe = load_train_recipe(recipe_path, overrides)
    recipe = recipe.model_copy(update={"precision": apply_environment(recipe.precision)})
    return train_task(
        recipe,
        lambda progress: build_task(recipe, progress),
        resume=resume,
        accept_changes=accept_changes,
        force=force,
        profile=profile,
        until=until,
        progress=progress,
        command=f"penjing train {recipe_path}",
    )


def train_task(
    recipe: RunRecipe,
    build: Callable[[Progress], Task],
    *,
    command: str,
    resume: str = "never",
    accept_changes: bool = False,
    force: bool = False,
    profile: bool = False,
    until: int | None = None,
    progress: Progress | None = None,
    interim: bool = False,
) -> dict[str, float]:
    """`train` for a task of the caller's own: distillation and quantization-aware training run the same loop.

    Args:
        build: makes the task, and its data, before processes join.
        command: what the exported checkpoint says made it.
        interim: the caller takes the checkpoint from `recipe.output`, and removes it and the run.

    Returns:
        The last evaluation; the checkpoint lies in `recipe.output`.
    """
    began = time.perf_counter()
    is_main = os.environ.get("RANK", "0") == "0"
    progress = progress if progress is not None and is_main else Silent()
    with watching(recipe.parallel.timeout) as watch, claimed_output(recipe, resume, force, is_main):
        check_machine(recipe, int(os.environ.get("WORLD_SIZE", "1")), is_new=resume == "never")
        task = build(progress if watch is None else Marked(progress, watch))
        recipe = with_steps(recipe, task)
        with join_world(recipe.device, watch) as world, stop_signals() as stop_requested:
            run = _Run(recipe, task, form_mesh(world, measured(recipe, world, progress), progress), progress, interim)
            return run.train(resume, accept_changes, force, profile, until, stop_requested, began, command)


class _Run:
    def __init__(self, recipe: RunRecipe, task: Task, world: World, progress: Progress, interim: bool = False) -> None:
        able = world.sum(torch.tensor(float(multiplies_bfloat16(world.device))))  # "auto" is the same in all processes
        self.recipe = recipe.model_copy(update={"precision": for_devices(recipe.precision, bool(able == world.size))})
        self.asked, self.interim = recipe, interim
        self.task, self.world, self.progress = task, world, progress
        if slow := slow_modes(recipe.precision, world.device):
            progress.note(slow)

    def train(
        self,
        resume: str,
        accept_changes: bool,
        force: bool,
        profile: bool,
        until: int | None,
        stop_requested: Callable[[], bool],
        began: float,
        command: str,
    ) -> dict[str, float]:
        recipe, world = self.recipe, self.world
        checkpoints = self._checkpoints("checkpoints", recipe.checkpoint.keep)
        if world.is_main and force and resume == "never" and recipe.run_folder.exists():
            empty(recipe.run_folder)
        world.barrier()
        world.at("reading the checkpoint to resume from")
        saved = find_state(checkpoints, resume, recipe, self.asked, accept_changes, self.progress.note)
        if world.is_main and saved is None:  # a run that was killed before its first state may have left some
            shutil.rmtree(recipe.run_folder / "best", ignore_errors=True)
        cut, largest = self._cut(None if saved is None else saved[1]["run"])
        world.at("building the model")
        spread = self._spread(is_new=saved is None)
        with ExitStack() as stack:
            trainer = self._trainer(spread, cut, checkpoints, stop_requested, stack, 0 if saved is None else saved[0])
            kept = {"micro_batch": largest, "shares": cut.shares, "recipe": recipe.model_dump(mode="json")}
            trainer.settings, trainer.pause_at = kept, until
            if saved is not None:
                trainer.load_state_dict(saved[1])
                trainer.monitor.on_resume(checkpoints.path(saved[0]), saved[0], time.perf_counter() - began)
            if profile:
                step = stack.enter_context(profiling(recipe.run_folder / "profile", world, self.progress))
                trainer.after_update = (*trainer.after_update, step)
            results = trainer.fit()
        if not trainer.is_complete:
            self.progress.note(f"paused after step {trainer.step} of {recipe.steps}; --resume auto goes on from there")
            return results
        world.at("writing the trained model")
        if trainer.average is not None:
            trainer.average.exchange()
        self._export(trainer.model, force or resume != "never", command, results)
        world.barrier()
        seconds = time.perf_counter() - began
        said = summary(
            recipe.output, recipe.run_folder, trainer.step, seconds, trainer.monitor, self.task.unit, results,
            self.task.next_command(recipe.output), self.interim,
        )  # fmt: skip
        self.progress.note(said)
        return results

    def _trainer(
        self,
        spread: Parallelized,
        cut: Cut,
        checkpoints: Checkpoints,
        stop_requested: Callable[[], bool],
        stack: ExitStack,
        first_step: int,
    ) -> Trainer:
        recipe, world, task = self.recipe, self.world, self.task
        micro_batch = cut.micro_batch
        stream = Prefetched(task.stream(micro_batch, world.data), recipe.data.prefetch, pin=can_pin(world.device))
        stack.callback(stream.close)
        if said := repeats(recipe.data.batch_size, stream.state_dict().get("num_samples")):
            self.progress.note(said)
        evaluation = best = None
        if every := recipe.evaluation.every:
            evaluation = Evaluation(lambda: task.held_out(micro_batch, world.data), task.objective.evaluation(), every)
            if isinstance(task, ShowingTask):
                evaluation = replace(evaluation, show=task.samples(spread.model, world))
            if isinstance(task, MixedTask):
                parts = task.held_out_parts(micro_batch, world.data)
                evaluation = replace(evaluation, parts=parts, hear=partial(task.hear, stream))
            judged = recipe.evaluation
            if judged.best or judged.patience:
                kept = self._checkpoints("best", 2) if judged.best else None  # a run may go on from before the newest
                best = Best(judged.metric, judged.goal, judged.patience, kept)
        model, num_parameters = spread.model, spread.num_parameters
        scale = recipe.precision.loss_scale or initial_scale(num_parameters)
        monitor = self._monitor(first_step)
        stack.callback(monitor.close)
        self.progress.note(
            f"{num_parameters:,} parameters, {world.size} process{'es' if world.size > 1 else ''} on "
            f"{world.device.type}, {cut}, {recipe.precision.mode}"
        )
        return Trainer(
            model=model,
            objective=task.objective,
            stream=stream,
            optimizer=build_optimizer(model, recipe.optimizer, recipe.learning_rate.peak),
            steps=recipe.steps,
            rate=recipe.learning_rate,
            accumulation=cut.accumulation,
            shares=unlike_shares(recipe.parallel, world, stream, cut.batch_size, micro_batch, self.progress.note),
            size=self._size,
            seed=recipe.seed,
            world=world,
            precision=Precision(model, recipe.precision, world.device, gather_in),
            norms=GradientNorms(recipe.clip),
            loss_scale=LossScale(scale, recipe.precision.loss_scale_window, enabled=False),
            average=None if recipe.average is None else AveragedWeights(model, recipe.average),
            checkpoints=checkpoints,
            checkpoint_every=recipe.checkpoint.every,
            monitor=monitor,
            evaluation=evaluation,
            best=best,
            pipeline=spread.pipeline,
            after_backward=spread.after_backward,
            after_update=task.after_update(model, world),
            stop_requested=stop_requested,
        )

    @property
    def _size(self) -> Callable[[Batch], int] | None:
        """Of a model of text the rates count all tokens that it computes, also those that are no target."""
        return (lambda batch: batch["tokens"].numel()) if self.task.unit == "tokens" else None

    def _checkpoints(self, name: str, keep: int) -> Checkpoints:
        """Checkpoints in a folder of the run."""
        folder, world = self.recipe.run_folder / name, self.world
        if isinstance(world, MeshWorld):
            return ShardedCheckpoints(folder, keep, world, self.recipe.parallel.timeout)
        return Checkpoints(folder, keep, world)

    def _monitor(self, first_step: int) -> Monitor:
        recipe, world = self.recipe, self.world
        if not world.is_main:
            # Only the main process may stop the run for what it alone sees; losses are the same everywhere.
            same = recipe.alarms.model_copy(update={"gpu_use": "off", "memory": "off", "io_wait": "off"})
            return Monitor(Alarms(same), every=recipe.monitor.every, device=world.device, unit=self.task.unit)
        example = {name: tensor.to(world.device) for name, tensor in self.task.example(1).items()}
        # Of the plain objective: a teacher's passes are no work of this model.
        flops = model_flops(self._model_on_device, self.task.objective.evaluation(), example)
        flops /= (self._size or self.task.objective.count)(example)
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
            gpu_use=gpu_use(world.device, recipe.alarms.gpu_use, self.progress.note),
            waited="io_wait" if recipe.data.prefetch else "rollout_share",
        )

    def _spread(self, *, is_new: bool) -> Parallelized:
        """The model, each process's part of it, with the weights that a new run begins with."""
        weights = self.task.weights()
        with nullcontext() if weights is None else without_data():
            model = self._model(compiled=self.recipe.compile)
        if weights is None:
            if is_new:
                self.task.initialize(model)
            model = model.to(self.world.device)
        spread = parallelize(model, self.world, self.progress.note)
        if weights is not None:
            materialize(spread.model, self.world.device)
            if is_new:
                fill_weights(spread.model, weights)
        return spread

    def _model_on_device(self) -> nn.Module:
        with self.world.device:  # tensors without data cannot be moved
            return with_buffers_on(self.world.device, self._model())

    def _model(self, *, compiled: bool = False) -> nn.Module:
        """As the task makes it, with what is frozen, compiled and recomputed."""
        model = self.task.build_model()
        freeze(model, self.recipe.freeze, self.recipe.optimizer.groups)
        memory = self.recipe.memory
        if compiled:
            compile_model(model, is_shared=isinstance(self.world, MeshWorld), recompute=memory.kinds != {"none"})
        apply_recompute(model, memory.recompute, memory.recompute_rules)
        return model

    def _estimate(self, micro_batch: int) -> MemoryEstimate:
        recipe, world = self.recipe, self.world

        def build() -> nn.Module:
            model = self._model_on_device()
            Precision(model, recipe.precision, world.device)
            return model

        estimate = estimate_memory(
            build, self.task.objective,
            {name: tensor.to(world.device) for name, tensor in self.task.example(micro_batch).items()},
            optimizer=recipe.optimizer.name, averaged=recipe.average is not None, replicated=world.size > 1,
        )  # fmt: skip
        if isinstance(self.task, KeepingTask):
            estimate = replace(estimate, beside=self.task.kept_bytes(world))
        return share_of(estimate, world, getattr(recipe, "model", None))

    def _cut(self, saved: Tree | None) -> tuple[Cut, int]:
        """How steps are cut, the same in all processes, and the largest micro-batch that a resumed run may take;
        refuses what cannot fit. `saved`: the settings of the run that goes on, whose batch may have been shared by
        another number of processes."""
        recipe, world = self.recipe, self.world
        batch, wanted, parts = recipe.data.batch_size, recipe.data.micro_batch, world.data.size
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        limit = parse_size(recipe.memory.limit) if recipe.memory.limit else memory_limit(world.device, num_local)
        if saved is not None:
            largest = int(wanted) if isinstance(wanted, int) else int(saved["micro_batch"])
            cut = recut(batch, parts, largest, recipe.parallel.micro_batches or 1)
            check_schedule(recipe, cut)
            if (before := saved.get("shares", parts)) != parts:
                self.progress.note(f"planned anew: data parallelism {before} → {parts}, {cut}")
            data = recipe.data.model_copy(update={"batch_size": cut.filled, "micro_batch": cut.micro_batch})
            check_run(recipe.model_copy(update={"data": data}), world.size, limit)
        else:
            check_run(recipe, world.size, limit)
            share = batch // parts
            if wanted == "auto":
                largest = fastest_micro_batch(
                    self.task, self._model, self._estimate, recipe.parallel.default_micro_batch(share), limit, recipe,
                    world, self.progress,
                )  # fmt: skip
            else:
                largest = int(wanted or recipe.parallel.default_micro_batch(share))
            cut = Cut(batch, parts, largest).check()
        estimate = self._estimate(cut.micro_batch)
        self.progress.note(str(estimate))
        check_memory(estimate, limit)
        return cut, largest

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
