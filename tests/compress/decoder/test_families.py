"""Decoders whose layers depart from Llama's: quantized, pruned and healed like others, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penjing.compress.decoder.stream import LayerStream
from penjing.compress.run import run_recipe
from penjing.compress.verify import verify_artifact
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.cli import _run
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.runtime import fused
from penjing.core.runtime.fused import fuse_decoder
from penjing.kernels.step_layers import LayerWeights
from tests.compress.conftest import write_recipe
from tests.conftest import tiny_config
from tests.core.imports.test_importer import Recorder
from tests.core.runtime.test_fused import CONFIGS
from tests.kernels.cpu import needs_extension

GEMMA: dict[str, Any] = {
    "model_type": "penjing",
    "norms": "around",
    "qk_norm": True,
    "activation": "gelu_tanh",
    "sliding_window": 20,
    "layer_types": ("sliding_attention", "full_attention"),
    "layer_rotary": ("local", "main"),
}
OLMO: dict[str, Any] = {"model_type": "penjing", "norms": "after", "qk_norm": True, "qk_norm_over": "all"}
STILL: dict[str, Any] = {"model_type": "penjing", "layer_rotary": ("main", "none"), "rotary_pairs": 5}
NEOX = CONFIGS["neox"]
GEMMA2: dict[str, Any] = GEMMA | {"qk_norm": False, "layer_rotary": None, "attention_cap": 3.0, "logit_cap": 5.0}
CASES = {"gemma": GEMMA, "olmo": OLMO, "still": STILL, "neox": NEOX, "gemma2": GEMMA2}
CASES |= {name: CONFIGS[name] for name in ("opt", "apertus", "sinks", "bitnet", "conv", "trinity", "laguna", "gemma4")}
UNROTATED = "steps.0.transform.rotate=false"
FOUR = ["steps.0.weights_bits=4", "steps.0.group=32", "steps.0.embedding_dtype=int8", UNROTATED]


def answers(folder: Path, checkpoint: Path) -> float:
    """How far the artifact's logits are from the checkpoint's, of their spread."""
    ids = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(0))
    artifact = load_model(folder)
    assert fuse_decoder(artifact.model) is not None
    with torch.no_grad():
        ours, floating = artifact.model(ids), load_model(checkpoint).model(ids)
    return float((ours - floating).square().mean().sqrt() / floating.std())


BITS = {"int8": ([UNROTATED], 0.1), "int4": (FOUR, 0.5)}
IN_FOUR = ("gemma2", "neox", "bitnet", "conv", "laguna")  # by default; the others are long variants


@pytest.mark.parametrize(
    ("bits", "name"),
    [
        pytest.param(bits, name, marks=() if bits == "int8" or name in IN_FOUR else pytest.mark.full)
        for bits in BITS for name in CASES
    ],
)  # fmt: skip
def test_the_artifact_answers_nearly_as_the_model(
    bits: str, name: str, tmp_path: Path, make_tiny_checkpoint: Callable[..., Path]
) -> None:
    checkpoint, (changes, bound) = make_tiny_checkpoint(**CASES[name]), BITS[bits]
    out = run_recipe(write_recipe(tmp_path, checkpoint, tmp_path / "out"), changes)
    assert answers(out, checkpoint) < bound
    verify_artifact(out)


@needs_extension
@pytest.mark.parametrize("of", [None, 5], ids=["every layer", "one of twelve"])
def test_a_fused_step_that_computes_something_else_is_refused(
    tmp_path: Path, make_tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, of: int | None
) -> None:
    laid_out = fused._layer_weights

    def wrong(config: DecoderConfig, index: int, layer: nn.Module) -> LayerWeights:
        right = laid_out(config, index, layer)
        return right if of not in (None, index) else replace(right, activation="gelu_tanh")

    monkeypatch.setattr(fused, "_layer_weights", wrong)
    checkpoint = make_tiny_checkpoint(num_hidden_layers=12 if of else 2)
    with pytest.raises(InputError, match=rf"differs from.*in layer {of or 0}"):
        run_recipe(write_recipe(tmp_path, checkpoint, tmp_path / "out"), [UNROTATED])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["neox", "conv", "laguna"])
def test_parallel_layers_without_a_gate_convolutions_and_gates_of_heads_are_rotated(
    name: str, tmp_path: Path, make_tiny_checkpoint: Callable[..., Path]
) -> None:
    checkpoint = make_tiny_checkpoint(**CASES[name])
    out = run_recipe(write_recipe(tmp_path, checkpoint, tmp_path / "out"), ["steps.0.transform.rotate=true"])
    assert answers(out, checkpoint) < 0.1


@pytest.mark.parametrize(("alpha", "said"), [("0.6", True), ("0", False)])
def test_smoothing_that_an_mlp_without_a_gate_cannot_absorb_is_said(
    tmp_path: Path, make_tiny_checkpoint: Callable[..., Path], alpha: str, said: bool
) -> None:
    notes = Recorder()
    recipe = write_recipe(tmp_path, make_tiny_checkpoint(**CONFIGS["arcee"]), tmp_path / "out")
    run_recipe(recipe, [UNROTATED, f"steps.0.transform.smooth_down={alpha}"], progress=notes)
    assert (
        sum("transform.smooth_down=0.6 does nothing here: the MLPs have no gate" in note for note in notes.notes)
        == said
    )


def test_halves_of_a_parallel_layer_are_not_corrected(
    tmp_path: Path, make_tiny_checkpoint: Callable[..., Path]
) -> None:
    stream = LayerStream(open_checkpoint(make_tiny_checkpoint(**NEOX)))
    with pytest.raises(ConfigError, match=r"parallel=true.*take method='activation'"):
        stream.halves(stream.float_layer(0, stream.weights(0)), 8)


def test_what_does_not_take_it_says_so(
    tmp_path: Path, make_tiny_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, make_tiny_checkpoint(**GEMMA), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"norms='around'.*set rotate = false"):
        run_recipe(recipe, ["steps.0.transform.rotate=true"])
    inner = write_recipe(tmp_path, make_tiny_checkpoint(**CONFIGS["bitnet"]), tmp_path / "inner")
    with pytest.raises(ConfigError, match=r"before their last matrix \(inner_norms\).*set rotate = false"):
        run_recipe(inner, ["steps.0.transform.rotate=true"])
    recipe = write_recipe(tmp_path, make_tiny_checkpoint(**GEMMA), tmp_path / "out")
    out = run_recipe(recipe, [UNROTATED])
    for form in ("onnx", "gguf", "compressed-tensors"):
        assert _run(["export", str(out), str(tmp_path / form), "--to", form]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_gradients_are_those_of_the_function(fields: dict[str, Any]) -> None:
    """Along the gradient itself, in float32."""
    torch.manual_seed(0)
    model = Decoder(tiny_config(**fields))
    ids = torch.randint(0, 320, (1, 24))

    def loss() -> torch.Tensor:
        return model(ids)[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).mean()

    loss().backward()
    weight = model.get_parameter("model.layers.0.mlp.gate_proj.weight")
    gradient = weight.grad
    assert gradient is not None
    step = gradient * (0.03 / gradient.norm())
    with torch.no_grad():
        weight += step
        after = float(loss())
        weight -= 2 * step
        before = float(loss())
    assert float((gradient * step).sum()) == pytest.approx((after - before) / 2, rel=0.05)
