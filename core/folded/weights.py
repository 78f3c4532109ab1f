"""The tensors of a folder as `families.Fold` says, under our names; the folder is opened like any checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from penjing.core.checkpoint.decoder import Checkpoint
from penjing.core.errors import InputError
from penjing.core.folded.families import Fold, fold_from_hf
from penjing.core.models.config import DecoderConfig
from penjing.core.models.rope import yarn_magnitudes

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj")


class FoldedCheckpoint(Checkpoint):
    """A folder of one of the families of `families`, which reads like a checkpoint of the network that it becomes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, self._read)
        self.tensor_names = tuple(part for name in self.tensor_names for part in self._parts_of(name))
        self._order = _rotary_order(self._fold)

    def _read(self, values: dict[str, Any], source: str) -> DecoderConfig:
        self._fold: Fold = fold_from_hf(values, source)
        return self._fold.config

    def get(self, name: str) -> torch.Tensor:
        """See `Checkpoint`; in float32 where it is changed."""
        theirs, rows = self._place(name)
        tensor = super().get(theirs)
        tensor = tensor if rows is None else tensor[rows[0] : rows[1]].clone()
        return self._changed(name, tensor)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint`."""
        theirs, rows = self._place(name)
        first, *others = super().shape(theirs)
        return (first if rows is None else max(0, min(rows[1], first) - rows[0]), *others)

    def dtype(self, name: str) -> str:
        """See `Checkpoint`."""
        return super().dtype(self._place(name)[0])

    def _changed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        fold, config = self._fold, self.config
        layer, leaf = _split(name)
        norm = leaf.endswith("norm.weight")
        wide = tensor.to(torch.float64)
        if norm and fold.plus_one:
            wide = wide + 1.0
        heads = leaf.startswith(("self_attn.q_", "self_attn.k_"))
        if heads and self._order is not None:
            many = 1 if norm and config.qk_norm_over == "head" else -1
            split = wide.reshape(many, config.head_dim, *wide.shape[1:])[:, self._order]
            # What a scaling multiplies rotated queries and keys by reaches the dimensions that stand still, too.
            split[:, self._order >= (fold.rotary or config.head_dim)] /= yarn_magnitudes(config.rope_scaling)[0]
            wide = split.reshape(wide.shape)
        factor = 1.0
        if leaf == ("self_attn.q_norm.weight" if config.qk_norm else "self_attn.q_proj.weight") or (
            leaf == "self_attn.q_proj.bias" and not config.qk_norm
        ):
            factor = fold.query
        elif leaf.startswith(("self_attn.o_proj.", "mlp.down_proj.")):
            factor = fold.residual
        elif layer is None and leaf == "model.embed_tokens.weight":
            factor = fold.embedding
        elif layer is None and norm:
            factor = fold.final
        if factor == 1.0 and not (norm and fold.plus_one) and not (heads and self._order is not None):
            return tensor
        return (wide * factor).to(torch.float32)

    def _place(self, name: str) -> tuple[str, tuple[int, int] | None]:
        """The name in the folder of the tensor `name`, and its rows where it is a part of one."""
        fold, config = self._fold, self.config
        layer, leaf = _split(name)
        if layer is None:
            return name, None
        prefix = f"model.layers.{layer}."
        module, _, kind = leaf.rpartition(".")
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        if fold.fused and module in _QKV:
            begin = {_QKV[0]: 0, _QKV[1]: query, _QKV[2]: query + key}[module]
            return f"{prefix}self_attn.qkv_proj.{kind}", (begin, begin + (query if begin == 0 else key))
        if fold.fused_mlp and module in _MLP:
            inner = config.ffn_size(layer)
            begin = inner * _MLP.index(module)
            return f"{prefix}mlp.gate_up_proj.{kind}", (begin, begin + inner)
        return f"{prefix}{fold.names.get(module, module)}.{kind}", None

    def _parts_of(self, stored: str) -> list[str]:
        """Our names of what the tensor `stored` holds."""
        layer, leaf = _split(stored)
        if layer is None:
            return [stored]
        module, _, kind = leaf.rpartition(".")
        modules: tuple[str, ...] = (module,)
        if self._fold.fused and module == "self_attn.qkv_proj":
            modules = _QKV
        elif self._fold.fused_mlp and module == "mlp.gate_up_proj":
            modules = _MLP
        elif self._fold.names:
            back = {theirs: ours for ours, theirs in self._fold.names.items()}
            modules = (back.get(module, module),)
        return [f"model.layers.{layer}.{each}.{kind}" for each in modules]


def _split(name: str) -> tuple[int | None, str]:
    """ "model.layers.3.mlp.up_proj.weight" → 3 and "mlp.up_proj.weight"; a name outside layers → None and itself."""
    if not name.startswith("model.layers."):
        return None, name
    number, _, leaf = name.removeprefix("model.layers.").partition(".")
    if not number.isdecimal() or not leaf:
        raise InputError(f"the tensor {name!r} has no place in a decoder")
    return int(number), leaf


def _rotary_order(fold: Fold) -> torch.Tensor | None:
    """(head_dim,) which dimension of a head of theirs stands at each place of ours; None: as it is."""
    size = fold.config.head_dim
    rotary = fold.rotary or size
    if rotary == size and not fold.interleaved:
        return None
    dims = torch.arange(rotary)
    pairs = dims.view(-1, 2).t() if fold.interleaved else dims.view(2, -1)
    rest = torch.arange(rotary, size).view(2, -1)
    return torch.cat((pairs[0], rest[0], pairs[1], rest[1]))
