"""`penjing compress sensitivity --bits`: what it costs when one layer alone is rounded.

Of a decoder: the network is transformed first as a recipe does (rotation, smoothing): outliers that it takes away make
no layer sensitive. Each decoder layer and the LM head are then rounded to each width, weights by row and activations by
token, and measured. Each linear layer also gets a score from one backward pass, ½ Σ_t (g_t · ΔY_t)²: half the empirical
Fisher information along the error of its outputs, about the rise of the loss in nats; see
https://arxiv.org/abs/2001.00281. With a width of 4 there is a score of W4A8 too: weights of 4 bits in groups of 32
inputs, activations of 8. `quantize/bits.py` spends a budget by these scores.

Of a classifier: the weights of each convolution and linear layer are rounded, one symmetric scale an output channel as
in the artifact (a batch norm's factor behind it changes nothing: it scales whole channels); the rest and all
activations stay floating. Where accuracy is too coarse to tell layers apart, the Kullback-Leibler divergence of the
answers from the floating network's does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn

from penjing.compress.decoder.artifact import make_weights
from penjing.compress.decoder.check import linear_modules
from penjing.compress.decoder.settings import Int8Settings, Transform
from penjing.compress.measure.perplexity import evaluation_windows
from penjing.compress.prune.resnet_subject import ResNetSubject
from penjing.compress.quantize.bits import GROUPED
from penjing.compress.samples.data import DataSettings, ImageData, token_samples
from penjing.compress.samples.named import calibration_files
from penjing.compress.sensitivity.study import (
    Samples,
    Study,
    check_context,
    cut,
    sound,
    study_images,
)
from penjing.core.checkpoint.load import load_model
from penjing.core.config import Config
from penjing.core.progress import Progress
from penjing.core.text.corpus import calibration_windows
from penjing.core.text.tokenizer import Tokenizer
from penjing.core.work import WorkFolder
from penjing.kernels.rounding import round_clamp_

BASELINE = "baseline"
GROUP = 32  # inputs, of the score of W4A8
FLOATS = Int8Settings(lm_head="keep", embedding_dtype="float32", keep=("*",), rounding="nearest")


class Widths(Config):
    """How far layers are rounded, and on what the network is judged then."""

    widths: tuple[int, ...] = Field(
        default=(8, 6, 4), min_length=1, description="Widths in bits, each narrower than the one before."
    )
    data: Samples = Field(default="calibration", description='"calibration" images or text, or "held-out" ones.')

    @field_validator("widths")
    @classmethod
    def _widths(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if any(not 2 <= value <= 16 for value in values) or list(values) != sorted(set(values), reverse=True):
            raise ValueError("each from 16 to 2, falling, such as 8,6,4")
        return values


class ClassifierBits(Widths):
    """The images that a classifier is judged on."""

    images: int = Field(default=512, ge=1, description="Images that the network is judged on.")


class DecoderBits(Widths):
    """The text that a decoder is judged on, and what is done to it before a layer is rounded."""

    windows: int = Field(default=4, ge=2, description="Windows that the network is judged on; half of them are code.")
    window: int = Field(default=256, ge=16, description="Tokens of a window.")
    transform: Transform = Field(default=Transform(), description="What is done before a layer is rounded.")
    calibration: DataSettings = Field(default=DataSettings(), description="Text that the transforms look at.")


def round_rows(x: Tensor, bits: int) -> Tensor:
    """Each row (…, K) rounded symmetrically to `bits` by its largest magnitude, and widened again."""
    limit = 2 ** (bits - 1) - 1
    scale = x.abs().amax(dim=-1, keepdim=True) / limit
    scale = scale.masked_fill(scale == 0, 1.0)
    return round_clamp_(x / scale, limit) * scale


def round_groups(weight_NK: Tensor) -> Tensor:
    """`weight_NK` rounded to 4 bits, GROUP inputs of a row at a time; whole rows where they are no groups."""
    group = GROUP if weight_NK.shape[1] % GROUP == 0 else weight_NK.shape[1]
    return round_rows(weight_NK.unflatten(1, (-1, group)), 4).flatten(1)


def calibrated_on(settings: DecoderBits) -> dict[str, dict[str, str]]:
    """See `Measure.files`."""
    return calibration_files(settings.calibration)


def decoder_bits(folder: Path, settings: DecoderBits, work: WorkFolder, progress: Progress) -> Study:
    check_context(folder, settings.window)
    check_context(folder, settings.calibration.window, "calibration.window")
    seen_WT = token_samples(folder, settings.calibration, progress).windows
    floats = FLOATS.model_copy(update={"transform": settings.transform})
    floating, _ = make_weights(folder, floats, seen_WT, work, progress)
    model, windows_WT = load_model(floating).model, _windows(folder, settings)
    names = linear_modules(model.config)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(".".join(name.split(".")[:3]), []).append(name)
    baseline = sound(folder, work.run(BASELINE, lambda: judge_windows(model, windows_WT)).result)
    progress.start("scores", len(windows_WT))
    scores = work.run("scores", lambda: width_scores(model, windows_WT, names, settings.widths, progress)).result
    linears = [
        {"name": name, "parameters": _linear(model, name).weight.numel(), "scores": scores[name]} for name in names
    ]

    def cell(group: str, bits: int) -> dict[str, Any]:
        with rounded(model, groups[group], bits):
            found = judge_windows(model, windows_WT)
        score = sum(scores[name][str(bits)] for name in groups[group])
        return {"value": found["value"], "loss": cut(found["loss"]), "score": score}

    sizes = {group: sum(_linear(model, name).weight.numel() for name in members) for group, members in groups.items()}
    return Study("perplexity", baseline, sizes, settings.widths, cell, {"linears": linears})


def _windows(folder: Path, settings: DecoderBits) -> Tensor:
    tokens, tokenizer = settings.windows * settings.window, Tokenizer.from_folder(folder)
    if settings.data == "calibration":
        return calibration_windows(tokenizer, tokens, settings.window, 0.5)
    half = settings.windows // 2 * settings.window
    return torch.cat(list(evaluation_windows(tokenizer, tokens - half, half, settings.window).values()))


@contextmanager
def rounded(model: nn.Module, names: list[str], bits: int) -> Iterator[None]:
    """Inside the block the linear layers `names` compute with `bits`; afterwards every bit is as before."""

    def compute(layer: nn.Linear) -> Callable[..., Tensor]:
        weight_NK = round_rows(layer.weight, bits)
        return lambda _, inputs, __: F.linear(round_rows(inputs[0], bits), weight_NK, layer.bias)

    handles = [layer.register_forward_hook(compute(layer)) for layer in (_linear(model, name) for name in names)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def width_scores(
    model: nn.Module, windows_WT: Tensor, names: list[str], widths: tuple[int, ...], progress: Progress | None = None
) -> dict[str, dict[str, float]]:
    """½ Σ_t (g_t · ΔY_t)² a token of each linear layer and width (as a string, or GROUPED), in nats; see the module.

    Args:
        windows_WT: (W, T) tokens; g is the gradient of the summed loss of a window's next tokens.
    """
    forms = [*map(str, widths), *([GROUPED] if 4 in widths else [])]
    scores = {name: dict.fromkeys(forms, 0.0) for name in names}

    def watch(name: str, layer: nn.Linear) -> Any:
        def forward(_: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
            x, kept = inputs[0].detach(), y.detach()

            def backward(gradient: Tensor) -> None:
                for form in forms:
                    bits = 8 if form == GROUPED else int(form)
                    weight_NK = round_groups(layer.weight) if form == GROUPED else round_rows(layer.weight, bits)
                    error = F.linear(round_rows(x, bits), weight_NK, layer.bias) - kept
                    scores[name][form] += float((gradient * error).sum(dim=-1).square().sum())

            y.register_hook(backward)

        return layer.register_forward_hook(forward)

    handles = [watch(name, _linear(model, name)) for name in names]
    handles.append(model.get_submodule("model.embed_tokens").register_forward_hook(lambda _, __, y: y.requires_grad_()))
    try:
        for tokens_T in windows_WT:
            with torch.enable_grad():
                logits_TV = model(tokens_T[None, :-1])[0]
                F.cross_entropy(logits_TV, tokens_T[1:], reduction="sum").backward()
            if progress is not None:
                progress.advance()
    finally:
        for handle in handles:
            handle.remove()
    counted = windows_WT[:, 1:].numel()
    return {name: {bits: value / 2 / counted for bits, value in found.items()} for name, found in scores.items()}


@torch.no_grad()
def judge_windows(model: nn.Module, windows_WT: Tensor) -> dict[str, Any]:
    """`value` (perplexity), `loss` (nats a token), `samples` (windows)."""
    total = 0.0
    for tokens_T in windows_WT:
        logits_TV = model(tokens_T[None, :-1])[0]
        total += float(F.cross_entropy(logits_TV, tokens_T[1:], reduction="sum"))
    mean = total / windows_WT[:, 1:].numel()
    return {"value": math.exp(cut(mean)), "loss": mean, "samples": len(windows_WT)}


def _linear(model: nn.Module, name: str) -> nn.Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear), name
    return layer


@dataclass(frozen=True)
class Answers:
    """What the floating network says of the study's images, and what is right.

    Attributes:
        log_probabilities: (N, classes) float32.
        labels: (N,) int64.
    """

    log_probabilities: Tensor
    labels: Tensor


def classifier_bits(folder: Path, settings: ClassifierBits, work: WorkFolder, progress: Progress) -> Study:
    model = ResNetSubject(folder).network()
    data = study_images(folder, settings.data, settings.images, progress)
    labels = torch.from_numpy(data.images.labels.astype(np.int64))

    def floating() -> dict[str, Any]:
        log_probabilities = _log_probabilities(model, data)
        work.save(BASELINE, {BASELINE: log_probabilities})
        judged = judge_answers(log_probabilities, Answers(log_probabilities, labels))
        return {"value": judged["value"], "loss": judged["loss"], "samples": len(labels)}

    baseline = sound(folder, work.run(BASELINE, floating).result)
    answers = Answers(work.load(BASELINE)[BASELINE], labels)
    layers = weighted_layers(model)

    def cell(name: str, bits: int) -> dict[str, Any]:
        with rounded_weights(layers[name], bits):
            return judge_answers(_log_probabilities(model, data), answers)

    sizes = {name: layer.weight.numel() for name, layer in layers.items()}
    return Study("accuracy", baseline, sizes, settings.widths, cell, {})


def weighted_layers(model: nn.Module) -> dict[str, nn.Conv2d | nn.Linear]:
    """Convolutions and linear layers, in order; a convolution has the name that it shares with its norm."""
    return {
        name.removesuffix(".conv"): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    }


@contextmanager
def rounded_weights(layer: nn.Conv2d | nn.Linear, bits: int) -> Iterator[None]:
    """Inside the block the weights of `layer` have `bits`, one scale an output channel; then they are as before."""
    weight = layer.weight.detach()  # the same memory
    before = weight.clone()
    try:
        weight.copy_(round_rows(before.flatten(1), bits).view_as(before))
        yield
    finally:
        weight.copy_(before)


def judge_answers(log_probabilities: Tensor, answers: Answers) -> dict[str, float]:
    """`value` (accuracy), `loss` and `divergence` (nats an image), both cut where nothing is learnt from more.

    Args:
        log_probabilities: (N, classes) of the network that is judged.
    """
    value = (log_probabilities.argmax(1) == answers.labels).double().mean()
    loss = F.nll_loss(log_probabilities.double(), answers.labels)
    divergence = F.kl_div(
        log_probabilities.double(), answers.log_probabilities.double(), reduction="batchmean", log_target=True
    )
    return {"value": float(value), "loss": cut(float(loss)), "divergence": cut(float(divergence))}


@torch.no_grad()
def _log_probabilities(model: nn.Module, data: ImageData) -> Tensor:
    return torch.cat([model(images).log_softmax(1) for (images,) in data.inputs()])
