"""Rows of a compression from its report, with paired intervals where it keeps the windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import run_compress

from penjing.compress.measure.evaluate import EvaluateSettings, Quality, perplexity
from penjing.compress.report.schema import Report, Stage


def quality(shift: float) -> Quality:
    noise = np.random.default_rng(0).normal(scale=0.5, size=(2, 32))
    wobble = np.random.default_rng(1).normal(scale=0.01, size=(2, 32)) * (shift != 0)
    losses = 2.0 + noise + wobble + shift * np.array([[1.0], [2.0]])
    return perplexity({"prose": losses[0].tolist(), "code": losses[1].tolist()}, EvaluateSettings())


def report(after: Quality, before: Quality) -> Report:
    def stage(name: str, found: Quality, size: int, **more: Any) -> Stage:
        return Stage.model_validate(
            {"name": name, "kind": name, "quality": found, "size": {"parameters": 10, "bytes": size}} | more
        )

    first = stage("model", before, 400)
    stages = (first, stage("quantize", after, 100, seconds=5.0, peak_memory_bytes=800))
    return Report(family="decoder", recipe={}, command="", versions={}, processor={}, stages=stages)


def test_a_run_in_steps_gives_the_paired_rise_of_each_text() -> None:
    rows = {row.metric: row for row in run_compress.report_rows(report(quality(0.01), quality(0.0)), "small")}
    assert rows["small/size"].ratio == pytest.approx(0.25)
    assert rows["small/seconds"].value == 5.0
    assert rows["small/peak_memory"].ratio == pytest.approx(2.0)
    for text, rise in (("prose", 1.0), ("code", 2.0)):
        low, value, high = (rows[f"small/perplexity_{text}_rise{end}"].value for end in ("_low", "", "_high"))
        assert low is not None
        assert value is not None
        assert high is not None
        assert low < value < high
        assert value == pytest.approx(rise, abs=0.5)
        assert high - low < 1.0  # windows differ by half a nat each, but the same ones are compared
        assert rows[f"small/perplexity_{text}"].ratio == pytest.approx(1 + value / 100, rel=1e-3)


def test_a_report_without_windows_has_perplexities_alone_and_the_first_recipe_no_name() -> None:
    bare = [Quality(q.name, q.value, q.low, q.high, q.samples, q.parts, "") for q in (quality(0.01), quality(0.0))]
    rows = {row.metric for row in run_compress.report_rows(report(*bare), "smollm2-int8")}
    assert rows == {"size", "perplexity_prose", "perplexity_code", "seconds", "peak_memory"}
