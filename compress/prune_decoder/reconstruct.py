"""What is left of a pruned decoder is fitted to what the whole one computed, layer by layer, by least squares.

The linear layers that read what was removed get new weights: down_proj behind narrower MLPs, o_proj behind fewer heads,
and the down_proj before layers that left as a whole, which so learns their linear part. Inputs are those of the pruned
network, whose earlier layers are fitted already. The target is the whole network's residual stream, so that errors do
not pile up; or what the whole layer makes of the same inputs, so that a layer does not learn the text by making up for
all before it. Rows count by how large the target is, as the norm behind it divides by that.

After LLM Surgeon (https://arxiv.org/abs/2312.17244), SparseGPT (https://arxiv.org/abs/2301.00774) and, for layers that
left, ReplaceMe (https://arxiv.org/abs/2505.02819).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penjing.compress.decoder.stream import Half, LayerStream
from penjing.core.checkpoint.decoder import open_checkpoint, save_checkpoint
from penjing.core.models.decoder import DecoderLayer
from penjing.core.progress import Progress

DAMPING = 0.01  # of the mean of the diagonal: the fitted weights are drawn towards the old ones
OWN_DAMPING = 0.1  # of a layer's own output: of SmolLM2 better than 0.01 on all of five texts
MLP = "mlp.down_proj"


def last_layers(layer: DecoderLayer) -> tuple[str, str]:
    """The linear layers through which the halves of `layer` end."""
    return "conv.out_proj" if layer.is_conv else "self_attn.o_proj", MLP


class NormalEquations:
    """The change of a weight that makes up for what its layer's output lacks, in the sense of least squares.

    Args:
        outputs, inputs: N and K of the weight.
    """

    def __init__(self, outputs: int, inputs: int) -> None:
        self._gram_KK = torch.zeros(inputs, inputs, dtype=torch.float64)
        self._cross_KN = torch.zeros(inputs, outputs, dtype=torch.float64)
        self._lacking = 0.0

    def add(self, x_MK: Tensor, lacking_MN: Tensor, weight_M: Tensor) -> None:
        """Take in inputs of the layer, how much its output lacks there, and how much each row counts."""
        scale_M1 = weight_M.sqrt()[:, None]
        x_MK, lacking_MN = scale_M1 * x_MK, scale_M1 * lacking_MN
        self._gram_KK += x_MK.t() @ x_MK
        self._cross_KN += x_MK.t() @ lacking_MN
        self._lacking += float(lacking_MN.double().square().sum())

    def change(self, damping: float) -> tuple[Tensor, float]:
        """(N, K) float64 to be added to the weight, and the share of the squared error that then is left.

        Args:
            damping: of the mean of the diagonal of XᵀX, added to the diagonal; 0 asks for independent inputs.
        """
        added = damping * float(self._gram_KK.diagonal().mean())
        damped_KK = self._gram_KK + added * torch.eye(len(self._gram_KK), dtype=torch.float64)
        change_KN = torch.linalg.solve(damped_KK, self._cross_KN)
        gained = 2 * (change_KN * self._cross_KN).sum() - (change_KN * (self._gram_KK @ change_KN)).sum()
        return change_KN.t(), 1 - float(gained) / self._lacking if self._lacking else 1.0


@torch.no_grad()
def reconstruct(
    whole: Path,
    cut: Path,
    into: Path,
    dropped: Sequence[int],
    windows_WT: Tensor,
    progress: Progress,
    *,
    own: bool = False,
) -> list[dict[str, Any]]:
    """Write the checkpoint `cut`, which lost some of `whole`, into `into` with fitted weights.

    Two layers, the windows' hidden states of both networks and one matrix of K × K float64 are in memory at a time, and
    the weights that changed until all are written.

    Args:
        dropped: layers of `whole` that `cut` lacks.
        windows_WT: (W, T) int64 calibration text.
        into: a folder without a checkpoint; its manifest is the caller's.
        own: the target is the whole layer's output for the same inputs, not the whole network's stream.

    Returns:
        For each weight that was fitted {tensor, error_left}: the share that is left of the squared error of the
        residual stream behind it.
    """
    source, left = LayerStream(open_checkpoint(whole)), LayerStream(open_checkpoint(cut))
    kept = [layer for layer in range(source.config.num_hidden_layers) if layer not in dropped]
    # Rows of the whole network's layers: those that one layer of the pruned one has to stand for.
    runs = [
        range(layer, after) for layer, after in zip(kept, [*kept[1:], source.config.num_hidden_layers], strict=True)
    ]
    target_WTE, hidden_WTE = source.embed(windows_WT), left.embed(windows_WT)
    progress.start("fitting what is left", len(kept))
    for gone in range(kept[0]):  # there is no weight before them to make up for them
        source.run(source.float_layer(gone, source.weights(gone)), target_WTE)
    changed: dict[str, Tensor] = {}
    found: list[dict[str, Any]] = []
    for layer, run in enumerate(runs):
        whole_layer = source.float_layer(run[0], source.weights(run[0]))
        pruned_layer = left.float_layer(layer, left.weights(layer))
        names = last_layers(pruned_layer)
        fewer = {name: _inputs(pruned_layer, name) < _inputs(whole_layer, name) for name in names}
        fewer[MLP] |= len(run) > 1
        halves = zip(
            names,
            source.halves(whole_layer, windows_WT.shape[1]),
            left.halves(pruned_layer, windows_WT.shape[1]),
            strict=True,
        )
        for name, whole_half, pruned_half in halves:
            wanted_WTE = hidden_WTE.clone() if own else target_WTE
            _advance(whole_half, wanted_WTE)
            if name == MLP:
                for gone in run[1:]:
                    source.run(source.float_layer(gone, source.weights(gone)), wanted_WTE)
            if fewer[name]:
                linear = pruned_layer.get_submodule(name)
                assert isinstance(linear, nn.Linear)
                error = _fit(linear, pruned_half, hidden_WTE, wanted_WTE, OWN_DAMPING if own else DAMPING)
                tensor = f"model.layers.{layer}.{name}.weight"
                changed[tensor] = linear.weight
                found.append({"tensor": tensor, "error_left": error})
            _advance(pruned_half, hidden_WTE)
        progress.advance()
    _write(cut, into, changed)
    return found


def _advance(half: Half, hidden_WTE: Tensor) -> None:
    for window_TE in hidden_WTE:
        window_TE.copy_(half(window_TE[None])[0])


def _fit(linear: nn.Linear, half: Half, hidden_WTE: Tensor, target_WTE: Tensor, damping: float) -> float:
    """Change the weight of `linear`, through which `half` ends, in place; the share of the error that is left."""
    seen: list[Tensor] = []
    handle = linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    equations = NormalEquations(linear.out_features, linear.in_features)
    try:
        for window_TE, target_TE in zip(hidden_WTE, target_WTE, strict=True):
            lacking_TE = target_TE - half(window_TE[None])[0]
            size_T = target_TE.square().mean(-1)
            equations.add(seen.pop()[0], lacking_TE, 1 / size_T.clamp(min=torch.finfo(torch.float32).tiny))
    finally:
        handle.remove()
    change_NK, error = equations.change(damping)
    linear.weight = nn.Parameter((linear.weight.double() + change_NK).to(torch.float32), requires_grad=False)
    return error


def _inputs(layer: DecoderLayer, name: str) -> int:
    linear = layer.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear.in_features


def _write(cut: Path, into: Path, changed: dict[str, Tensor]) -> None:
    """The checkpoint `cut` with other weights, each in the type that it is stored in."""
    checkpoint = open_checkpoint(cut)
    tensors = (
        (name, changed[name].to(stored.dtype) if name in changed else stored)
        for name in checkpoint.tensor_names
        for stored in [checkpoint.get(name)]
    )
    save_checkpoint(into, checkpoint.config, tensors, tokenizer_from=cut, dtype=checkpoint.config_json["dtype"])
