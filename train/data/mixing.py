"""The shares of domains in a mixture, and what moves them between evaluations.

The rule of perplexity: when a domain's held-out perplexity has risen so many times in a row (3), its weight is raised
by a factor (1.15) and all are normalised, which multiplies its odds w / (1 − w) by exactly that factor. Noise alone
triggers it three times in a hundred evaluations; so the whole rise must also exceed `min_rise` standard deviations of
the steps before it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from pydantic import Field, model_validator

from penjing.core.config import Config
from penjing.core.errors import ConfigError, InputError

_BEFORE = 16  # steps of a perplexity that its noise is estimated from
_FEWEST = 8  # with fewer there is no estimate, and nothing is raised
_FORGET = 0.9  # of a reward of the bandit, from one evaluation to the next


class MixingConfig(Config):
    """Shares of domains in each batch. A domain is what documents say (`domain`), else the name of their source."""

    kind: Literal["fixed", "temperature", "stratified", "perplexity", "odm"] = Field(
        description='"fixed": as `weights` say, or by size; "temperature": size to the power 1 / temperature; '
        '"stratified": equal shares; "perplexity": a domain whose held-out perplexity rises gets more; "odm": a bandit '
        "that prefers domains of high loss (https://arxiv.org/abs/2312.02406), fed by evaluations."
    )
    weights: dict[str, float] = Field(
        default={}, description="Shares at the beginning, of fixed and perplexity; by default by tokens."
    )
    temperature: float = Field(default=2.0, ge=1, description="Of temperature: 1 is by size, large ones are equal.")
    rises: int = Field(default=3, ge=1, description="Of perplexity: so many rises in a row raise a weight.")
    factor: float = Field(default=1.15, gt=1, description="Of perplexity: by which a weight is raised.")
    min_rise: float = Field(
        default=3.0,
        ge=0,
        description="Of perplexity: the rises together are at least so many standard deviations of the changes before "
        "them; 0 takes every rise, noise too.",
    )
    cooldown: int = Field(default=0, ge=0, description="Of perplexity: evaluations after a raise without another.")
    max_share: float = Field(default=0.9, gt=0, le=1, description="Of perplexity: no weight is raised above it.")
    max_epochs: float = Field(
        default=4.0, gt=0, description="No domain is repeated more often: refused at the beginning, not raised later."
    )

    @model_validator(mode="after")
    def _weights_fit(self) -> MixingConfig:
        if self.weights and self.kind not in ("fixed", "perplexity"):
            raise ValueError(f"weights are for fixed and perplexity, not for {self.kind!r}; leave them out")
        if any(weight < 0 for weight in self.weights.values()) or (self.weights and not sum(self.weights.values())):
            raise ValueError(f"weights must be 0 or more, and not all 0 (got {self.weights})")
        return self


def first_weights(config: MixingConfig, sizes: Mapping[str, int]) -> dict[str, float]:
    """Domain → share at the beginning; they add up to 1.

    Args:
        sizes: domain → its samples.

    Raises:
        ConfigError: `weights` name other domains than there are.
    """
    if config.weights and set(config.weights) != set(sizes):
        raise ConfigError(
            f"data.mixing.weights name {', '.join(sorted(config.weights))}, the domains are "
            f"{', '.join(sorted(sizes))}; give each its weight"
        )
    power = {"temperature": 1 / config.temperature, "stratified": 0.0, "odm": 0.0}.get(config.kind, 1.0)
    return _normal(config.weights or {domain: size**power for domain, size in sizes.items()})


class Mixing:
    """The weights of a run, moved by what evaluations find.

    Attributes: weights: domain → share, adding up to 1.
    """

    def __init__(self, config: MixingConfig, sizes: Mapping[str, int]) -> None:
        self.config = config
        self.weights = first_weights(config, sizes)
        self._history: dict[str, list[float]] = {domain: [] for domain in sizes}
        self._rested = dict.fromkeys(sizes, config.rises + config.cooldown)  # evaluations since a raise
        self._rewards = dict.fromkeys(sizes, 0.0)
        self._evaluations = 0

    def hear(self, losses: Mapping[str, float], may_rise: Mapping[str, bool]) -> list[str]:
        """Take the mean held-out loss of each domain, and move the weights; the domains that were raised.

        Args:
            losses: in nats; perplexity is their exponential.
            may_rise: whether a domain has enough data left to be raised.

        Raises:
            InputError: a loss is not finite.
        """
        for domain, loss in losses.items():
            if not math.isfinite(loss):
                raise InputError(
                    f"data.mixing: the held-out loss of domain {domain!r} is {loss}; look at its text, or lower the "
                    "learning rate"
                )
        self._evaluations += 1
        if self.config.kind == "odm":
            self._bandit(losses)
        return self._raise(losses, may_rise) if self.config.kind == "perplexity" else []

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "weights": dict(self.weights), "history": {name: list(past) for name, past in self._history.items()},
            "rested": dict(self._rested), "rewards": dict(self._rewards), "evaluations": self._evaluations,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo `state_dict`.

        Raises:
            InputError: the domains are others.
        """
        if list(state["weights"]) != list(self.weights):
            raise InputError(
                f"the checkpoint was made with the domains {', '.join(state['weights'])}, this run has "
                f"{', '.join(self.weights)}; set [data] as it was, or start a new run"
            )
        self.weights = {name: float(weight) for name, weight in state["weights"].items()}
        self._history = {name: [float(each) for each in past] for name, past in state["history"].items()}
        self._rested = {name: int(rested) for name, rested in state["rested"].items()}
        self._rewards = {name: float(reward) for name, reward in state["rewards"].items()}
        self._evaluations = int(state["evaluations"])

    def _raise(self, losses: Mapping[str, float], may_rise: Mapping[str, bool]) -> list[str]:
        raised = []
        for domain, loss in losses.items():
            history = self._history[domain]
            history.append(math.exp(loss))
            del history[: -(_BEFORE + self.config.rises + 1)]
            self._rested[domain] += 1
            if (
                self._rested[domain] >= max(self.config.rises, self.config.cooldown + 1)
                and may_rise[domain]
                and rises(history, self.config.rises, self.config.min_rise)
                and self.weights[domain] < self.config.max_share
            ):
                raised.append(domain)
                self._rested[domain] = 0
        before = dict(self.weights)
        self.weights = _normal(
            {name: weight * (self.config.factor if name in raised else 1) for name, weight in before.items()}
        )
        if any(self.weights[domain] > self.config.max_share for domain in raised):
            self.weights = before
            return []
        return raised

    def _bandit(self, losses: Mapping[str, float]) -> None:
        """Exponential weights with exploration, every arm being seen at each evaluation."""
        count, turn = len(losses), self._evaluations
        for domain, loss in losses.items():
            kept = _FORGET if turn > 1 else 0.0
            self._rewards[domain] = kept * self._rewards[domain] + (1 - kept) * loss
        explore = min(1 / count, math.sqrt(math.log(max(count, 2)) / (count * turn)))
        top = max(self._rewards.values())
        odds = _normal({name: math.exp(explore * (reward - top)) for name, reward in self._rewards.items()})
        self.weights = {name: (1 - count * explore) * share + explore for name, share in odds.items()}


def rises(history: Sequence[float], count: int, min_rise: float) -> bool:
    """Whether the last `count` changes of `history` are all rises, and together at least `min_rise` standard deviations
    of the changes before them."""
    changes = [after - before for before, after in pairwise(history)]
    if len(changes) < count or min(changes[-count:]) <= 0:
        return False
    if not min_rise:
        return True
    earlier = changes[:-count]
    return len(earlier) >= _FEWEST and sum(changes[-count:]) >= min_rise * statistics.stdev(earlier)


def _normal(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
