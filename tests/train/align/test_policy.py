"""The policy's loss where it can be known without a reference: equal rewards, ratios of one, answers that fill up."""

from __future__ import annotations

import pytest
import torch

from penjing.core.models.decoder import Decoder
from penjing.train.align.advantages import group_advantages, leave_one_out
from penjing.train.objective.policy import Aggregate, AnswerRewards, PolicyGradient, answer_tokens
from tests.train.chat.test_trl import decoder, sampled  # noqa: F401


@pytest.mark.parametrize("value", [0.1, 1 / 3, -1e6])
def test_equal_rewards_teach_nothing_bit_for_bit(value: float) -> None:
    rewards = torch.full((2, 7), value)
    for scale in ("group", "batch", "none"):
        assert not group_advantages(rewards, scale).any()
    assert not leave_one_out(rewards).any()


def test_a_ratio_of_one_gives_the_gradient_of_reinforce(decoder: Decoder) -> None:  # noqa: F811
    batch = sampled()
    del batch["old"], batch["reference"]
    found, _ = answer_tokens(decoder, batch)
    expected = torch.autograd.grad(-(found * batch["advantage"][batch["answer"]]).sum(), decoder.model.norm.weight)
    loss = PolicyGradient((0.1, 0.1))(decoder, batch).total
    torch.testing.assert_close(torch.autograd.grad(loss, decoder.model.norm.weight), expected)


@pytest.mark.parametrize("aggregate", ["token", "answer", "constant"])
def test_answers_that_fill_a_batch_up_count_for_nothing(decoder: Decoder, aggregate: Aggregate) -> None:  # noqa: F811
    batch, less = sampled(), sampled()
    batch["real"][-1] = False
    keep = less["answer"] < len(less["tokens"]) - 1
    less |= {name: less[name][keep] for name in ("rows", "next", "answer", "old", "reference")}
    less |= {name: less[name][:-1] for name in ("tokens", "advantage", "reward", "ended", "silent", "real")}
    objective = PolicyGradient(kl=0.1, aggregate=aggregate, most=20)
    assert objective.count(batch) == objective.count(less)
    whole, part = objective(decoder, batch), objective(decoder, less)
    torch.testing.assert_close(whole.total, part.total)
    for name, (total, count) in whole.counted.items():
        torch.testing.assert_close(total / count, part.counted[name][0] / part.counted[name][1], msg=name)


def test_held_out_answers_are_judged_by_their_rewards(decoder: Decoder) -> None:  # noqa: F811
    batch = sampled()
    batch["reward"] = torch.tensor([1.0, 0, 1, 0, 0, 5])
    batch["real"][-1] = False
    judged = AnswerRewards()
    assert judged.count(batch) == 5
    loss = judged(decoder, batch)
    assert float(loss.total) == -2.0
    assert [float(value) for value in loss.counted["reward"]] == [2.0, 5.0]
    assert float(loss.counted["length"][0]) == torch.bincount(batch["answer"])[:-1].sum()


def test_the_reward_for_entropy_is_that_of_torchs_distribution(decoder: Decoder) -> None:  # noqa: F811
    batch, weight = sampled(), decoder.model.norm.weight
    logits = decoder(batch["tokens"], logit_rows=batch["rows"])
    expected = torch.autograd.grad(-0.3 * torch.distributions.Categorical(logits=logits).entropy().sum(), weight)
    with_entropy, plain = (
        torch.autograd.grad(PolicyGradient(entropy=entropy)(decoder, batch).total, weight)[0] for entropy in (0.3, 0.0)
    )
    torch.testing.assert_close(with_entropy - plain, expected[0], rtol=1e-4, atol=1e-5)
