"""Rows of INT8 on texts of many kinds: paired with the checkpoint, and the worst among those never looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
import run_generalisation
from lib.texts import SOURCES, html_text
from run_generalisation import VARIANTS, text_windows, variant_rows

from penjing.compress.measure.evaluate import EvaluateSettings, Quality, perplexity
from penjing.compress.recipe import load_recipe
from penjing.core.errors import SetupError


def quality(name: str, losses: list[float]) -> Quality:
    return perplexity({name: losses}, EvaluateSettings())


def test_rises_are_paired_and_the_worst_is_of_an_unseen_text() -> None:
    losses = {"scripture": [2.0, 3.0], "news": [1.0, 4.0], "essays": [2.5, 2.5]}
    before = {name: quality(name, each) for name, each in losses.items()}
    grown = {"scripture": 0.05, "news": 0.01, "essays": 0.002}
    after = {name: quality(name, [loss + grown[name] for loss in each]) for name, each in losses.items()}
    rows = {row.metric: row for row in variant_rows("v", before, after)}
    assert rows["v/news_rise"].value == pytest.approx(1.005, abs=2e-3)
    assert rows["v/news_rise_low"].value == pytest.approx(1.005, abs=2e-3)  # the same in every window
    assert rows["v/worst_rise"].value == rows["v/news_rise"].value
    assert len(rows) == 12


def test_a_text_that_cannot_be_fetched_is_a_row_with_its_reason(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing:
        def text(self) -> str:
            raise SetupError("no network; connect")

    class There:
        def text(self) -> str:
            return "some words of a text " * 2000

    monkeypatch.setattr(run_generalisation, "SOURCES", {"news": Missing(), "essays": There()})
    rows: list[run_generalisation.Row] = []
    windows, versions = text_windows(tiny_checkpoint, ["news", "essays"], 3, rows)
    assert list(windows) == ["essays"]
    assert windows["essays"].shape == (3, 512)
    assert list(versions) == ["text essays"]
    assert [(row.metric, row.reason) for row in rows] == [(f"{tiny_checkpoint.name}-fp32/news", "no network; connect")]
    assert run_generalisation.floating(run_generalisation.CHECKPOINT) == "fp32"


def test_every_variant_is_a_recipe_that_can_be_read(tiny_checkpoint: Path) -> None:
    for recipe, overrides in VARIANTS.values():
        load_recipe(Path("recipes") / f"{recipe}.toml", [f"model={tiny_checkpoint}", *overrides])


def test_html_gives_paragraphs(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<h1>A title</h1><p>One\n <b>bold</b> line.</p><script>x</script><p></p><li>An item</li>")
    assert html_text([page]) == "A title\n\nOne bold line.\n\nAn item"
    assert set(SOURCES) >= {"news", "essays", "french", "sayings"}
