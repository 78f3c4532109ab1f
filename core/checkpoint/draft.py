"""Draft networks on disk: `draft.json`, `draft.safetensors` and a manifest.

With the network lie some rows of the head of the decoder that it learnt from. A model that was made of that decoder may
keep its hidden states otherwise (rotated, or with the last norm's weights in the head): its own head tells how.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penjing.core.checkpoint.safetensors_writer import save_tensors
from penjing.core.config import parse_config
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text
from penjing.core.manifest import MANIFEST_NAME, read_json_object, verify, write_manifest
from penjing.core.runtime.draft import Draft, DraftConfig

CONFIG, TENSORS = "draft.json", "draft.safetensors"
KNOWN, ANCHOR_IDS, ANCHORS = "token_ids", "anchor_ids", "anchors"
ANCHORS_PER_CHANNEL = 4  # rows of the decoder's head for each channel: enough to average roundings of 8 bits away
MOST_RESIDUE = 0.3  # of a head; that of another model leaves 0.87, of the same one in 4 bits 0.1


class StoredDraft:
    """A draft network that was read, its known tokens, and the rows of its decoder's head."""

    def __init__(self, folder: Path, network: Draft, tensors: Mapping[str, Tensor]) -> None:
        self.folder, self.network = folder, network
        self.token_ids_K, self.anchor_ids_A, self.anchors_AE = (tensors[name] for name in (KNOWN, ANCHOR_IDS, ANCHORS))

    def basis(self, head_AE: Tensor) -> Tensor:
        """(E, E) float32 that turns a model's hidden state into one of the decoder that the draft learnt from.

        Args:
            head_AE: rows `anchor_ids_A` of that model's head, in floating point.

        Raises:
            InputError: no such matrix makes one head of the other: the draft is another model's.
        """
        # Both heads give the same logits: anchors · state = head · hidden, so that state = basis · hidden.
        basis = torch.linalg.lstsq(self.anchors_AE.double(), head_AE.double()).solution
        left = (self.anchors_AE.double() @ basis - head_AE.double()).norm() / head_AE.double().norm()
        if not left <= MOST_RESIDUE:
            raise InputError(
                f"draft = {self.folder} was trained for another model (their heads differ by {100 * left:.0f} %); "
                "train one for this model with algorithm.kind = 'draft'"
            )
        return basis.float()


def anchor_ids(config: DraftConfig) -> Tensor:
    """Tokens, evenly spread over the vocabulary, whose rows of the head are kept."""
    count = min(ANCHORS_PER_CHANNEL * config.hidden_size, config.vocab_size)
    return torch.linspace(0, config.vocab_size - 1, count).round().long().unique()


def save_draft(folder: Path, network: Draft, token_ids_K: Tensor, head_VE: Tensor, created_by: dict[str, Any]) -> None:
    """Write a draft network into `folder`, not yet published, complete with manifest.

    Args:
        token_ids_K: (K,) int64, the tokens that it knows.
        head_VE: the head of the decoder that it learnt from.
    """
    anchors = anchor_ids(network.config)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    tensors |= {KNOWN: token_ids_K, ANCHOR_IDS: anchors, ANCHORS: head_VE.detach().cpu()[anchors].float().contiguous()}
    atomic_write_text(folder / CONFIG, json.dumps(network.config.model_dump(), indent=2) + "\n")
    save_tensors(tensors, folder / TENSORS)
    write_manifest(folder, "checkpoint", created_by)


def load_draft(folder: Path) -> StoredDraft:
    """The draft network in `folder`, in float32.

    Raises:
        InputError: missing, damaged, or no draft network.
    """
    if not (folder / CONFIG).is_file():
        raise InputError(
            f"{folder} is no draft network, which has a {CONFIG}; make one with algorithm.kind = 'draft' "
            "(recipes/smollm2-draft.toml)"
        )
    if (folder / MANIFEST_NAME).exists():
        verify(folder)
    config = parse_config(DraftConfig, read_json_object(folder / CONFIG), str(folder / CONFIG))
    try:
        with safe_open(folder / TENSORS, framework="pt") as reader:
            tensors = {name: reader.get_tensor(name) for name in list(reader.keys())}
        network = Draft(config)
        extra = (KNOWN, ANCHOR_IDS, ANCHORS)
        network.load_state_dict({name: tensor for name, tensor in tensors.items() if name not in extra})
        known, anchors, rows = (tensors[name] for name in extra)
    except (SafetensorError, OSError, RuntimeError, KeyError) as error:
        raise InputError(f"{folder / TENSORS} is no complete draft network ({error}); make it again") from error
    fits = known.shape == (config.num_known,) and rows.shape == (len(anchors), config.hidden_size)
    for ids in (known, anchors):
        fits = fits and ids.dtype == torch.int64 and bool(((ids >= 0) & (ids < config.vocab_size)).all())
    if not fits:
        raise InputError(f"{folder / TENSORS} does not fit {CONFIG} beside it; make it again")
    return StoredDraft(folder, network.eval().requires_grad_(False), tensors)
