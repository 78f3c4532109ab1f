"""Where the tensors of a network lie in what stores it, as a `Fold` says, and what makes ours of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penjing.core.errors import InputError
from penjing.core.folded.fold import Fold, Stretched
from penjing.core.models.rope import yarn_magnitudes
from penjing.core.models.tensor_names import tensor_shapes

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OF_QUERIES = ("self_attn.q_proj", "self_attn.g_proj")
_NORMED = ("self_attn.q_norm", "self_attn.k_norm", "self_attn.v_norm")
_SINKS = "self_attn.sinks"
NO_SINK = -30000.0  # of which an exponential function is 0 beside any score; half precision holds it
_OF_KEYS = ("self_attn.k_", "self_attn.v_")  # stored, though not read, where layers read others' keys
_OUT = "self_attn.o_proj.weight"
_MLP = ("gate_proj", "up_proj")
_TABLES = ("embed_tokens", "embed_positions")
_BEFORE_MLP = "post_attention_layernorm"
_MLPS = ("mlp", "mlp.shared_experts")
WRITERS = ("self_attn.o_proj", ".down_proj")
_OF_EXPERTS = ("mlp.experts.", "mlp.shared_experts.")
EXPERT = re.compile(r"(?<=\bexperts\.)\d+(?=\.)")
_CHOICE = "mlp.e_score_correction_bias"
_AFTER = ("attention_output_norm.", "mlp_output_norm.")
_BIASES = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "out", "lm_head": "head"}


@dataclass(frozen=True)
class Rows:
    """Rows of a matrix; with `heads` of keys those of queries, keys or values, as `part` says: each head of keys, of
    `size`, has its queries, its keys and its values behind each other."""

    begin: int
    end: int
    heads: int = 0
    size: int = 0
    part: int = 0

    def of(self, tensor: Tensor) -> Tensor:
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


@dataclass(frozen=True)
class Missing:
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

    def added(self, tensor: Tensor) -> Tensor:
        """The tensor with zeros in their places."""
        parts = tensor.unflatten(self.dim, (self.groups, self.there // self.groups, -1))
        sizes = list(parts.shape)
        sizes[self.dim + 1] = (self.whole - self.there) // self.groups
        return torch.cat((parts, parts.new_zeros(sizes)), self.dim + 1).flatten(self.dim, self.dim + 2)


class Placement:
    """How the tensors of `fold.config` are stored, by their names in the model."""

    def __init__(self, fold: Fold) -> None:
        self.fold, self.config = fold, fold.config
        self._order = _rotary_order(fold)
        layers = range(self.config.num_hidden_layers if self.config.shared_keys else 0)
        self._borrowing = {layer for layer in layers if self.config.keys_of(layer) != layer}

    def get(self, name: str, stored: Callable[[str], Tensor], shape: Callable[[str], tuple[int, ...]]) -> Tensor:
        """The tensor `name`; in float32 where it is changed.

        Args:
            stored: name there → the tensor as it is stored.
            shape: name of ours → the shape of a tensor that is not stored.
        """
        if not self.fold.centred:
            return self._plain(name, stored, shape)
        module, _, kind = name.rpartition(".")
        if module.endswith("norm") and not self.holds(name):
            return self._plain(name, stored, shape)
        if kind == "weight" and not module.endswith((*WRITERS, *_TABLES)):
            return self._plain(name, stored, shape)
        plain = self._plain(name, stored, shape) if self.holds(name) else torch.zeros(shape(name))
        wide = plain.double()
        if module.endswith((*WRITERS, *_TABLES)):
            wide -= wide.mean(dim=1 if module.endswith(_TABLES) else 0, keepdim=True)
        elif "shift" in self.fold.stored:
            layer, leaf = split_name(name)
            norm = "model.norm" if layer is None else f"model.layers.{layer}.{_norm_before(leaf)}"
            shift = stored(self.place(f"{norm}.bias")[0]).double()
            wide += self._plain(f"{module}.weight", stored, shape).double() @ shift
        return wide.to(torch.float32)

    def holds(self, name: str) -> bool:
        """Whether the tensor `name` is stored; the others are 1 or, of one with centred norms, 0 at first."""
        if not self.fold.centred:
            plain = self.fold.plain_norms and name.endswith("norm.weight")
            return not (plain or (self.fold.plain_values and name.endswith(".v_norm.weight")) or self._sinkless(name))
        module, _, kind = name.rpartition(".")
        if module.endswith("norm"):
            part = "norm" if kind == "weight" else "shift"
        elif kind == "weight":
            return True
        else:
            part = _BIASES.get(module.rpartition(".")[2], "mlp")
        return part in self.fold.stored

    def _sinkless(self, name: str) -> bool:
        layer, leaf = split_name(name)
        return layer is not None and leaf == _SINKS and bool(heads := self.fold.layer_heads) and not heads[layer].sinks

    def _plain(self, name: str, stored: Callable[[str], Tensor], shape: Callable[[str], tuple[int, ...]]) -> Tensor:
        """The tensor without what centred norms need."""
        if not self.holds(name):
            return self._changed(name, torch.full(shape(name), NO_SINK if name.endswith(_SINKS) else 1.0))
        theirs, rows = self.place(name)
        tensor = stored(theirs)
        if name.endswith(_CHOICE):
            return tensor.flatten()
        tensor = tensor.t() if self.is_transposed(theirs) else tensor
        changed = self._changed(name, tensor if rows is None else rows.of(tensor).clone())
        if self.fold.reads:
            changed = self._read_alike(name, changed, stored)
        missing = self.missing(name)
        return changed if missing is None else missing.added(changed)

    def _read_alike(self, name: str, tensor: Tensor, stored: Callable[[str], Tensor]) -> Tensor:
        """A matrix that multiplies what it reads by a vector of its own, where the norm before it does that here."""
        layer, leaf = split_name(name)
        module, number = EXPERT.sub("*", leaf.rpartition(".")[0]), EXPERT.search(leaf)
        if layer is None:
            return tensor
        if module == _BEFORE_MLP:
            return torch.where(tensor == 0, 1.0, tensor)
        if number is not None and module in self.fold.gains:
            gain = stored(f"{self.fold.layers}{layer}.{self.fold.gains[module]}")[int(number[0])]
            return (tensor.double() * gain.double()).float()
        if module not in self.fold.reads:
            return tensor
        own, main = (
            stored(f"{self.fold.layers}{layer}.{self.fold.reads[each]}").double()
            for each in (module, self.fold.main_reader)
        )
        factor = own / torch.where(main == 0, 1.0, main)
        return tensor if bool((factor == 1).all()) else (tensor.double() * factor).float()

    def missing(self, name: str) -> Missing | Stretched | None:
        """What the heads of the tensor `name` lack where it is stored."""
        layer, leaf = split_name(name)
        module = leaf.rpartition(".")[0]
        if layer is not None and self.fold.layer_heads and (leaf == _OUT or module in (*_QKV, *_NORMED)):
            size, keys = self.config.head_dim, self.config.num_key_value_heads
            of_values = leaf == _OUT or module == _QKV[2]
            return self.fold.layer_heads[layer].as_ours(size, keys, int(leaf == _OUT), module in _QKV[1:], of_values)
        if layer is None or not self.fold.heads or not (leaf == _OUT or module in _OF_QUERIES):
            return None
        there, whole = self.fold.heads[layer], self.config.num_attention_heads
        if there == whole:
            return None
        return Missing(int(leaf == _OUT), self.config.num_key_value_heads, there, whole)

    def _changed(self, name: str, tensor: Tensor) -> Tensor:
        fold, config = self.fold, self.config
        layer, leaf = split_name(name)
        norm = leaf.endswith("norm.weight")
        embedding = layer is None and leaf == "model.embed_tokens.weight"
        order, factor = self.arranged(name)
        if not (norm and fold.plus_one) and not (embedding and fold.normed) and order is None and factor is None:
            return tensor
        wide = tensor.to(torch.float64)
        if embedding and fold.normed:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        if norm and fold.plus_one:
            wide = wide + 1.0
        wide = wide if order is None else wide[order]
        if factor is not None:
            wide = wide * factor.view(-1, *[1] * (wide.dim() - 1))
        return wide.to(torch.float32)

    def arranged(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        """Which row of what is stored stands at each row of the tensor `name`, and the factors of these rows, or one of
        all, in float64; None: as they are."""
        fold, config = self.fold, self.config
        layer, leaf = split_name(name)
        norm = leaf.endswith("norm.weight")
        order, factor = None, None
        rotated = self._order_of(layer)
        if leaf.startswith(("self_attn.q_", "self_attn.k_")) and rotated is not None:
            heads = config.num_attention_heads if layer is None or not fold.heads else fold.heads[layer]
            own = fold.layer_heads[layer].keys if layer is not None and fold.layer_heads else None
            heads = heads if leaf.startswith("self_attn.q_") else own or config.num_key_value_heads
            many = 1 if norm and config.qk_norm_over == "head" else heads
            order = (torch.arange(many)[:, None] * config.head_dim + rotated).flatten()
            scale = yarn_magnitudes(config.rope_scaling)[0]
            if scale != 1.0 and (norm or not config.qk_norm):
                # it reaches the dimensions that stand still here, and does not there
                still = rotated >= (fold.rotary or config.head_dim)
                factor = torch.where(still, 1 / scale, 1.0).double().repeat(many)
        number = self._factor(layer, leaf) * self._of_smaller_heads(layer, leaf)
        if number != 1.0:
            factor = torch.full((1,), number, dtype=torch.float64) if factor is None else factor * number
        return order, factor

    def _of_smaller_heads(self, layer: int | None, leaf: str) -> float:
        """Factor of what makes a head of zeros, too: as large over all dimensions as over those that are there."""
        if layer is None or not self.fold.layer_heads:
            return 1.0
        grown = (self.config.head_dim / self.fold.layer_heads[layer].size) ** 0.5
        module = leaf.rpartition(".")[0]
        return grown if module in _QKV else 1 / grown if module in _NORMED else 1.0

    def moved(self) -> list[str]:
        """Linear layers, by their names in a layer, whose inputs or outputs are others than where they are stored."""
        found = set[str]()
        for name in tensor_shapes(self.config):
            layer, leaf = split_name(name)
            module = leaf.removesuffix(".weight")
            if layer is None or not leaf.endswith("_proj.weight"):
                continue
            centred = self.fold.centred and ("shift" in self.fold.stored or module.endswith(WRITERS))
            centred = centred or EXPERT.sub("*", module) in {**self.fold.reads, **self.fold.gains}
            if centred or self.missing(name) is not None or self.arranged(name) != (None, None):
                found.add(module)
        return sorted(found)

    def _order_of(self, layer: int | None) -> Tensor | None:
        """Of the heads of a layer; see `_rotary_order`."""
        kinds = self.config.layer_rotary
        if layer is None or kinds is None or self.config.rotary_local_pairs is None:
            return self._order
        return None if kinds[layer] == "local" else self._order  # all dimensions of those rotate

    def _factor(self, layer: int | None, leaf: str) -> float:
        fold, config = self.fold, self.config
        if leaf == ("self_attn.q_norm.weight" if config.qk_norm else "self_attn.q_proj.weight") or (
            leaf == "self_attn.q_proj.bias" and not config.qk_norm
        ):
            return fold.query
        if leaf.startswith("self_attn.v_proj."):
            return fold.value
        if leaf.startswith(_AFTER) if config.norms != "before" else leaf.rpartition(".")[0].endswith(WRITERS):
            return fold.residual * (fold.experts if leaf.startswith(_OF_EXPERTS) else 1.0)
        if leaf == "mlp.gate.weight":
            return fold.router
        if layer is None and leaf == "model.embed_tokens.weight":
            return fold.embedding
        if layer is None and leaf.endswith("norm.weight"):
            return fold.final
        return 1.0

    def place(self, name: str) -> tuple[str, Rows | None]:
        """The name there of the tensor `name`, and its rows where it is a part of one."""
        fold, config = self.fold, self.config
        layer, leaf = split_name(name)
        module, _, kind = leaf.rpartition(".")
        if layer is None:
            module = "model.embed_tokens" if fold.tied and module == "lm_head" else module
            first = fold.first_position if module == "model.embed_positions" else 0
            rows = Rows(first, first + config.max_position_embeddings) if first else None
            return f"{fold.outside.get(module, module)}.{kind}", rows
        if fold.layer_heads and module == "self_attn.v_proj" and fold.layer_heads[layer].values_are_keys:
            module = "self_attn.k_proj"
        if leaf in fold.names:
            return f"{fold.layers}{layer}.{fold.names[leaf]}", None
        rows = None
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        if fold.fused and module in _QKV:
            at = _QKV.index(module)
            begin = (0, query, query + key)[at]
            heads = config.num_key_value_heads if fold.fused_heads else 0
            rows = Rows(begin, begin + (key if at else query), heads, config.head_dim, at)
            module = "self_attn.qkv_proj"
        elif fold.fused_mlp and module.endswith(_MLP) and EXPERT.search(module) is None:
            block, _, part = module.rpartition(".")
            inner = config.ffn_size(layer)
            if block != "mlp" and config.moe is not None:
                inner = config.moe.shared_expert_intermediate_size
            begin = inner * _MLP.index(part)
            module, rows = f"{block}.gate_up_proj", Rows(begin, begin + inner)
        return f"{fold.layers}{layer}.{self._module_there(module)}.{kind}", rows

    def _module_there(self, module: str) -> str:
        number = EXPERT.search(module)
        if number is None:
            return self.fold.names.get(module, module)
        numbered = EXPERT.sub("*", module)
        return self.fold.names.get(numbered, numbered).replace("*", number[0])

    def parts_of(self, stored: str) -> list[str]:
        """Our names of what the tensor `stored` holds."""
        fold = self.fold
        module, _, kind = stored.rpartition(".")
        if stored.endswith(fold.unused) or stored.startswith(fold.apart):
            return []
        number, _, leaf = module.removeprefix(fold.layers).partition(".")
        if not module.startswith(fold.layers) or not number.isdecimal():
            found = _named_so(module, fold.outside)
        elif self._leaves_out(int(number), leaf):
            return []
        else:
            inside = stored.removeprefix(f"{fold.layers}{number}.")
            if whole := [ours for ours, name in fold.names.items() if name == inside]:
                return [f"model.layers.{number}.{ours}" for ours in whole]
            own = [each for ours in _named_so(leaf, fold.names) for each in self._fused(ours)]
            here = fold.layer_heads[int(number) : int(number) + 1]
            if own == ["self_attn.k_proj"] and any(each.values_are_keys for each in here):
                own.append("self_attn.v_proj")
            found = [f"model.layers.{number}.{each}" for each in own]
        shifts = kind == "bias" and "shift" in fold.stored
        return [f"{each}.{kind}" for each in found if not (shifts and each.endswith("norm"))]

    def _leaves_out(self, layer: int, leaf: str) -> bool:
        """Whether the network has no such module: of layers that guess further tokens, or keys that nothing reads."""
        beyond = self.fold.more_layers and layer >= self.config.num_hidden_layers
        return beyond or (layer in self._borrowing and leaf.startswith(_OF_KEYS))

    def is_transposed(self, theirs: str) -> bool:
        """Whether the tensor `theirs` has inputs first."""
        return theirs.endswith(tuple(f".{module}.weight" for module in self.fold.transposed))

    def _fused(self, module: str) -> tuple[str, ...]:
        if self.fold.fused and module == "self_attn.qkv_proj":
            return _QKV
        block, _, leaf = module.rpartition(".")
        together = self.fold.fused_mlp and leaf == "gate_up_proj" and block in _MLPS
        return tuple(f"{block}.{part}" for part in _MLP) if together else (module,)


def _named_so(theirs: str, names: dict[str, str]) -> list[str]:
    """Our names of the module `theirs`."""
    number = EXPERT.search(theirs)
    if number is None:
        return [ours for ours, name in names.items() if name == theirs] or [theirs]
    return [each.replace("*", number[0]) for each in _named_so(EXPERT.sub("*", theirs), names)]


def _norm_before(leaf: str) -> str:
    return "input_layernorm" if leaf.startswith("self_attn.") else "post_attention_layernorm"


def split_name(name: str) -> tuple[int | None, str]:
    """ "model.layers.3.mlp.up_proj.weight" → 3 and "mlp.up_proj.weight"; a name outside layers → None and itself."""
    if not name.startswith("model.layers."):
        return None, name
    number, _, leaf = name.removeprefix("model.layers.").partition(".")
    if not number.isdecimal() or not leaf:
        raise InputError(f"the tensor {name!r} has no place in a decoder")
    return int(number), leaf


def _rotary_order(fold: Fold) -> Tensor | None:
    """(head_dim,) which dimension of a head of theirs stands at each place of ours; None: as it is."""
    size = fold.config.head_dim
    rotary = fold.rotary or size
    if rotary == size and not fold.interleaved:
        return torch.arange(size).view(2, -1).flip(0).flatten() if fold.backwards else None
    dims = torch.arange(rotary)
    pairs = dims.view(-1, 2).t() if fold.interleaved else dims.view(2, -1)
    rest = torch.arange(rotary, size).view(2, -1)
    return torch.cat((pairs[0], rest[0], pairs[1], rest[1]))
