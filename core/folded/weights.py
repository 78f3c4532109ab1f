"""The tensors of a folder as `families.Fold` says, under our names; the folder is opened like any checkpoint."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penjing.core.checkpoint.decoder import Checkpoint
from penjing.core.errors import InputError
from penjing.core.folded.families import Fold, fold_from_hf
from penjing.core.folded.gemma import token_table
from penjing.core.folded.placement import EXPERT, Placement
from penjing.core.models.config import DecoderConfig
from penjing.core.models.tensor_names import TOKEN_INPUTS

_TABLE = "embed_tokens_per_layer.weight"
_CHOICE = "mlp.e_score_correction_bias"


class FoldedCheckpoint(Checkpoint):
    """A folder of one of the families of `families`, which reads like a checkpoint of the network that it becomes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, self._read)
        self._there = there = frozenset(self.tensor_names)
        self._fold = _as_named(self._fold, there)
        if "lm_head" in self._fold.outside and f"{self._fold.outside['lm_head']}.weight" not in there:
            del self._fold.outside["lm_head"]  # transformers writes its own name since version 5
        self._placement = Placement(self._fold)
        self._check_tied()
        self.tensor_names = tuple(part for name in self.tensor_names for part in self._parts_of(name))

    def _read(self, values: dict[str, Any], source: str) -> DecoderConfig:
        self._fold: Fold = fold_from_hf(values, source)
        return self._fold.config

    def _check_tied(self) -> None:
        """Inside what sees, a folder may have a head of its own and not say so."""
        head = f"{self._fold.outside.get('lm_head', 'lm_head')}.weight"
        if self._fold.inside and self.config.tie_word_embeddings and head in self._there:
            embedding = self._fold.outside["model.embed_tokens"]
            if not torch.equal(super().get(head), super().get(f"{embedding}.weight")):
                raise InputError(
                    f"{self.folder}: {head} is not the embedding, which config.json says: set tie_word_embeddings=false"
                )

    def moved(self) -> list[str]:
        """See `Placement`."""
        return self._placement.moved()

    @property
    def left_out(self) -> str:
        """See `Fold`."""
        return self._fold.left_out

    def _name_in_model(self, stored: str) -> str:
        return stored  # `Fold` has their names

    def _names_in_folder(self, name: str) -> tuple[str, ...]:
        return (name,)

    def get(self, name: str) -> torch.Tensor:
        """See `Checkpoint`; in float32 where it is changed."""
        if name == TOKEN_INPUTS:
            return token_table(super().get, self._of_tokens.removesuffix(_TABLE), self.config)
        return self._placement.get(name, super().get, self.shape)

    @property
    def _of_tokens(self) -> str:
        return self._placement.place(TOKEN_INPUTS)[0]

    def _parts_of(self, stored: str) -> list[str]:
        return self._placement.parts_of(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint`."""
        if not self._placement.holds(name):
            module, _, kind = name.rpartition(".")
            of_heads = module.endswith((".q_norm", ".k_norm", ".v_norm"))
            if name.endswith(".sinks"):
                return (self.config.num_attention_heads,)
            norm = self.config.head_dim if of_heads else self.config.hidden_size
            return (self.shape(f"{module}.weight")[0],) if kind == "bias" else (norm,)
        theirs, rows = self._placement.place(name)
        stored = super().shape(theirs)
        if name == TOKEN_INPUTS:  # a row there has all layers' behind each other
            width = self.config.token_inputs
            return (math.prod(stored) // width, width) if len(stored) == 2 and stored[1] % width == 0 else stored
        if name.endswith(_CHOICE):
            return (math.prod(stored),)  # ERNIE's is one row
        first, *others = reversed(stored) if self._placement.is_transposed(theirs) else stored
        found = (first if rows is None else rows.count(first), *others)
        missing = self._placement.missing(name)
        return found if missing is None else missing.size(found)

    def dtype(self, name: str) -> str:
        """See `Checkpoint`."""
        if self._placement.holds(name):
            return super().dtype(self._placement.place(name)[0])
        module, _, kind = name.rpartition(".")
        return self.dtype(f"{module}.weight" if kind == "bias" else "model.embed_tokens.weight")


def _as_named(fold: Fold, names: frozenset[str]) -> Fold:
    """`fold` of a folder whose tensors are `names`: those of the network without its head lack their first word, and of
    several spellings it has one."""
    if fold.inside:
        begin = next((each for each in fold.inside if any(name.startswith(each) for name in names)), fold.inside[0])
        plain = {f"model.{name}": f"model.{name}" for name in ("embed_tokens", "norm")} | fold.outside
        outside = {ours: f"{begin}{theirs.removeprefix('model.')}" for ours, theirs in plain.items()}
        outside["lm_head"] = "language_model.lm_head"
        fold = replace(fold, layers=f"{begin}layers.", outside=outside)
    prefix = fold.layers.partition(".")[0] + "."
    if not fold.inside and fold.layers != "model.layers." and not any(name.startswith(prefix) for name in names):
        outside = {ours: theirs.removeprefix(prefix) for ours, theirs in fold.outside.items()}
        fold = replace(fold, layers=fold.layers.removeprefix(prefix), outside=outside)
    if not fold.spelled:
        return fold
    there = {EXPERT.sub("*", name).removeprefix(fold.layers).partition(".")[2] for name in names}
    there |= {name.rpartition(".")[0] for name in there}
    found = {ours: next((each for each in known if each in there), known[0]) for ours, known in fold.spelled.items()}
    return replace(fold, names=fold.names | found)
