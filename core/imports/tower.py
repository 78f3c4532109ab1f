"""The image tower of two as a network of its own, which everything that is done with graphs can be done with."""

from __future__ import annotations

from pathlib import Path

import torch

from penjing.core.checkpoint.towers import load_towers
from penjing.core.errors import InputError
from penjing.core.family import family_of
from penjing.core.imports.torch_zoo import Found
from penjing.core.vision.towers import ImageTower

TOWER = "image"


def image_tower(source: str) -> Found:
    """`FOLDER:image`, where the folder is a checkpoint of two towers.

    Raises:
        InputError: it is of another family, damaged, or was not imported yet.
    """
    folder = Path(source.rpartition(":")[0]).expanduser()
    if family_of(folder) != "towers":
        raise InputError(f"{source}: {folder} does not hold two towers, whose image tower could be taken")
    towers = load_towers(folder)
    config = towers.config
    generator = torch.Generator().manual_seed(0)
    example = torch.randn(2, config.channels, *config.image_size, generator=generator)
    return Found(
        ImageTower(towers).requires_grad_(False).eval(), keyword={"images": example},
        dynamic={"images": {0: "batch"}}, meaning="embedding", pixels=config.pixels,
    )  # fmt: skip
