"""AdamW with means in 8 bits, beside torch's AdamW."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from penjing.core.models.decoder import Decoder
from penjing.train.optim.adamw_8bit import BLOCK, Packed, levels
from penjing.train.optim.optimizer import OptimizerConfig, build_optimizer, load_optimizer_state, optimizer_state
from penjing.train.run import train
from tests.conftest import tiny_config


@pytest.mark.parametrize("signed", [False, True])
def test_the_levels_are_256_that_lie_closer_the_smaller_they_are(signed: bool) -> None:
    found = levels(signed)
    assert found.unique().numel() == 256
    assert found.max() == 1
    assert 0 in found
    positive = found[found > 0]
    assert (positive[1:] / positive[:-1]).max() < (5.92 if signed else 2.75)
    assert (positive[-20:] / positive[-21:-1]).max() < (1.02 if signed else 1.01)
    if signed:
        assert torch.equal(-found[found < 0].flip(0), positive[:-1])
        # the published list begins so, and has these around 0.5
        torch.testing.assert_close(positive[:3], torch.tensor([5.5e-7, 3.25e-6, 7.75e-6]))
        assert (positive - 0.5007812).abs().min() < 1e-6


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    scale=st.sampled_from([0.0, 1e-30, 1e-8, 1.0, 1e20]),
    signed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_is_packed_is_the_nearest_level_and_packs_to_itself(
    shape: list[int], scale: float, signed: bool, seed: int
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    values = values if signed else values.abs()
    packed = Packed.of(values, signed)
    found = packed.unpack()
    assert found.shape == values.shape
    assert packed.codes.dtype == torch.uint8
    assert packed.codes.numel() < values.numel() + BLOCK
    tops_N = packed.scales.repeat_interleave(BLOCK)[: values.numel()]
    nearest_N = (levels(signed) * tops_N[:, None] - values.reshape(-1, 1)).abs().min(dim=1).values
    assert ((values - found).abs().reshape(-1) <= nearest_N + 1e-6 * tops_N.abs()).all()
    again = Packed.of(found, signed)
    assert torch.equal(again.unpack(), found)
    assert torch.equal(again.codes, packed.codes) or scale == 0


def _trained(name: str, updates: int) -> tuple[list[float], int]:
    """Losses of a small classifier, and the bytes of the optimiser's state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    images, truth = torch.randn(512, 64), nn.Linear(64, 10)
    labels = truth(images).argmax(1)
    optimizer = build_optimizer(model, OptimizerConfig.model_validate({"name": name}), 3e-3)
    losses = []
    for step in range(updates):
        chosen = slice(64 * (step % 8), 64 * (step % 8) + 64)
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    tensors: list[Tensor] = []
    for state in optimizer.state.values():
        for value in state.values():
            tensors += [value.codes, value.scales] if isinstance(value, Packed) else [value]
    return losses, sum(tensor.nbytes for tensor in tensors)


def test_it_trains_as_adamw_in_a_quarter_of_its_state() -> None:
    wide, large = _trained("adamw", 80)
    narrow, small = _trained("adamw8bit", 80)
    assert narrow[0] == wide[0]
    mean_wide, mean_narrow = sum(wide[-8:]) / 8, sum(narrow[-8:]) / 8
    assert mean_wide < 0.1 * wide[0]
    assert abs(mean_narrow - mean_wide) < 0.02 * wide[0]
    assert narrow != wide
    assert small < 0.32 * large  # the last layer and the biases are below 4096 elements


def test_without_packing_its_updates_are_torchs() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Decoder(tiny_config()))
    optimizers = [
        build_optimizer(model, OptimizerConfig.model_validate({"name": name, "not_8bit": ["*"]}), 1e-3)
        for model, name in zip(models, ("adamw8bit", "adamw"), strict=True)
    ]
    tokens = torch.randint(0, 320, (2, 16))
    for _ in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_embeddings_and_small_tensors_stay_wide_and_the_state_goes_over_to_adamw() -> None:
    torch.manual_seed(0)
    model = Decoder(tiny_config(hidden_size=64, head_dim=16, intermediate_size=96))
    config = OptimizerConfig(name="adamw8bit")
    optimizer = build_optimizer(model, config, 1e-3)
    model(torch.randint(0, 320, (2, 16))).square().mean().backward()
    optimizer.step()
    packed = {name for name, each in model.named_parameters() if isinstance(optimizer.state[each]["exp_avg"], Packed)}
    assert packed == {name for name, each in model.named_parameters() if each.numel() >= 4096 and "embed" not in name}
    assert packed
    state = optimizer_state(optimizer, model)
    other = build_optimizer(model, OptimizerConfig(), 1e-3)
    load_optimizer_state(other, model, state)
    other.step()
    again = build_optimizer(model, config, 1e-3)
    load_optimizer_state(again, model, state)
    for name, values in optimizer_state(again, model).items():
        for key, value in values.items():
            assert torch.equal(value, state[name][key]), (name, key)


def test_a_run_resumes_to_the_same_losses(
    recipe: Path, tmp_path: Path, losses: Callable[[Path], dict[int, float]]
) -> None:
    sizes = ["model.hidden_size=64", "model.head_dim=16", "model.intermediate_size=96"]
    chosen = ["optimizer.name=adamw8bit", "steps=8", *sizes]
    train(recipe, chosen)
    whole = losses(tmp_path / "out-run")
    for step in (6, 8):
        shutil.rmtree(tmp_path / "out-run" / "checkpoints" / f"step-{step:09d}")
    train(recipe, chosen, resume="auto")
    assert losses(tmp_path / "out-run") == whole
