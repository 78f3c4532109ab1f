"""Reports of runs in steps: a round trip, a page that stands alone, damage in one line, and what Pareto means."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.compress.measure.evaluate import EvaluateSettings, accuracy
from penjing.compress.report.pareto import Point, front
from penjing.compress.report.run_page import changed_widths
from penjing.compress.report.schema import parse_report, read_report
from penjing.compress.report.write import write_reports
from penjing.core.errors import InputError
from tests.compress.report.reports import made_up_report


class Page(HTMLParser):
    """What a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in ("meta", "path", "use", "rect", "image", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "path", "use", "rect", "image", "br"):
            assert self.open.pop() == tag, f"{tag} closes another tag"

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_report_is_written_and_read(tmp_path: Path) -> None:
    values = made_up_report()
    write_reports(tmp_path, values)
    assert json.loads((tmp_path / "report.json").read_text()) == values
    report = read_report(tmp_path)
    assert report == read_report(tmp_path / "report.json") == parse_report(values, "x")
    assert [stage.name for stage in report.stages] == ["00-model", "01-prune", "02-distill"]
    assert asdict(report.stages[1].quality) | {"parts": []} == values["stages"][1]["quality"]
    change = report.lost(report.stages[1])
    assert change is not None
    assert change.value == pytest.approx(0.06)
    assert change.low < 0.06 < change.high


def test_the_page_stands_alone_and_says_everything(tmp_path: Path) -> None:
    values = made_up_report()
    values["command"] = "penjing compress <script>alert(1)</script> $x$"
    values["stages"][1]["name"] = "01-<b>prune$\\frac$"
    write_reports(tmp_path, values)
    text = (tmp_path / "report.html").read_text()
    assert "http" not in text
    page = Page(text)
    assert not page.open
    assert page.tags.count("svg") == 3
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert "img" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    assert "url(" not in re.sub(r"url\(#", "", text)
    for said in (
        "penjing compress <script>alert(1)</script> $x$",
        "01-<b>prune$\\frac$",
        "95.00 % (92.",
        "+6.00 points",
        "71.4%",
        "1.40× (1.30–1.50)",
        "repeated milder",
        "torch",
        "onnxruntime, batch 64",
        "blocks.0.layers.0.conv",
    ):
        assert said in page.text, said
    write_reports(tmp_path, values)
    assert (tmp_path / "report.html").read_text() == text  # the same report gives the same page


def damaged(change: Any) -> dict[str, Any]:
    values = deepcopy(made_up_report())
    change(values)
    return values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(stages=[]), r"stages: .*at least 1"),
        (lambda v: v.pop("command"), "command: Field required"),
        (lambda v: v["stages"][1]["quality"].update(value=float("nan")), r"stages\.1\.quality\.value: .*finite"),
        (lambda v: v["stages"][1]["quality"].update(name="beauty"), r"stages\.1\.quality\.name"),
        (lambda v: v["stages"][1]["quality"].update(record="AA"), "the record of accuracy is damaged"),
        (lambda v: v["stages"][2]["size"].update(bytes=0), r"stages\.2\.size\.bytes: .*greater than 0"),
        (lambda v: v["stages"][2]["latency"][0].update(seconds="fast"), r"stages\.2\.latency\.0\.seconds"),
        (lambda v: v["decisions"][0].pop("loss"), r"decisions\.0\.loss: Field required"),
        (lambda v: v.update(schema_version=2), "schema_version 2, this penjing reads 1; upgrade"),
        (lambda v: v.update(schema_version="one"), "schema_version"),
        (lambda v: (v.pop("stages"), v.update(kind="classifier")), "made by itself, which measures no accuracy"),
        (lambda v: v.pop("stages"), "neither stages nor an artifact's figures"),
    ],
)
def test_damage_is_one_clear_error(tmp_path: Path, change: Any, message: str) -> None:
    values = damaged(change)
    (tmp_path / "report.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=message) as caught:
        read_report(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=message):
        write_reports(tmp_path / "never", values)
    assert not (tmp_path / "never").exists()


def test_what_is_no_report_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no report\.json"):
        read_report(tmp_path)
    (tmp_path / "report.json").write_text('{"half')
    with pytest.raises(InputError, match="not valid JSON"):
        read_report(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        read_report(tmp_path / "missing")


def test_an_artifacts_report_is_two_stages(tiny_int8: Path) -> None:
    report = read_report(tiny_int8)
    fp32, int8 = report.stages
    assert fp32.size.bytes > 3 * int8.size.bytes - 100_000
    own = json.loads((tiny_int8 / "report.json").read_text())
    # 128 tokens of prose and 64 of code in windows of 64
    pooled = (2 * np.log(own["perplexity"]["prose"]["int8"]) + np.log(own["perplexity"]["code"]["int8"])) / 3
    assert int8.quality.value == pytest.approx(np.exp(pooled))
    assert int8.quality.samples == 3
    assert report.lost(int8) is None
    assert int8.seconds == pytest.approx(own["seconds"] - own["seconds_measuring"])  # as a step's: without measurement


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 10)), min_size=1, max_size=12))
def test_the_front_is_what_nothing_beats(pairs: list[tuple[int, int]]) -> None:
    settings = EvaluateSettings(resamples=100)
    points = [Point(str(i), x, accuracy(np.arange(10) < right, settings)) for i, (x, right) in enumerate(pairs)]
    along = front(points)
    assert along
    for point in points:
        rivals = [
            other
            for other in points
            if other.x <= point.x
            and other.quality.value >= point.quality.value
            and (other.x, other.quality.value) != (point.x, point.quality.value)
        ]
        same = [other for other in along if (other.x, other.quality.value) == (point.x, point.quality.value)]
        assert bool(same) == (not rivals)


def test_the_chart_of_a_deep_decoder_shows_what_changed_once() -> None:
    names = [f"layers.{layer}.{kind}" for layer in range(30) for kind in ("q_proj", "gate_proj", "up_proj")]
    before = dict.fromkeys(names, 64)
    after = {name: 48 if "q_" not in name else 64 for name in names}
    shown, _, hidden = changed_widths(before, after)
    assert list(shown) == [f"layers.{layer}.gate_proj" for layer in range(30)]
    assert hidden == 60
    del after["layers.29.q_proj"]  # a layer was dropped
    assert len(changed_widths(before, after)[0]) == 60
