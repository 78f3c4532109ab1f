"""One page for every study: its words, its columns and the command that makes it again."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from penjing.compress.report.study_page import _command, most_sensitive, study_page

SAMPLES: dict[str, dict[str, Any]] = {
    "accuracy": {"images": 64},
    "perplexity": {"windows": 4, "window": 32},
}


def record(kind: str, quality: str) -> dict[str, Any]:
    steps = {"ratios": [0.1, 0.5], "method": "l1"} if kind == "pruning" else {"widths": [8, 4]}
    baseline = {"value": 0.5 if quality == "accuracy" else 20.0, "loss": 3.0, "samples": 64}
    worse = {"value": 0.4 if quality == "accuracy" else 30.0, "divergence": 0.25, "score": 0.75}
    rows = [
        {
            "name": name,
            "size": 7,
            "cells": [{"at": step, "loss": loss, **worse} for step in next(iter(steps.values()))],
        }
        for name, loss in (("first", 3.5), ("<second>", 4.0))
    ]
    return {
        "kind": kind,
        "quality": quality,
        "checkpoint": "build/net",
        "settings": {"data": "held-out", **steps, **SAMPLES[quality]},
        "baseline": baseline,
        "rows": rows,
        "versions": {"penjing": "1"},
        "device": {"name": "a processor", "cores": 2},
    }


@pytest.mark.parametrize(
    ("kind", "quality", "figures", "texts"),
    [
        (
            "pruning",
            "accuracy",
            1,
            ("40.00 % (-10.00)", "50 % removed", "--ratios 0.1,0.5 --method l1"),
        ),
        ("pruning", "perplexity", 1, ("30 (1.500×)", "64 windows of 32 tokens", "--windows 4")),
        ("bits", "accuracy", 2, ("<th>divergence</th>", "<td>0.25</td>", "--bits --widths 8,4", "--images 64")),
        ("bits", "perplexity", 1, ("30 (+50.00 %)", "<th>score</th>", "<td>0.75</td>", "Most sensitive at 4 bits")),
    ],
)
def test_a_page_says_what_was_measured(kind: str, quality: str, figures: int, texts: tuple[str, ...]) -> None:
    page = study_page(record(kind, quality))
    assert page.count("<svg") == figures
    for text in (*texts, "--data held-out", "&lt;second&gt;", "a processor, 2 cores"):
        assert text in page
    assert "<second>" not in page
    assert "http" not in page


def test_the_most_sensitive_part_loses_most_at_the_last_step() -> None:
    assert most_sensitive(record("pruning", "perplexity")) == ["<second>", "first"]


def test_the_command_is_one_that_can_be_pasted() -> None:
    values: dict[str, Any] = record("pruning", "accuracy") | {"checkpoint": "my build/net"}
    values["settings"]["source"] = "a b.npz"
    command = _command(values)
    expected = "my build/net|--ratios|0.1,0.5|--method|l1|--data|held-out|--images|64"
    assert shlex.split(command.replace("\\\n", ""))[3:] == [*expected.split("|"), "--source", "a b.npz"]
    assert all(line.endswith("\\") for line in command.splitlines()[:-1])
