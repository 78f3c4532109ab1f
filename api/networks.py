"""`penjing.load`: the network of a checkpoint or of an artifact, ready to be called, whatever its family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.arguments import StrPath, as_path
from penjing.core.artifact.base import is_artifact
from penjing.core.artifact.onnx_classifier import normalised, open_classifier_artifact
from penjing.core.artifact.onnx_encoder import embed_in_batches, open_encoder_artifact
from penjing.core.artifact.towers import load_embedder
from penjing.core.checkpoint.classifier import load_classifier
from penjing.core.checkpoint.classifier_config import ClassifierConfig
from penjing.core.checkpoint.encoder import load_encoder
from penjing.core.checkpoint.load import LoadedModel, load_model
from penjing.core.errors import ConfigError, InputError, first_line
from penjing.core.family import FAMILIES, family_of, table_of
from penjing.core.models.encoder_config import EncoderConfig
from penjing.core.text.text_tokenizer import TextTokenizer, TextTokens, as_texts
from penjing.core.vision.embedder import Embedder
from penjing.graphs import Network, QuantizedNetwork


@dataclass(frozen=True)
class ImageClassifier:
    """An image classifier: a checkpoint in torch, or an artifact in ONNX Runtime on the CPU.

    Attributes:
        config: architecture, labels, normalisation.
        is_artifact: whether it runs in ONNX Runtime.
    """

    config: ClassifierConfig
    is_artifact: bool
    _logits: Callable[[NDArray[np.uint8]], NDArray[np.float32]] = field(repr=False)

    def __call__(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(N, C, H, W) uint8 images, normalised here → (N, classes) float32 logits.

        Raises:
            InputError: another dtype or shape.
        """
        images = np.asarray(pixels)
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] != len(self.config.mean):
            raise InputError(
                f"images are {images.dtype} of shape {images.shape}; give uint8 of shape "
                f"(images, {len(self.config.mean)}, height, width)"
            )
        return self._logits(images)


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder: a checkpoint in torch, or an artifact in ONNX Runtime on the CPU.

    Attributes:
        config: architecture.
        tokenizer: text → token ids.
        is_artifact: whether it runs in ONNX Runtime.
    """

    config: EncoderConfig
    tokenizer: TextTokenizer
    is_artifact: bool
    _embed: Callable[[list[str]], NDArray[np.float32]] = field(repr=False)

    def __call__(self, texts: str | Sequence[str]) -> NDArray[np.float32]:
        """Texts → (texts, hidden) float32 embeddings of length 1, in order; a single text gives one row.

        Raises:
            InputError: there is no text, or something else among them.
        """
        return self._embed(as_texts(texts))


@dataclass(frozen=True)
class Opener:
    """What `load` does with a family that another package brings: `FAMILY` of that package's module `load`.

    Attributes:
        open: a folder, and the device where its network shall run → the network, ready to be called. It checks hashes,
            and refuses a device where it does not run with a `ConfigError`.
    """

    open: Callable[[Path, str], Any]


Loaded: TypeAlias = LoadedModel | ImageClassifier | TextEncoder | Embedder | Network | QuantizedNetwork


def load(folder: StrPath, *, device: str = "cpu") -> Loaded:
    """The network in `folder`, a checkpoint or an artifact, in evaluation mode; every hash is checked.

    Args:
        device: where a decoder runs, such as "cuda"; other families run on the CPU.

    Returns:
        A decoder as `LoadedModel`, whose `model(token_ids)` gives logits; `ImageClassifier`; `TextEncoder`; of two
        towers `Embedder`; of a graph `Network`, or `QuantizedNetwork` where it is an artifact. Of a family that another
        package brings, what that package makes of it.

    Raises:
        ConfigError: a device that the network's family does not run on here.
        InputError: missing or damaged files, or a family that this function does not know.
    """
    path = as_path("folder", folder)
    name = family_of(path)
    if name == "decoder":
        _check_device(device)
        return load_model(path, device)
    if name not in FAMILIES:
        return table_of("load", name).open(path, device)
    if name not in _OPEN:
        known = ", ".join(["decoder", *_OPEN])
        raise InputError(f"{path} holds a network of the family {name!r}; penjing.load knows {known}")
    if device != "cpu":
        raise ConfigError(f"device {device!r}: {path} is of the family {name!r}, which runs on the CPU here")
    return _OPEN[name](path)


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:  # as torch's builds differ
        raise ConfigError(f"device {device!r} cannot be used here ({first_line(error)}); take 'cpu'") from None


def _classifier(folder: Path) -> ImageClassifier:
    if is_artifact(folder):
        artifact = open_classifier_artifact(folder)
        session = artifact.session()
        return ImageClassifier(artifact.config, True, lambda pixels: artifact.logits(session, pixels))
    model, config = load_classifier(folder)

    def logits(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        with torch.inference_mode():
            return model(torch.from_numpy(normalised(pixels, config))).numpy()

    return ImageClassifier(config, False, logits)


def _encoder(folder: Path) -> TextEncoder:
    if is_artifact(folder):
        artifact = open_encoder_artifact(folder)
        session = artifact.session()
        return TextEncoder(artifact.config, artifact.tokenizer, True, lambda texts: artifact.embed(session, texts))
    model = load_encoder(folder)
    tokenizer = TextTokenizer(folder, model.config)

    def run(batch: TextTokens) -> NDArray[np.float32]:
        with torch.inference_mode():
            return model(*batch.tensors()).numpy()

    return TextEncoder(model.config, tokenizer, False, lambda texts: embed_in_batches(tokenizer, texts, run))


def _graph(folder: Path) -> Network | QuantizedNetwork:
    return QuantizedNetwork.load(folder) if is_artifact(folder) else Network.load(folder)


_OPEN: dict[str, Callable[[Path], ImageClassifier | TextEncoder | Embedder | Network | QuantizedNetwork]] = {
    "classifier": _classifier,
    "encoder": _encoder,
    "graph": _graph,
    "towers": load_embedder,
}
