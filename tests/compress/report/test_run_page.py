"""The page of a run: it stands alone, says everything, and fits every family."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from penjing.compress.outcome import write_reports
from penjing.compress.report.run_figures import changed_widths, lines_by_kind
from penjing.compress.report.run_page import run_page
from penjing.compress.report.schema import LayerError, parse_report
from tests.compress.report.reports import made_up_int8, made_up_report


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


def test_the_page_stands_alone_and_says_everything(tmp_path: Path) -> None:
    values = made_up_report()
    values["command"] = "penjing compress <script>alert(1)</script> $x$"
    values["stages"][1]["name"] = "01-<b>prune$\\frac$"
    write_reports(tmp_path, parse_report(values, "x"))
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
    write_reports(tmp_path, parse_report(values, "x"))
    assert (tmp_path / "report.html").read_text() == text  # the same report gives the same page


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("classifier", ("98.00 % of the calibration samples", "how much they vary between images", "not measured")),
        ("encoder", ("1 − their cosine", "the mean difference of 1 - cosine", "layers.5.down")),
        ("decoder", ("layer_outputs compares every layer", "int8_runtime", "model.layers.0.self_attn.q_proj", "prose")),
    ],
)
def test_rounding_is_told_of_every_family(family: str, said: tuple[str, ...]) -> None:
    text = run_page(parse_report(made_up_int8(family), "x"))
    page = Page(text)
    assert not page.open
    shown = " ".join(page.text.split())
    for each in (*said, "Rounding in 01-quantize", "weights in int8", "exceeds 0.1", "3.00 times smaller"):
        assert each in shown, each
    assert "<h2>Widths</h2>" not in text  # nothing was removed


def test_errors_are_lines_over_depth_where_layers_are_numbered() -> None:
    def lines(*names: str) -> dict[str, list[tuple[int, float]]]:
        return lines_by_kind([LayerError(name=name, format="int8", weight=0.1, output=0.2) for name in names])

    found = lines("layers.0.mlp.up", "layers.0.mlp.down", "layers.1.mlp.up", "layers.1.mlp.down", "head")
    assert found == {"up": [(0, 0.2), (1, 0.2)], "down": [(0, 0.2), (1, 0.2)]}
    assert list(lines("blocks.0.one.conv", "blocks.1.one.conv", "blocks.0.two.conv")) == ["one.conv", "two.conv"]
    assert lines("stem", "middle", "head", "layers.0.up") == {}
    assert lines("layers.0.up", "layers.1.down") == {}  # no kind has two


def test_the_chart_of_a_deep_decoder_shows_what_changed_once() -> None:
    names = [f"layers.{layer}.{kind}" for layer in range(30) for kind in ("q_proj", "gate_proj", "up_proj")]
    before = dict.fromkeys(names, 64)
    after = {name: 48 if "q_" not in name else 64 for name in names}
    shown, _, hidden = changed_widths(before, after)
    assert list(shown) == [f"layers.{layer}.gate_proj" for layer in range(30)]
    assert hidden == 60
    del after["layers.29.q_proj"]  # a layer was dropped
    assert len(changed_widths(before, after)[0]) == 60
