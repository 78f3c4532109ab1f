"""How many questions about images a decoder that sees answers exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from penjing.compress.measure.evaluate import EvaluateSettings, Quality, accuracy, evaluate_decoder
from penjing.compress.sight.network import load_seeing
from penjing.compress.sight.rows import BATCH, read_rows
from penjing.core.checkpoint.vision_language import vision_language_config
from penjing.core.errors import InputError
from penjing.core.progress import Progress
from penjing.train.chat.sighted import SightedRows
from penjing.train.data.stream import one_pass


def evaluate_seeing(folder: Path, model: Path, settings: EvaluateSettings, progress: Progress) -> Quality:
    """The share of questions of which every token is the likeliest one, each given the right tokens so far, which is
    what greedy decoding answers exactly; where `settings` name no questions, the perplexity on text.

    Args:
        folder: a checkpoint, or its artifact. model: the checkpoint that the run began with.

    Raises:
        ConfigError, InputError: see `evaluate_decoder` and `read_rows`; it computes NaN.
    """
    if not settings.questions:
        return evaluate_decoder(folder, model, settings, progress)
    config = vision_language_config(model)
    named = settings.questions, settings.question_images, settings.most_questions
    asked = read_rows(model, config, *named, "evaluate.questions", progress)
    progress.start("questions about images", len(asked))
    return accuracy(answered_exactly(load_seeing(folder), asked, progress), settings)


@torch.inference_mode()
def answered_exactly(network: nn.Module, rows: SightedRows, progress: Progress) -> NDArray[np.bool_]:
    """Whether each question is answered exactly, in their order.

    Raises:
        InputError: a logit is NaN or infinite.
    """
    right = []
    for batch in one_pass(rows, len(rows), micro_batch=BATCH, rank=0, world_size=1):
        logits = network(batch["tokens"], batch["images"], batch["rows"], batch["seen"])
        if not bool(logits.isfinite().all()):
            raise InputError("the decoder computes NaN or infinity: it is damaged, or its training diverged")
        counted = batch["targets"] >= 0
        sample = batch["sample"][counted]
        wrong = logits[counted].argmax(-1) != batch["targets"][counted]
        asked = np.unique(sample.numpy())
        right.append(~np.isin(asked, sample[wrong].numpy()))
        progress.advance(len(asked))
    return np.concatenate(right)
