"""Batch-norm statistics against torch's own cumulative average and against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from penjing.compress.prune.batch_norm import reestimate_batch_norms
from penjing.core.errors import InputError
from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import cifar_resnet


def test_one_batch_gives_what_torch_tracks_in_training() -> None:
    torch.manual_seed(0)
    model, images = ResNet(cifar_resnet(8, width=4)), torch.randn(12, 3, 8, 8)
    oracle = ResNet(cifar_resnet(8, width=4))
    oracle.load_state_dict(model.state_dict())
    for module in oracle.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the cumulative average: after one batch that batch
    oracle.train()(images)
    assert reestimate_batch_norms(model.eval(), [(images,)]) == 9
    wanted = dict(oracle.named_buffers())
    for name, buffer in model.named_buffers():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(buffer, wanted[name], rtol=1e-5, atol=1e-6)


def test_batches_of_unequal_size_count_by_their_values() -> None:
    values = np.random.default_rng(0).normal(3, 2, (23, 5))
    model = nn.BatchNorm1d(5).train()
    parts = torch.from_numpy(values).float().split([16, 5, 2])
    reestimate_batch_norms(nn.Sequential(model), [(part,) for part in parts])
    assert model.running_mean is not None
    assert model.running_var is not None
    np.testing.assert_allclose(model.running_mean, values.mean(0), rtol=1e-5)
    np.testing.assert_allclose(model.running_var, values.var(0, ddof=1), rtol=1e-5)


def test_nothing_else_changes() -> None:
    torch.manual_seed(0)
    model = ResNet(cifar_resnet(8, width=4)).train()
    model.blocks[0].eval()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    reestimate_batch_norms(model, [(torch.randn(4, 3, 8, 8),)])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())
    assert modes == [module.training for module in model.modules()]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_without_norms_nothing_is_read_and_without_data_it_is_refused() -> None:
    def never() -> object:
        raise AssertionError("the inputs were read")
        yield

    assert reestimate_batch_norms(nn.Linear(2, 2), never()) == 0  # type: ignore[arg-type]
    norm = nn.BatchNorm1d(2)
    with pytest.raises(InputError, match="need two values a channel at least, there were 0; give more samples"):
        reestimate_batch_norms(norm, [])
    assert norm.running_mean is not None
    assert torch.equal(norm.running_mean, torch.zeros(2))
