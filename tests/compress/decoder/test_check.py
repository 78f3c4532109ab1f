"""What a run refuses of a decoder: damaged models, by name, and networks and settings that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penjing.compress.run import run_recipe
from penjing.core.errors import ConfigError, InputError
from tests.compress.conftest import write_recipe
from tests.compress.decoder.plain import UP, Damage, changed_model


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda tensors: tensors[UP].__setitem__((3, 4), float("nan")),
            f"{UP} holds 1 values that are NaN or infinite",
        ),
        (lambda tensors: tensors[UP].__setitem__(3, float("inf")), f"{UP} holds 64 values that are NaN or infinite"),
        (lambda tensors: tensors.pop(UP), f"lacks {UP}, which config.json promises"),
        (lambda tensors: tensors.update(surprise=torch.ones(1)), "1 tensors have no place.*the first is surprise"),
        (
            lambda tensors: tensors.update({UP: torch.ones(96, 63)}),
            r"has shape \(96, 63\), config.json asks for \(96, 64\)",
        ),
        (lambda tensors: tensors.update({UP: torch.ones(96, 64, dtype=torch.int8)}), "is I8; compression starts from"),
    ],
)
def test_a_damaged_model_is_refused_by_name(
    tiny_checkpoint: Path, tmp_path: Path, damage: Damage, message: str
) -> None:
    model = changed_model(tiny_checkpoint, tmp_path / "model", damage)
    with pytest.raises(InputError, match=message):
        run_recipe(write_recipe(tmp_path, model, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_model_that_predicts_nothing_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = changed_model(tiny_checkpoint, tmp_path / "model", lambda tensors: tensors["model.norm.weight"].mul_(1e5))
    with pytest.raises(InputError, match=r"the model's loss on prose is .* a token: it is damaged"):
        run_recipe(write_recipe(tmp_path, model, tmp_path / "out"))


def test_an_artifact_is_not_compressed_again(tiny_int8: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is quantized already \(compressed-tensors\); compress the checkpoint"):
        run_recipe(write_recipe(tmp_path, tiny_int8, tmp_path / "out"))


@pytest.mark.parametrize("name", ["mlp_hadamard", "table_hadamard"])
def test_a_network_with_a_hadamard_transform_is_not_compressed_again(
    make_tiny_checkpoint: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    model = make_tiny_checkpoint(model_type="penjing", **{name: 32})
    with pytest.raises(InputError, match="has a Hadamard transform"):
        run_recipe(write_recipe(tmp_path, model, tmp_path / "out"))


def test_an_embedding_beyond_float16_is_refused(make_tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint(tie_word_embeddings=False)
    model = changed_model(
        checkpoint,
        tmp_path / "model",
        lambda tensors: tensors["model.embed_tokens.weight"].__setitem__((7, 7), 1e8),
    )
    with pytest.raises(InputError, match=r"has values beyond float16; use --set steps\.N\.embedding_dtype=bfloat16"):
        run_recipe(write_recipe(tmp_path, model, tmp_path / "out"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluate.window=2048", "evaluate.prose_tokens=2048", "evaluate.code_tokens=0"], "evaluate.*2048"),
        (["data.window=1024", "data.tokens=1024"], r"steps.0: data.window=1024 is longer than the context of 512"),
        (['steps.0.keep=["*.down_prj"]'], r"steps.0: keep: '\*.down_prj' matches no linear layer"),
        (['steps.0.zero_points=["*.down_prj"]'], r"steps.0: zero_points: '\*.down_prj' matches no linear layer"),
        (['steps.0.zero_points=["*.q_proj"]'], r"name all layers that read what model.layers.0.self_attn.q_proj reads"),
        (["steps.0.transform.hadamard_down=64"], r"hadamard_down=64: .* needed that divides 96; take 32, or 0"),
        (["steps.0.transform.hadamard_table=128"], r"hadamard_table=128: .* needed that divides 64; take 64, or 0"),
        (["steps.0.transform.hadamard_down=3"], r"hadamard_down=3: a power of two .* take 32"),
    ],
)
def test_a_recipe_that_does_not_fit_the_model_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_recipe(write_recipe(tmp_path, tiny_checkpoint, tmp_path / "out"), overrides)
