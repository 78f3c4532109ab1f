"""Run a decoder layer by layer, with one layer's weights in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.core.checkpoint import Checkpoint, open_checkpoint
from penjing.core.models.decoder import Decoder, DecoderLayer
from penjing.core.models.rope import inverse_frequencies
from penjing.kernels.rms_norm import rms_norm
from penjing.kernels.rotary import rotary_cos_sin

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LOGIT_ROWS = 128  # rows of logits at a time: 128 × 49 152 float32 are 25 MB

Weights = dict[str, Tensor]  # a layer's tensors by their names inside the layer: "self_attn.q_proj.weight"
# Called for every linear layer with its name inside the layer and its input (1, T, K); what it returns, if anything,
# replaces the input.
Observe = Callable[[str, Tensor], Tensor | None]


class LayerStream:
    """The layers of a checkpoint, run one after the other on hidden states that the caller keeps.

    Args:
        checkpoint: floating weights under Hugging Face names.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint, self.config = checkpoint, checkpoint.config
        with torch.device("meta"):
            self._decoder = Decoder(self.config)
        self._inverse_frequency = inverse_frequencies(self.config)

    def stored(self, name: str) -> Tensor:
        """The tensor `name` as it is stored: a view of the file, which stays mapped while the view lives.

        The file is opened anew each time, because pages that were read count as resident until it is unmapped.
        """
        return open_checkpoint(self.checkpoint.folder).get(name)

    def embed(self, windows_WT: Tensor) -> Tensor:
        """(W, T) token ids → (W, T, E) float32 hidden states."""
        return F.embedding(windows_WT, self.stored(EMBEDDING)).to(torch.float32)

    def weights(self, layer: int) -> Weights:
        """The float32 tensors of `layer`; a copy that may be changed."""
        names = self._layer(layer).state_dict().keys()
        source = open_checkpoint(self.checkpoint.folder)
        stored = {name: source.get(f"model.layers.{layer}.{name}") for name in names}
        return {name: tensor.to(torch.float32, copy=True) for name, tensor in stored.items()}

    @torch.no_grad()
    def run(self, layer: int, weights: Weights, hidden_WTE: Tensor, observe: Observe | None = None) -> None:
        """Send `hidden_WTE` through `layer` with `weights`, window by window, in place."""
        module = self._layer(layer)
        module.load_state_dict(weights, assign=True)
        handles = [] if observe is None else _hook_linears(module, observe)
        cos, sin = rotary_cos_sin(self._inverse_frequency, torch.arange(hidden_WTE.shape[1]))
        try:
            for window_TE in hidden_WTE:
                window_TE.copy_(module(window_TE[None], cos, sin, self._decoder.causal_attention)[0])
        finally:
            for handle in handles:
                handle.remove()
            module.to_empty(device="meta")

    def head_weight(self) -> Tensor:
        """(V, E) weight of the LM head as it is stored: the embedding where they are tied."""
        tied = self.config.tie_word_embeddings
        return self.stored(EMBEDDING if tied else HEAD)

    def final_norm(self, hidden_TE: Tensor) -> Tensor:
        """The last norm, (…, E) → (…, E)."""
        return rms_norm(hidden_TE, self.stored(FINAL_NORM).to(torch.float32), self.config.rms_norm_eps)

    def _layer(self, layer: int) -> DecoderLayer:
        module = self._decoder.model.layers[layer]
        assert isinstance(module, DecoderLayer)
        return module


def _hook_linears(module: nn.Module, observe: Observe) -> list[Any]:
    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], Tensor | None]:
        return lambda _, inputs: observe(name, inputs[0])

    linears = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    return [layer.register_forward_pre_hook(hook(name)) for name, layer in linears]
