"""What checkpoints cost: parameters, bytes on disk, multiply-accumulates, widths, and time measured in turns."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from penjing.compress.export.onnx_graph import export_network
from penjing.compress.graph.own import encoder_network
from penjing.compress.measure.generate import Sequences
from penjing.compress.measure.skeleton import Skeleton
from penjing.core.artifact.base import MODEL_FILE, is_artifact
from penjing.core.artifact.onnx_classifier import open_classifier_artifact
from penjing.core.artifact.onnx_encoder import IDS, MASK, open_encoder_artifact, open_encoder_session
from penjing.core.checkpoint.classifier import classifier_config, load_classifier
from penjing.core.checkpoint.encoder import load_encoder
from penjing.core.checkpoint.load import load_model
from penjing.core.config import Config
from penjing.core.errors import InputError, SetupError
from penjing.core.family import EYES
from penjing.core.memory import available_bytes
from penjing.core.models.decoder import Decoder
from penjing.core.progress import Progress, megabytes
from penjing.core.runtime.onnx_runtime import INPUT, OUTPUT, open_session, run_session
from penjing.core.runtime.timing import interleaved, summarise
from penjing.core.text.text_tokenizer import encoder_config

WEIGHTS = ("*.safetensors", "*.onnx", f"{EYES}/*.safetensors", f"*/{MODEL_FILE}")  # files of a folder
TEXT_TOKENS = 128  # of a text that encoders are timed with

Calls = dict["Case", dict[int, Callable[[], object]]]
"""Of each case, what is called for each folder (by its place) that can run it."""


class MeasureSettings(Config):
    """`[measure]`: how long is timed, and what a decoder is asked. The times are those of a CPU, on as many threads as
    torch uses."""

    rounds: int = Field(default=5, ge=0, description="Rounds in which all take turns; 0 looks at sizes alone.")
    seconds: float = Field(default=0.3, ge=0, description="Of one turn, which is one call at the least.")
    batches: tuple[int, ...] = Field(default=(1, 64), min_length=1, description="Images at a time, of a classifier.")
    prefill_tokens: int = Field(default=128, ge=1, description="Tokens of the prompt, of a decoder.")
    texts: int = Field(default=8, ge=1, description="Texts of 128 tokens at a time, of a text encoder.")
    onnxruntime: bool = Field(default=True, description="Checkpoints that can run in ONNX Runtime too are timed there.")
    greedy: int = Field(
        default=0,
        ge=0,
        description="How many prompts a decoder continues with the likeliest tokens, to see how many stay those of the "
        "model; 0 for none.",
    )
    greedy_tokens: int = Field(default=32, ge=1, description="Tokens of each such answer, at most.")
    prompts: tuple[Path, ...] = Field(
        default=(),
        description="Your own prompts for greedy: UTF-8 files, each line of which is one, folders of them, and .jsonl "
        "files as in data.calibrate. By default beginnings of the texts of [evaluate].",
    )
    choices: tuple[Path, ...] = Field(
        default=(),
        description="Multiple-choice questions for a decoder, as .jsonl files: lines with query, choices and gold, or "
        "lines of ARC or HellaSwag, as lm-eval reads them.",
    )

    @property
    def asks(self) -> bool:
        """Whether the model is asked anything."""
        return bool(self.greedy or self.choices)


@dataclass(frozen=True)
class Case:
    """One computation that every checkpoint of a family is timed with; `amount` images, tokens or texts a call."""

    runtime: Literal["torch", "onnxruntime"]
    name: str
    amount: int
    unit: str


def timed(
    folders: Sequence[Path],
    calls: Callable[[Sequence[Path], MeasureSettings], Calls],
    settings: MeasureSettings,
    progress: Progress,
) -> list[list[dict[str, Any]]]:
    """Times of checkpoints of one family, the first of which is what the others are compared with; JSON-ready.

    All are held in memory at once and take turns (`interleaved`).

    Returns:
        For each folder its rows {runtime, case, unit, seconds, low, high, throughput, speedup, speedup_low,
        speedup_high, runs}; none where `settings` ask for no rounds.

    Raises:
        InputError: a folder is damaged.
        SetupError: too little memory for all of them.
    """
    found: list[list[dict[str, Any]]] = [[] for _ in folders]
    if not settings.rounds:
        return found
    check_memory(folders)
    cases = calls(folders, settings)
    progress.start("timing", settings.rounds * sum(len(of_case) for of_case in cases.values()))
    with torch.no_grad():
        for case, of_case in cases.items():
            turns = list(of_case.values())
            times = interleaved(turns, rounds=settings.rounds, seconds=settings.seconds, done=progress.advance)
            for index, own in zip(of_case, times, strict=True):
                figures = summarise(own, times[0], case.amount)
                found[index].append({"runtime": case.runtime, "case": case.name, "unit": case.unit, **figures})
    return found


def check_memory(folders: Sequence[Path]) -> None:
    """Refuse to hold the networks in `folders` at once where there is too little memory.

    Raises:
        SetupError: there is.
    """
    if (free := available_bytes()) < (needed := 2 * sum(weight_bytes(folder) for folder in folders)):
        raise SetupError(
            f"measuring {len(folders)} checkpoints in turns needs about {megabytes(needed)} of memory, "
            f"{megabytes(free)} are available; measure fewer"
        )


def weight_bytes(folder: Path) -> int:
    """Size of the weight files of a checkpoint or artifact."""
    return sum(path.stat().st_size for pattern in WEIGHTS for path in folder.glob(pattern))


def sizes_of(folder: Path, skeleton: Skeleton) -> dict[str, Any]:
    """`size` {parameters, bytes (of the weights on disk), macs, macs_per} and `widths` {layer: output channels or
    features} of a checkpoint or artifact; no weight is read."""
    layers = skeleton.layers()
    return {
        "size": {
            "parameters": sum(parameter.numel() for parameter in skeleton.model.parameters()),
            "bytes": weight_bytes(folder),
            "macs": sum(layer.macs for layer in layers) // skeleton.inputs,
            "macs_per": skeleton.unit,
        },
        "widths": {layer.name: layer.width for layer in layers if layer.width is not None},
    }


def classifier_calls(folders: Sequence[Path], settings: MeasureSettings) -> Calls:
    """Classifiers in torch and in ONNX Runtime, their quantized artifacts there alone."""
    in_torch: dict[int, nn.Module] = {}
    in_onnx: dict[int, Any] = {}
    for index, folder in enumerate(folders):
        if is_artifact(folder):
            in_onnx[index] = open_classifier_artifact(folder).session(torch.get_num_threads())
        else:
            in_torch[index], config = load_classifier(folder)
            if settings.onnxruntime:
                in_onnx[index] = onnx_session(in_torch[index], _images(config, 2))
    configs = [classifier_config(folder) for folder in folders]
    calls: Calls = {}
    for batch in settings.batches:
        images = [_images(config, batch) for config in configs]
        name = f"batch {batch}"
        if in_torch:
            calls[Case("torch", name, batch, "images")] = {
                index: partial(model, images[index]) for index, model in in_torch.items()
            }
        if in_onnx:
            calls[Case("onnxruntime", name, batch, "images")] = {
                index: partial(run_session, session, images[index].numpy()) for index, session in in_onnx.items()
            }
    return calls


def encoder_calls(folders: Sequence[Path], settings: MeasureSettings) -> Calls:
    """Text encoders in torch and in ONNX Runtime, their quantized artifacts there alone."""
    in_torch: dict[int, nn.Module] = {}
    in_onnx: dict[int, Any] = {}
    for index, folder in enumerate(folders):
        if is_artifact(folder):
            in_onnx[index] = open_encoder_artifact(folder).session(torch.get_num_threads())
            continue
        model = load_encoder(folder)
        in_torch[index] = model
        if settings.onnxruntime:
            with tempfile.TemporaryDirectory() as scratch:
                export_network(encoder_network(model), Path(scratch) / "model.onnx", {})
                in_onnx[index] = open_encoder_session(Path(scratch) / "model.onnx", threads=torch.get_num_threads())
    length = min(encoder_config(folder).max_position_embeddings for folder in folders)
    ids = torch.ones(settings.texts, min(TEXT_TOKENS, length), dtype=torch.int64)
    feed = {IDS: ids.numpy(), MASK: ids.numpy()}
    name = f"{settings.texts} texts of {ids.shape[1]} tokens"
    calls: Calls = {}
    if in_torch:
        calls[Case("torch", name, settings.texts, "texts")] = {
            index: partial(model, ids, ids) for index, model in in_torch.items()
        }
    if in_onnx:
        calls[Case("onnxruntime", name, settings.texts, "texts")] = {
            index: partial(session.run, None, feed) for index, session in in_onnx.items()
        }
    return calls


def _images(config: Any, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, config.model.in_channels, *config.image_size, generator=generator)


def onnx_session(model: nn.Module, images: Tensor) -> Any:
    """`model` as an ONNX Runtime session on the CPU, any number of images like `images` (N, C, H, W) float32 → logits.

    It folds batch norms and uses as many threads as torch does.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the newer exporter needs a package (onnxscript) that we do not
        axes = {INPUT: {0: "batch"}, OUTPUT: {0: "batch"}}
        names = {"input_names": [INPUT], "output_names": [OUTPUT], "dynamic_axes": axes}
        written = Path(folder) / "model.onnx"
        torch.onnx.export(model, (images,), written, dynamo=False, **names)
        return open_session(written, threads=torch.get_num_threads())


