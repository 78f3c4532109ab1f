"""Which layers of a decoder leave, found by leaving each out in turn: the one whose absence costs the loss on
calibration text least goes, and so on with those that are left (SLEB, https://arxiv.org/abs/2402.09025).

A layer that seems idle may be what makes up for another one's absence; choosing all at once does not see that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.compress.decoder.stream import LayerStream
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.progress import Progress

TRIAL_TOKENS = 2048  # of all trials: 30 layers of SmolLM2 hold 140 MB of hidden states then
LOGIT_STRIDE = 4  # the loss is that of every fourth token: the head costs as much as eight layers of SmolLM2


@torch.no_grad()
def layers_by_trial(
    folder: Path, windows_WT: Tensor, count: int, progress: Progress
) -> tuple[list[int], list[dict[str, Any]]]:
    """The layers to drop, ascending, and for each round {layer, loss, without}: the layer that left, the loss with it
    gone, and the losses in nats a token without each other layer that was tried, by number.

    A round runs the layers that are left once; all trials go through a layer while its weights are in memory.

    Args:
        windows_WT: (W, T) int64 calibration text, of which evenly spread windows of TRIAL_TOKENS in all are taken.
        count: how many leave, less than there are.
    """
    stream = LayerStream(open_checkpoint(folder))
    windows = min(len(windows_WT), max(1, TRIAL_TOKENS // windows_WT.shape[1]))
    windows_WT = windows_WT[[index * len(windows_WT) // windows for index in range(windows)]]
    left = list(range(stream.config.num_hidden_layers))
    progress.start("leaving each layer out in turn", sum(len(left) - gone for gone in range(count)))
    rounds: list[dict[str, Any]] = []
    for _ in range(count):
        losses = _trials(stream, windows_WT, left, progress)
        best = min(left, key=lambda layer: (losses[layer], -layer))
        rounds.append({"layer": best, "loss": losses[best], "without": {str(each): losses[each] for each in left}})
        left.remove(best)
    return sorted(each["layer"] for each in rounds), rounds


def _trials(stream: LayerStream, windows_WT: Tensor, left: list[int], progress: Progress) -> dict[int, float]:
    """The loss without each of the layers `left`."""
    hidden_WTE = stream.embed(windows_WT)
    without: dict[int, Tensor] = {}
    for layer in left:
        module = stream.float_layer(layer, stream.weights(layer))
        for trial_WTE in without.values():
            stream.run(module, trial_WTE)
        without[layer] = hidden_WTE.clone()
        stream.run(module, hidden_WTE)
        progress.advance()
    head = stream.stored_head()
    losses = {}
    for layer, trial_WTE in without.items():
        rows_RE, targets_R = trial_WTE[:, :-1:LOGIT_STRIDE], windows_WT[:, 1::LOGIT_STRIDE]
        parts = zip(rows_RE, targets_R, strict=True)
        sums = [F.cross_entropy(head(stream.final_norm(rows)), targets, reduction="sum") for rows, targets in parts]
        losses[layer] = float(torch.stack(sums).sum()) / targets_R.numel()
    return losses
