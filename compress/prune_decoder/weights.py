"""Single weights of a decoder become zero, layer by layer, where the network's output misses them least.

magnitude   the smallest |w| leave
wanda       the smallest |w| · ‖x‖₂ leave, x being the input that w multiplies (https://arxiv.org/abs/2306.11695)
sparsegpt   the smallest w² / [H⁻¹]ⱼⱼ leave, H = XᵀX, a column after the other; what stays of a row makes up for what
            left, in the sense of least squares (https://arxiv.org/abs/2301.00774)

The inputs of a layer are those that come out of the layers before it once these have lost their weights. Embedding and
head stay whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penjing.compress.decoder.stream import LayerStream
from penjing.core.checkpoint.decoder import open_checkpoint, save_checkpoint
from penjing.core.errors import ConfigError
from penjing.core.progress import Progress

WeightMethod = Literal["magnitude", "wanda", "sparsegpt"]
DAMPING = 0.01  # of the mean of the diagonal of H, added to it, as in the paper
BLOCK = 128  # columns that SparseGPT chooses among at once


def smallest(score_NK: Tensor, share: float, pattern: tuple[int, int] | None) -> Tensor:
    """Which entries leave, (N, K) bool: `share` of each row, or with a pattern (n, m) all but the n largest of every m
    neighbours; m divides K."""
    if pattern is not None:
        keep, of = pattern
        grouped = score_NK.unflatten(1, (-1, of))
        gone = torch.zeros_like(grouped, dtype=torch.bool)
        return gone.scatter(2, grouped.topk(of - keep, dim=2, largest=False).indices, True).flatten(1)
    count = round(share * score_NK.shape[1])
    gone = torch.zeros_like(score_NK, dtype=torch.bool)
    return gone.scatter(1, score_NK.topk(count, dim=1, largest=False).indices, True)


def sparsegpt(weight_NK: Tensor, gram_KK: Tensor, share: float, pattern: tuple[int, int] | None) -> Tensor:
    """The weight with zeros, and with what stays changed to make up for them; float64.

    Args:
        weight_NK: float64.
        gram_KK: XᵀX of its inputs, float64. Inputs that are always zero lose their weights.
        share, pattern: as `smallest`, the share being one of each block of columns.
    """
    weight_NK, gram_KK = weight_NK.clone(), gram_KK.clone()
    dead = gram_KK.diagonal() == 0
    gram_KK.diagonal()[dead] = 1.0
    weight_NK[:, dead] = 0.0
    gram_KK.diagonal().add_(DAMPING * gram_KK.diagonal().mean())
    # Row j of the upper factor holds, from j on, what the inverse of H without the columns before j has in row j.
    inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(gram_KK))
    factor_KK = torch.linalg.cholesky(inverse_KK, upper=True)
    columns = weight_NK.shape[1]
    for begin in range(0, columns, BLOCK):
        end = min(begin + BLOCK, columns)
        diagonal = factor_KK.diagonal()
        errors = torch.zeros(len(weight_NK), end - begin, dtype=weight_NK.dtype)
        gone = torch.zeros_like(errors, dtype=torch.bool)
        if pattern is None:  # of the block as a whole, so that rows may lose more or less than others
            score = weight_NK[:, begin:end].square() / diagonal[begin:end].square()
            count = round(share * score.numel())
            gone.view(-1)[score.flatten().topk(count, largest=False).indices] = True
        for column in range(begin, end):
            if pattern is not None and (column - begin) % pattern[1] == 0:
                near = slice(column, column + pattern[1])
                score = weight_NK[:, near].square() / diagonal[near].square()
                gone[:, near.start - begin : near.stop - begin] = smallest(score, 0.0, pattern)
            here = column - begin
            left = torch.where(gone[:, here], weight_NK[:, column], 0.0) / diagonal[column]
            weight_NK[:, column:end] -= left[:, None] * factor_KK[column, column:end]
            weight_NK[gone[:, here], column] = 0.0
            errors[:, here] = left
        weight_NK[:, end:] -= errors @ factor_KK[begin:end, end:]
    return weight_NK


@torch.no_grad()
def zero_weights(
    source: Path,
    into: Path,
    method: WeightMethod,
    share: float,
    pattern: tuple[int, int] | None,
    windows_WT: Tensor,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Write the checkpoint `source` into `into` with zeros in the linear weights of its layers.

    One layer, the windows' hidden states and a matrix of K × K float32 for each of its inputs are in memory at a time,
    and the weights that changed until all are written.

    Args:
        windows_WT: (W, T) int64 calibration text.
        into: a folder without a checkpoint; its manifest is the caller's.

    Raises:
        ConfigError: the pattern does not divide the inputs of a weight.

    Returns:
        For each weight {tensor, zeros, error}: the share of zeros, and of the squared output of the product that is
        missing on the calibration text.
    """
    stream = LayerStream(open_checkpoint(source))
    hidden_WTE = stream.embed(windows_WT)
    changed: dict[str, Tensor] = {}
    found: list[dict[str, Any]] = []
    progress.start(f"zeros by {method}", stream.config.num_hidden_layers)
    for index in range(stream.config.num_hidden_layers):
        layer = stream.float_layer(index, stream.weights(index))
        grams: dict[str, Tensor] = {}

        def add(name: str, x_1TK: Tensor, grams: dict[str, Tensor] = grams) -> None:
            x_TK = x_1TK[0]
            grams[name] = grams.get(name, 0.0) + x_TK.t() @ x_TK  # type: ignore[operator]

        stream.run(layer, hidden_WTE.clone(), add)
        for name, gram in grams.items():
            linear = layer.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            if pattern is not None and linear.in_features % pattern[1]:
                raise ConfigError(
                    f"pattern={pattern[0]}:{pattern[1]}: {name} of {source} has {linear.in_features} inputs, which "
                    f"{pattern[1]} does not divide; take a smaller pattern, or ratio"
                )
            before, gram_KK = linear.weight.double(), gram.double()
            if method == "sparsegpt":
                after = sparsegpt(before, gram_KK, share, pattern)
            else:
                score = before.abs() * (gram_KK.diagonal().sqrt() if method == "wanda" else 1.0)
                after = before.masked_fill(smallest(score, share, pattern), 0.0)
            tensor = f"model.layers.{index}.{name}.weight"
            changed[tensor] = after.to(torch.float32)
            linear.weight = nn.Parameter(changed[tensor], requires_grad=False)
            missing, whole = ((x @ gram_KK * x).sum() for x in (before - after, before))
            zeros = float((after == 0).double().mean())
            found.append({"tensor": tensor, "zeros": zeros, "error": float(missing / whole) if whole else 0.0})
        stream.run(layer, hidden_WTE)
        progress.advance()
    checkpoint = stream.checkpoint
    tensors = (
        (name, changed[name].to(stored.dtype) if name in changed else stored)
        for name in checkpoint.tensor_names
        for stored in [checkpoint.get(name)]
    )
    save_checkpoint(into, checkpoint.config, tensors, tokenizer_from=source, dtype=checkpoint.config_json["dtype"])
    return found