def decoder_calls(folders: Sequence[Path], settings: MeasureSettings) -> Calls:
    """Decoders and their INT8 artifacts in penjing's own runtime: a prompt, and one more token after it."""
    models = [load_model(folder).model for folder in folders]
    length = settings.prefill_tokens
    prefill: dict[int, Callable[[], object]] = {}
    decode: dict[int, Callable[[], object]] = {}
    for index, (folder, model) in enumerate(zip(folders, models, strict=True)):
        if length >= model.config.max_position_embeddings:
            raise InputError(
                f"{folder} has a context of {model.config.max_position_embeddings} tokens, too few for prefill_tokens="
                f"{length} and one more; measure with fewer"
            )
        prompt = torch.arange(length)[None] % model.config.vocab_size
        prefill[index] = partial(model, prompt, logit_rows=torch.tensor([length - 1]))
        decode[index] = DecodeStep(model, prompt)
    return {
        Case("torch", f"prefill {length} tokens", length, "tokens"): prefill,
        Case("torch", f"decode after {length} tokens", 1, "tokens"): decode,
    }


class DecodeStep:
    """One more token of one sequence, with the keys and values of its prompt kept: logits (1, 1, V).

    Args:
        prompt: (1, T) int64.
    """

    def __init__(self, model: Decoder, prompt: Tensor) -> None:
        with torch.no_grad():
            self._sequence = Sequences(model, [prompt[0].tolist()])
        self._token = int(prompt[0, -1])

    def __call__(self) -> Tensor:
        return self._sequence.following([self._token], keep=False)[None]
