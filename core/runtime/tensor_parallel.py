"""A decoder that several processes compute together, each with a part of every linear layer.

Every layer is split by its outputs, and what the next one reads is gathered from all processes before it:

    q, k, v      whole heads, so that attention and its cache are split too   the heads are gathered
    o_proj       rows                                                         gathered: the residual is whole
    gate, up     rows                                                         what down_proj reads is gathered
    down_proj    rows                                                         gathered
    lm_head      rows                                                         gathered by the first process alone

Megatron-LM (https://arxiv.org/abs/1909.08053) splits o_proj and down_proj by their inputs and adds up partial sums,
which takes half as many exchanges but another order of additions. Here each number is one whole dot product that one
process computes, so that all of them are bit-equal to those of a single process, whatever the number of processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from penjing.core.errors import ConfigError
from penjing.core.models.attention import Attention
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder, DecoderLayer
from penjing.core.models.mlp import MLP
from penjing.core.runtime.batch_invariant import BatchInvariantLinear
from penjing.core.runtime.quantized import Int4Linear, Int8Linear
from penjing.core.runtime.schemes import EMBEDDING_MODULE
from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.cpu.packing import Panels
from penjing.kernels.step_layers import pack_together


class Gather(Protocol):
    """How the processes exchange what they computed."""

    def everywhere(self, x_MN: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """(M, sum of `sizes`): what all processes have, (M, sizes[rank]) each, beside each other."""
        ...

    def first(self, x_MN: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """The same for process 0; the others get `x_MN` back."""
        ...


@dataclass(frozen=True)
class Split:
    """How many outputs of each layer each of `ranks` processes has; tuples are one number a process."""

    config: DecoderConfig
    ranks: int

    def check(self) -> None:
        """Raise ConfigError unless the model can be split so; nothing of its weights is looked at."""
        config, wanted = self.config, f"tensor_parallel={self.ranks}"
        kinds = {"has experts": config.moe, "keeps its keys as latent attention": config.latent_attention}
        for what, value in kinds.items():
            if value is not None:
                raise ConfigError(f"{wanted} does not fit this model, which {what}; leave tensor_parallel=1")
        if found := config.departures():
            raise ConfigError(f"{wanted} does not fit a model with {', '.join(found)}; leave tensor_parallel=1")
        if not self._heads_fit():
            heads, kv = config.num_attention_heads, config.num_key_value_heads
            fitting = [str(n) for n in range(1, heads + 1) if Split(config, n)._heads_fit()]
            raise ConfigError(
                f"{wanted} does not divide {heads} heads with {kv} of keys and values: up to {kv} processes share "
                f"those out, more have one each and divide the heads; take one of {', '.join(fitting)}"
            )
        block = config.mlp_hadamard or 1
        narrowest = min(config.ffn_size(layer) for layer in range(config.num_hidden_layers)) // block
        if narrowest < self.ranks:
            what = f"blocks of {block} channels that a transform keeps together" if block > 1 else "channels"
            raise ConfigError(f"{wanted}: the narrowest MLP has {narrowest} {what}, at least one a process is needed")

    def _heads_fit(self) -> bool:
        heads, kv = self.config.num_attention_heads, self.config.num_key_value_heads
        return self.ranks <= kv or (self.ranks % kv == 0 and heads % self.ranks == 0)

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """Key-value heads of each process; one is kept by several where there are more processes."""
        kv = self.config.num_key_value_heads
        return _even(kv, self.ranks) if self.ranks <= kv else (1,) * self.ranks

    @property
    def heads(self) -> tuple[int, ...]:
        """Heads of queries of each process."""
        total, kv = self.config.num_attention_heads, self.config.num_key_value_heads
        each = total // kv if self.ranks <= kv else total // self.ranks
        return tuple(each * count for count in self.kv_heads)

    def inner(self, layer: int) -> tuple[int, ...]:
        """Channels of the MLP; a block of the Hadamard transform stays together."""
        block = self.config.mlp_hadamard or 1
        return tuple(block * count for count in _even(self.config.ffn_size(layer) // block, self.ranks))

    @property
    def hidden(self) -> tuple[int, ...]:
        """Channels of the hidden state."""
        return _even(self.config.hidden_size, self.ranks)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Rows of the LM head."""
        return _even(self.config.vocab_size, self.ranks)

    def share(self, rank: int) -> DecoderConfig:
        """The model whose cache process `rank` keeps."""
        sizes = {"num_attention_heads": self.heads[rank], "num_key_value_heads": self.kv_heads[rank]}
        return self.config.model_copy(update=sizes)

    def rows(self, name: str, rank: int) -> slice | None:
        """Outputs of the linear layer `name` that process `rank` has; None: it is none of those that are split."""
        part = name.rpartition(".")[2]
        size = self.config.head_dim
        if part == "q_proj":
            return _own(tuple(size * count for count in self.heads), rank)
        if part in ("k_proj", "v_proj"):
            kv = self.config.num_key_value_heads
            if self.ranks > kv:
                first = rank * kv // self.ranks
                return slice(first * size, (first + 1) * size)
            return _own(tuple(size * count for count in self.kv_heads), rank)
        if part in ("o_proj", "down_proj"):
            return _own(self.hidden, rank)
        if part in ("gate_proj", "up_proj"):
            return _own(self.inner(int(name.split(".")[2])), rank)
        return _own(self.tokens, rank) if part == "lm_head" else None

    def cut(self, rank: int, name: str, value: Tensor) -> Tensor:
        """What process `rank` needs of the float parameter `name` as it is stored: its rows, in float32. The embedding
        stays as it is, a view of the file, of which the rows that texts need are read."""
        if name == f"{EMBEDDING_MODULE}.weight":
            return value
        module = name.rpartition(".")[0]
        rows = self.rows(module, rank)
        return (value if rows is None else value[rows]).to(torch.float32)


