"""A decoder's artifact and its eyes as one network."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from penjing.core.artifact.base import is_artifact
from penjing.core.checkpoint.load import load_model
from penjing.core.checkpoint.vision_language import load_vision_language
from penjing.core.errors import InputError
from penjing.core.models.decoder import Decoder
from penjing.core.vision.sight import Sight


class Seeing(nn.Module):
    """A decoder and its eyes, called as `VisionLanguage` is."""

    def __init__(self, decoder: Decoder, sight: Sight) -> None:
        super().__init__()
        self.decoder, self.sight = decoder, sight

    def forward(
        self, tokens_BT: Tensor, images: Tensor, logit_rows: Tensor | None = None, seen: Tensor | None = None
    ) -> Tensor:
        """See `VisionLanguage`."""
        embedded = self.decoder.model.embed(tokens_BT).to(torch.float32)
        here = (tokens_BT == self.sight.config.image_token_id)[..., None]
        rows = self.sight(images)
        rows = rows if seen is None else rows[seen]
        return self.decoder(tokens_BT, logit_rows=logit_rows, embedded=embedded.masked_scatter(here, rows))


def load_seeing(folder: Path) -> nn.Module:
    """The checkpoint or artifact of a decoder that sees, called as `VisionLanguage` is.

    Raises:
        InputError: damaged, or it has no eyes.
    """
    if not is_artifact(folder):
        return load_vision_language(folder)
    loaded = load_model(folder)
    if loaded.sight is None:
        raise InputError(f"{folder} is the artifact of a decoder without eyes; take one that sees")
    return Seeing(loaded.model, loaded.sight)
