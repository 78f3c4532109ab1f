"""What a run says about itself: records of quantities and rates, passed to sinks and alarms, and a line for the
user."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from penjing.core.config import Config
from penjing.core.progress import Progress, Silent, clock
from penjing.train.monitor.alarms import Alarm, AlarmError, Alarms
from penjing.train.monitor.memory import memory_use
from penjing.train.monitor.sinks import JsonLines, MLflow, Prometheus, Record, Sink, TensorBoard, WeightsAndBiases
from penjing.train.numerics.recompute import blocks


class MonitorConfig(Config):
    """What is recorded of a run, and where it goes; metrics.jsonl is always written."""

    every: int = Field(default=10, ge=1, description="Steps between two records.")
    activations_every: int = Field(
        default=200, ge=0, description="Steps between two records of the ranges of activations; 0 records none."
    )
    tensorboard: bool = Field(default=True, description="Records also go to TensorBoard files in the run folder.")
    prometheus_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="The port where Prometheus may read the newest record; by default none.",
    )
    wandb: str | None = Field(
        default=None, description="A project of Weights & Biases that records also go to, where wandb is installed."
    )
    mlflow: str | None = Field(
        default=None, description="An experiment of MLflow that records also go to, where mlflow is installed."
    )


class Monitor:
    """Collects one run's steps. Only the main process has sinks and a progress that shows anything.

    Attributes: last: the newest record of training. count, learnt, seconds: how many units this run has computed, how
        many of them its loss counted, and the time of its steps, pauses left out.

    Args:
        waited: what a record calls the share of the time that passes until the batches of a step are there.
    """

    def __init__(
        self,
        alarms: Alarms,
        sinks: Sequence[Sink] = (),
        *,
        every: int = 10,
        activations_every: int = 0,
        device: torch.device | None = None,
        unit: str = "tokens",
        flops_per_unit: float = 0.0,
        peak_flops: float = math.inf,
        progress: Progress | None = None,
        gpu_use: Callable[[], float] | None = None,
        waited: str = "io_wait",
    ) -> None:
        self.alarms = alarms
        self.every = every
        self.activations_every = activations_every
        self._sinks = sinks
        self._device = device or torch.device("cpu")
        self._gpu_use = gpu_use
        self._waited_for = waited
        self._unit = unit
        self._flops_per_unit = flops_per_unit
        self._peak_flops, self._is_peak_raised = peak_flops, False
        self.progress: Progress = progress or Silent()
        self.last: Record = {}
        self.count, self.learnt, self.seconds = 0, 0, 0.0
        self._since = time.perf_counter()
        self._steps = self._count = self._learnt = 0
        self._waited = 0.0

    def start(self, first: int, steps: int) -> None:
        """The run goes from step `first` to `steps`; the clock of the rates starts."""
        self.progress.start("training", steps)
        self.progress.advance(first)
        self._reset()

    def on_step(self, step: int, steps: int, values: Record, count: int, waited_s: float, nonfinite: bool) -> None:
        """Take the values of one finished step (`step` counts from 1); every process calls it with the same values.

        Args:
            values: with "count", what the loss counted.
            count: the units that were computed; of conversations, that are learnt in part, more than those.

        Raises:
            AlarmError: an alarm whose action is "stop" rang.
        """
        self._steps += 1
        self._count += count
        self._learnt += values.get("count", count)
        self._waited += waited_s
        rung = self.alarms.on_step(values["loss"], nonfinite)
        if step % self.every == 0 or step == steps or step == 1:
            record: Record = {"step": step, **values, **self._rates()}
            rung += self.alarms.on_record(record)
            self._write(record)
            self.progress.status(self._line(record, steps))
            self.last = record
            self._reset()
        self.progress.advance()
        self._tell(step, rung)

    def on_values(self, step: int, values: Record) -> None:
        """Write a record of its own, such as an evaluation, and note it."""
        self._write({"step": step, **values})
        shown = " ".join(f"{name} {value:.4f}" for name, value in values.items() if isinstance(value, float))
        self.progress.note(f"step {step}: {shown}")

    def on_resume(self, checkpoint: Path, step: int, seconds: float) -> None:
        """The run goes on from `checkpoint`, `seconds` after its command began: a record `recovered_s`, and a line."""
        self._write({"step": step, "recovered_s": seconds})
        self.progress.note(f"resumed from {checkpoint} (step {step}); recovered in {seconds:.1f} s")

    def note(self, line: str) -> None:
        """Show one line."""
        self.progress.note(line)

    def pause(self) -> float:
        """Stop the clock of the rates (evaluation, checkpoint); give the result to `resume`."""
        return time.perf_counter()

    def resume(self, paused_at: float) -> None:
        """Let the clock go on as if no time had passed since `pause`."""
        self._since += time.perf_counter() - paused_at

    def mfu(self, rate: float) -> float:
        """Model FLOPs utilisation at `rate` units a second."""
        return 3 * self._flops_per_unit * rate / self._peak_flops

    def _raise_peak(self, rate: float) -> None:
        """More than the peak was reached, so that the peak is higher: what is reached at `rate` units a second."""
        reached = self.mfu(rate)
        if reached <= 1.0:
            return
        self._peak_flops *= reached
        if not self._is_peak_raised:
            self.progress.note(
                f"updates reached {reached:.0%} of the peak that was timed when the run began, as they do where the "
                "machine was busy then, or where frozen parts save work; MFU is read against the fastest update instead"
            )
        self._is_peak_raised = True

    def close(self) -> None:
        """Flush and close the sinks."""
        for sink in self._sinks:
            sink.close()

    def _reset(self) -> None:
        self._since = time.perf_counter()
        self._steps = self._count = self._learnt = 0
        self._waited = 0.0

    def _rates(self) -> Record:
        seconds = max(time.perf_counter() - self._since, 1e-9)
        rate = self._count / seconds
        self._raise_peak(rate)
        self.count += self._count
        self.learnt += self._learnt
        self.seconds += seconds
        rates: Record = {
            f"{self._unit}_per_s": rate,
            "step_s": seconds / self._steps,
            "mfu": self.mfu(rate),
            self._waited_for: self._waited / seconds,
        }
        if (memory := memory_use(self._device)) is not None:
            rates |= {"memory_bytes": memory[0], "memory_share": memory[0] / memory[1]}
        if self._learnt != self._count:
            rates[f"learnt_{self._unit}_per_s"] = self._learnt / seconds
        if self._gpu_use is not None:
            rates["gpu_use"] = self._gpu_use()
        return rates

    def _line(self, record: Record, steps: int) -> str:
        reward = f"reward {record['reward']:.3f} " if "reward" in record else ""
        return (
            f"step {record['step']}/{steps} left {clock((steps - record['step']) * record['step_s'])} "
            f"{reward}loss {record['loss']:.4f} lr {record['learning_rate']:.1e} "
            f"{speed(record[f'{self._unit}_per_s'], record.get(f'learnt_{self._unit}_per_s'), self._unit)} "
            f"MFU {record['mfu']:.0%}"
        )

    def _write(self, record: Record) -> None:
        for sink in self._sinks:
            sink.write({key: _finite(value) for key, value in record.items()})

    def _tell(self, step: int, rung: list[Alarm]) -> None:
        for alarm in rung:
            self._write({"step": step, "alarm": alarm.name, "message": alarm.message})
            self.progress.note(f"alarm {alarm.name} at step {step}: {alarm.message}")
        for alarm in rung:
            if alarm.action == "stop":
                raise AlarmError(f"alarm {alarm.name} at step {step}: {alarm.message} (alarms.{alarm.name} = 'stop')")


def speed(rate: float, learnt: float | None, unit: str) -> str:
    """How fast a run is, for the user; `learnt`: units a second that its loss counts, None where it counts all."""
    apart = "" if learnt is None else f" ({learnt:,.0f} learnt)"
    return f"{rate:,.0f} {unit}/s{apart}"


class ActivationRanges:
    """Watches the largest magnitude and the root mean square of each block's output during one forward pass.

    A context manager, which watches nothing without a model; afterwards `values` maps "activation/BLOCK/amax" and
    "…/rms" to floats. Numbers are read at its end: in the pass they would cut a graph of the whole model.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._blocks = {} if model is None else blocks(model)
        self._handles: list[Any] = []
        self._seen: dict[str, Tensor] = {}
        self.values: dict[str, float] = {}

    def __enter__(self) -> ActivationRanges:
        for name, block in self._blocks.items():
            self._handles.append(block.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self.values = {name: float(value) for name, value in self._seen.items()}

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            wide = tensor.detach().to(torch.float32)
            self._seen[f"activation/{name}/amax"] = wide.abs().amax()
            self._seen[f"activation/{name}/rms"] = wide.square().mean().sqrt()

        return look


def open_sinks(folder: Path, config: MonitorConfig, first_step: int) -> list[Sink]:
    """The sinks that a recipe asks for, under the run's `folder`.

    Raises:
        SetupError: a package is missing, or a port is in use.
    """
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", first_step)]
    if config.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", first_step))
    if config.prometheus_port is not None:
        sinks.append(Prometheus(config.prometheus_port))
    if config.wandb is not None:
        sinks.append(WeightsAndBiases(config.wandb, folder, first_step))
    if config.mlflow is not None:
        sinks.append(MLflow(config.mlflow, folder, first_step))
    return sinks


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
