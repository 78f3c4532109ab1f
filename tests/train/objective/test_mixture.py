"""Mixtures of two samples learn both classes, as torch's cross-entropy with shares for targets says."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from penjing.train.objective.mixture import OTHERS, SHARES, classes_sum
from penjing.train.objective.objective import IGNORED, CrossEntropy


def test_a_mixture_learns_both_classes_by_their_shares() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 5, requires_grad=True)
    own, other = torch.randint(5, (6,)), torch.randint(5, (6,))
    shares = torch.rand(6)
    wanted = torch.zeros(6, 5).scatter_add_(1, own[:, None], 1 - shares[:, None])
    wanted.scatter_add_(1, other[:, None], shares[:, None])
    for smoothing in (0.0, 0.1):
        batch = {"targets": own, OTHERS: other, SHARES: shares}
        found = classes_sum(logits, batch, ignored=IGNORED, label_smoothing=smoothing)
        expected = F.cross_entropy(logits, wanted, reduction="sum", label_smoothing=smoothing)
        assert torch.allclose(found, expected, rtol=1e-5)
        one, two = (torch.autograd.grad(each, logits)[0] for each in (found, expected))
        assert torch.allclose(one, two, atol=1e-6)


def test_what_fills_a_batch_up_counts_for_nothing_in_a_mixture_either() -> None:
    logits = torch.randn(3, 5)
    batch = {"targets": torch.tensor([1, IGNORED, 2]), OTHERS: torch.tensor([3, IGNORED, 4])}
    batch[SHARES] = torch.tensor([0.25, 0.0, 0.5])
    found = classes_sum(logits, batch, ignored=IGNORED)
    rows = [
        classes_sum(logits[at : at + 1], {k: v[at : at + 1] for k, v in batch.items()}, ignored=IGNORED)
        for at in (0, 2)
    ]
    assert torch.allclose(found, rows[0] + rows[1])


def test_the_objective_of_images_takes_mixtures() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    batch = {"images": torch.randn(2, 1, 2, 2), "targets": torch.tensor([0, 1])}
    halves = batch | {OTHERS: torch.tensor([1, 0]), SHARES: torch.tensor([0.5, 0.5])}
    plain, mixed = (CrossEntropy("images", accuracy=True)(model, each) for each in (batch, halves))
    logits = model(batch["images"])
    assert torch.allclose(plain.total, F.cross_entropy(logits, batch["targets"], reduction="sum"))
    assert torch.allclose(mixed.total, -logits.log_softmax(1)[:, :2].sum() / 2)
