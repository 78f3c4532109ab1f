"""How well two towers find what belongs together among held-out pairs, and what is timed of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.compress.export.onnx_graph import export_network
from penjing.compress.graph.own import tower_networks
from penjing.compress.measure.cost import Calls, Case, MeasureSettings
from penjing.compress.measure.evaluate import EvaluateSettings, Part, Quality, accuracy
from penjing.compress.samples.pairs import PairSamples, pairs_of
from penjing.core.artifact.base import is_artifact
from penjing.core.artifact.onnx_graph import open_graph_session, run_graph
from penjing.core.artifact.towers import network_of
from penjing.core.checkpoint.towers import load_towers
from penjing.core.checkpoint.towers_config import towers_config
from penjing.core.errors import InputError
from penjing.core.progress import Progress
from penjing.core.text.text_tokenizer import TextTokens, pad
from penjing.core.vision.embedder import Vectors

BATCH = 64
TEXT_TOKENS = 16  # of a text that is timed


def evaluate_towers(folder: Path, model: Path, settings: EvaluateSettings, progress: Progress) -> Quality:
    """The share of held-out images whose nearest text is their own, of all different texts; its parts are the share of
    texts whose nearest image is one of their own, and the mean cosines of both towers' vectors to those of `model`.
    Ties count as missed.

    Raises:
        ConfigError: no source of pairs is named.
        InputError: damaged, or NaN.
    """
    pairs = pairs_of(model, settings, settings.held_out, "test", settings.images, BATCH, progress)
    progress.start("held-out pairs", 2)
    before = _vectors(model, pairs)
    images, texts = before if folder == model else _vectors(folder, pairs)
    progress.advance(2)
    products = images @ texts.T
    own = products[np.arange(len(images)), pairs.group]
    right = (products >= own[:, None]).sum(1) == 1
    best = np.full(len(texts), -np.inf)
    np.maximum.at(best, pairs.group, own)
    others = np.where(pairs.group[:, None] == np.arange(len(texts)), -np.inf, products).max(0)
    cosines = [float((one * other).sum(1).mean()) for one, other in zip(before, (images, texts), strict=True)]
    return replace(
        accuracy(right, settings),
        parts=(
            Part("nearest image of a text right", float((best > others).mean()), len(texts)),
            Part("cosine of images", cosines[0], len(images)),
            Part("cosine of texts", cosines[1], len(texts)),
        ),
    )


def _vectors(folder: Path, pairs: PairSamples) -> tuple[Vectors, Vectors]:
    _, see, read = network_of(folder, torch.get_num_threads())
    images = np.concatenate([see(batch.numpy()) for batch in pairs.images.split(BATCH)])
    texts = np.concatenate([read(pad([row])) for row in pairs.texts])
    if not (np.isfinite(images).all() and np.isfinite(texts).all()):
        raise InputError(f"{folder} computes NaN or infinity: it is damaged, or its training diverged")
    return images, texts


def towers_calls(folders: Sequence[Path], settings: MeasureSettings) -> Calls:
    """Both towers in torch and in ONNX Runtime, artifacts there alone: so many images at a time as `settings.batches`
    say, and so many texts as `settings.texts`.

    Raises:
        InputError: a folder is damaged.
    """
    config = towers_config(folders[0])
    vocabulary, longest = config.text.vocab_size, config.text.max_position_embeddings
    ids = np.arange(settings.texts * min(TEXT_TOKENS, longest)).reshape(settings.texts, -1) % vocabulary
    tokens = TextTokens(ids, np.ones_like(ids))
    found: dict[str, dict[int, tuple[Callable[..., Vectors], Callable[..., Vectors]]]] = {}
    for index, folder in enumerate(folders):
        kind = "onnxruntime" if is_artifact(folder) else "torch"
        found.setdefault(kind, {})[index] = network_of(folder, torch.get_num_threads())[1:]
        if kind == "torch" and settings.onnxruntime:
            found.setdefault("onnxruntime", {})[index] = _exported(folder)
    calls: Calls = {}
    for runtime in ("torch", "onnxruntime"):
        each = found.get(runtime, {})
        for batch in settings.batches:
            images = np.zeros((batch, config.channels, *config.image_size), np.float32)
            case = Case(runtime, f"batch {batch}", batch, "images")
            calls[case] = {index: partial(see, images) for index, (see, _) in each.items()}
        case = Case(runtime, f"{settings.texts} texts of {ids.shape[1]} tokens", settings.texts, "texts")
        calls[case] = {index: partial(read, tokens) for index, (_, read) in each.items()}
    return {case: of_case for case, of_case in calls.items() if of_case}


def _exported(folder: Path) -> tuple[Callable[..., Vectors], Callable[..., Vectors]]:
    """The towers of a checkpoint as they would run in ONNX Runtime."""
    networks = tower_networks(load_towers(folder))
    sessions = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, network in networks.items():
            path = Path(scratch) / f"{name}.onnx"
            export_network(network, path, {})
            sessions[name] = open_graph_session(path, network.config, threads=torch.get_num_threads())

    def run(name: str, *values: NDArray[np.float32] | NDArray[np.int64]) -> Vectors:
        config = networks[name].config
        inputs = {spec.name: value for spec, value in zip(config.inputs, values, strict=True)}
        (vectors,) = run_graph(sessions[name], config, inputs).values()
        return vectors

    return lambda images: run("image", images), lambda tokens: run("text", tokens.ids, tokens.mask)
