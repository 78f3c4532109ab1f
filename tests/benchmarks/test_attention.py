import pytest
from lib.plot_attention import NAMES, curve, draw
from lib.rows import new_row
from run_attention import CONTESTANTS, _in_a_process

from penjing.core.errors import InputError


@pytest.mark.parametrize("subject", ["layer", "model"])
def test_a_pass_is_timed_and_its_memory_counted(subject):
    found = _in_a_process(subject, "lsh_2", 256, 1, "cpu")  # memory that other tests gave back would not grow
    assert found["seconds"] > 0
    assert found["bytes"] > 256 * 8 * 64 * 4  # at least the queries


def test_the_figure_shows_the_newest_rows_by_tokens(tmp_path):
    assert set(NAMES) == set(CONTESTANTS)
    rows = [
        new_row("attention", f"layer_{what}_{name}_{tokens}", tokens / 7, "ms", runs=1)
        for what in ("step", "memory")
        for name in NAMES
        for tokens in (4096, 1024)
    ]
    rows.append(new_row("attention", "layer_step_lsh_1_1024", 5.0, "ms", runs=1))
    assert curve(rows, "layer", "step", "lsh_1") == [(1024, 5.0), (4096, pytest.approx(585.1))]
    path = draw(rows, tmp_path)
    assert "LSH, 2 rounds" in path.read_text()
    with pytest.raises(InputError, match="run_attention"):
        draw([], tmp_path)
