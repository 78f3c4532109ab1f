"""The page of a run that learns from rewards."""

from __future__ import annotations

import json
from pathlib import Path

from penjing.train.align.page import write_rollout_page


def test_a_page_shows_rewards_over_the_distance(tmp_path: Path) -> None:
    steps = [{"step": step, "reward": step / 10, "gold": 1 - step / 10, "kl": step / 100} for step in range(1, 6)]
    records = [*steps, {"step": 5, "eval/reward": 0.625, "eval/gold": 0.25}, {"step": 5, "alarm": "…"}]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 6, "rew')  # killed while it wrote
    answers = [{"prompt": "2+2", "answer": f"<b>{place}</b>\u2028", "reward": 1.0} for place in range(12)]
    written = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in answers)
    (tmp_path / "answers.jsonl").write_text(written)
    page = write_rollout_page(tmp_path, "ppo from build/x", 10)
    assert page is not None
    html = page.read_text()
    assert "distance from the reference" in html
    assert "0.625" in html
    assert "gold, held out" in html
    assert "&lt;b&gt;11&lt;/b&gt;" in html
    assert "&lt;b&gt;1&lt;/b&gt;" not in html  # of an earlier evaluation
    assert "http" not in html


def test_without_a_reference_there_is_no_distance_and_without_records_no_page(tmp_path: Path) -> None:
    assert write_rollout_page(tmp_path, "grpo", 10) is None
    records = [{"step": 1, "reward": float("nan")}, {"step": 2, "reward": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = write_rollout_page(tmp_path, "grpo", 10)
    assert page is not None
    assert "distance from" not in page.read_text()
