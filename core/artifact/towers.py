"""Artifact folders of two towers in INT8, and what embeds by them or by a checkpoint.

config.json, with CLIP and SigLIP preprocessor_config.json, the tokenizer and the longest text are a checkpoint's;
`image/` and `text/` are artifacts of graphs (see `onnx_graph.py`), whose output is a vector of length 1.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.core.artifact.base import is_artifact
from penjing.core.artifact.onnx_encoder import IDS, MASK
from penjing.core.artifact.onnx_graph import GraphArtifact, open_graph_artifact, run_graph
from penjing.core.checkpoint.towers import load_towers
from penjing.core.checkpoint.towers_config import towers_config
from penjing.core.errors import InputError
from penjing.core.manifest import verify
from penjing.core.text.text_tokenizer import TextTokenizer, TextTokens
from penjing.core.vision.embedder import Embedder, Vectors
from penjing.core.vision.towers import TwoTowers
from penjing.core.vision.towers_config import TowersConfig

IMAGE, TEXT = "image", "text"


def open_towers_artifact(folder: Path) -> tuple[TowersConfig, dict[str, GraphArtifact]]:
    """Both towers' artifacts by name; every hash is checked.

    Raises:
        InputError: missing, damaged, of another kind, or with towers that do not belong together.
    """
    verify(folder)
    config = towers_config(folder)
    found = {name: open_graph_artifact(folder / name) for name in (IMAGE, TEXT)}
    for name, each in found.items():
        wanted = {IMAGE: ["images"], TEXT: [IDS, MASK]}[name]
        shape = each.config.outputs[0].shape
        if [spec.name for spec in each.config.inputs] != wanted or shape[1:] != (config.dimension,):
            raise InputError(
                f"{folder / name} gives {each.config.outputs[0]}, and {config.dimension} numbers are wanted of "
                f"{', '.join(wanted)}; compress the towers again"
            )
    return config, found


def network_of(folder: Path, threads: int = 1) -> tuple[TowersConfig, Callable[..., Vectors], Callable[..., Vectors]]:
    """What computes the vectors of normalised images (N, C, H, W) float32, and of tokens; on `threads` of the caller.

    Raises:
        InputError: damaged, or of another kind.
    """
    if not is_artifact(folder):
        model = load_towers(folder).requires_grad_(False)
        return model.config, *_in_torch(model)
    config, parts = open_towers_artifact(folder)
    sessions = {name: each.session(threads) for name, each in parts.items()}

    def run(name: str, **inputs: NDArray[np.float32] | NDArray[np.int64]) -> Vectors:
        (found,) = run_graph(sessions[name], parts[name].config, inputs).values()
        return found

    return (
        config,
        lambda images: run(IMAGE, images=images),
        lambda tokens: run(TEXT, **{IDS: tokens.ids, MASK: tokens.mask}),
    )


def load_embedder(folder: Path, threads: int = 0) -> Embedder:
    """A checkpoint or an artifact of two towers, and their tokenizer, for inference.

    Args:
        threads: see `Embedder`.

    Raises:
        InputError: missing, damaged, or of another kind.
    """
    config, see, read = network_of(folder)
    return Embedder(config, see, read, TextTokenizer(folder, config.text), threads)


def _in_torch(model: TwoTowers) -> tuple[Callable[..., Vectors], Callable[..., Vectors]]:
    @torch.inference_mode()
    def see(images: NDArray[np.float32]) -> Vectors:
        return model.of_images(torch.from_numpy(images)).numpy()

    @torch.inference_mode()
    def read(tokens: TextTokens) -> Vectors:
        return model.of_features(model.text(*tokens.tensors())).numpy()

    return see, read
