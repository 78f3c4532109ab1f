"""Tensors of a network of ours as the folder of a `Published` has them: names, order of rows, factors, fused matrices.

Integers, and what belongs to them, pass too: rows of weights and of their scales are moved alike, and what is
multiplied is a norm or the embedding, which are floats in such a folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from penjing.core.errors import InputError
from penjing.core.folded.fold import Fold
from penjing.core.folded.placement import Placement, split_name
from penjing.core.models.tensor_names import tensor_shapes

Pairs = Iterable[tuple[str, Tensor]]
_EMBEDDING = "model.embed_tokens"
_PACKED_ROWS = "weight_zero_point"  # eight outputs in a word


class Spelling:
    """The names that a folder has for the modules of a network, and which of ours each of its own holds."""

    def __init__(self, fold: Fold, source: str) -> None:
        # a tied head is no tensor of such a folder, and an artifact may have it apart
        published = {ours: names[0] for ours, names in fold.spelled.items()}
        self._fold, self._source = replace(fold, tied=False, names=fold.names | published), source
        self._placement = Placement(self._fold)
        self._ours: dict[str, dict[int, list[str]]] = {}
        names = dict.fromkeys(name.rpartition(".")[0] for name in tensor_shapes(fold.config))
        for module in [*names, "lm_head"]:
            theirs, rows = self._placement.place(f"{module}.weight")
            begin = 0 if rows is None else rows.begin
            ours = self._ours.setdefault(theirs.rpartition(".")[0], {}).setdefault(begin, [])
            ours += [module] if module not in ours else []

    def module(self, ours: str) -> str:
        """The name of the module `ours`, or of the one that holds it."""
        return self._placement.place(f"{ours}.weight")[0].rpartition(".")[0]

    def tensors(self, pairs: Pairs) -> Iterator[tuple[str, Tensor]]:
        """Our tensors, in any order → theirs; a fused one comes with the last of its parts.

        Raises:
            InputError: a tensor has no place there.
        """
        waiting: dict[tuple[str, str], dict[str, Tensor]] = {}
        for name, tensor in pairs:
            module, _, kind = name.rpartition(".")
            if self._is_left_out(name, tensor):
                continue
            if self._fold.centred and module == _EMBEDDING:
                self._check_centred(tensor)
            theirs = self._placement.place(name)[0]
            if split_name(name)[1] in self._fold.names:  # what is no weight of a module has a name of its own
                yield theirs, tensor
                continue
            theirs = theirs.rpartition(".")[0]
            found = waiting.setdefault((theirs, kind), {})
            found[module] = self._changed(name, tensor)
            parts = self._ours[theirs]
            if len(found) == sum(map(len, parts.values())):
                yield f"{theirs}.{kind}", self._whole(theirs, kind, waiting.pop((theirs, kind)))
                if kind == "weight" and theirs.endswith("norm") and "shift" in self._fold.stored:
                    yield f"{theirs}.bias", torch.zeros_like(tensor)
        if waiting:
            (theirs, kind), found = next(iter(waiting.items()))
            parts = [each for ours in self._ours[theirs].values() for each in ours]
            lost = next(each for each in parts if each not in found)
            raise InputError(f"{self._source}: {theirs}.{kind} is made of {', '.join(parts)}, and {lost} has no {kind}")

    def _whole(self, theirs: str, kind: str, found: dict[str, Tensor]) -> Tensor:
        parts: list[Tensor] = []
        for _, ours in sorted(self._ours[theirs].items()):
            if any(not torch.equal(found[each], found[ours[0]]) for each in ours[1:]):
                raise InputError(f"{self._source}: {' and '.join(ours)} differ, and are one {theirs} in other engines")
            parts.append(found[ours[0]])
        if len(parts) == 1:
            return parts[0]
        if kind == "weight_shape":
            return torch.stack([torch.stack([part[0] for part in parts]).sum(), parts[0][1]])
        if any(part.shape[1:] != parts[0].shape[1:] or part.dtype != parts[0].dtype for part in parts):
            raise InputError(
                f"{self._source}: parts of {theirs} have weights of different bits, and it is one matrix elsewhere"
            )
        return torch.cat(parts)

    def _is_left_out(self, name: str, tensor: Tensor) -> bool:
        """Whether such a folder does not hold the tensor, which then has no effect."""
        fold = self._fold
        norm = name.endswith("norm.weight")
        if norm and (fold.plain_norms or (fold.centred and "norm" not in fold.stored)):
            usual = 1.0
        elif fold.centred and name == "lm_head.bias" and "head" not in fold.stored:
            usual = 0.0
        else:
            return False
        if bool((tensor != usual).any()):
            raise InputError(f"{self._source}: {name} has no place in the network that other engines read")
        return True

    def _check_centred(self, rows_VE: Tensor) -> None:
        """Norms subtract the mean there and not here, so it has to be 0: a rotated stream has the channel of all ones
        turned elsewhere, and of each row there is 1 / E in it."""
        some = rows_VE[:: max(1, len(rows_VE) // 1024)].to(torch.float64)
        share = some.mean(dim=1).square().sum() / some.square().mean(dim=1).sum().clamp(min=1e-30)
        if float(share) * rows_VE.shape[1] > 0.1:
            raise InputError(
                f"{self._source} was rotated, and the norms of the network that other engines read subtract a mean, "
                "which lets no rotation pass: compress with transform.rotate=false"
            )

    def _changed(self, name: str, tensor: Tensor) -> Tensor:
        """Undo what `Placement` makes of the tensor; a factor of integers is one of their scales."""
        module, _, kind = name.rpartition(".")
        if kind == "weight_shape":
            return tensor
        order, factor = self._placement.arranged(f"{module}.{kind if kind == 'bias' else 'weight'}")
        if kind == _PACKED_ROWS and order is not None:
            raise InputError(
                f"{self._source}: zero points of {module} are packed by eight outputs, which stand in another order "
                "elsewhere: compress with offsets=false, or export --to gguf"
            )
        shift = float(self._fold.plus_one and name.endswith("norm.weight"))
        if tensor.dtype.is_floating_point and (factor is not None or shift):
            by = torch.ones(1, dtype=torch.float64) if factor is None else factor
            wide = tensor.to(torch.float64) / by.view(-1, *[1] * (tensor.dim() - 1)) - shift
            tensor = wide.to(tensor.dtype)
        if order is None:
            return tensor
        made = torch.empty_like(tensor)
        made[order] = tensor
        return made
