"""Perplexity equals a plain computation with transformers; evaluation and calibration texts are disjoint."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from penjing.compress.decoder.stream import LayerStream
from penjing.compress.measure.perplexity import evaluation_windows, exponential, streamed_losses
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.runtime.quantized import Int8Linear
from penjing.core.text.corpus import calibration_text, code_text, heldout_text
from penjing.core.text.tokenizer import Tokenizer


def transformers_perplexity(folder: Path, windows_WT: torch.Tensor) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        # labels=input: transformers shifts them and averages over the T − 1 next tokens of every window
        return math.exp(float(model(windows_WT, labels=windows_WT).loss))


def streamed_perplexity(folder: Path, windows: dict[str, torch.Tensor]) -> dict[str, float]:
    losses = streamed_losses(LayerStream(open_checkpoint(folder)), windows)
    return {name: exponential(math.fsum(part) / len(part), name) for name, part in losses.items()}


def test_perplexity_equals_transformers(tiny_checkpoint: Path) -> None:
    windows = evaluation_windows(Tokenizer.from_folder(tiny_checkpoint), 384, 128, 64)
    streamed = streamed_perplexity(tiny_checkpoint, windows)
    assert list(streamed) == ["prose", "code"]
    for name, part in windows.items():
        wanted = transformers_perplexity(tiny_checkpoint, part)
        assert math.isclose(streamed[name], wanted, rel_tol=1e-5)


def test_weights_alone_are_those_of_the_artifact_beside_floating_activations(tiny_int8: Path) -> None:
    windows = evaluation_windows(Tokenizer.from_folder(tiny_int8), 384, 0, 64)
    model = load_model(tiny_int8).model
    for module in model.modules():
        if isinstance(module, Int8Linear):
            widened = module.packed.weight_NK.float() * module.packed.scale_N[:, None]
            module.forward = lambda x, weight=widened: F.linear(x, weight)  # type: ignore[method-assign]
    with torch.no_grad():
        logits = model(windows["prose"])[:, :-1].flatten(0, 1)
    wanted = float(F.cross_entropy(logits, windows["prose"][:, 1:].flatten()))
    stream = LayerStream(open_checkpoint(tiny_int8))
    alone, both = (streamed_losses(stream, windows, weights_alone=alone)["prose"] for alone in (True, False))
    assert math.fsum(alone) / len(alone) == pytest.approx(wanted, rel=1e-5)
    assert math.fsum(both) / len(both) != pytest.approx(wanted, rel=1e-5)


def test_windows_longer_than_one_block_of_logits_count_every_token(tiny_checkpoint: Path) -> None:
    windows = evaluation_windows(Tokenizer.from_folder(tiny_checkpoint), 600, 0, 300)
    assert list(windows) == ["prose"]
    streamed = streamed_perplexity(tiny_checkpoint, windows)
    assert math.isclose(streamed["prose"], transformers_perplexity(tiny_checkpoint, windows["prose"]), rel_tol=1e-5)


def test_smollm2_reads_english(smollm2: Path) -> None:
    windows = evaluation_windows(Tokenizer.from_folder(smollm2), 256, 0, 128)
    streamed = streamed_perplexity(smollm2, windows)
    wanted = transformers_perplexity(smollm2, windows["prose"])
    assert math.isclose(streamed["prose"], wanted, rel_tol=1e-4)
    assert wanted < 40


def test_calibration_text_shares_no_paragraph_with_evaluation_text() -> None:
    def paragraphs(text: str) -> set[str]:
        return {part.strip() for part in text.split("\n\n") if len(part.strip()) > 200}

    calibration = paragraphs(calibration_text())
    assert len(calibration) > 100
    assert not calibration & paragraphs(heldout_text())
    assert not calibration & paragraphs(code_text(200_000))


def test_asking_for_more_text_than_there_is_says_so(tiny_checkpoint: Path) -> None:
    with pytest.raises(InputError, match="were asked for; ask for fewer"):
        evaluation_windows(Tokenizer.from_folder(tiny_checkpoint), 2**20, 0, 64)
