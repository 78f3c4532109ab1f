"""Decoders with short convolutions in all that compression offers beside plain rounding, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penjing.compress.distill.features import AttentionRelations
from penjing.compress.prune_decoder.weights import zero_weights
from penjing.compress.run import run_recipe
from penjing.compress.verify import verify_artifact
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError
from penjing.core.progress import Silent
from tests.compress.conftest import write_recipe
from tests.compress.decoder.test_families import answers
from tests.conftest import tiny_config
from tests.core.models.test_short_conv import CONV


@pytest.fixture
def checkpoint(make_tiny_checkpoint: Callable[..., Path]) -> Path:
    return make_tiny_checkpoint(**CONV)


@pytest.mark.parametrize(
    "changes",
    [
        ["steps.0.kv_cache=int8"],
        ["steps.0.zero_points=['*.conv.*', '*.down_proj']", "steps.0.embedding_dtype=int8"],
        ["steps.0.transform.hadamard_down=32", "steps.0.transform.hadamard_table=32"],
        ["steps.0.keep=['*.conv.out_proj']"],
    ],
    ids=["scales of the cache", "zero points", "transforms that run", "kept floating"],
)
def test_what_rounding_offers(checkpoint: Path, tmp_path: Path, changes: list[str]) -> None:
    out = run_recipe(write_recipe(tmp_path, checkpoint, tmp_path / "out"), changes)
    assert answers(out, checkpoint) < 0.1
    verify_artifact(out)
    stored = open_checkpoint(out).tensor_names
    scales = [name for name in stored if name.endswith("k_scale")]
    assert scales == (["model.layers.1.self_attn.k_scale"] if "kv_cache" in changes[0] else [])


def test_taps_stay_floating_and_projections_do_not(checkpoint: Path, tmp_path: Path) -> None:
    model = load_model(run_recipe(write_recipe(tmp_path, checkpoint, tmp_path / "out"), [])).model
    kinds = {
        name: type(model.get_submodule(f"model.layers.0.conv.{name}")).__name__ for name in ("in_proj", "out_proj")
    }
    assert kinds == {"in_proj": "Int8Linear", "out_proj": "Int8Linear"}
    assert model.get_parameter("model.layers.0.conv.taps.weight").dtype == torch.float32


def test_it_learns_rounded(write: Any, checkpoint: Path, tmp_path: Path) -> None:
    out = run_recipe(write("learnt", 4), [f"model={str(checkpoint)!r}", "guard.perplexity_ratio=9"])
    assert answers(out, checkpoint) < 0.3
    verify_artifact(out)


def test_weights_become_zeros(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    windows = torch.randint(3, 320, (4, 24), generator=torch.Generator().manual_seed(1))
    found = zero_weights(checkpoint, tmp_path / "out", "wanda", 0.5, None, windows, Silent())
    shares = {row["tensor"]: row["zeros"] for row in found}
    assert shares["model.layers.0.conv.in_proj.weight"] == pytest.approx(0.5, abs=0.02)
    assert "model.layers.0.conv.taps.weight" not in shares


def test_relations_need_attention_in_the_last_layer() -> None:
    config = tiny_config(**CONV)
    with pytest.raises(ConfigError, match=r"weights\.relations is of the last layer's attention, and it has none"):
        AttentionRelations.between(config, config, None)
