"""A decoder that sees becomes an INT8 artifact: its decoder as any other, its eyes beside it.

What rotates the decoder's residual stream rotates the rows of images too: the projector takes it up.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from penjing.compress.decoder.settings import Int8Settings
from penjing.compress.distill.seeing import TRAINING, hidden_weights, learning_from
from penjing.compress.distill.training import train_checkpoint
from penjing.compress.quantizers import decoder
from penjing.compress.quantizers.decoder import RoundedDecoder
from penjing.compress.quantizers.sight_training import RoundedSightTask
from penjing.compress.samples.data import DataSettings
from penjing.compress.sight.network import load_seeing
from penjing.compress.sight.parity import measure_sight
from penjing.compress.sight.rounding import RoundedSight, round_sight
from penjing.compress.sight.rows import BATCH, check_scenes, images_of, read_rows, seen_text
from penjing.compress.sight.settings import ImageQuestions, ImageRows
from penjing.core.artifact.parity import read_parity, write_parity
from penjing.core.artifact.transform import read_transforms
from penjing.core.checkpoint.sight import save_sight
from penjing.core.checkpoint.vision_language import load_vision_language, vision_language_config
from penjing.core.errors import ConfigError
from penjing.core.manifest import read_manifest, write_manifest
from penjing.core.progress import Progress
from penjing.core.vision.projector import linears
from penjing.core.vision.sight import Sight
from penjing.core.vision.vision_language import VisionLanguage
from penjing.core.work import Places
from penjing.train.chat.sighted import SightedRows
from penjing.train.data.stream import one_pass
from penjing.train.families.base import Task
from penjing.train.recipe.recipe import RunRecipe

RESIDUAL = "model.layers.0.mlp.down_proj"  # a layer whose output goes into the residual stream, as rows of images do


class SightQuantize(ImageQuestions, ImageRows, decoder.DecoderQuantize):
    """INT8 for a decoder that sees, and for what it sees with."""

    sight: Literal["int8", "float32"] = Field(
        default="int8",
        description="Of a decoder that sees: the linear layers of its vision transformer and projection.",
    )
    sight_alpha: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Of a decoder that sees: SmoothQuant's alpha inside the vision transformer; 0 leaves it out.",
    )


def check(source: Path, step: SightQuantize, data: DataSettings) -> None:
    """See `decoder.check`."""
    if step.steps and (wrong := hidden_weights(step.distill)):
        raise ConfigError(f"{source} sees; a teacher's logits alone teach it: leave distill.{wrong[0]} out")
    check_scenes(source, vision_language_config(source), (*step.questions, *step.rows, *step.sources))
    if shared := sorted(set(step.questions) & {*(step.rows or data.rows), *step.sources}):
        raise ConfigError(f"{shared[0]} would teach or calibrate, and judge; take other rows for one of them")
    decoder.check(source, step, data, TRAINING)


def quantize(
    places: Places, step: SightQuantize, data: DataSettings, model: Path, progress: Progress
) -> dict[str, Any]:
    """See `decoder.quantize`; the record has `images`, what was asked before and after, where there are questions."""
    whole = load_vision_language(places.source)
    sight, images, seen = Sight.of(whole), None, None
    calibrating = step if step.rows else data
    if calibrating.rows:
        named = calibrating.rows, calibrating.row_images, calibrating.most_rows
        setting = "the step's rows" if step.rows else "data.rows"
        rows = read_rows(places.source, whole.config, *named, setting, progress)
        images = images_of(rows)
        seen = seen_text(rows, images, sight, whole.config.decoder.vocab_size, data.window)
    eyes: RoundedSight | None = None

    def rounded(folder: Path) -> tuple[Sight, RoundedSight | None]:
        """The eyes in the basis of the artifact in `folder`, and in INT8."""
        turned = _turned(sight, whole, folder)
        if step.sight == "float32":
            return turned, None
        return turned, round_sight(turned, images, step.sight_alpha, step.rounding == "compensated", progress)

    def learn(floating: Path, calibrated: Path, settings: Int8Settings) -> dict[str, Any]:
        nonlocal eyes
        turned, eyes = rounded(calibrated)
        teacher, begun = step.teacher or model, RoundedDecoder(floating, calibrated, settings)

        def wrap(task: Task, run: RunRecipe) -> Task:
            learning = learning_from(task, run, places.source, teacher, step.distill, step.temperature)
            return RoundedSightTask(learning, begun, turned, eyes)

        names = {"student": places.source, "calibrated": calibrated, "teacher": teacher}
        paths = places.source, places.partial
        return train_checkpoint(*paths, step, TRAINING, data, places.scratch, progress, wrap, names)

    record = decoder.quantize(places, step, data, model, progress, seen, learn)
    if not step.steps:
        turned, eyes = rounded(places.partial)
        save_sight(places.partial, turned if eyes is None else eyes.sight, None if eyes is None else eyes.tensors)
    if eyes is not None:
        differences = measure_sight(places.partial)
        parity = read_parity(places.partial)
        write_parity(places.partial, parity.model_copy(update={"differences": parity.differences + differences}))
        quantized = record["quantized"]
        quantized["layers"] += eyes.layers
        quantized["differences"] += [each.model_dump() for each in differences]
    manifest = read_manifest(places.partial)
    write_manifest(places.partial, "artifact", manifest.created_by, manifest.extra)
    if not step.questions:
        return record
    named = step.questions, step.question_images, step.most_questions
    asked = read_rows(places.source, whole.config, *named, "the step's questions", progress)
    return record | {"images": compared(whole, load_seeing(places.partial), asked, progress)}


def _turned(sight: Sight, whole: VisionLanguage, folder: Path) -> Sight:
    """`sight`, whose rows are turned as the artifact in `folder` turns the decoder's residual stream."""
    transforms = read_transforms(folder, whole.config.decoder)
    if transforms is None:
        return sight
    projector = copy.deepcopy(whole.projector)
    last = linears(projector)[-1][1]
    last.weight = nn.Parameter(transforms.giving(RESIDUAL, last.weight.detach()).to(torch.float32))
    if last.bias is not None:
        turned = transforms.giving(RESIDUAL, last.bias.detach()[:, None])[:, 0]
        last.bias = nn.Parameter(turned.to(torch.float32))
    return Sight(sight.config, sight.vision, projector)


