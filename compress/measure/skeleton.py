"""The networks of checkpoints and artifacts without storage, and what one run of them multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from penjing.compress.decoder.check import check_model
from penjing.core.artifact.base import is_artifact
from penjing.core.checkpoint.classifier import classifier_config, classifier_skeleton
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.models.decoder import Decoder
from penjing.core.models.encoder import Encoder
from penjing.core.models.resnet import ResNet
from penjing.core.text.text_tokenizer import encoder_config

BATCH, TOKENS = 2, 16  # what the analysis runs on; sizes of 1 would be mistaken for broadcasts


@dataclass(frozen=True)
class Skeleton:
    """A network on "meta", in evaluation mode, and inputs for it: `inputs` of `unit`, such as "image" or "token"."""

    model: nn.Module
    example: tuple[Tensor, ...]
    inputs: int
    unit: str


def skeleton_of_classifier(folder: Path) -> Skeleton:
    """Of an image classifier's checkpoint or artifact.

    Raises:
        InputError: damaged, or the stored tensors are not those of `config.json`.
    """
    config = classifier_config(folder)
    with torch.device("meta"):
        model = ResNet(config.model).eval() if is_artifact(folder) else classifier_skeleton(folder)[0]
        example = (torch.empty(BATCH, config.model.in_channels, *config.image_size),)
    return Skeleton(model, example, BATCH, "image")


def skeleton_of_decoder(folder: Path) -> Skeleton:
    """Of a decoder's checkpoint or artifact.

    Raises:
        InputError: damaged, or the stored tensors are not those of `config.json`.
    """
    checkpoint = open_checkpoint(folder)
    if not is_artifact(folder):
        check_model(checkpoint)  # sizes that the files do not bear out could be any
    with torch.device("meta"):
        model = Decoder(checkpoint.config).to("meta").eval()
        example = (torch.zeros(BATCH, TOKENS, dtype=torch.int64),)
    return Skeleton(model, example, BATCH * TOKENS, "token")


def skeleton_of_encoder(folder: Path) -> Skeleton:
    """Of a text encoder's checkpoint or artifact.

    Raises:
        InputError: damaged.
    """
    with torch.device("meta"):
        model = Encoder(encoder_config(folder)).eval()
        tokens = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    return Skeleton(model, (tokens, tokens), BATCH * TOKENS, "token")


def count_macs(model: nn.Module, example: tuple[Tensor, ...]) -> dict[str, int]:
    """Multiply-accumulates of matrix products and convolutions under each module that has weights of its own."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(*example)
    root = type(model).__name__
    return {
        name.removeprefix(f"{root}."): sum(operations.values()) // 2
        for name, operations in counter.get_flop_counts().items()
    }
