"""Figures as people read them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penjing.compress.measure.evaluate import EvaluateSettings, perplexity
from penjing.compress.report.schema import Answered, Report, parse_report
from penjing.compress.report.text import (
    READINGS,
    answer_said,
    badness,
    loss_in_words,
    loss_text,
    quality_text,
    summary_line,
)
from tests.compress.report.reports import made_up_int8, made_up_report


@pytest.fixture
def pruned() -> Report:
    return parse_report(made_up_report(), "x")


def test_one_line_says_what_a_run_gained_and_cost(pruned: Report) -> None:
    assert summary_line(pruned) == (
        "0.28 MB → 0.20 MB, 62% of the multiply-accumulates, accuracy 95.00% → 94.00% (-1.00 points), "
        "38 s for the steps"
    )
    decoder = parse_report(made_up_int8("decoder"), "x")
    assert "perplexity 12.18 → 12.30 (+1.01%), 25 s for the steps" in summary_line(decoder)
    sizes = [stage.size.model_copy(update={"macs": None}) for stage in decoder.stages]
    stages = (stage.model_copy(update={"size": size}) for stage, size in zip(decoder.stages, sizes, strict=True))
    assert "multiply" not in summary_line(decoder.model_copy(update={"stages": tuple(stages)}))


def test_a_quality_with_its_interval_and_without(pruned: Report) -> None:
    assert quality_text(pruned.first) == "95.00 % (92.00–98.00)"
    assert loss_text(pruned, pruned.last) == "+1.00 points (+0.00…+2.50)"
    bare = pruned.last.model_copy(update={"quality": replace(pruned.last.quality, record="")})
    assert quality_text(bare) == "94.00 %"
    assert loss_text(pruned, bare) == "+1.00 points"


def test_a_gain_is_not_called_a_loss(pruned: Report) -> None:
    assert loss_in_words(pruned, pruned.last) == "lost +1.00 points (+0.00…+2.50)"
    first, last = pruned.first.quality, pruned.last.quality
    turned = pruned.last.model_copy(update={"quality": first}), pruned.first.model_copy(update={"quality": last})
    better = pruned.model_copy(update={"stages": turned[::-1]})
    assert loss_in_words(better, better.last) == "gained +1.00 points (+0.00…+2.50)"
    bare = better.last.model_copy(update={"quality": replace(first, record="")})
    assert loss_in_words(better, bare) == "gained +1.00 points"
    figure = Answered(
        task="greedy",
        measure="ended",
        unit="share",
        value=0.5,
        low=0.4,
        high=0.6,
        samples=9,
        lost=(-0.012, -0.03, 0.01),
    )
    assert answer_said(figure) == "50.0 % (40.0–60.0), gained +1.2 points (-1.0…+3.0)"
    assert answer_said(figure.model_copy(update={"lost": None})) == "50.0 % (40.0–60.0)"


def test_every_quality_has_a_direction_and_a_form() -> None:
    losses = {"prose": [2.0, 2.5]}
    good, bad = (perplexity({"prose": [x + more for x in losses["prose"]]}, EvaluateSettings()) for more in (0, 1))
    assert badness(good) < badness(bad)
    assert READINGS["similarity"].number(0.99871) == "0.9987"
    assert READINGS["similarity"].loss(0.0013) == "+0.0013"
    assert [name for name, reading in READINGS.items() if not reading.larger_is_better] == ["perplexity"]
