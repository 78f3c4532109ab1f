"""Answers that share their prompt are learnt from as if each had its own: losses, metrics and gradients."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from penjing.core.models.decoder import Decoder
from penjing.train.align.actor_critic import ActorCritic
from penjing.train.align.rollouts import answer_batch
from penjing.train.objective.actor_critic import ProximalPolicy
from penjing.train.objective.objective import Batch, Loss, Objective
from penjing.train.objective.on_policy import OnPolicyDistillation
from penjing.train.objective.policy import PolicyGradient
from tests.conftest import random_tensors, tiny_config

PROMPTS = [[5, 6, 7, 8]] * 3 + [[9, 10]] * 2 + [[5, 6, 7, 8]]  # the last one is not beside its like
ANSWERS = [[11, 12, 13], [14], [11, 15], [16, 17, 18, 19], [20, 2], [21, 22]]
SIZES = [len(answer) for answer in ANSWERS]


def shared(config_vocabulary: int) -> Batch:
    draw, answers, tokens = torch.Generator().manual_seed(0), len(ANSWERS), sum(SIZES)
    of_answers = {name: torch.rand(answers, generator=draw) for name in ("reward", "ended", "silent")}
    names = ("old", "reference", "engine", "value", "return")
    of_tokens: dict[str, Sequence[Sequence[float]]] = {
        name: [torch.randn(size, generator=draw).tolist() for size in SIZES] for name in names
    }
    batch = answer_batch(PROMPTS, ANSWERS, of_answers, of_tokens)
    batch |= {"real": torch.tensor([True] * (answers - 1) + [False]), "advantage": torch.randn(answers, generator=draw)}
    batch["old"] -= 5  # near what a vocabulary of random tokens gives
    batch["teacher"] = torch.randn(tokens, config_vocabulary, generator=draw)
    return {name: each.double() if each.is_floating_point() else each for name, each in batch.items()}


def apart(batch: Batch) -> Batch:
    """The same with a row for each answer, its prompt before it."""
    width = max(len(prompt) + size for prompt, size in zip(PROMPTS, SIZES, strict=True))
    tokens, rows = torch.zeros(len(ANSWERS), width, dtype=torch.int64), list[int]()
    for place, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        tokens[place, : len(prompt + answer)] = torch.tensor(prompt + answer)
        begin = place * width + len(prompt) - 1
        rows += range(begin, begin + len(answer))
    return {name: each for name, each in batch.items() if name != "paths"} | {
        "tokens": tokens,
        "rows": torch.tensor(rows),
    }


CASES: dict[str, tuple[type[Decoder], Objective]] = {
    "grpo": (Decoder, PolicyGradient(kl=0.1, entropy=0.05)),
    "rloo": (Decoder, PolicyGradient(whole=True, aggregate="answer")),
    "ppo": (ActorCritic, ProximalPolicy(entropy=0.05)),
    "distill": (Decoder, OnPolicyDistillation()),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_but_time_changes(name: str) -> None:
    network, objective = CASES[name]
    config = tiny_config()
    model = network(config)
    model.load_state_dict(dict(random_tensors(config)), strict=False)
    model.tie_weights()
    model.double()
    batch = shared(config.vocab_size)
    if name == "ppo":
        batch["advantage"] = batch["advantage"][batch["answer"]]
    assert batch["tokens"].numel() == 4 + 2 + 4 + sum(SIZES)
    found, expected = (learnt(model, objective, each) for each in (batch, apart(batch)))
    torch.testing.assert_close(found[0].total, expected[0].total)
    assert found[0].counted.keys() == expected[0].counted.keys()
    for metric, (total, count) in found[0].counted.items():
        torch.testing.assert_close((total, count), expected[0].counted[metric], msg=metric)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(mine, theirs)


def learnt(model: nn.Module, objective: Objective, batch: Batch) -> tuple[Loss, list[torch.Tensor]]:
    loss = objective(model, batch)
    return loss, list(torch.autograd.grad(loss.total, list(model.parameters())))
