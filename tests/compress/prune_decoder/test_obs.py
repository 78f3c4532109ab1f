"""Units that leave one after the other cost what a least-squares solution of what stays says, and those leave that
others can stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penjing.compress.prune_decoder.obs import leaving
from penjing.compress.run import run_recipe
from penjing.core.errors import ConfigError
from tests.compress.prune.checkpoints import decoder, prune, resnet
from tests.compress.prune_decoder.test_reconstruct import logits, repeat_units, rewrite, text

ROWS, INPUTS, OUTPUTS, DAMPING = 100, 24, 10, 0.01


def layer() -> tuple[Tensor, Tensor]:
    """Inputs that depend on each other, and a weight."""
    generator = torch.Generator().manual_seed(0)
    x_MK, mixed_KK, weight_NK = (
        torch.randn(size, dtype=torch.float64, generator=generator)
        for size in ((ROWS, INPUTS), (INPUTS, INPUTS), (OUTPUTS, INPUTS))
    )
    return x_MK @ mixed_KK, weight_NK


def error(x_MK: Tensor, weight_NK: Tensor, gone: Tensor) -> float:
    """What is left by torch's own least squares, with rows that draw the weight to the old one."""
    stays = [column for column in range(INPUTS) if column not in gone.tolist()]
    ridge = DAMPING * float(x_MK.square().sum(0).mean())
    rows = torch.cat([x_MK, ridge**0.5 * torch.eye(INPUTS, dtype=torch.float64)])
    wanted = rows @ weight_NK.t()
    solution = torch.linalg.lstsq(rows[:, stays], wanted).solution
    return float((wanted - rows[:, stays] @ solution).square().sum())


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("columns", [1, 3])
def test_scores_are_errors_of_least_squares(block: int, columns: int) -> None:
    x_MK, weight_NK = layer()
    units = list(torch.arange(INPUTS).split(columns))
    count = len(units) // 2
    scores = leaving(weight_NK, x_MK.t() @ x_MK, units, count, DAMPING, block)
    order = scores[scores.argsort()].tolist(), scores.argsort().tolist()
    for left, (score, unit) in enumerate(zip(*order, strict=True)):
        before = order[1][: min(left, count)]
        gone = torch.cat([units[each] for each in [*before, unit]])
        assert score == pytest.approx(error(x_MK, weight_NK, gone), rel=1e-9)


def test_the_cheapest_of_all_leaves_first() -> None:
    x_MK, weight_NK = layer()
    units = list(torch.arange(INPUTS).split(1))
    order = leaving(weight_NK, x_MK.t() @ x_MK, units, 6, DAMPING, block=1).argsort().tolist()
    gone: list[int] = []
    for unit in order[:6]:
        trials = {
            each: error(x_MK, weight_NK, torch.tensor([*gone, each])) for each in range(INPUTS) if each not in gone
        }
        assert unit == min(trials, key=lambda each: trials[each])
        gone.append(unit)


def test_channels_that_others_can_stand_for_leave_and_are_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penjing.compress.prune_decoder.reconstruct.DAMPING", 0.0)
    model = decoder(tmp_path / "dense")
    repeat_units(model, range(8), range(20, 28))
    with torch.no_grad():
        for each in model.model.layers:
            mlp: Any = each.mlp
            mlp.down_proj.weight[:, :8] *= 40  # large ones, which other methods would keep
    rewrite(tmp_path / "dense", model)
    settings: dict[str, Any] = {"parts": ["ffn"], "ratio": 8 / 48}
    record = prune(tmp_path / "dense", tmp_path / "fitted", text(), method="obs", reconstruct=True, **settings)
    pairs = {frozenset(pair) for pair in zip(range(8), range(20, 28), strict=True)}
    for row in record["groups"]:
        assert {frozenset({each, each + 20 if each < 8 else each - 20}) for each in row["removed"]} == pairs
    torch.testing.assert_close(logits(tmp_path / "fitted"), logits(tmp_path / "dense"), atol=1e-2, rtol=1e-2)
    record = prune(tmp_path / "dense", tmp_path / "other", text(), method="activation", **settings)
    assert not any({*row["removed"]} >= set(range(8)) for row in record["groups"])


def test_heads_and_layers_that_left_are_counted_right(tmp_path: Path) -> None:
    decoder(tmp_path / "dense")
    record = prune(
        *(tmp_path / "dense", tmp_path / "cut", text()),
        parts=["ffn", "heads", "layers"], layers=[1], ratio=0.5, method="obs", rank="global",
    )  # fmt: skip
    parts = {row["part"] for row in record["groups"]}
    assert parts == {"ffn", "heads"}
    assert all(np.isfinite([row["least"], row["largest"]]).all() for row in record["importance"])
    assert logits(tmp_path / "cut").isfinite().all()


def test_where_nothing_can_be_corrected_it_is_refused(tmp_path: Path) -> None:
    decoder(tmp_path / "decoder")
    resnet(tmp_path / "resnet")
    for folder, more, says in (
        ("resnet", {}, 'method="obs" is for decoders'),
        ("decoder", {"parts": ["hidden"]}, 'the part "hidden" is read by all layers'),
    ):
        step = {"kind": "prune", "ratio": 0.3, "method": "obs"} | more
        recipe = {"model": str(tmp_path / folder), "output": str(tmp_path / "out"), "steps": [step]}
        with pytest.raises(ConfigError, match=says):
            run_recipe(recipe)
    with pytest.raises(ConfigError, match="needs calibration data"):
        prune(tmp_path / "decoder", tmp_path / "a", ratio=0.3, method="obs")
    with pytest.raises(ConfigError, match="is read by more"):
        prune(tmp_path / "decoder", tmp_path / "b", text(), parts=["hidden"], ratio=0.3, method="obs")
