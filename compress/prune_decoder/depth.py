"""Depth pruning: which layers of a decoder change their input least.

A layer's influence is 1 − the cosine between its input and its output, over calibration tokens (ShortGPT,
https://arxiv.org/abs/2403.03853; Minitron, https://arxiv.org/abs/2407.14679).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.compress.decoder.stream import LayerStream
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import InputError
from penjing.core.progress import Progress


@torch.no_grad()
def block_influence(folder: Path, batches: Iterable[tuple[Tensor, ...]], progress: Progress) -> list[float]:
    """The influence of each layer, 0 (it changes nothing) … 2; one layer's weights are in memory at a time.

    Args:
        batches: (tokens (B, T) int64,); all are held as hidden states.

    Raises:
        InputError: there are no batches.
    """
    windows = [tokens_BT for (tokens_BT,) in batches]
    if not windows:
        raise InputError("block influence needs at least one batch of tokens; give calibration data")
    stream = LayerStream(open_checkpoint(folder))
    progress.start("influence of each layer", stream.config.num_hidden_layers)
    hidden = [stream.embed(tokens_BT) for tokens_BT in windows]
    influence = []
    for layer in range(stream.config.num_hidden_layers):
        module = stream.float_layer(layer, stream.weights(layer))
        cosines = []
        for x_BTE in hidden:
            before_BTE = x_BTE.clone()
            stream.run(module, x_BTE)
            cosines.append(F.cosine_similarity(before_BTE.double(), x_BTE.double(), dim=-1).flatten())
        influence.append(1 - float(torch.cat(cosines).mean()))
        progress.advance()
    return influence


def least(influence: list[float], count: int) -> list[int]:
    """The `count` layers of least influence, ascending; of equals the later goes, whose loss fewer layers feel."""
    order = sorted(range(len(influence)), key=lambda layer: (influence[layer], -layer))
    return sorted(order[:count])
