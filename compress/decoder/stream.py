"""Run a decoder layer by layer, with one layer's weights in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.attention import Attend, causal_attention
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder, DecoderLayer, capped_logits, table_basis
from penjing.core.models.rope import inverse_frequencies, layer_angles
from penjing.core.models.tensor_names import POSITIONS, TOKEN_INPUTS
from penjing.core.runtime.embedding import stored_table, tied_name
from penjing.core.runtime.quantized import apply_quantized, dequantized, quantized_linear
from penjing.core.runtime.schemes import Scheme, has_int8_embedding, quantized_modules
from penjing.kernels.rms_norm import rms_norm

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
LOGIT_ROWS = 128  # rows of logits at a time: 128 × 49 152 float32 are 25 MB

Weights = dict[str, Tensor]  # a layer's tensors by their names inside the layer: "self_attn.q_proj.weight"
# Called for every linear layer with its name inside the layer and its input (1, T, K); what it returns, if anything,
# replaces the input.
Observe = Callable[[str, Tensor], Tensor | None]

# Called with the keys (as they are cached: rotated) and values of each window, (1, T, KV, D).
ObserveKV = Callable[[Tensor, Tensor], None]


class Beside:
    """What layers read of texts beside their hidden states: the tokens, and keys and values of layers before them.

    Attributes:
        tokens_WT: (W, T) int64.
        kept: layer → its keys and values (W, T, KV, D), where layers behind it read them, too.
    """

    def __init__(self, tokens_WT: Tensor, kept: dict[int, tuple[Tensor, Tensor]] | None = None) -> None:
        self.tokens_WT = tokens_WT
        self.kept = {} if kept is None else kept


Half = Callable[[Tensor], Tensor]  # the residual stream of a window (1, T, E) → what it is behind that half of a layer


def refuse_tokens(config: DecoderConfig, folder: Path, what: str) -> None:
    """Refuse a decoder whose layers read more than hidden states where `what` knows nothing of it.

    Raises:
        InputError: it has such layers.
    """
    if config.token_inputs or config.shared_keys:
        raise InputError(
            f"{folder} has layers that take something of tokens or read others' keys (token_inputs, shared_keys), "
            f"which {what} does not know; quantize it without training, or serve it as it is ('penjing serve {folder}')"
        )


class LayerStream:
    """The layers of a checkpoint or an artifact, run one after the other on hidden states that the caller keeps.

    Args:
        checkpoint: weights under Hugging Face names.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint, self.config = checkpoint, checkpoint.config
        with torch.device("meta"):
            self._decoder = Decoder(self.config)
        self._inverse_frequency = inverse_frequencies(self.config)
        quantization = checkpoint.quantization
        linears = [name for name, layer in self._decoder.named_modules() if isinstance(layer, nn.Linear)]
        self.schemes: dict[str, Scheme] = {} if quantization is None else quantized_modules(quantization, linears)
        self._int8_table = has_int8_embedding(quantization)

    def stored(self, name: str) -> Tensor:
        """The tensor `name` as it is stored: a view of the file, which stays mapped while the view lives. The LM head's
        where it is one table with the embedding are the embedding's.

        The file is opened anew each time, because pages that were read count as resident until it is unmapped.
        """
        tied = self._int8_table and self.config.tie_word_embeddings
        return open_checkpoint(self.checkpoint.folder).get(tied_name(name) if tied else name)

    def embed(self, windows_WT: Tensor) -> Tensor:
        """(W, T) token ids → (W, T, E) float32 hidden states."""
        if self._int8_table:
            embedded = stored_table(self.stored, self.config.tie_word_embeddings).rows(windows_WT)
        else:
            embedded = F.embedding(windows_WT, self.stored(EMBEDDING)).to(torch.float32)
        embedded = table_basis(embedded, self.config)
        if self.config.learned_positions:
            embedded = embedded + self.stored(POSITIONS)[: windows_WT.shape[1]].to(torch.float32)
        return embedded

    def weights(self, layer: int) -> Weights:
        """The float32 tensors of `layer`, dequantized where they are quantized; a copy that may be changed."""
        names = self._decoder.model.layers[layer].state_dict().keys()
        source, prefix = open_checkpoint(self.checkpoint.folder), f"model.layers.{layer}."
        found: Weights = {}
        for name in names:
            module = prefix + name.removesuffix(".weight")
            if self.is_quantized(module) and name.endswith(".weight"):
                found[name] = dequantized(module, self.schemes[module], source.get)
            else:
                found[name] = source.get(prefix + name).to(torch.float32, copy=True)
        return found

    def is_quantized(self, module: str) -> bool:
        """Whether the linear layer `module` ("model.layers.0.mlp.up_proj", "lm_head") is stored in integers."""
        return module in self.schemes

    def float_layer(self, layer: int, weights: Weights) -> DecoderLayer:
        """The layer in float32 with `weights`."""
        module = self._empty_layer(layer)
        module.load_state_dict(weights, assign=True)
        return module

    def stored_layer(self, layer: int) -> DecoderLayer:
        """The layer as it runs: what is stored in integers through the runtime, the rest in float32."""
        module, prefix = self._empty_layer(layer), f"model.layers.{layer}."
        source = open_checkpoint(self.checkpoint.folder)
        schemes = {name.removeprefix(prefix): each for name, each in self.schemes.items() if name.startswith(prefix)}
        apply_quantized(module, schemes, lambda name: source.get(prefix + name))
        floats = {name: source.get(prefix + name).to(torch.float32) for name in module.state_dict()}
        module.load_state_dict(floats, assign=True)
        return module

    @torch.no_grad()
    def run(
        self,
        module: DecoderLayer,
        hidden_WTE: Tensor,
        observe: Observe | None = None,
        observe_kv: ObserveKV | None = None,
        attend: Attend | None = None,
        beside: Beside | None = None,
    ) -> None:
        """Send `hidden_WTE` through a layer, window by window, in place; `attend`: instead of the network's own;
        `beside`: of the same windows, where layers of the network read more than hidden states."""
        sees = attend or causal_attention(self._decoder.config)

        def watched(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            if observe_kv is not None:
                observe_kv(k, v)
            return sees(layer, q, k, v, sinks)

        handles = [] if observe is None else _hook_linears(module, observe)
        cos, sin = self._angles(module, hidden_WTE.shape[1])
        own: list[tuple[Tensor, Tensor]] = []
        try:
            for window, window_TE in enumerate(hidden_WTE):
                kept, token = self._read_beside(module, beside, window)
                watching = replace(sees, attention=watched, kept=kept)
                window_TE.copy_(module(window_TE[None], cos, sin, watching, *token)[0])
                own += [kept[layer] for layer in kept if layer == module.mixer.layer]
        finally:
            for handle in handles:
                handle.remove()

        if own and beside is not None:
            keys, values = (torch.cat(each) for each in zip(*own, strict=True))
            beside.kept[module.mixer.layer] = keys, values

    def _read_beside(
        self, module: DecoderLayer, beside: Beside | None, window: int
    ) -> tuple[dict[int, tuple[Tensor, Tensor]], tuple[Tensor, ...]]:
        layer, config = module.mixer.layer, self.config
        lender = config.keys_of(layer)
        if beside is None:
            refuse_tokens(config, self.checkpoint.folder, "this step")
            return {}, ()
        kept = {} if lender == layer else {lender: tuple(each[window, None] for each in beside.kept[lender])}
        token: tuple[Tensor, ...] = ()
        if config.token_inputs:
            rows_T = beside.tokens_WT[window] * config.num_hidden_layers + layer
            token = (F.embedding(rows_T, self.stored(TOKEN_INPUTS)).float()[None],)
        return kept, token  # pyright: ignore[reportReturnType]

    def halves(self, module: DecoderLayer, num_tokens: int) -> tuple[Half, Half]:
        """Attention, or what stands in its place, and MLP of a layer, each with its norm and added to the residual
        stream.

        Raises:
            ConfigError: they are no halves, since both read what enters the layer.
        """
        if module.parallel:
            raise ConfigError(
                f"{self.checkpoint.folder}: attention and MLP of a layer run beside each other (parallel=true), and "
                "method='obs' and reconstruct correct one behind the other; take method='activation', not reconstruct"
            )
        attend = causal_attention(self._decoder.config)
        cos, sin = self._angles(module, num_tokens)
        return lambda x_1TE: module.with_attention(x_1TE, cos, sin, attend), module.with_mlp

    def _angles(self, module: DecoderLayer, num_tokens: int) -> tuple[Tensor, Tensor]:
        return layer_angles(self.config, self._inverse_frequency, torch.arange(num_tokens))(module.mixer.layer)

    def head_weight(self) -> Tensor:
        """(V, E) weight of the LM head as it is stored: the embedding where they are tied."""
        tied = self.config.tie_word_embeddings
        return self.stored(EMBEDDING if tied else HEAD)

    def stored_head(self) -> Callable[[Tensor], Tensor]:
        """The LM head as it runs: (R, E) float32 → (R, V) float32."""
        if self.is_quantized("lm_head"):
            head = quantized_linear("lm_head", self.schemes["lm_head"], self.stored)
        else:
            head = partial(F.linear, weight=self.head_weight().to(torch.float32), bias=self.head_bias())
        return lambda x_RE: capped_logits(head(table_basis(x_RE, self.config)), self.config)

    def floating_head(self) -> Callable[[Tensor], Tensor]:
        """`stored_head` with its weight widened, so that what it reads is not rounded."""
        if self.is_quantized("lm_head"):
            weight_VE = dequantized("lm_head", self.schemes["lm_head"], self.stored)
        else:
            weight_VE = self.head_weight().to(torch.float32)
        bias_V, config = self.head_bias(), self.config
        return lambda x_RE: capped_logits(F.linear(table_basis(x_RE, config), weight_VE, bias_V), config)

    def head_bias(self) -> Tensor | None:
        """(V,) float32 of the LM head, if it has one."""
        return self.stored(HEAD_BIAS).to(torch.float32) if self.config.head_bias else None

    def final_norm(self, hidden_TE: Tensor) -> Tensor:
        """The last norm, (…, E) → (…, E)."""
        return rms_norm(hidden_TE, self.stored(FINAL_NORM).to(torch.float32), self.config.rms_norm_eps)

    def _empty_layer(self, layer: int) -> DecoderLayer:
        with torch.device("meta"):
            return DecoderLayer(self.config, layer)


def _hook_linears(module: nn.Module, observe: Observe) -> list[Any]:
    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], Tensor | None]:
        return lambda _, inputs: observe(name, inputs[0])

    linears = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    return [layer.register_forward_pre_hook(hook(name)) for name, layer in linears]
