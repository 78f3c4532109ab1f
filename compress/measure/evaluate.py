"""How good a checkpoint is: accuracy or perplexity on held-out data, with a confidence interval."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator
from torch import nn

from penjing.compress.decoder.check import check_finite
from penjing.compress.decoder.stream import LayerStream
from penjing.compress.measure.bootstrap import interval, resampled_means
from penjing.compress.measure.perplexity import evaluation_windows, exponential, own_windows, streamed_losses
from penjing.compress.samples.data import fitting_images
from penjing.compress.samples.retrieval import Embeddings, Retrieval, embeddings, nearest, own_retrievals, retrieval_set
from penjing.compress.sight.settings import ImageQuestions
from penjing.core.artifact.base import is_artifact
from penjing.core.artifact.onnx_classifier import ClassifierArtifact, open_classifier_artifact
from penjing.core.checkpoint.classifier import ClassifierConfig, load_classifier
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError, InputError
from penjing.core.images.normalise import normalise
from penjing.core.manifest import verify
from penjing.core.progress import Progress, Silent
from penjing.core.runtime.onnx_runtime import run_session
from penjing.core.text.tokenizer import Tokenizer
from penjing.train.data.images import ImageSet
from penjing.train.sources.open import open_source
from penjing.train.sources.settings import SourceSettings

BATCH = 500
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)  # where a report is read


class EvaluateSettings(ImageQuestions, SourceSettings):
    """`[evaluate]`: held-out data, which nothing is calibrated or trained on."""

    prose_tokens: int = Field(default=8192, ge=64, description="Tokens of held-out prose, for a decoder.")
    code_tokens: int = Field(default=4096, ge=0, description="Tokens of source code, for a decoder; 0 leaves it out.")
    own: dict[str, Path] = Field(
        default={},
        description="Your own held-out texts, for a decoder or a text encoder, by the name that reports give them: "
        "UTF-8 files, folders of them, and .jsonl files as in data.calibrate.",
    )
    own_tokens: int = Field(default=8192, ge=64, description="Tokens of each text of your own, at most.")
    window: int = Field(default=512, ge=16, description="Tokens of a window, which starts afresh.")
    images: int = Field(default=10_000, ge=1, description="How many test images, or other samples of a graph, at most.")
    held_out: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the source that is evaluated on, 0 for all of it; without a source of its own, "
        "[evaluate] takes the share of [data]'s source that is held out there.",
    )
    metric: str = Field(
        default="auto",
        description="How a graph is judged: accuracy (of the classes of the samples), agreement (the share of samples "
        "whose class is that of the model that the run began with), similarity (the cosine of all outputs to that "
        "model's), or FILE.py:FUNCTION (of the outputs and the classes, which gives a number for each sample, larger "
        "where it is better). By default accuracy where the samples have classes, else similarity.",
    )
    texts: int = Field(
        default=256,
        ge=8,
        description="Held-out paragraphs, for a text encoder, and at most so many of each text of your own.",
    )
    resamples: int = Field(default=2000, ge=100, description="Resamples of the bootstrap that gives the intervals.")
    seed: int = Field(default=0, ge=0, description="Seed of the bootstrap.")

    @field_validator("metric")
    @classmethod
    def _known_metric(cls, value: str) -> str:
        if value not in ("auto", "accuracy", "agreement", "similarity") and ".py:" not in value:
            raise ValueError("must be auto, accuracy, agreement, similarity or FILE.py:FUNCTION")
        return value

    @model_validator(mode="after")
    def _whole_windows(self) -> EvaluateSettings:
        for name in ("prose_tokens", "code_tokens"):
            if getattr(self, name) % self.window:
                raise ValueError(f"{name}={getattr(self, name)} is not a multiple of window={self.window}")
        if self.own_tokens < self.window:
            raise ValueError(f"own_tokens={self.own_tokens} is less than one window={self.window}")
        if taken := {"prose", "code"} & self.own.keys():
            raise ValueError(f"own.{taken.pop()}: that name is taken; give your text another")
        return self


def images_judged(settings: EvaluateSettings) -> int:
    """How many samples evaluation runs: as many as the source has for it, at most `settings.images`.

    Raises:
        InputError: the source is damaged.
    """
    if settings.source is None:
        return settings.images
    return min(settings.images, len(open_source(settings).judged(settings.held_out)))


QualityName = Literal["accuracy", "agreement", "perplexity", "similarity", "score"]


@dataclass(frozen=True)
class Part:
    """The quality on one text."""

    __pydantic_config__ = STRICT

    name: str
    value: float
    samples: int


@dataclass(frozen=True)
class Quality:
    """What a checkpoint reaches; `dataclasses.asdict` of it is JSON-ready, `quality_from_json` reads that.

    Attributes:
        name: larger is better for "accuracy" (a share), "agreement" (the share of samples with the class of the model
            that the run began with), "similarity" (the mean cosine of embeddings or outputs to that model's) and
            "score" (of the user's own function), smaller for "perplexity".
        value: over all samples.
        low, high: 95 % bootstrap interval over samples, which are images, texts, or windows of text.
        samples: how many.
        parts: of a perplexity the texts by themselves, in the order of `record`; of a similarity the shares of queries
            whose nearest document is the model's choice, and the right one, then of each text of the user's own its
            mean cosine and the same two shares; none for images.
        record: each sample's outcome as base64: a bit an image, set if it is right; a float32 a window, its mean loss,
            or a text, its cosine. With it two checkpoints are compared sample by sample (`compare`).
    """

    __pydantic_config__ = STRICT

    name: QualityName
    value: float
    low: float
    high: float
    samples: int
    parts: tuple[Part, ...]
    record: str

    def outcomes(self) -> list[NDArray[np.float64]]:
        """1 or 0 for each image; the cosine of each text; or each window's mean loss in nats, an array for each text.

        Raises:
            InputError: the record does not hold as many samples as it says.
        """
        try:
            data = base64.b64decode(self.record, validate=True)
            if self.name in ("accuracy", "agreement"):
                return [np.unpackbits(np.frombuffer(data, np.uint8), count=self.samples).astype(np.float64)]
            losses = np.frombuffer(data, np.float32).astype(np.float64)
            if self.name in ("similarity", "score") and len(losses) == self.samples:
                return [losses]
        except ValueError as error:
            raise InputError(f"the record of {self.name} is damaged ({error}); evaluate again") from None
        ends = np.cumsum([part.samples for part in self.parts])
        if len(losses) != self.samples or not len(ends) or ends[-1] != self.samples:
            raise InputError(f"the record of {self.name} is damaged: {len(losses)} windows; evaluate again")
        return np.split(losses, ends[:-1])


@dataclass(frozen=True)
class Change:
    """How much worse the second of two checkpoints is on the same samples: the difference of accuracies (0.01 is a
    point), or the ratio of perplexities minus one. Negative where it is better."""

    value: float
    low: float
    high: float


def quality_from_json(values: dict[str, Any]) -> Quality:
    """What `dataclasses.asdict` made of a quality.

    Raises:
        InputError: it is not one.
    """
    try:
        return TypeAdapter(Quality).validate_python(values)
    except ValidationError as error:
        raise InputError(f"a stored quality is damaged ({error.errors()[0]['msg']}); evaluate again") from None


def evaluate_classifier(folder: Path, _: Path, settings: EvaluateSettings, progress: Progress) -> Quality:
    """Accuracy of an image classifier on Fashion-MNIST's test images, normalised as its configuration says.

    An INT8 artifact runs in ONNX Runtime; hashes are checked.

    Raises:
        InputError: damaged, made for other images, or it computes NaN.
        SetupError: the images cannot be fetched.
    """
    if is_artifact(folder):
        artifact = open_classifier_artifact(folder)
        model, config = OnnxClassifier(artifact), artifact.config
    else:
        model, config = load_classifier(folder)
    data = fitting_images(folder, config, "test", progress, settings, settings.held_out, settings.images)
    progress.start("accuracy on held-out images", -(-len(data.images) // BATCH))
    return accuracy(right_answers(model, config, data, progress), settings)


def evaluate_decoder(folder: Path, _: Path, settings: EvaluateSettings, progress: Progress) -> Quality:
    """Perplexity of a decoder or of its INT8 artifact on held-out text, with one layer in memory at a time.

    Raises:
        ConfigError: windows longer than the model's context.
        InputError: the checkpoint is damaged or of another kind, or computes NaN.
    """
    checkpoint = open_checkpoint(folder)
    if checkpoint.manifest is not None:
        verify(folder)
    if settings.window > checkpoint.config.max_position_embeddings:
        raise ConfigError(
            f"evaluate.window={settings.window} is longer than the context of {folder}, "
            f"{checkpoint.config.max_position_embeddings} tokens; use a smaller one"
        )
    tokenizer = Tokenizer.from_folder(folder)
    windows = evaluation_windows(tokenizer, settings.prose_tokens, settings.code_tokens, settings.window)
    windows |= own_windows(folder, settings.own, settings.own_tokens, settings.window)
    progress.start("perplexity on held-out text", checkpoint.config.num_hidden_layers)
    try:
        return perplexity(streamed_losses(LayerStream(checkpoint), windows, progress), settings)
    except InputError:
        check_finite(checkpoint, progress)  # names the weight that is to blame, if one is
        raise


def evaluate_encoder(folder: Path, model: Path, settings: EvaluateSettings, progress: Progress) -> Quality:
    """How near the embeddings of a text encoder, or of its INT8 artifact, are to those of the checkpoint `model`.

    Raises:
        InputError: either is damaged or computes NaN, or there is less text than asked for.
    """
    sets = {"": retrieval_set(settings.texts), **own_retrievals(settings.own, settings.texts)}
    texts = [text for each in sets.values() for text in each.texts()]
    progress.start("embeddings of held-out text", 2 * len(texts))
    before, after = (embeddings(each, texts, progress) for each in (model, folder))
    return similarity(before, after, settings, sets)


class OnnxClassifier(nn.Module):
    """A quantized classifier in ONNX Runtime with as many threads as torch uses; (N, C, H, W) → (N, classes)."""

    def __init__(self, artifact: ClassifierArtifact) -> None:
        super().__init__()
        self._session = artifact.session(torch.get_num_threads())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return torch.from_numpy(run_session(self._session, images.numpy()))


@torch.no_grad()
def right_answers(
    model: nn.Module, config: ClassifierConfig, data: ImageSet, progress: Progress | None = None
) -> NDArray[np.bool_]:
    """Whether the largest logit of each image is its label's, (N,).

    Args:
        model: (N, C, H, W) float32 → (N, classes), in evaluation mode.

    Raises:
        InputError: a logit is NaN or infinite.
    """
    progress = progress or Silent()
    mean, std = np.array(config.mean, np.float32), np.array(config.std, np.float32)
    right = []
    for begin in range(0, len(data.images), BATCH):
        logits = model(torch.from_numpy(normalise(data.images[begin : begin + BATCH], mean, std)))
        if not torch.isfinite(logits).all():
            raise InputError("the classifier computes NaN or infinity: it is damaged, or its training diverged")
        right.append(logits.argmax(1).numpy() == data.labels[begin : begin + BATCH])
        progress.advance()
    return np.concatenate(right)


def accuracy(right: NDArray[np.bool_], settings: EvaluateSettings) -> Quality:
    """The quality that `right`, (N,), amounts to."""
    outcomes = right.astype(np.float64)
    low, high = interval(resampled_means([outcomes], resamples=settings.resamples, seed=settings.seed))
    record = base64.b64encode(np.packbits(right).tobytes()).decode()
    return Quality("accuracy", float(outcomes.mean()), low, high, len(right), (), record)


def similarity(
    before: Embeddings, after: Embeddings, settings: EvaluateSettings, sets: dict[str, Retrieval]
) -> Quality:
    """The quality of `after` beside `before`, both (texts, hidden) of length 1, the texts of each of `sets` in turn.

    Args:
        sets: by the name of the user's text, "" for what comes along.

    Raises:
        InputError: a number is NaN or infinite.
    """
    cosines = (before * after).sum(1).astype(np.float64)
    if not np.isfinite(cosines).all():
        raise InputError("the encoder computes NaN or infinity: it is damaged; get or make it again")
    parts: list[Part] = []
    begin = 0
    for name, retrieval in sets.items():
        count, end = len(retrieval.queries), begin + len(retrieval.texts())
        if name:
            parts.append(Part(name, float(cosines[begin:end].mean()), end - begin))
        if count:
            first, second = (nearest(x[begin : begin + count], x[begin + count : end]) for x in (before, after))
            said = f"{name}: " if name else ""
            parts.append(Part(f"{said}nearest document unchanged", float((first == second).mean()), count))
            parts.append(Part(f"{said}nearest document right", float((second == np.arange(count)).mean()), count))
        begin = end
    low, high = interval(resampled_means([cosines], resamples=settings.resamples, seed=settings.seed))
    record = base64.b64encode(cosines.astype(np.float32).tobytes()).decode()
    return Quality("similarity", float(cosines.mean()), low, high, len(cosines), tuple(parts), record)


def perplexity(losses: dict[str, list[float]], settings: EvaluateSettings) -> Quality:
    """The quality of `losses`: for each text the mean loss in nats of each of its windows, all of one length.

    Raises:
        InputError: a loss is so large that there is no finite perplexity: the model is damaged.
    """
    parts = tuple(Part(name, exponential(float(np.mean(part)), name), len(part)) for name, part in losses.items())
    strata = [np.array(part) for part in losses.values()]
    means = resampled_means(strata, resamples=settings.resamples, seed=settings.seed)
    low, high = interval(np.exp(means))
    every = np.concatenate(strata)
    record = base64.b64encode(every.astype(np.float32).tobytes()).decode()
    return Quality("perplexity", math.exp(every.mean()), low, high, len(every), parts, record)


def compare(before: Quality, after: Quality, settings: EvaluateSettings | None = None) -> Change:
    """How much worse `after` is than `before`, over the same samples: most of their noise is common and drops out.

    Raises:
        InputError: they were measured on different samples.
    """
    settings = settings or EvaluateSettings()
    kinds = [(each.name, each.samples, [(p.name, p.samples) for p in each.parts]) for each in (before, after)]
    if kinds[0] != kinds[1]:
        raise InputError(
            f"{before.name} on {before.samples} samples and {after.name} on {after.samples} cannot be compared; "
            "evaluate both on the same data"
        )
    differences = [old - new for old, new in zip(before.outcomes(), after.outcomes(), strict=True)]
    means = resampled_means(differences, resamples=settings.resamples, seed=settings.seed)
    value = np.concatenate(differences).mean()
    if before.name == "perplexity":
        means, value = np.expm1(-means), math.expm1(-value)
    return Change(float(value), *interval(means))
