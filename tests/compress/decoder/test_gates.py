"""Decoders whose attention has gates in all that compression offers beside plain rounding, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from penjing.compress.run import run_recipe
from penjing.compress.verify import verify_artifact
from penjing.core.artifact.transform import FILE, HEAD, RESIDUAL
from penjing.core.checkpoint.load import load_model
from penjing.core.cli import _run
from penjing.core.errors import ConfigError
from penjing.core.runtime.device_step import unsupported
from penjing.core.runtime.tensor_parallel import Split
from tests.compress.conftest import write_recipe
from tests.compress.decoder.test_families import answers

HEADS: dict[str, Any] = {"model_type": "penjing", "attention_gate": "head", "attention_gate_function": "softplus"}
CHANNELS: dict[str, Any] = {"model_type": "penjing", "attention_gate": "channel", "qk_norm": True}


@pytest.mark.parametrize("fields", [HEADS, CHANNELS], ids=["heads", "channels"])
@pytest.mark.parametrize(
    "changes",
    [
        ["steps.0.kv_cache=int8", "steps.0.transform.rotate=true"],
        ["steps.0.zero_points=['*.[qkvg]_proj', '*.o_proj']", "steps.0.embedding_dtype=int8"],
        ["steps.0.keep=['*.g_proj']"],
        ["steps.0.rounding=compensated"],
    ],
    ids=["rotated", "zero points", "kept floating", "compensated"],
)
def test_what_rounding_offers(
    make_tiny_checkpoint: Callable[..., Path], tmp_path: Path, fields: dict[str, Any], changes: list[str]
) -> None:
    checkpoint = make_tiny_checkpoint(**fields)
    out = run_recipe(write_recipe(tmp_path, checkpoint, tmp_path / "out"), changes)
    assert answers(out, checkpoint) < 0.1
    verify_artifact(out)
    gate = load_model(out).model.get_submodule("model.layers.0.self_attn.g_proj")
    assert type(gate).__name__ == ("Int8Linear" if "keep" not in changes[0] else "BatchInvariantLinear")


@pytest.mark.parametrize(("fields", "turned"), [(HEADS, True), (CHANNELS, False)], ids=["heads", "channels"])
def test_heads_are_rotated_unless_their_channels_have_gates(
    make_tiny_checkpoint: Callable[..., Path], tmp_path: Path, fields: dict[str, Any], turned: bool
) -> None:
    recipe = write_recipe(tmp_path, make_tiny_checkpoint(**fields), tmp_path / "out")
    vectors = load_file(run_recipe(recipe, ["steps.0.transform.rotate=true"]) / FILE)
    assert RESIDUAL in vectors
    assert (HEAD in vectors) == turned


def test_layers_of_one_input_have_zero_points_together(
    make_tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, make_tiny_checkpoint(**HEADS), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"name all layers that read what .*self_attn.q_proj reads, or none"):
        run_recipe(recipe, ["steps.0.zero_points=['*.[qkv]_proj']"])


def test_it_learns_rounded(write: Any, make_tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = make_tiny_checkpoint(**CHANNELS)
    out = run_recipe(write("learnt", 4), [f"model={str(checkpoint)!r}", "guard.perplexity_ratio=9"])
    assert answers(out, checkpoint) < 0.3
    verify_artifact(out)


def test_what_does_not_know_gates_says_so(
    make_tiny_checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make_tiny_checkpoint(**HEADS)
    model = load_model(checkpoint).model
    assert unsupported(model) == "attention_gate=head"
    with pytest.raises(ConfigError, match=r"does not fit a model with attention_gate=head; leave tensor_parallel=1"):
        Split(model.config, 2).check()
    out = run_recipe(write_recipe(tmp_path, checkpoint, tmp_path / "out"), [])
    assert _run(["export", str(out), str(tmp_path / "onnx"), "--to", "onnx"]) == 0  # its gate has compared them
    capsys.readouterr()
    for form in ("gguf", "compressed-tensors"):
        assert _run(["export", str(out), str(tmp_path / "refused"), "--to", form]) == 3
        assert "attention_gate=head" in " ".join(capsys.readouterr().err.split())
