"""The tensors of an artifact for engines that look up floats: one in INT8 is widened, and apart from the head."""

from __future__ import annotations

import torch
from torch import Tensor

from penjing.core.checkpoint.decoder import Checkpoint
from penjing.core.runtime.embedding import CHANNEL, stored_table, tied_name
from penjing.core.runtime.schemes import EMBEDDING_MODULE, has_int8_embedding

EMBEDDING = f"{EMBEDDING_MODULE}.weight"
HEAD = ("lm_head.weight", "lm_head.weight_scale")


def with_floating_embedding(checkpoint: Checkpoint, name: str) -> Tensor:
    """The tensor `name` of an artifact whose embedding, if it is in INT8, is float16 and apart from the LM head."""
    if not has_int8_embedding(checkpoint.quantization):
        return checkpoint.get(name)
    tied = checkpoint.config.tie_word_embeddings
    if name == EMBEDDING:
        return _floating(checkpoint, tied)
    return checkpoint.get(tied_name(name) if tied else name)


def names_with_floating_embedding(checkpoint: Checkpoint) -> list[str]:
    """Of the tensors of an artifact whose embedding is in INT8, as `with_floating_embedding` gives them."""
    names = [name for name in checkpoint.tensor_names if name not in (CHANNEL, f"{EMBEDDING}_scale")]
    return names + (list(HEAD) if checkpoint.config.tie_word_embeddings else [])


def _floating(checkpoint: Checkpoint, tied: bool) -> Tensor:
    table = stored_table(checkpoint.get, tied)
    tokens = torch.arange(len(table.weight_VE))
    return torch.cat([table.rows(part).to(torch.float16) for part in tokens.split(8192)])
