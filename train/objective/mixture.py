"""The cross-entropy of samples that are mixtures of two, each with its own class."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from penjing.train.objective.cross_entropy import cross_entropy_sum

OTHERS = "others"
"""The entry of a batch, (B,) int64, with the class of the other sample in each mixture."""
SHARES = "shares"
"""The entry of a batch, (B,) float32, with the other sample's share."""


def classes_sum(
    logits_NV: torch.Tensor, batch: Mapping[str, torch.Tensor], *, ignored: int, label_smoothing: float = 0.0
) -> torch.Tensor:
    """The cross-entropy with `batch["targets"]`, summed; of mixtures with both classes, each by its share.

    Args:
        logits_NV: (N, V) floating.
        batch: "targets" (N,) int64 in [0, V) or `ignored`; and of mixtures `OTHERS` and `SHARES`, whose share is 0
            where there is no other class.

    Returns:
        A scalar, float32 or the wider type of the logits.
    """
    targets = batch["targets"].flatten()
    if OTHERS not in batch:
        return cross_entropy_sum(logits_NV, targets, ignored=ignored, label_smoothing=label_smoothing)
    wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    own, other = (
        F.cross_entropy(wide, each, ignore_index=ignored, label_smoothing=label_smoothing, reduction="none")
        for each in (targets, batch[OTHERS])
    )
    return own.lerp(other, batch[SHARES].to(own.dtype)).sum()
