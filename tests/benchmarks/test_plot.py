import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from lib import plot_engine as plot
from lib.rows import Row, new_row

from penjing.core.errors import InputError


def rows_of(speed: float) -> list[Row]:
    return [
        new_row("engine", metric, speed, "tok/s", runs=3, baseline=baseline, baseline_value=speed / ratio)
        for metric in plot.TITLES
        for baseline, ratio in (("transformers 5.23.0 FP32 eager", 8.0), ("vLLM CPU 0.32.0 W8A8", 0.5))
    ]


def test_bars_are_ours_the_servers_and_the_peers_sorted():
    server = [new_row("server", "one_stream", 190.0, "tok/s", runs=3, baseline="in process", baseline_value=200.0)]
    assert plot.engine_bars(rows_of(200.0), server, "one_stream") == [
        ("transformers FP32 eager", 25.0),
        ("penjing via Triton server", 190.0),
        ("penjing INT8", 200.0),
        ("vLLM CPU W8A8", 400.0),
    ]


def test_a_row_without_a_value_is_not_drawn():
    failed = new_row("engine", "one_stream", None, "tok/s", runs=0, baseline="llama_cpp", reason="it failed")
    names = [name for name, _ in plot.engine_bars([*rows_of(200.0), failed], [], "one_stream")]
    assert "llama_cpp" not in names


def test_the_figure_is_small_text_on_no_background_and_repeats(tmp_path: Path):
    rows = rows_of(200.0)
    first = plot.draw_engine(rows, [], tmp_path / "a").read_bytes()
    assert plot.draw_engine(rows, [], tmp_path / "b").read_bytes() == first
    assert len(first) < 30_000
    tree = ElementTree.fromstring(first)
    text = " ".join(tree.itertext())
    for word in ("penjing INT8", "transformers FP32 eager", "One stream", "400"):
        assert word in text, word
    assert b"fill: #ffffff" not in first
    assert b"fill: #000000" not in first


def test_four_bits_have_a_figure_of_their_own(tmp_path: Path):
    int4 = [row.model_copy(update={"metric": f"int4/{row.metric}"}) for row in rows_of(300.0)]
    rows = [*rows_of(200.0), *int4]
    text = " ".join(ElementTree.fromstring(plot.draw_int4(rows, tmp_path).read_bytes()).itertext())
    assert "penjing 4 bits" in text
    assert "600" in text
    assert "400" not in text
    assert (
        plot.draw_engine(rows, [], tmp_path).read_bytes() == plot.draw_engine(rows_of(200.0), [], tmp_path).read_bytes()
    )


@pytest.mark.parametrize("background", ["#ffffff", "#0d1117"])
@pytest.mark.parametrize("colour", [plot.INK, plot.OURS, plot.OTHERS])
def test_colours_stand_out_on_light_and_dark_pages(colour, background):
    """WCAG 2 contrast: 3:1 for graphics and large text."""

    def luminance(value: str) -> float:
        parts = [int(value[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(colour), luminance(background)))
    assert (light + 0.05) / (dark + 0.05) >= 3


def test_without_rows_the_error_says_what_to_run(tmp_path: Path):
    with pytest.raises(InputError, match=r"run_engine\.py"):
        plot.draw_engine([], [], tmp_path)
