"""The loop: it wires model, objective, stream, precision, optimiser, checkpoints and monitor, and knows none of them
closely.

One step: fetch the micro-batches, count their terms over the world, backward each with the loss divided by that
count, reduce in the last, measure the norm, clip, update. So an update depends on the samples of the step alone, not
on how they were cut. All randomness of a step comes from (seed, step, rank), so there is no generator state to save.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from penjing.core.errors import InputError
from penjing.train.data.order import step_seed
from penjing.train.data.stream import Stream, refuse_nonfinite
from penjing.train.monitor.alarms import AlarmConfig, Alarms
from penjing.train.monitor.monitor import ActivationRanges, Monitor
from penjing.train.numerics.gradients import gradients_of, scale_gradients
from penjing.train.numerics.precision import Precision, PrecisionConfig
from penjing.train.objective.objective import Batch, Loss, Objective, WholeStep
from penjing.train.objective.totals import add, means
from penjing.train.optim.clip import ClipConfig, GradientNorms
from penjing.train.optim.loss_scale import LossScale
from penjing.train.optim.optimizer import AveragedWeights, load_optimizer_state, optimizer_state, set_learning_rate
from penjing.train.optim.schedule import LearningRate
from penjing.train.processes.stop import InterruptedRunError
from penjing.train.processes.world import World
from penjing.train.shares import Shares
from penjing.train.state.best import Best
from penjing.train.state.checkpoint import Checkpoints
from penjing.train.state.state import Tree, load_model_state, model_state

if TYPE_CHECKING:  # torch.distributed.pipelining imports the whole compiler
    from penjing.train.pipeline.pipeline import Pipeline

K = TypeVar("K")


@dataclass(frozen=True)
class Evaluation:
    """Held-out data, `batches()` being this process's share of one pass, judged by `objective` every `every` steps.

    Attributes: parts: the same data in parts with names, whose losses are told too, as "loss/NAME". hear: called with
        the results of evaluations between two steps; gives values to record. show: called with the step's number
        before each evaluation between two steps, also the last one: shows what the model makes of something.
    """

    batches: Callable[[], Iterable[Batch]]
    objective: Objective
    every: int
    parts: Mapping[str, Callable[[], Iterable[Batch]]] = field(default_factory=dict)
    hear: Callable[[dict[str, float]], dict[str, float]] | None = None
    show: Callable[[int], None] | None = None


@dataclass
class Trainer:
    """A run. The first five fields are needed; the others do nothing special by default.

    Attributes: accumulation: micro-batches of one step in each process. shares: gives each its own number instead, by
        its speed. size: how many units of the monitor's rates a batch holds; by default as many as its loss counts.
        pipeline: runs `model`, the stages of this process, with those of others. after_backward: called when the
        gradients of a step are summed, to finish what is left of that. after_update: called with the step's number
        (from 1) after each update: proximal steps, router biases, profilers. stop_requested: asked once a step; when
        true in any process, all save and stop. pause_at: the step at which `fit` returns, evaluated and saved, though
        there are more. best: judges evaluations, may end the run, and has the weights that it ends with. settings:
        plain values that a resumed run wants to know, saved as "run". step: updates done so far.
    """

    model: nn.Module
    objective: Objective
    stream: Stream
    optimizer: torch.optim.Optimizer
    steps: int
    rate: LearningRate = field(default_factory=LearningRate)
    accumulation: int = 1
    shares: Shares | None = None
    size: Callable[[Batch], int] | None = None
    seed: int = 0
    world: World = field(default_factory=World)
    precision: Precision | None = None
    norms: GradientNorms = field(default_factory=lambda: GradientNorms(ClipConfig(norm=None)))
    loss_scale: LossScale = field(default_factory=lambda: LossScale(enabled=False))
    average: AveragedWeights | None = None
    checkpoints: Checkpoints | None = None
    checkpoint_every: int = 1000
    monitor: Monitor = field(default_factory=lambda: Monitor(Alarms(AlarmConfig())))
    evaluation: Evaluation | None = None
    best: Best | None = None
    pipeline: Pipeline | None = None
    after_backward: tuple[Callable[[], None], ...] = ()
    after_update: tuple[Callable[[int], None], ...] = ()
    stop_requested: Callable[[], bool] = lambda: False
    pause_at: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    step: int = 0

    def __post_init__(self) -> None:
        if self.precision is None:
            self.precision = Precision(self.model, PrecisionConfig(), self.world.device)

    def fit(self) -> dict[str, float]:
        """Train up to `steps`, or until `best` says that it is over, then evaluate; the result is that evaluation's
        (empty without one), or the best one's where the weights go back to it. `pause_at` ends it before that.

        Raises:
            InterruptedRunError: a stop was requested; the state is saved.
            AlarmError: an alarm stopped the run.
            InputError: the data hold NaN, or nothing to learn from.
            SetupError: a checkpoint could not be written.
        """
        replica = self.world.replicate(self.model)
        self.model.train()
        self.monitor.start(self.step, self.steps)
        results: dict[str, float] = {}
        end = min(self.steps, self.pause_at or self.steps)
        try:
            while self.step < end and not self.is_complete:
                stop = self._advance(replica)
                last = self.step == end
                if self.evaluation is not None:
                    due = self.step == self.steps or self.step % self.evaluation.every == 0
                    if due or last:
                        results = self._tell(self.evaluation)
                    if due:  # what a pause evaluates besides changes nothing of the run
                        if self.evaluation.hear is not None:
                            self.monitor.on_values(self.step, self.evaluation.hear(results))
                        last |= self._judge_step(results)
                if stop or last or self.step % self.checkpoint_every == 0:
                    self.save(wait=stop or last)
                if stop and not last:
                    raise InterruptedRunError(f"stopped at step {self.step} as asked; --resume auto goes on from there")
            if not results and self.evaluation is not None:  # a run that was complete already
                results = self.evaluate()
        finally:
            for checkpoints in (self.checkpoints, None if self.best is None else self.best.checkpoints):
                if checkpoints is not None:
                    checkpoints.wait()
        return (self._return_to_best() if self.is_complete else {}) or results

    @property
    def is_complete(self) -> bool:
        """Whether no step is left, or `best` says that the run is over."""
        return self.step >= self.steps or (self.best is not None and self.best.is_over)

    def _tell(self, evaluation: Evaluation) -> dict[str, float]:
        """Show and evaluate the model between two steps, and record what comes out."""
        if evaluation.show is not None:
            self.world.at(f"the samples after step {self.step}")
            paused_at = self.monitor.pause()
            evaluation.show(self.step)
            self.monitor.resume(paused_at)
        results = self.evaluate()
        self.monitor.on_values(self.step, {f"eval/{name}": value for name, value in results.items()})
        return results

    def _judge_step(self, results: dict[str, float]) -> bool:
        """Keep the weights where this evaluation is the best; True when there has been none for too long."""
        if self.best is None:
            return False
        if self.best.judge(self.step, results) and self.best.checkpoints is not None:
            self._save(self.best.checkpoints, self._weights(), wait=False)
        if self.best.is_over and self.step < self.steps:
            self.monitor.note(
                f"step {self.step}: no evaluation since step {self.best.step} was better, and patience is over"
            )
        return self.best.is_over

    def _return_to_best(self) -> dict[str, float]:
        """Give the model the weights of the best evaluation, if they are kept; its results."""
        if self.best is None or self.best.checkpoints is None or not self.best.results:
            return {}
        self.world.barrier()  # the main process has written what all read
        _, state = self.best.checkpoints.load(self.best.checkpoints.path(self.best.step), self.world)
        load_model_state(self.model, state["model"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.monitor.note(f"the weights are those of step {self.best.step}, of the best evaluation")
        return self.best.results

    def _advance(self, replica: nn.Module) -> bool:
        """One step; True when some process was asked to stop."""
        assert self.precision is not None
        torch.manual_seed(step_seed(self.seed, self.step, self.world.data.rank))
        self.precision.switch(self.step, self.steps)
        self.loss_scale.enabled = self.precision.scales_loss
        set_learning_rate(self.optimizer, rate := self.rate.at(self.step, self.steps))
        began = time.perf_counter()
        self.world.at(f"step {self.step + 1}, reading its data")
        own = self.accumulation if self.shares is None else self.shares.own
        micro_batches = [self.world.part(next(self.stream)) for _ in range(own)]
        waited_s = time.perf_counter() - began
        self.world.at(f"step {self.step + 1}")
        count, size = self._count(micro_batches)
        watch = self.monitor.activations_every and self.step % self.monitor.activations_every == 0
        with ActivationRanges(self.model if watch else None) as ranges:
            sums = self._backward(replica, micro_batches, count)

        for hook in self.after_backward:
            hook()
        gradients = gradients_of(self.model.parameters())
        scale = self.loss_scale.value
        norm = float(self.world.global_norm(self.model)) / scale
        flags = {"_stop": float(self.stop_requested()), "_nonfinite": float(not math.isfinite(norm))}
        totals = self._sum_over_world(self._share(sums) | flags)
        stop, nonfinite = totals.pop("_stop") > 0, totals.pop("_nonfinite") > 0
        limit = self.norms.limit()
        outlier = False
        if not nonfinite:
            outlier = self.norms.observe(norm)
            scale_gradients(gradients, min(1.0, limit / max(norm, 1e-12)) / scale)
            self.optimizer.step()
            if self.average is not None:
                self.average.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_scale.update(overflow=nonfinite)
        self.step += 1
        for hook in self.after_update:
            hook(self.step)

        found = means(totals, count)
        if nonfinite and not (self.loss_scale.enabled and math.isfinite(found["loss"])):
            refuse_nonfinite(micro_batches, self.step)
        values = found | {
            "learning_rate": rate,
            "gradient_norm": norm,
            "gradient_limit": limit,
            "gradient_outlier": int(outlier),
            "gradient_outliers": self.norms.num_outliers,
            "gradient_log_mean": self.norms.log_mean,
            "gradient_log_deviation": self.norms.log_deviation,
            "loss_scale": scale,
            "loss_scale_changes": self.loss_scale.num_changes,
            "precision": self.precision.mode,
            "count": count,
        }
        values |= ranges.values
        if self.pipeline is not None:
            values |= self.pipeline.values
        if self.shares is not None:
            values |= self.shares.after_step()
        unexplained = nonfinite and (not self.loss_scale.enabled or self.loss_scale.exhausted)
        self.monitor.on_step(self.step, self.steps, values, size, waited_s, unexplained)
        return stop

    def _count(self, micro_batches: list[Batch]) -> tuple[int, int]:
        """What the loss of a step counts, and what its rates count, in all processes together."""
        measures = (self.objective.count, self.size or self.objective.count)
        mine = [sum(map(measure, micro_batches)) if self.world.speaks else 0 for measure in measures]
        count, size = self.world.sum(torch.tensor(mine, dtype=torch.int64)).tolist()
        if count == 0:
            raise InputError(
                f"step {self.step + 1}: every target of the batch is ignored; check the data for empty samples"
            )
        return count, size

    def _backward(self, replica: nn.Module, micro_batches: list[Batch], count: int) -> dict[str, float]:
        """Accumulate gradients of scale × loss / count; this process's sums of the loss and the metrics."""
        totals: dict[str, torch.Tensor] = {}
        if self.pipeline is not None:
            batches = [self._on_device(batch) for batch in micro_batches]
            totals = self.pipeline.backward(self.objective, batches, self.loss_scale.value / count)
            return {name: float(total) for name, total in totals.items()}
        if isinstance(self.objective, WholeStep):
            self.objective.begin(self.model, [self._on_device(batch) for batch in micro_batches])
        for index, batch in enumerate(micro_batches):
            last, shares = index == len(micro_batches) - 1, self.shares
            with self.world.reducing(replica, now=last), shares.whole(last) if shares else nullcontext():
                with shares.forward() if shares else nullcontext():
                    loss = self.objective(replica, self._on_device(batch))
                (loss.total * (self.loss_scale.value / count)).backward()
            self.world.at(f"step {self.step + 1}, micro-batch {index + 1} of {len(micro_batches)}")
            add(totals, loss)
        return {name: float(total) for name, total in totals.items()}

    def evaluate(self) -> dict[str, float]:
        """Means over one pass of the held-out data, in float32, with the averaged weights if there are any.

        Raises:
            InputError: there is no held-out data to judge by.
        """
        assert self.evaluation is not None
        assert self.precision is not None
        self.world.at(f"the evaluation after step {self.step}")
        paused_at = self.monitor.pause()
        self.world.average_buffers(self.model)
        totals: dict[str, dict[str, torch.Tensor]] = {}  # of each part
        if self.average is not None:
            self.average.exchange()
        self.model.eval()
        try:
            with torch.no_grad(), self.precision.evaluation():
                for name, batches in (self.evaluation.parts or {"": self.evaluation.batches}).items():
                    part = totals[name] = {"count": torch.zeros((), dtype=torch.float64)}
                    for batch in map(self.world.part, batches()):
                        part["count"] += self.evaluation.objective.count(batch)
                        add(part, self._judge(self.evaluation.objective, self._on_device(batch)))
                        self.world.at(f"the evaluation after step {self.step}", everywhere=False)
        finally:
            self.model.train()
            self.world.reshard(self.model)
            if self.average is not None:
                self.average.exchange()
        mine = {(metric, name): float(each) for name, part in totals.items() for metric, each in part.items()}
        sums = self._sum_over_world(self._share(mine))
        self.monitor.resume(paused_at)
        counts = {name: sums["count", name] for name in totals}
        if not all(counts.values()):
            raise InputError("the held-out data is empty; give evaluation more samples, or set evaluation.every = 0")
        whole = {metric: sum(sums.get((metric, name), 0.0) for name in totals) for metric, _ in sums}
        count = whole.pop("count")
        parts = {f"loss/{name}": sums["loss", name] / counted for name, counted in counts.items() if name}
        return means(whole, count) | parts

    def _judge(self, objective: Objective, batch: Batch) -> Loss:
        if self.pipeline is not None:
            return self.pipeline.evaluate(objective, batch)
        return objective(self.model, batch)

    def save(self, *, wait: bool = False) -> None:
        """Save the state, without holding up the loop unless `wait`; all processes call it, and the main one writes, or
        each its part."""
        self.world.at(f"the checkpoint of step {self.step}")
        self.world.average_buffers(self.model)
        if self.checkpoints is not None:
            self._save(self.checkpoints, self.state_dict(), wait=wait)

    def _save(self, checkpoints: Checkpoints, state: dict[str, Tree], *, wait: bool) -> None:
        if self.world.is_main or checkpoints.sharded:
            paused_at = self.monitor.pause()
            checkpoints.save(self.step, state, wait=wait)
            self.monitor.resume(paused_at)

    def _weights(self) -> dict[str, Tree]:
        average = None if self.average is None else self.average.state_dict()
        return {"model": model_state(self.model), "average": average}

    def state_dict(self) -> dict[str, Tree]:
        """Everything that the rest of the run depends on, the same in every process."""
        return {
            "step": self.step,
            "run": self.settings,
            **self._weights(),
            "optimizer": optimizer_state(self.optimizer, self.model),
            "loss_scale": self.loss_scale.state_dict(),
            "norms": self.norms.state_dict(),
            "alarms": self.monitor.alarms.state_dict(),
            "stream": self.stream.state_dict(),
            "best": None if self.best is None else self.best.state_dict(),
            "shares": None if self.shares is None else self.shares.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Tree]) -> None:
        """Undo `state_dict`.

        Raises:
            InputError: the state is of another model, or of a run with other settings of `average`.
        """
        load_model_state(self.model, state["model"])
        load_optimizer_state(self.optimizer, self.model, state["optimizer"])
        if (self.average is None) != (state["average"] is None):
            raise InputError(
                "average: the saved run and this one differ in whether weights are averaged; set it as before"
            )
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.loss_scale.load_state_dict(state["loss_scale"])
        self.norms.load_state_dict(state["norms"])
        self.monitor.alarms.load_state_dict(state["alarms"])
        self.stream.load_state_dict(state["stream"])
        if self.best is not None and state.get("best") is not None:
            self.best.load_state_dict(state["best"])
        if self.shares is not None and state.get("shares") is not None:
            self.shares.load_state_dict(state["shares"])
        self.step = int(state["step"])

    def _on_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.world.device, non_blocking=True) for name, tensor in batch.items()}

    def _share(self, values: dict[K, float]) -> dict[K, float]:
        """What this process adds to sums over the world: nothing where another adds the same."""
        return values if self.world.speaks else dict.fromkeys(values, 0.0)

    def _sum_over_world(self, values: dict[K, float]) -> dict[K, float]:
        summed = self.world.sum(torch.tensor(list(values.values()), dtype=torch.float64))
        return dict(zip(values, summed.tolist(), strict=True))
