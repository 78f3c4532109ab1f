"""Muon with AdamW as one optimiser, beside torch's two."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penjing.core.errors import ConfigError
from penjing.core.models.decoder import Decoder
from penjing.train.optim.optimizer import OptimizerConfig, build_optimizer, set_learning_rate
from penjing.train.run import train
from tests.conftest import tiny_config
from tests.train.data.test_sources import Notes


def test_it_is_torchs_muon_on_inner_matrices_and_torchs_adamw_elsewhere() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Decoder(tiny_config(tie_word_embeddings=False)))
    mine, theirs = models
    config = OptimizerConfig(name="muon", momentum=0.95, weight_decay=0.1)
    optimizer = build_optimizer(mine, config, 0.02)
    ends, inner, vectors = [], [], []
    for name, parameter in theirs.named_parameters():
        end = "embed_tokens" in name or "lm_head" in name
        (vectors if parameter.dim() < 2 else ends if end else inner).append(parameter)
    assert len(ends) == 2
    assert len(inner) == 7 * theirs.config.num_hidden_layers
    muon = torch.optim.Muon(inner, 0.02, 0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": ends, "weight_decay": 0.1}]
    adamw = torch.optim.AdamW(groups, 0.02, config.betas, config.eps, fused=True)
    tokens = torch.randint(0, 320, (2, 16))
    for step in range(3):
        rate = 0.02 / (step + 1)
        for each in (optimizer, muon, adamw):
            set_learning_rate(each, rate)
        for model in models:
            model.zero_grad()
            model(tokens).square().mean().backward()
        for each in (optimizer, muon, adamw):
            each.step()
    before = dict(Decoder(tiny_config(tie_word_embeddings=False)).named_parameters())
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, before[name]) or a.dim() < 2, name


def test_a_run_with_muon_resumes_to_the_same_losses(
    recipe: Path, tmp_path: Path, losses: Callable[[Path], dict[int, float]]
) -> None:
    settings = ["optimizer.name=muon", "learning_rate.peak=0.01", "steps=8"]
    train(recipe, settings)
    whole = losses(tmp_path / "out-run")
    for step in (6, 8):
        shutil.rmtree(tmp_path / "out-run" / "checkpoints" / f"step-{step:09d}")
    train(recipe, settings, resume="auto")
    assert losses(tmp_path / "out-run") == whole
    with pytest.raises(ConfigError, match=r"'muon' needs whole matrices, and this \[parallel\] splits them"):
        train(recipe, [*settings, "parallel.zero=1"], force=True)


def test_a_run_goes_on_with_other_parameters_of_muon(recipe: Path) -> None:
    train(recipe, ["optimizer.name=muon", "evaluation.every=0"], until=4)
    notes = Notes()
    longer = "optimizer.not_muon=['*embed*', '*lm_head*', '*q_proj*']"
    settings = ["optimizer.name=muon", "evaluation.every=0", longer]
    train(recipe, settings, resume="auto", accept_changes=True, progress=notes)
    assert [line for line in notes.notes if "starts without" in line]
