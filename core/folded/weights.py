"""The tensors of a folder as `families.Fold` says, under our names; the folder is opened like any checkpoint."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penjing.core.checkpoint.decoder import Checkpoint
from penjing.core.errors import InputError
from penjing.core.folded.families import Fold, fold_from_hf
from penjing.core.models.config import DecoderConfig
from penjing.core.models.rope import yarn_magnitudes

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OF_QUERIES = ("self_attn.q_proj", "self_attn.g_proj")
_OUT = "self_attn.o_proj.weight"
_MLP = ("gate_proj", "up_proj")
_TABLES = ("embed_tokens", "embed_positions")
_MLPS = ("mlp", "mlp.shared_experts")
_WRITERS = ("self_attn.o_proj", ".down_proj")
_OF_EXPERTS = ("mlp.experts.", "mlp.shared_experts.")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_CHOICE = "mlp.e_score_correction_bias"
_AFTER = ("attention_output_norm.", "mlp_output_norm.")
_BIASES = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "out", "lm_head": "head"}


class FoldedCheckpoint(Checkpoint):
    """A folder of one of the families of `families`, which reads like a checkpoint of the network that it becomes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, self._read)
        self._there = frozenset(self.tensor_names)
        self._fold = _as_named(self._fold, self._there)
        if "lm_head" in self._fold.outside and f"{self._fold.outside['lm_head']}.weight" not in self._there:
            del self._fold.outside["lm_head"]  # transformers writes its own name since version 5
        self.tensor_names = tuple(part for name in self.tensor_names for part in self._parts_of(name))
        self._order = _rotary_order(self._fold)

    def _read(self, values: dict[str, Any], source: str) -> DecoderConfig:
        self._fold: Fold = fold_from_hf(values, source)
        return self._fold.config

    @property
    def plain(self) -> bool:
        """Whether the folder holds the very tensors of the network, under its names."""
        return self._fold == Fold(self.config)

    def _name_in_model(self, stored: str) -> str:
        return stored  # `Fold` has their names

    def _names_in_folder(self, name: str) -> tuple[str, ...]:
        return (name,)

    def get(self, name: str) -> torch.Tensor:
        """See `Checkpoint`; in float32 where it is changed."""
        return self._centred(name) if self._fold.centred else self._plain(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint`."""
        if not self._holds(name):
            module, _, kind = name.rpartition(".")
            norm = self.config.head_dim if module.endswith((".q_norm", ".k_norm")) else self.config.hidden_size
            return (self.shape(f"{module}.weight")[0],) if kind == "bias" else (norm,)
        theirs, rows = self._place(name)
        if name.endswith(_CHOICE):
            return (math.prod(super().shape(theirs)),)  # ERNIE's is one row
        first, *others = reversed(super().shape(theirs)) if self._is_transposed(theirs) else super().shape(theirs)
        found = (first if rows is None else rows.count(first), *others)
        missing = self._missing(name)
        return found if missing is None else missing.size(found)

    def dtype(self, name: str) -> str:
        """See `Checkpoint`."""
        if self._holds(name):
            return super().dtype(self._place(name)[0])
        module, _, kind = name.rpartition(".")
        return self.dtype(f"{module}.weight" if kind == "bias" else "model.embed_tokens.weight")

    def _holds(self, name: str) -> bool:
        """Whether the folder holds the tensor `name`; the others are 1 or, of one with centred norms, 0 at first."""
        if not self._fold.centred:
            return not (self._fold.plain_norms and name.endswith("norm.weight"))
        module, _, kind = name.rpartition(".")
        if module.endswith("norm"):
            part = "norm" if kind == "weight" else "shift"
        elif kind == "weight":
            return True
        else:
            part = _BIASES.get(module.rpartition(".")[2], "mlp")
        return part in self._fold.stored

    def _plain(self, name: str) -> torch.Tensor:
        """The tensor without what centred norms need."""
        if not self._holds(name):
            return self._changed(name, torch.ones(self.shape(name)))
        theirs, rows = self._place(name)
        tensor = super().get(theirs)
        if name.endswith(_CHOICE):
            return tensor.flatten()
        tensor = tensor.t() if self._is_transposed(theirs) else tensor
        changed = self._changed(name, tensor if rows is None else rows.of(tensor).clone())
        missing = self._missing(name)
        return changed if missing is None else missing.added(changed)

    def _missing(self, name: str) -> _Missing | None:
        """The heads that the tensor `name` lacks in the folder."""
        layer, leaf = _split(name)
        module = leaf.rpartition(".")[0]
        if layer is None or not self._fold.heads or not (leaf == _OUT or module in _OF_QUERIES):
            return None
        there, whole = self._fold.heads[layer], self.config.num_attention_heads
        if there == whole:
            return None
        return _Missing(int(leaf == _OUT), self.config.num_key_value_heads, there, whole)

    def _centred(self, name: str) -> torch.Tensor:
        module, _, kind = name.rpartition(".")
        if module.endswith("norm") and not self._holds(name):
            return self._plain(name)
        if kind == "weight" and not module.endswith((*_WRITERS, *_TABLES)):
            return self._plain(name)
        wide = self._plain(name).double() if self._holds(name) else torch.zeros(self.shape(name), dtype=torch.float64)
        if module.endswith((*_WRITERS, *_TABLES)):
            wide -= wide.mean(dim=1 if module.endswith(_TABLES) else 0, keepdim=True)
        elif "shift" in self._fold.stored:
            layer, leaf = _split(name)
            norm = "model.norm" if layer is None else f"model.layers.{layer}.{_norm_before(leaf)}"
            wide += self._plain(f"{module}.weight").double() @ self._shift(norm)
        return wide.to(torch.float32)

    def _shift(self, norm: str) -> torch.Tensor:
        """(E,) float64: what a norm of ours adds there, and its factors with it."""
        return super().get(self._place(f"{norm}.bias")[0]).double()

    def _changed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        fold, config = self._fold, self.config
        layer, leaf = _split(name)
        order = self._order_of(layer)
        norm = leaf.endswith("norm.weight")
        wide = tensor.to(torch.float64)
        embedding = layer is None and leaf == "model.embed_tokens.weight"
        if embedding and fold.normed:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        if norm and fold.plus_one:
            wide = wide + 1.0
        heads = leaf.startswith(("self_attn.q_", "self_attn.k_"))
        if heads and order is not None:
            many = 1 if norm and config.qk_norm_over == "head" else -1
            split = wide.reshape(many, config.head_dim, *wide.shape[1:])[:, order]
            # What a scaling multiplies rotated queries and keys by reaches the dimensions that stand still, too.
            if norm or not config.qk_norm:
                split[:, order >= (fold.rotary or config.head_dim)] /= yarn_magnitudes(config.rope_scaling)[0]
            wide = split.reshape(wide.shape)
        factor = 1.0
        if leaf == ("self_attn.q_norm.weight" if config.qk_norm else "self_attn.q_proj.weight") or (
            leaf == "self_attn.q_proj.bias" and not config.qk_norm
        ):
            factor = fold.query
        elif leaf.startswith(_AFTER) if config.norms != "before" else leaf.rpartition(".")[0].endswith(_WRITERS):
            factor = fold.residual * (fold.experts if leaf.startswith(_OF_EXPERTS) else 1.0)
        elif embedding:
            factor = fold.embedding
        elif layer is None and norm:
            factor = fold.final
        changed = (norm and fold.plus_one) or (embedding and fold.normed) or (heads and order is not None)
        if factor == 1.0 and not changed:
            return tensor
        return (wide * factor).to(torch.float32)

    def _order_of(self, layer: int | None) -> torch.Tensor | None:
        """Of the heads of a layer; see `_rotary_order`."""
        kinds = self.config.layer_rotary
        if layer is None or kinds is None or self.config.rotary_local_pairs is None:
            return self._order
        return None if kinds[layer] == "local" else self._order  # all dimensions of those rotate

    def _place(self, name: str) -> tuple[str, _Rows | None]:
        """The name in the folder of the tensor `name`, and its rows where it is a part of one."""
        fold, config = self._fold, self.config
        layer, leaf = _split(name)
        module, _, kind = leaf.rpartition(".")
        if layer is None:
            module = "model.embed_tokens" if fold.tied and module == "lm_head" else module
            first = fold.first_position if module == "model.embed_positions" else 0
            rows = _Rows(first, first + config.max_position_embeddings) if first else None
            return f"{fold.outside.get(module, module)}.{kind}", rows
        if leaf in fold.names:
            return f"{fold.layers}{layer}.{fold.names[leaf]}", None
        rows = None
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        if fold.fused and module in _QKV:
            at = _QKV.index(module)
            begin = (0, query, query + key)[at]
            heads = config.num_key_value_heads if fold.fused_heads else 0
            rows = _Rows(begin, begin + (key if at else query), heads, config.head_dim, at)
            module = "self_attn.qkv_proj"
        elif fold.fused_mlp and module.endswith(_MLP) and _EXPERT.search(module) is None:
            block, _, part = module.rpartition(".")
            inner = config.ffn_size(layer)
            if block != "mlp" and config.moe is not None:
                inner = config.moe.shared_expert_intermediate_size
            begin = inner * _MLP.index(part)
            module, rows = f"{block}.gate_up_proj", _Rows(begin, begin + inner)
        return f"{fold.layers}{layer}.{self._module_in_folder(module)}.{kind}", rows

    def _module_in_folder(self, module: str) -> str:
        number = _EXPERT.search(module)
        if number is None:
            return self._fold.names.get(module, module)
        numbered = _EXPERT.sub("*", module)
        return self._fold.names.get(numbered, numbered).replace("*", number[0])

    def _parts_of(self, stored: str) -> list[str]:
        """Our names of what the tensor `stored` holds."""
        fold = self._fold
        module, _, kind = stored.rpartition(".")
        if stored.endswith(fold.unused) or stored.startswith(fold.apart):
            return []
        number, _, leaf = module.removeprefix(fold.layers).partition(".")
        if not module.startswith(fold.layers) or not number.isdecimal():
            found = _named_so(module, fold.outside)
        elif fold.more_layers and int(number) >= self.config.num_hidden_layers:
            return []
        else:
            if whole := [ours for ours, name in fold.names.items() if name == f"{leaf}.{kind}"]:
                return [f"model.layers.{number}.{ours}" for ours in whole]
            own = [each for ours in _named_so(leaf, fold.names) for each in self._fused(ours)]
            found = [f"model.layers.{number}.{each}" for each in own]
        shifts = kind == "bias" and "shift" in fold.stored
        return [f"{each}.{kind}" for each in found if not (shifts and each.endswith("norm"))]

    def _is_transposed(self, theirs: str) -> bool:
        return theirs.endswith(tuple(f".{module}.weight" for module in self._fold.transposed))

    def _fused(self, module: str) -> tuple[str, ...]:
        if self._fold.fused and module == "self_attn.qkv_proj":
            return _QKV
        block, _, leaf = module.rpartition(".")
        together = self._fold.fused_mlp and leaf == "gate_up_proj" and block in _MLPS
        return tuple(f"{block}.{part}" for part in _MLP) if together else (module,)


@dataclass(frozen=True)
class _Missing:
    """Heads of queries that a layer has fewer of than others, `there` of `whole`, along `dim` of a tensor: as many for
    each of `groups` heads of keys, behind those that are there."""

    dim: int
    groups: int
    there: int
    whole: int

    def size(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape with them; as it is where it is none of so many heads."""
        if len(shape) <= self.dim:
            return shape
        each, rest = divmod(shape[self.dim], self.there)
        return shape if rest else (*shape[: self.dim], each * self.whole, *shape[self.dim + 1 :])

    def added(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with zeros in their places."""
        parts = tensor.unflatten(self.dim, (self.groups, self.there // self.groups, -1))
        sizes = list(parts.shape)
        sizes[self.dim + 1] = (self.whole - self.there) // self.groups
        return torch.cat((parts, parts.new_zeros(sizes)), self.dim + 1).flatten(self.dim, self.dim + 2)


@dataclass(frozen=True)
class _Rows:
    """Rows of a matrix; with `heads` of keys those of queries, keys or values, as `part` says: each head of keys, of
    `size`, has its queries, its keys and its values behind each other."""

    begin: int
    end: int
    heads: int = 0
    size: int = 0
    part: int = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.heads:
            return tensor[self.begin : self.end]
        parts = tensor.unflatten(0, (self.heads, -1, self.size))
        return (parts[:, :-2], parts[:, -2:-1], parts[:, -1:])[self.part].flatten(0, 2)

    def count(self, rows: int) -> int:
        """How many they are of a matrix of so many."""
        if not self.heads:
            return max(0, min(self.end, rows) - self.begin)
        keys = self.heads * self.size
        return 0 if rows % keys else keys if self.part else rows - 2 * keys


def _as_named(fold: Fold, names: frozenset[str]) -> Fold:
    """`fold` of a folder whose tensors are `names`: those of the network without its head lack their first word, and of
    several spellings it has one."""
    prefix = fold.layers.partition(".")[0] + "."
    if fold.layers != "model.layers." and not any(name.startswith(prefix) for name in names):
        outside = {ours: theirs.removeprefix(prefix) for ours, theirs in fold.outside.items()}
        fold = replace(fold, layers=fold.layers.removeprefix(prefix), outside=outside)
    if not fold.spelled:
        return fold
    there = {_EXPERT.sub("*", name).removeprefix(fold.layers).partition(".")[2] for name in names}
    there |= {name.rpartition(".")[0] for name in there}
    found = {ours: next((each for each in known if each in there), known[0]) for ours, known in fold.spelled.items()}
    return replace(fold, names=fold.names | found)


def _named_so(theirs: str, names: dict[str, str]) -> list[str]:
    """Our names of the module `theirs`."""
    number = _EXPERT.search(theirs)
    if number is None:
        return [ours for ours, name in names.items() if name == theirs] or [theirs]
    return [each.replace("*", number[0]) for each in _named_so(_EXPERT.sub("*", theirs), names)]


def _norm_before(leaf: str) -> str:
    return "input_layernorm" if leaf.startswith("self_attn.") else "post_attention_layernorm"


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
        return torch.arange(size).view(2, -1).flip(0).flatten() if fold.backwards else None
    dims = torch.arange(rotary)
    pairs = dims.view(-1, 2).t() if fold.interleaved else dims.view(2, -1)
    rest = torch.arange(rotary, size).view(2, -1)
    return torch.cat((pairs[0], rest[0], pairs[1], rest[1]))