class _Gathered(nn.Module):
    """A part of a linear layer whose input is gathered before it, or its output after it."""

    def __init__(
        self,
        part: nn.Module,
        gather: Gather,
        inputs: tuple[int, ...] | None,
        outputs: tuple[int, ...],
        first: bool = False,
    ) -> None:
        super().__init__()
        self.part, self.gather, self.inputs, self.outputs, self.to_first = part, gather, inputs, outputs, first

    def forward(self, x: Tensor) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1])
        if self.inputs is not None:
            x_MK = self.gather.everywhere(x_MK, self.inputs)
        y_MN = self.part(x_MK)
        y_MN = self.gather.first(y_MN, self.outputs) if self.to_first else self.gather.everywhere(y_MN, self.outputs)
        return y_MN.view(*x.shape[:-1], y_MN.shape[-1])


class _PackedLinear(nn.Module):
    """A layer in integers of which nothing but the packed panels is kept: (M, K) floating → (M, N) float32."""

    def __init__(self, extension: CpuExtension, panels: Panels) -> None:
        super().__init__()
        self._extension, self._panels = extension, panels

    def forward(self, x_MK: Tensor) -> Tensor:
        y_MN = self._extension.int8_linear(x_MK.reshape(-1, x_MK.shape[-1]), self._panels)
        return y_MN.view(*x_MK.shape[:-1], y_MN.shape[-1])


def pack_integers(model: nn.Module, extension: CpuExtension) -> None:
    """Lay out the layers in integers of `model` for the C++ kernels, in place; their stored form is given up."""
    found = {name: each.packed for name, each in model.named_modules() if isinstance(each, (Int8Linear, Int4Linear))}
    for name, panels in zip(found, pack_together(extension, list(found.values())), strict=True):
        model.set_submodule(name, _PackedLinear(extension, panels))


def apply_tensor_parallel(model: Decoder, split: Split, rank: int, gather: Gather, extension: CpuExtension) -> None:
    """Leave process `rank` its part of `model`, in place; `Split.check` has passed.

    Args:
        model: ready to serve (`core.checkpoint.load`); its float parameters whole, or already cut by `Split.cut`.
    """

    def part(name: str) -> nn.Module:
        rows = split.rows(name, rank)
        assert rows is not None
        return _part(model.get_submodule(name), rows)

    size = split.config.head_dim
    for index, layer in enumerate(model.model.layers):
        assert isinstance(layer, DecoderLayer)
        assert type(layer.self_attn) is Attention
        assert type(layer.mlp) is MLP
        within = f"model.layers.{index}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            model.set_submodule(f"{within}.{name}", part(f"{within}.{name}"))
        seen = tuple(size * count for count in split.heads)
        for name, inputs in (("self_attn.o_proj", seen), ("mlp.down_proj", split.inner(index))):
            whole = _Gathered(part(f"{within}.{name}"), gather, inputs, split.hidden)
            model.set_submodule(f"{within}.{name}", whole)
    model.set_submodule("lm_head", _Gathered(part("lm_head"), gather, None, split.tokens, first=True))
    pack_integers(model, extension)


def _part(module: nn.Module, rows: slice) -> nn.Module:
    """The outputs `rows` of a linear layer; weights stay views of what they were."""
    if isinstance(module, Int8Linear):
        eight = module.packed
        bias_N = None if eight.bias_N is None else eight.bias_N[rows]
        stored = eight.stored[rows] if isinstance(eight.stored, Tensor) else eight.stored.rows(rows)
        return Int8Linear(stored, eight.scale_N[rows], bias_N, eight.zero_points)
    if isinstance(module, Int4Linear):
        four = module.packed
        bias_N, offset_NG = (None if x is None else x[rows] for x in (four.bias_N, four.offset_NG))
        return Int4Linear(four.packed_NK8[rows], four.scale_NG[rows], bias_N, offset_NG, four.activation_bits)
    assert isinstance(module, nn.Linear)
    count = rows.stop - rows.start
    made = BatchInvariantLinear(module.in_features, count, bias=module.bias is not None, device="meta")
    made.weight = _parameter(module.weight, rows, count)
    if module.bias is not None:
        made.bias = _parameter(module.bias, rows, count)
    return made


def _parameter(value: Tensor, rows: slice, count: int) -> nn.Parameter:
    own = value.detach() if len(value) == count else value.detach()[rows]  # `Split.cut` may have been before
    return nn.Parameter(own.to(torch.float32), requires_grad=False)


def _even(total: int, ranks: int) -> tuple[int, ...]:
    return tuple(total // ranks + (rank < total % ranks) for rank in range(ranks))


def _own(sizes: tuple[int, ...], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
