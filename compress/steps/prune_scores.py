"""How important the units of a network are, by the method that a step names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from penjing.compress.families.base import OneByOne
from penjing.compress.prune.graph import Group
from penjing.compress.prune.importance import Kind, Scores, activation, magnitude, random, taylor
from penjing.compress.prune.subject import Subject
from penjing.compress.samples.data import Samples
from penjing.core.errors import ConfigError
from penjing.core.models.decoder import Decoder
from penjing.core.progress import Progress
from penjing.core.vision.vision_language import VisionLanguage
from penjing.train.numerics.recompute import apply_recompute, blocks

LOGIT_STRIDE = 64


def unit_scores(
    subject: Subject,
    groups: list[Group],
    method: Kind,
    seed: int,
    data: Samples | None,
    obs: OneByOne | None,
    progress: Progress,
) -> Scores:
    """How important each unit of each group is, by `method`: (units,) a group.

    Args:
        seed: of "random".
        data: calibration batches, which "taylor", "activation" and "obs" need.
        obs: that method of the family, see `Pruner`.

    Raises:
        ConfigError: the family has no "obs".
    """
    if method in ("l1", "l2"):
        return magnitude(subject.weights, groups, 1 if method == "l1" else 2)
    if method == "random":
        return random(groups, seed)
    assert data is not None
    if method == "obs":
        if obs is None:
            raise ConfigError(f'method="obs" is for decoders, {subject.folder} is none; take "taylor" or "activation"')
        return obs(subject, groups, data, progress)
    model = subject.network()
    if method == "activation":
        speaks = isinstance(model, Decoder | VisionLanguage)
        return activation(model, groups, _few_logits(model, data) if speaks else data.inputs())
    if blocks(model):
        apply_recompute(model, "full")  # what a whole network keeps for its gradients can be ten times its size
    return taylor(model, groups, data.losses(model))


def _few_logits(model: nn.Module, data: Samples) -> Iterator[tuple[Any, ...]]:
    """Arguments of a decoder, one window at a time with one row of logits in 64: those of 2048 tokens would be 0.7 of
    SmolLM2's size. Questions about images ask for those of their answers alone."""
    others = (None,) if isinstance(model, VisionLanguage) else (None, None)
    for inputs in data.inputs():
        tokens_BT, *seen = inputs
        if seen:
            yield inputs
            continue
        for window_1T in tokens_BT.split(1):
            yield window_1T, *others, torch.arange(0, window_1T.numel(), LOGIT_STRIDE)
