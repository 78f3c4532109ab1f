"""Conversations about images for compression: those that calibrate, and those that are asked before and after."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penjing.core.errors import ConfigError
from penjing.core.progress import Progress
from penjing.core.text.tokenizer import Tokenizer
from penjing.core.vision.sight import Sight, picture_of, pixels_of
from penjing.core.vision.vision_language import VisionLanguageConfig
from penjing.train.chat.rows import take_rows
from penjing.train.chat.sighted import Sighted, SightedRows, SightTokens
from penjing.train.chat.tokens import ChatTokens
from penjing.train.data.stream import Draw, one_pass
from penjing.train.sources.decoders import FORMATS
from penjing.train.sources.scenes import SCENES, SIDE, scenes

BATCH = 8  # images at a time


def read_rows(
    folder: Path,
    config: VisionLanguageConfig,
    named: Sequence[str],
    images: Path,
    most: int,
    setting: str,
    progress: Progress,
) -> SightedRows:
    """The first `most` of the rows with images that `named` names, in the tokens of the model in `folder`.

    Args:
        setting: what names them in the recipe.

    Raises:
        ConfigError: scenes for a model that takes images of another size.
        InputError: a source is missing or damaged, or too many of its rows are bad.
    """
    check_scenes(folder, config, named)
    token = Tokenizer.from_folder(folder).id_to_token(config.image_token_id)
    assert token is not None
    context = config.decoder.max_position_embeddings
    writer = SightTokens(
        ChatTokens.from_folder(folder, setting=None),
        token,
        config.rows,
        partial(picture_of, config, formats=FORMATS),
        images,
        context,
        f"{setting.removesuffix('s')}_images",
    )
    rows: list[Sighted] = []
    if files := [each for each in named if each not in SCENES]:
        rows += take_rows(files, writer.row, 0.0, progress, setting=setting, most=most)[0]
    for name in (each for each in named if each in SCENES):
        rows += writer.questions((scene.picture, scene.turns) for scene in scenes(name, progress)[:most])
    return SightedRows(rows[:most], 0, pixels_of(config))


def check_scenes(folder: Path, config: VisionLanguageConfig, named: Sequence[str]) -> None:
    """Refuse scenes for a model that takes images of another size.

    Raises:
        ConfigError: it does.
    """
    size = config.vision.image_size
    if size != SIDE and (wrong := [name for name in named if name in SCENES]):
        raise ConfigError(f"{wrong[0]} has images of {SIDE} pixels, {folder} takes {size}; take other rows")


def images_of(rows: SightedRows) -> Tensor:
    """(N, C, H, W) float32: the images of all rows, as they enter the network."""
    batches = one_pass(rows, len(rows), micro_batch=BATCH, rank=0, world_size=1)
    return torch.cat([batch["images"] for batch in batches])


@torch.inference_mode()
def seen_text(rows: SightedRows, images: Tensor, sight: Sight, vocab_size: int, window: int) -> tuple[Tensor, Tensor]:
    """All conversations in one stream, cut into windows; what is left at its end is left out.

    Returns:
        (windows, tokens) int64, where a row of an image is a token beyond the vocabulary: its size and the place in
        (rows of all images, hidden) float32.

    Args:
        images: of `images_of`.
        sight: whose rows the decoder will read.

    Raises:
        ConfigError: there is not one window.
    """
    seen_RE = torch.cat([sight(batch).flatten(0, 1) for batch in images.split(BATCH)])
    stream, first = list[Tensor](), 0
    for place, row in enumerate(rows.rows):
        batch = rows.batch(Draw(np.array([place]), np.ones(1, np.bool_)))
        each = sight.config.rows
        for text, ids in enumerate(batch["tokens"]):
            ids = ids[: len(row.texts[text].ids)].clone()  # what pads it is left out
            here = ids == sight.config.image_token_id
            ids[here] = vocab_size + first * each + torch.arange(int(here.sum()))
            stream.append(ids)
        first += len(row.pictures)
    ids_T = torch.cat(stream)
    if len(ids_T) < window:
        raise ConfigError(
            f"the rows that calibrate have {len(ids_T)} tokens, and a window {window}: name more rows, or take a "
            "smaller data.window"
        )
    return ids_T[: len(ids_T) // window * window].view(-1, window), seen_RE
