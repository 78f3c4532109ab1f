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
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from penjing.compress.measure.data import is_classifier
from penjing.compress.prune.inspect import BATCH, TOKENS, count_macs
from penjing.core.artifact.base import is_artifact
from penjing.core.artifact.onnx_classifier import open_classifier_artifact
from penjing.core.checkpoint.classifier import classifier_config, classifier_skeleton, load_classifier
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.config import Config
from penjing.core.errors import InputError, SetupError
from penjing.core.memory import available_bytes
from penjing.core.models.attention import causal_attention
from penjing.core.models.decoder import Decoder
from penjing.core.models.resnet import ResNet
from penjing.core.progress import Progress, Silent, megabytes
from penjing.core.runtime.onnx_runtime import INPUT, OUTPUT, open_session, run_session
from penjing.core.timing import interleaved, summarise


class MeasureSettings(Config):
    """How long is measured. The times are those of a CPU, on as many threads as torch uses."""

    rounds: int = Field(default=5, ge=1)
    seconds: float = Field(default=0.3, ge=0)  # of one turn; at least one call
    batches: tuple[int, ...] = Field(default=(1, 64), min_length=1)  # images at a time
    prefill_tokens: int = Field(default=128, ge=1)
    onnxruntime: bool = True  # classifiers run in ONNX Runtime too


@dataclass(frozen=True)
class Case:
    """One computation that every checkpoint of a kind is timed with; `amount` images or tokens a call."""

    runtime: Literal["torch", "onnxruntime"]
    name: str
    amount: int
    unit: str


def measure(
    folders: Sequence[Path], settings: MeasureSettings | None = None, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Sizes and times of checkpoints of one kind, the first of which is what the others are compared with; JSON-ready.

    All are held in memory at once and take turns (`interleaved`), in torch; classifiers also in ONNX Runtime, their
    quantized artifacts there alone.

    Returns:
        For each folder `kind` ("classifier" or "decoder"), `size` {parameters, bytes (of the weights on disk), macs,
        macs_per}, `widths` {layer: output channels or features}, `latency` [{runtime, case, unit, seconds, low, high,
        throughput, speedup, speedup_low, speedup_high, runs}].

    Raises:
        InputError: no folder, or one is damaged, or they are of different kinds.
        SetupError: too little memory for all of them.
    """
    settings, progress = settings or MeasureSettings(), progress or Silent()
    if not folders:
        raise InputError("there is nothing to measure; give checkpoint folders")
    kinds = {is_classifier(folder) for folder in folders}
    if len(kinds) > 1:
        raise InputError(f"{folders[0]} and others are of different kinds; measure classifiers or decoders, not both")
    if (free := available_bytes()) < (needed := 2 * sum(weight_bytes(folder) for folder in folders)):
        raise SetupError(
            f"measuring {len(folders)} checkpoints in turns needs about {megabytes(needed)} of memory, "
            f"{megabytes(free)} are available; measure fewer"
        )
    found: list[dict[str, Any]] = [size_of(folder) | {"latency": []} for folder in folders]
    calls = _classifiers(folders, settings) if kinds == {True} else _decoders(folders, settings)
    progress.start("timing", settings.rounds * sum(len(of_case) for of_case in calls.values()))
    with torch.no_grad():
        for case, of_case in calls.items():
            turns = list(of_case.values())
            times = interleaved(turns, rounds=settings.rounds, seconds=settings.seconds, done=progress.advance)
            for index, own in zip(of_case, times, strict=True):
                figures = summarise(own, times[0], case.amount)
                row = {"runtime": case.runtime, "case": case.name, "unit": case.unit, **figures}
                found[index]["latency"].append(row)
    return found


def weight_bytes(folder: Path) -> int:
    """Size of the weight files of a checkpoint or artifact."""
    return sum(path.stat().st_size for pattern in ("*.safetensors", "*.onnx") for path in folder.glob(pattern))


def size_of(folder: Path) -> dict[str, Any]:
    """`kind`, `size` and `widths` of a checkpoint or artifact, as in `measure`; no weight is read.

    Raises:
        InputError: the folder is neither, or damaged.
    """
    classifier = is_classifier(folder)
    with torch.device("meta"):
        if classifier:
            config = classifier_config(folder)
            model = ResNet(config.model).eval() if is_artifact(folder) else classifier_skeleton(folder)[0]
            example, count = torch.empty(BATCH, config.model.in_channels, *config.image_size), BATCH
        else:
            model = Decoder(open_checkpoint(folder).config).to("meta").eval()
            example, count = torch.zeros(BATCH, TOKENS, dtype=torch.int64), BATCH * TOKENS
    macs = count_macs(model, (example,))
    owners = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    return {
        "kind": "classifier" if classifier else "decoder",
        "size": {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "bytes": weight_bytes(folder),
            "macs": sum(macs.get(name, 0) for name in owners) // count,
            "macs_per": "image" if classifier else "token",
        },
        "widths": {name: layer.weight.shape[0] for name, layer in layers},
    }


Calls = dict[Case, dict[int, Callable[[], object]]]  # of each case: place among the folders → what is timed


def _classifiers(folders: Sequence[Path], settings: MeasureSettings) -> Calls:
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


def _decoders(folders: Sequence[Path], settings: MeasureSettings) -> Calls:
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
        self._model = model
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        causal = causal_attention(model.config)

        def keep(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._kept[layer] = k, v
            return causal(layer, q, k, v)

        with torch.no_grad():
            model(prompt, attend=keep)
        self._token = prompt[:, -1:]
        self._position = torch.full((1, 1), prompt.shape[1])

    def __call__(self) -> Tensor:
        return self._model(self._token, self._position, self._attend)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        old_k, old_v = self._kept[layer]
        keys, values = torch.cat([old_k, k], 1), torch.cat([old_v, v], 1)
        q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True).transpose(1, 2)
