"""Zeros where they should be, and what stays changed as the exact update of least squares changes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penjing.compress.families.base import family
from penjing.compress.prune_decoder.weights import DAMPING, smallest, sparsegpt
from penjing.compress.run import run_recipe
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError
from penjing.core.manifest import verify
from penjing.core.progress import Silent
from tests.compress.prune.checkpoints import Data, decoder, resnet

TEXT = torch.randint(50, (12, 33), generator=torch.Generator().manual_seed(2))


def exact(weight_NK: np.ndarray, gram_KK: np.ndarray, share: float) -> np.ndarray:
    """The paper's algorithm without its factorization: after each column, an inverse of what comes behind it."""
    weight, gram = weight_NK.copy(), gram_KK + DAMPING * gram_KK.diagonal().mean() * np.eye(len(gram_KK))
    inverses = [np.linalg.inv(gram[column:, column:]) for column in range(len(gram))]
    score = weight**2 / np.array([inverse[0, 0] for inverse in inverses])
    gone = np.zeros(weight.size, dtype=bool)
    gone[np.argsort(score, axis=None)[: round(share * weight.size)]] = True
    gone = gone.reshape(weight.shape)
    for column, inverse in enumerate(inverses):
        error = np.where(gone[:, column], weight[:, column], 0.0) / inverse[0, 0]
        weight[:, column:] -= error[:, None] * inverse[0]
    return np.where(gone, 0.0, weight)


def case(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and the Gram matrix of inputs that depend on each other."""
    generator = torch.Generator().manual_seed(columns)
    x_MK = torch.randn(4 * columns, columns, generator=generator, dtype=torch.float64)
    x_MK = x_MK @ torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    return torch.randn(5, columns, generator=generator, dtype=torch.float64), x_MK.t() @ x_MK


def test_sparsegpt_is_the_exact_update() -> None:
    weight_NK, gram_KK = case(24)
    expected = exact(weight_NK.numpy(), gram_KK.numpy(), 0.5)
    np.testing.assert_allclose(sparsegpt(weight_NK, gram_KK, 0.5, None).numpy(), expected, atol=1e-8)


@pytest.mark.parametrize("pattern", [None, (2, 4)])
def test_what_stays_makes_up_for_what_left(pattern: tuple[int, int] | None) -> None:
    weight_NK, gram_KK = case(300)  # more than one block of columns

    def error(other_NK: torch.Tensor) -> float:
        return float(((weight_NK - other_NK) @ gram_KK * (weight_NK - other_NK)).sum())

    masked = [
        weight_NK.masked_fill(smallest(score, 0.5, pattern), 0.0)
        for score in (weight_NK.abs(), weight_NK.abs() * gram_KK.diagonal().sqrt())
    ]
    fitted = sparsegpt(weight_NK, gram_KK, 0.5, pattern)
    for found in (*masked, fitted):
        if pattern is None:
            assert float((found == 0).double().mean()) == pytest.approx(0.5, abs=0.01)
        else:
            assert ((found == 0).unflatten(1, (-1, 4)).sum(-1) == 2).all()
    assert error(fitted) < 0.7 * error(masked[1])
    assert error(masked[1]) < error(masked[0])


def test_the_smallest_of_a_row_leave() -> None:
    score = torch.tensor([[3.0, 1.0, 2.0, 9.0], [0.0, 8.0, 7.0, 0.5]])
    assert smallest(score, 0.25, None).tolist() == [[False, True, False, False], [True, False, False, False]]
    assert smallest(score, 0.0, (1, 2)).tolist() == [[False, True, True, False], [True, False, False, True]]


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_a_checkpoint_keeps_its_shapes_and_says_what_it_lost(tmp_path: Path, method: str) -> None:
    decoder(source := tmp_path / "source")
    (tmp_path / "out").mkdir()
    zero = family("decoder").need("pruner", "pruned").zero_weights
    found = zero(source, tmp_path / "out", method, 0.5, None, Data((TEXT, TEXT)), Silent())
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert {one["tensor"] for one in found} == {
        name for name in before.tensor_names if ".layers." in name and "proj" in name
    }
    for name in before.tensor_names:
        assert after.get(name).shape == before.get(name).shape
        if all(one["tensor"] != name for one in found):
            assert torch.equal(after.get(name), before.get(name))
    for one in found:
        assert one["zeros"] == pytest.approx(0.5, abs=0.03)
        assert 0 < one["error"] < 1


def test_a_step_of_a_recipe(tmp_path: Path, tiny_checkpoint: Path) -> None:
    values: dict[str, Any] = {
        "model": str(tiny_checkpoint), "output": str(tmp_path / "out"),
        "data": {"tokens": 256, "window": 32, "code": 0.0},
        "evaluate": {"prose_tokens": 64, "code_tokens": 0, "window": 32}, "measure": {"rounds": 0},
        "guard": {"perplexity_ratio": 1e9, "retries": 0},
        "steps": [{"kind": "prune_weights", "method": "wanda", "pattern": "2:4"}],
    }  # fmt: skip
    out = run_recipe(values, progress=Silent())
    verify(out)
    weight = open_checkpoint(out).get("model.layers.0.mlp.up_proj.weight")
    assert ((weight == 0).unflatten(1, (-1, 4)).sum(-1) == 2).all()
    with pytest.raises(ConfigError, match="give one of ratio"):
        run_recipe(values | {"steps": [{"kind": "prune_weights"}]}, progress=Silent())
    with pytest.raises(ConfigError, match="N below M"):
        run_recipe(values | {"steps": [{"kind": "prune_weights", "pattern": "4:2"}]}, progress=Silent())
    with pytest.raises(ConfigError, match="96 inputs, which 64 does not divide"):
        run_recipe(
            values | {"output": str(tmp_path / "other"), "steps": [{"kind": "prune_weights", "pattern": "2:64"}]},
            progress=Silent(),
        )


def test_classifiers_are_refused(tmp_path: Path) -> None:
    resnet(tmp_path / "r")
    values: dict[str, Any] = {"model": str(tmp_path / "r"), "output": str(tmp_path / "out")}
    with pytest.raises(ConfigError, match="prune_weights is for decoders"):
        run_recipe(values | {"steps": [{"kind": "prune_weights", "ratio": 0.5}]}, progress=Silent())
