"""Fitted weights are those of least squares, and make up exactly for what was a combination of what stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penjing.compress.decoder.stream import LayerStream
from penjing.compress.measure.perplexity import streamed_losses
from penjing.compress.prune_decoder import reconstruct as module
from penjing.compress.prune_decoder import trials
from penjing.compress.prune_decoder.reconstruct import NormalEquations
from penjing.compress.run import run_recipe
from penjing.core.checkpoint.decoder import open_checkpoint, save_checkpoint
from penjing.core.errors import ConfigError
from penjing.core.manifest import verify, write_manifest
from penjing.core.models.decoder import Decoder
from tests.compress.prune.checkpoints import Data, decoder, prune, resnet

TEXT = torch.randint(50, (24, 33), generator=torch.Generator().manual_seed(2))


def text() -> Data:
    return Data((TEXT, TEXT))


def test_the_change_is_that_of_least_squares() -> None:
    torch.manual_seed(0)
    x_MK, lacking_MN, weight_M = torch.randn(40, 6), torch.randn(40, 3), torch.rand(40) + 0.1
    equations = NormalEquations(3, 6)
    for rows in torch.arange(40).split(9):
        equations.add(x_MK[rows], lacking_MN[rows], weight_M[rows])
    for damping in (0.0, 0.3):
        scaled = (weight_M.sqrt()[:, None] * x_MK).double().numpy()
        wanted = (weight_M.sqrt()[:, None] * lacking_MN).double().numpy()
        ridge = np.sqrt(damping * (scaled**2).sum(0).mean()) * np.eye(6)  # rows that ask for no change
        expected, *_ = np.linalg.lstsq(np.vstack([scaled, ridge]), np.vstack([wanted, np.zeros((6, 3))]), rcond=None)
        change_NK, left = equations.change(damping)
        np.testing.assert_allclose(change_NK.numpy(), expected.T, atol=1e-5)
        error = ((wanted - scaled @ expected) ** 2).sum() / (wanted**2).sum()
        assert left == pytest.approx(error, abs=1e-5)
        assert left < 1


def test_nothing_lacks_where_nothing_was_removed() -> None:
    equations = NormalEquations(2, 3)
    equations.add(torch.randn(5, 3), torch.zeros(5, 2), torch.ones(5))
    change_NK, left = equations.change(0.01)
    assert not change_NK.any()
    assert left == 1


def rewrite(folder: Path, model: Decoder) -> None:
    save_checkpoint(folder, model.config, model.named_parameters())
    write_manifest(folder, "checkpoint", {})


def logits(folder: Path) -> Tensor:
    verify(folder)
    checkpoint = open_checkpoint(folder)
    model = Decoder(checkpoint.config)
    model.load_state_dict({name: checkpoint.get(name).float() for name in checkpoint.tensor_names}, strict=False)
    with torch.no_grad():
        return model.eval()(TEXT[:4])


def repeat_units(model: Decoder, units: Sequence[int], of: Sequence[int]) -> None:
    """Channels `units` of every MLP become multiples of `of`, with output weights so small that they leave first."""
    with torch.no_grad():
        for layer in model.model.layers:
            mlp: Any = layer.mlp
            mlp.gate_proj.weight[units] = mlp.gate_proj.weight[of]
            mlp.up_proj.weight[units] = -0.5 * mlp.up_proj.weight[of]
            mlp.down_proj.weight[:, units] *= 0.2


def test_channels_that_others_can_stand_for_are_made_up_for_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DAMPING", 0.0)
    model = decoder(tmp_path / "dense")
    repeat_units(model, range(8), range(20, 28))
    rewrite(tmp_path / "dense", model)
    settings: dict[str, Any] = {"parts": ["ffn"], "method": "activation", "ratio": 8 / 48}
    record = prune(tmp_path / "dense", tmp_path / "cut", text(), **settings)
    assert [row["removed"] for row in record["groups"]] == [list(range(8))] * 3
    record = prune(tmp_path / "dense", tmp_path / "fitted", text(), reconstruct=True, **settings)
    assert [row["tensor"] for row in record["reconstructed"]] == [
        f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(3)
    ]
    assert max(row["error_left"] for row in record["reconstructed"]) < 1e-4
    expected = logits(tmp_path / "dense")
    torch.testing.assert_close(logits(tmp_path / "fitted"), expected, atol=2e-3, rtol=1e-3)
    assert (logits(tmp_path / "cut") - expected).abs().max() > 0.05
    assert sorted(path.name for path in (tmp_path / "fitted").iterdir()) == sorted(
        path.name for path in (tmp_path / "cut").iterdir()
    )


@pytest.mark.parametrize(
    ("settings", "fitted", "to"),
    [
        ({"parts": ["heads"], "method": "l1", "ratio": 0.3}, ["0.o", "1.o", "2.o"], "network"),
        (
            {"parts": ["ffn", "heads"], "method": "l1", "ratio": 0.3},
            ["0.o", "0.d", "1.o", "1.d", "2.o", "2.d"],
            "layer",
        ),
        ({"parts": ["layers"], "layers": [1]}, ["0.d"], "layer"),
        ({"parts": ["layers"], "layers": [0]}, [], "network"),
        ({"parts": ["ffn", "layers"], "layers": [1], "method": "l1", "ratio": 0.3}, ["0.d", "1.d"], "network"),
    ],
)
def test_what_reads_the_removed_comes_nearer_to_the_whole_network(
    tmp_path: Path, settings: dict[str, Any], fitted: list[str], to: str
) -> None:
    decoder(tmp_path / "dense", torch.bfloat16)
    prune(tmp_path / "dense", tmp_path / "cut", text(), **settings)
    record = prune(tmp_path / "dense", tmp_path / "fitted", text(), reconstruct=True, reconstruct_to=to, **settings)
    short = {"self_attn.o_proj.weight": "o", "mlp.down_proj.weight": "d"}
    names = [row["tensor"].split(".", 3)[2:] for row in record["reconstructed"]]
    assert [f"{layer}.{short[rest]}" for layer, rest in names] == fitted
    assert all(0 < row["error_left"] < 1 for row in record["reconstructed"])
    checkpoint = open_checkpoint(tmp_path / "fitted")
    assert {checkpoint.dtype(name) for name in checkpoint.tensor_names} == {"BF16"}
    expected = logits(tmp_path / "dense")
    cut, near = (logits(tmp_path / name) for name in ("cut", "fitted"))
    if fitted:
        assert (near - expected).square().mean() < 0.8 * (cut - expected).square().mean()
    else:
        torch.testing.assert_close(near, cut)


def inputs_of(linear: torch.nn.Module, half: Callable[[Tensor], Tensor], stream_WTE: Tensor) -> list[Tensor]:
    """What a layer reads while `half` runs."""
    seen: list[Tensor] = []

    def look(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])

    handle = linear.register_forward_pre_hook(look)
    with torch.no_grad():
        for each in stream_WTE:
            half(each[None])
    handle.remove()
    return seen


def test_a_layer_is_fitted_to_what_the_whole_layer_makes_of_the_same_inputs(tmp_path: Path) -> None:
    decoder(tmp_path / "dense")
    settings: dict[str, Any] = {"parts": ["ffn"], "method": "l1", "ratio": 0.3}
    prune(tmp_path / "dense", tmp_path / "cut", text(), **settings)
    prune(tmp_path / "dense", tmp_path / "fitted", text(), reconstruct=True, reconstruct_to="layer", **settings)
    whole, cut, fitted = (LayerStream(open_checkpoint(tmp_path / name)) for name in ("dense", "cut", "fitted"))
    hidden_WTE = fitted.embed(TEXT)
    for layer in range(3):
        layers = [each.float_layer(layer, each.weights(layer)) for each in (whole, cut, fitted)]
        (attends, reads), (_, lacks), (_, ends) = (
            stream.halves(each, TEXT.shape[1]) for stream, each in zip((whole, cut, fitted), layers, strict=True)
        )
        with torch.no_grad():
            stream_WTE = torch.cat([attends(window[None]) for window in hidden_WTE])
            wanted, left, hidden_WTE = (
                torch.cat([half(each[None]) for each in stream_WTE]) for half in (reads, lacks, ends)
            )
        down, old = (each.get_submodule("mlp.down_proj") for each in (layers[2], layers[1]))
        seen = inputs_of(old, lacks, stream_WTE)
        scale_M1 = wanted.flatten(0, 1).square().mean(-1, keepdim=True).rsqrt().double()
        inputs_MK = torch.cat(seen).flatten(0, 1).double() * scale_M1
        lacking_MN = (wanted - left).flatten(0, 1).double() * scale_M1
        ridge = (module.OWN_DAMPING * inputs_MK.square().sum(0).mean()).sqrt() * torch.eye(inputs_MK.shape[1]).double()
        rows, zeros = torch.cat([inputs_MK, ridge]), torch.zeros(len(ridge), lacking_MN.shape[1]).double()
        expected_KN = torch.linalg.lstsq(rows, torch.cat([lacking_MN, zeros])).solution
        change_NK = (down.weight - old.weight).detach().double()  # type: ignore[operator]
        torch.testing.assert_close(change_NK, expected_KN.t(), atol=1e-5, rtol=1e-3)


def test_trials_count_the_loss_without_each_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "LOGIT_STRIDE", 1)
    decoder(tmp_path / "dense")
    record = prune(tmp_path / "dense", tmp_path / "two", text(), parts=["layers"], layers=2, layers_by="trials")
    first, second = record["layer_trials"]
    gone = [first["layer"]]
    for trial in (first, second):
        for layer, loss in trial["without"].items():
            dropped = [int(layer)] if trial is first else [*gone, int(layer)]
            folder = tmp_path / f"without-{'-'.join(map(str, dropped))}"
            prune(tmp_path / "dense", folder, parts=["layers"], layers=dropped)
            found = streamed_losses(LayerStream(open_checkpoint(folder)), {"text": TEXT})["text"]
            assert loss == pytest.approx(float(np.mean(found)), rel=1e-5)


def test_what_cannot_be_fitted_is_refused(tmp_path: Path) -> None:
    decoder(tmp_path / "dense")
    with pytest.raises(ValueError, match="leave out one of them"):
        prune(tmp_path / "dense", tmp_path / "a", text(), parts=["hidden"], ratio=0.3, reconstruct=True)
    with pytest.raises(ValueError, match="say how many"):
        prune(tmp_path / "dense", tmp_path / "b", text(), parts=["layers"], layers=[1], layers_by="trials")
    with pytest.raises(ConfigError, match="needs calibration data"):
        prune(tmp_path / "dense", tmp_path / "c", ratio=0.3, reconstruct=True)


def test_a_classifier_is_not_fitted(tmp_path: Path) -> None:
    resnet(tmp_path / "dense")
    step = {"kind": "prune", "ratio": 0.3, "reconstruct": True}
    recipe = {"model": str(tmp_path / "dense"), "output": str(tmp_path / "out"), "steps": [step]}
    with pytest.raises(ConfigError, match="reconstruct is for decoders"):
        run_recipe(recipe)
