"""The rows of run_vision_language.py from finished runs."""

from __future__ import annotations

import pytest
from run_vision_language import DRAWN, int8_rows, rows_of


def test_what_was_found_stands_beside_guessing() -> None:
    shares = {"image_to_text_at_1": 0.05, "image_to_text_at_10": 0.2, "text_to_image_at_1": 0.06}
    towers = {
        "recipe": {"output": "build/clip", "steps": 300, "data": {"kind": "pairs"}},
        "evaluation": shares | {"text_to_image_at_10": 0.25, "loss": 5.0},
    }
    rows = {row.metric: row for row in rows_of(towers)}
    assert set(rows) == {f"clip/300_steps/{name}" for name in (*shares, "text_to_image_at_10")}
    assert rows["clip/300_steps/image_to_text_at_1"].ratio == pytest.approx(0.05 * DRAWN, rel=0.01)


def test_answers_stand_beside_a_guessed_class() -> None:
    run = {"recipe": {"output": "vlm", "steps": 9, "data": {"kind": "image-chat"}}, "evaluation": {"exact": 0.5}}
    (row,) = rows_of(run)
    assert (row.metric, row.value, row.ratio) == ("vlm/9_steps/exact", 0.5, 4.5)


def test_int8_stands_beside_the_checkpoint() -> None:
    asked = {"exact": {"before": 0.8, "after": 0.6}}
    stages = [{"size": {"bytes": 4e6}}, {"size": {"bytes": 1e6}, "record": {"images": asked}}]
    exact, size = int8_rows({"stages": stages}, "vlm-int8")
    assert (exact.metric, exact.value, exact.ratio) == ("vlm-int8/exact", 0.6, pytest.approx(0.75))
    assert (size.metric, size.value, size.ratio) == ("vlm-int8/size", 1.0, pytest.approx(0.25))