@torch.inference_mode()
def compared(before: nn.Module, after: nn.Module, rows: SightedRows, progress: Progress) -> dict[str, Any]:
    """How the answers of two networks differ, each given the right tokens so far.

    Returns:
        `questions`; of both `exact`, the share of questions of which every token is the likeliest; `same_tokens`, the
        share of places where both find the same token likeliest; and the mean and largest difference of the
        log-probabilities of the right tokens.
    """
    exact = {"before": 0, "after": 0}
    same, gaps, questions = [], [], 0
    progress.start("questions about images", len(rows))
    for batch in one_pass(rows, len(rows), micro_batch=BATCH, rank=0, world_size=1):
        targets, found = batch["targets"], {}
        counted = targets >= 0
        for name, network in (("before", before), ("after", after)):
            logits = network(batch["tokens"], batch["images"], batch["rows"], batch["seen"])[counted]
            found[name] = logits.float().log_softmax(-1)
            wrong = found[name].argmax(-1) != targets[counted]
            asked = batch["sample"][counted].unique()
            exact[name] += len(asked) - len(batch["sample"][counted][wrong].unique())
        questions += len(asked)
        same.append(found["before"].argmax(-1) == found["after"].argmax(-1))
        right = targets[counted][:, None]
        gaps.append((found["before"].gather(1, right) - found["after"].gather(1, right)).abs())
        progress.advance(len(asked))
    gap = torch.cat(gaps)
    return {
        "questions": questions,
        "exact": {name: count / questions for name, count in exact.items()},
        "same_tokens": float(torch.cat(same).float().mean()),
        "logprob_difference": {"mean": float(gap.mean()), "largest": float(gap.max())},
    }
