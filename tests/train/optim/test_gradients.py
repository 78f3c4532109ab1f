from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from penjing.train.numerics.gradients import global_norm, scale_gradients
from penjing.train.optim.clip import ClipConfig, GradientNorms
from penjing.train.optim.loss_scale import LossScale, initial_scale
from penjing.train.optim.optimizer import OptimizerConfig, build_optimizer
from penjing.train.optim.schedule import LearningRate


def test_norm_and_clipping_equal_torchs() -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size)) for size in (3, 50, 7)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.clip_grad_norm_(parameters, 0.5)
    assert float(global_norm(gradients)) == pytest.approx(float(norm))
    scale_gradients(gradients, 0.5 / float(global_norm(gradients)))
    for mine, parameter in zip(gradients, parameters, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(mine, parameter.grad, atol=1e-6)


def test_the_fit_finds_mean_and_deviation_and_counts_outliers() -> None:
    random.seed(1)
    norms = GradientNorms(ClipConfig(norm=None, adaptive=True, deviations=4.0, memory=0.995))
    for _ in range(4000):
        norms.observe(random.lognormvariate(0.7, 0.3))
    assert norms.log_mean == pytest.approx(0.7, abs=0.06)
    assert norms.log_deviation == pytest.approx(0.3, abs=0.05)
    assert norms.num_outliers <= 4
    assert norms.limit() == pytest.approx(math.exp(0.7 + 4 * 0.3), rel=0.3)
    limit = norms.limit()
    assert norms.observe(100.0)
    assert norms.limit() < limit * 1.1  # a spike enters at the edge: 100 itself would raise the limit by half


def test_a_fixed_limit_bounds_the_adaptive_one() -> None:
    norms = GradientNorms(ClipConfig(norm=1.0, adaptive=True))
    assert norms.limit() == 1.0
    for _ in range(30):
        norms.observe(0.1)
    assert norms.limit() == pytest.approx(0.1, rel=0.01)
    assert GradientNorms(ClipConfig(norm=None)).limit() == math.inf


def test_the_fit_survives_a_checkpoint() -> None:
    norms = GradientNorms(ClipConfig(adaptive=True))
    for step in range(40):
        norms.observe(1 + step % 3)
    other = GradientNorms(ClipConfig(adaptive=True))
    other.load_state_dict(norms.state_dict())
    assert (other.limit(), other.log_deviation) == (norms.limit(), norms.log_deviation)


def test_the_loss_scale_moves_as_torchs_scaler_does() -> None:
    random.seed(0)
    ours = LossScale(2.0**12, window=5)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=5)
    for _ in range(200):
        overflow = random.random() < 0.15
        theirs.scale(weight.sum() * (math.inf if overflow else 1.0)).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(overflow)
        assert ours.value == theirs.get_scale()
    assert ours.num_changes > 20


def test_the_first_loss_scale_grows_with_the_model() -> None:
    assert initial_scale(135_000_000) == 2.0**16
    assert initial_scale(1_000_000) == 2.0**12
    assert initial_scale(1) == 2.0**8
    assert initial_scale(10**12) == 2.0**20


def test_a_scale_that_is_off_is_one() -> None:
    scale = LossScale(1024.0, enabled=False)
    scale.update(True)
    assert (scale.value, scale.num_changes) == (1.0, 0)


def test_cosine_and_wsd_have_their_shape() -> None:
    cosine = LearningRate(peak=1.0, warmup=0.1, floor=0.1)
    rates = [cosine.at(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    wsd = LearningRate(kind="wsd", peak=2.0, warmup=0.1, decay=0.3, floor=0.0)
    rates = [wsd.at(step, 100) for step in range(100)]
    assert set(rates[9:70]) == {2.0}
    assert rates[-1] == pytest.approx(0.0)
    assert rates[84] == pytest.approx(1.0, abs=0.05)


def test_vectors_do_not_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.2, no_decay=("2.*",)))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name for name, p in model.named_parameters() if decays[id(p)]} == {"0.weight"}
