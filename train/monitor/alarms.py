"""Alarms: rules over the records of a run, each with a threshold, patience and an action, "log" or "stop"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from penjing.core.config import Config
from penjing.core.errors import PenjingError

Action = Literal["off", "log", "stop"]


class AlarmError(PenjingError):
    """An alarm whose action is "stop" rang: the run ended before its last step; its checkpoints are intact."""


class AlarmConfig(Config):
    """What each alarm does ("off", "log" or "stop"), and when it rings."""

    nonfinite: Action = Field(default="stop", description="When the loss or a gradient is not finite.")
    loss_spike: Action = Field(default="log", description="When the loss jumps above its running mean.")
    gpu_use: Action = Field(default="log", description="When the GPU is idle too often.")
    memory: Action = Field(default="log", description="When the memory is nearly full.")
    io_wait: Action = Field(default="log", description="When the model waits too long for its data.")
    chosen_falls: Action = Field(
        default="log", description="Of dpo: when the chosen answers themselves become much less likely."
    )
    answers_run_on: Action = Field(
        default="log",
        description="Of rollouts, but for a draft network: when many answers do not end within data.max_tokens.",
    )
    entropy_falls: Action = Field(
        default="log", description="Of rollouts: when the model no longer tries different answers."
    )
    loss_spike_deviations: float = Field(
        default=6.0, gt=0, description="Standard deviations above the running mean from which a loss is a spike."
    )
    gpu_use_below: float = Field(
        default=0.70, gt=0, le=1, description="The share of the time below which gpu_use rings."
    )
    memory_above: float = Field(
        default=0.85, gt=0, le=1, description="The share of the memory above which memory rings."
    )
    io_wait_above: float = Field(
        default=0.05, gt=0, le=1, description="The share of the time above which io_wait rings."
    )
    chosen_falls_below: float = Field(
        default=-0.5,
        lt=0,
        description="The change of a chosen token's log-probability, in nats, below which chosen_falls rings.",
    )
    answers_run_on_above: float = Field(
        default=0.5, gt=0, le=1, description="The share of such answers above which answers_run_on rings."
    )
    entropy_falls_below: float = Field(
        default=0.02, gt=0, description="The entropy of a token, in nats, below which entropy_falls rings."
    )
    patience: int = Field(
        default=3,
        ge=1,
        description="Records in a row before gpu_use, memory, io_wait, chosen_falls, answers_run_on or entropy_falls "
        "rings.",
    )


@dataclass(frozen=True)
class Alarm:
    """One alarm that rang: its name, what happened, and "log" or "stop"."""

    name: str
    message: str
    action: Action


class Alarms:
    """Watches a run's steps and records."""

    warm_up = 20  # losses before a spike can be told from the start of training
    memory = 0.98

    def __init__(self, config: AlarmConfig) -> None:
        self.config = config
        self._num_losses = 0
        self._mean = 0.0
        self._variance = 0.0
        self._in_a_row: dict[str, int] = {}

    def on_step(self, loss: float, nonfinite: bool) -> list[Alarm]:
        """Watch one step. `nonfinite`: loss or gradients are not finite, and the loss scale is not the cause."""
        if nonfinite or not math.isfinite(loss):
            message = f"the loss is {loss}" if not math.isfinite(loss) else "a gradient is not finite"
            advice = "lower the learning rate, or set precision.mode to 'fp32' to see where it begins"
            return self._ring("nonfinite", f"{message}; the update was skipped; {advice}")
        rung: list[Alarm] = []
        deviation = math.sqrt(self._variance)
        edge = self._mean + self.config.loss_spike_deviations * max(deviation, 1e-3 * abs(self._mean))
        spike = self._num_losses >= self.warm_up and loss > edge
        if spike:
            rung = self._ring(
                "loss_spike",
                f"the loss {loss:.4f} is above {edge:.4f}, its running mean {self._mean:.4f} + "
                f"{self.config.loss_spike_deviations:g} deviations",
            )
        value = edge if spike else loss
        weight = max(1.0 - self.memory, 1.0 / (self._num_losses + 1))
        delta = value - self._mean
        self._mean += weight * delta
        self._variance = (1.0 - weight) * (self._variance + weight * delta * delta)
        self._num_losses += 1
        return rung

    def on_record(self, record: Mapping[str, Any]) -> list[Alarm]:
        """Watch the slow quantities of a record, each optional: gpu_use, memory_share, io_wait and ended, each a
        share of 1, chosen_change, and entropy beside reward."""
        config = self.config
        rung: list[Alarm] = []
        for name, key, bad, rule in (
            ("gpu_use", "gpu_use", lambda value: value < config.gpu_use_below, f"below {config.gpu_use_below:.0%}"),
            ("memory", "memory_share", lambda value: value > config.memory_above, f"above {config.memory_above:.0%}"),
            ("io_wait", "io_wait", lambda value: value > config.io_wait_above, f"above {config.io_wait_above:.0%}"),
        ):
            if record.get(key) is None:
                continue
            if self._lasts(name, bad(record[key])):
                rung += self._ring(name, f"{key} is {record[key]:.0%}, {rule} for {config.patience} records")
        if (change := record.get("chosen_change")) is not None:
            edge = config.chosen_falls_below
            if self._lasts("chosen", change < edge):
                rung += self._ring(
                    "chosen_falls",
                    f"a token of a chosen answer has changed by {change:.2f} nats, below {edge:g}, for "
                    f"{config.patience} records: the model unlearns both answers; lower the learning rate, raise "
                    "objective.beta, or set objective.sft",
                )
        if (ended := record.get("ended")) is not None and "tokens_a_step" not in record:
            edge = config.answers_run_on_above
            if self._lasts("run_on", 1 - ended > edge):
                rung += self._ring(
                    "answers_run_on",
                    f"{1 - ended:.0%} of the answers do not end, above {edge:.0%}, for {config.patience} records; "
                    "raise data.max_tokens, begin with a checkpoint that ends its answers, or set algorithm.kl",
                )
        if (entropy := record.get("entropy")) is not None and "reward" in record:
            edge = config.entropy_falls_below
            if self._lasts("entropy", entropy < edge):
                rung += self._ring(
                    "entropy_falls",
                    f"the entropy of a token is {entropy:.3f} nats, below {edge:g}, for {config.patience} records, "
                    f"with a mean reward of {record['reward']:.2f}: the model no longer tries other answers, so the "
                    "reward will hardly rise; if it is not yet good, begin again with a lower learning rate, "
                    "algorithm.entropy = 0.01, or algorithm.redraws",
                )
        return rung

    def _lasts(self, name: str, bad: bool) -> bool:
        """Whether `patience` records in a row have just been bad."""
        self._in_a_row[name] = self._in_a_row.get(name, 0) + 1 if bad else 0
        return self._in_a_row[name] == self.config.patience

    def _ring(self, name: str, message: str) -> list[Alarm]:
        action: Action = getattr(self.config, name)
        return [] if action == "off" else [Alarm(name, message, action)]

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        losses = {"num_losses": self._num_losses, "mean": self._mean, "variance": self._variance}
        return losses | {"in_a_row": dict(self._in_a_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        self._num_losses = int(state["num_losses"])
        self._mean, self._variance = float(state["mean"]), float(state["variance"])
        self._in_a_row = {name: int(count) for name, count in state.get("in_a_row", {}).items()}
