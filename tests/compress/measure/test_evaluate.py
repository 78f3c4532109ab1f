"""Accuracy and perplexity equal plain loops; bootstrap intervals equal what theory gives; bad checkpoints are named."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from penjing.compress.families.base import family, family_at
from penjing.compress.measure.bootstrap import interval, resampled_means
from penjing.compress.measure.evaluate import (
    EvaluateSettings,
    Quality,
    accuracy,
    compare,
    perplexity,
    quality_from_json,
)
from penjing.compress.measure.perplexity import evaluation_windows
from penjing.compress.samples import data
from penjing.core.checkpoint.classifier import load_classifier
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.resnet_config import imagenet_resnet
from penjing.core.progress import Silent
from penjing.core.text.tokenizer import Tokenizer
from tests.compress.classifiers import made_up_images, write_classifier

SMALL = EvaluateSettings(prose_tokens=384, code_tokens=128, window=64)


@pytest.fixture
def classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(data, "load_fashion", made_up_images)
    return write_classifier(tmp_path / "classifier")


def evaluated(folder: Path, settings: EvaluateSettings | None = None) -> Quality:
    return family_at(folder).evaluate(folder, folder, settings or EvaluateSettings(), Silent())


def exact_binomial(count: int, share: float) -> tuple[float, float]:
    """The 2.5 % and 97.5 % quantiles of a binomial distribution over its count: what a bootstrap tends to."""
    logs = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) + k * math.log(share)
        + (count - k) * math.log1p(-share)
        for k in range(count + 1)
    ]  # fmt: skip
    cumulative = np.cumsum(np.exp(logs))
    return int(np.searchsorted(cumulative, 0.025)) / count, int(np.searchsorted(cumulative, 0.975)) / count


@pytest.mark.parametrize(("count", "right"), [(40, 30), (300, 270), (2000, 1860)])
def test_the_interval_of_an_accuracy_is_the_binomial_one(count: int, right: int) -> None:
    outcomes = np.arange(count) < right
    found = accuracy(outcomes, EvaluateSettings(resamples=20_000))
    low, high = exact_binomial(count, right / count)
    assert abs(found.low - low) <= 1.5 / count + 1e-3
    assert abs(found.high - high) <= 1.5 / count + 1e-3
    assert found.value == right / count


def test_the_interval_of_a_mean_is_the_normal_one() -> None:
    values = np.random.default_rng(3).normal(2.0, 0.5, 400)
    low, high = interval(resampled_means([values], resamples=20_000))
    half = 1.959964 * values.std() / math.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.003)
    assert high == pytest.approx(values.mean() + half, abs=0.003)


def test_strata_are_drawn_by_themselves() -> None:
    # Between the strata there is a gap of 10; inside them nothing varies, so nothing does in the mean.
    means = resampled_means([np.full(8, 0.0), np.full(24, 10.0)])
    assert means == pytest.approx(7.5)


def test_own_texts_are_parts_by_their_names(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(" ".join(f"word{index}" for index in range(400)))
    own = EvaluateSettings(prose_tokens=128, code_tokens=64, window=64, own={"mine": path}, own_tokens=192)
    found, without = evaluated(tiny_checkpoint, own), evaluated(tiny_checkpoint, own.model_copy(update={"own": {}}))
    assert [(part.name, part.samples) for part in found.parts] == [("prose", 2), ("code", 1), ("mine", 3)]
    assert found.parts[:2] == without.parts
    held_out = family("decoder").held_out
    assert held_out(own) == 64 * sum(part.samples for part in found.parts)  # of which the time to come is told
    with pytest.raises(ValueError, match="that name is taken"):
        EvaluateSettings(own={"code": path})


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_a_record_gives_the_outcomes_back(right: list[bool]) -> None:
    quality = accuracy(np.array(right), EvaluateSettings(resamples=100))
    again = quality_from_json(json.loads(json.dumps(asdict(quality))))
    assert again == quality
    assert again.outcomes()[0].tolist() == [float(answer) for answer in right]
    assert quality.low <= quality.value <= quality.high


def test_accuracy_equals_a_plain_loop(classifier: Path) -> None:
    model, config = load_classifier(classifier)
    images = made_up_images("test")
    right = []
    with torch.no_grad():
        for image, label in zip(images.images, images.labels, strict=True):
            x = (torch.from_numpy(image.copy()).double() / 255 - config.mean[0]) / config.std[0]
            right.append(int(model(x[None].float()).argmax()) == label)
    found = evaluated(classifier)
    assert found.outcomes()[0].tolist() == [float(answer) for answer in right]
    assert found.value == sum(right) / len(right)
    assert 0.05 < found.low < found.value < found.high < 1
    assert evaluated(classifier, EvaluateSettings(images=70)).value == sum(right[:70]) / 70


def test_perplexity_equals_transformers_window_by_window(tiny_checkpoint: Path) -> None:
    found = evaluated(tiny_checkpoint, SMALL)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    windows = evaluation_windows(Tokenizer.from_folder(tiny_checkpoint), 384, 128, 64)
    with torch.no_grad():
        wanted = {name: [float(model(w[None], labels=w[None]).loss) for w in part] for name, part in windows.items()}
    for losses, part in zip(found.outcomes(), wanted.values(), strict=True):
        assert losses == pytest.approx(part, rel=1e-5)
    every = np.concatenate(list(wanted.values()))
    assert found.value == pytest.approx(math.exp(every.mean()), rel=1e-5)
    assert [(part.name, part.samples) for part in found.parts] == [("prose", 6), ("code", 2)]
    assert found.parts[1].value == pytest.approx(math.exp(np.mean(wanted["code"])), rel=1e-5)
    assert found.low < found.value < found.high


def test_two_checkpoints_are_compared_sample_by_sample() -> None:
    generator = np.random.default_rng(0)
    before = generator.random(1000) < 0.9
    after = before.copy()
    after[np.flatnonzero(before)[:20]] = False  # 2 points lost, nothing gained
    settings = EvaluateSettings()
    change = compare(accuracy(before, settings), accuracy(after, settings))
    assert change.value == pytest.approx(0.02)
    assert 0.01 < change.low < 0.015 < 0.025 < change.high < 0.03  # by themselves they have ± 1.9 points each
    losses = generator.normal(3, 0.5, 24)
    ratio = compare(
        perplexity({"prose": losses.tolist()}, settings), perplexity({"prose": (losses + 0.1).tolist()}, settings)
    )
    assert [ratio.value, ratio.low, ratio.high] == pytest.approx([math.exp(0.1) - 1] * 3, rel=1e-5)


def test_what_was_measured_on_other_samples_is_not_compared() -> None:
    one, other = (accuracy(np.ones(count, np.bool_), EvaluateSettings()) for count in (10, 11))
    with pytest.raises(InputError, match="accuracy on 10 samples and accuracy on 11 cannot be compared"):
        compare(one, other)
    with pytest.raises(InputError, match="damaged"):
        replace(one, record="AA").outcomes()
    with pytest.raises(InputError, match="damaged"):
        quality_from_json(asdict(one) | {"value": float("nan")})
    text = perplexity({"prose": [1.0, 2.0]}, EvaluateSettings())
    with pytest.raises(InputError, match="damaged"):
        replace(text, samples=3).outcomes()


def test_bad_checkpoints(tmp_path: Path, classifier: Path, tiny_checkpoint: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        evaluated(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"evaluate\.window=1024 is longer than the context .* 512 tokens"):
        evaluated(tiny_checkpoint, EvaluateSettings(prose_tokens=1024, code_tokens=0, window=1024))
    other = write_classifier(tmp_path / "other", model=imagenet_resnet(18, 10), image_size=(64, 64))
    with pytest.raises(
        InputError, match=r"takes images of \(3, 64, 64\) in 10 classes, Fashion-MNIST has \(1, 12, 12\)"
    ):
        evaluated(other)
    (classifier / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="SHA-256"):
        evaluated(classifier)
    broken = write_classifier(tmp_path / "broken", scale=float("nan"))
    with pytest.raises(InputError, match="computes NaN or infinity"):
        evaluated(broken)
