"""PPO: losses, gradients and advantages are verl's, and a value is learnt with the policy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from penjing.core.errors import ConfigError, InputError
from penjing.train.align.advantages import generalized_advantages, whitened
from penjing.train.objective.actor_critic import ProximalPolicy
from penjing.train.objective.logprobs import token_logprobs
from penjing.train.objective.objective import Objective
from penjing.train.objective.policy import PolicyGradient
from penjing.train.run import train
from tests.train.align.test_rollouts import recipe, records  # noqa: F401
from tests.train.reference import cases

VERL = json.loads((Path(__file__).parents[1] / "reference/verl.json").read_text())


class Said(nn.Module):
    """Answers with ready logits and values, whatever it is asked."""

    def __init__(self, logits: Tensor, values: Tensor) -> None:
        super().__init__()
        self.logits, self.values = nn.Parameter(logits), nn.Parameter(values)

    def forward(self, token_ids: Tensor, logit_rows: Tensor, valued: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        return (self.logits, self.values) if valued else self.logits


def sampled() -> tuple[Said, dict[str, Tensor]]:
    given: dict[str, Tensor] = {name: torch.as_tensor(each) for name, each in cases.ppo_tokens().items()}
    rows = len(cases.PPO_SIZES)
    logprobs = given["logits"].log_softmax(-1).gather(1, given["next"][:, None])[:, 0]
    batch = {
        "tokens": torch.zeros(rows, 1), "rows": torch.arange(sum(cases.PPO_SIZES)), "next": given["next"],
        "answer": torch.arange(rows).repeat_interleave(torch.tensor(cases.PPO_SIZES)), "old": logprobs + given["shift"],
        "value": given["old_values"], "advantage": given["advantages"], "return": given["returns"],
        "real": torch.ones(rows, dtype=torch.bool), "reward": torch.zeros(rows), "ended": torch.ones(rows),
    }  # fmt: skip
    return Said(given["logits"], given["values"]), batch


@pytest.mark.parametrize("name", cases.PPO)
def test_losses_and_gradients_are_those_of_verl(name: str) -> None:
    model, batch = sampled()
    objective = ProximalPolicy(**cases.PPO[name])
    (objective(model, batch).total / objective.count(batch)).backward()
    expected = VERL["ppo"][name]
    found = float((objective(model, batch).total / objective.count(batch)).detach())
    assert found == pytest.approx(expected["loss"], abs=1e-8)
    for mine, theirs in ((model.logits, "logits"), (model.values, "values")):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, torch.tensor(expected[theirs], dtype=torch.float64), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", cases.GAE)
def test_advantages_are_those_of_verl(name: str) -> None:
    given = {key: torch.tensor(each, dtype=torch.float64)[:, None] for key, each in cases.gae().items()}
    sizes = torch.tensor(cases.PPO_SIZES)[:, None]
    found, returns = generalized_advantages(given["rewards"], given["values"], sizes, *cases.GAE[name])
    expected = {key: torch.tensor(each, dtype=torch.float64)[:, None] for key, each in VERL["gae"][name].items()}
    torch.testing.assert_close(whitened(found, sizes), expected["advantages"], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(returns, expected["returns"], rtol=1e-6, atol=1e-7)


def test_equal_advantages_of_tokens_are_zero() -> None:
    assert not whitened(torch.full((2, 3, 4), 1 / 3), torch.full((2, 3), 4)).any()
    assert not whitened(torch.full((1, 1, 2), 0.7), torch.ones(1, 1, dtype=torch.int64)).any()  # a single token


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_entropy_can_be_learnt(temperature: float) -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, dtype=torch.float64, generator=random, requires_grad=True)
    tokens = torch.tensor([0, 3, 6, 2, 2])
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, tokens, temperature), logits)


def test_a_value_is_learnt_with_the_policy_and_is_not_exported(recipe: Path, tmp_path: Path) -> None:  # noqa: F811
    settings = ["algorithm.kind=ppo", "steps=16", "evaluation.every=16", "reward.gold=number"]
    results = train(recipe, settings)
    steps = records(tmp_path / "out-run")
    assert steps[0]["value"] == 0.0  # it begins without an opinion
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.2
    assert abs(steps[-1]["value"] - steps[-1]["reward"]) < 0.3
    assert max(record["gap"] for record in steps) < 1e-4
    assert {"gold", "reward"} <= results.keys()
    assert not [name for name in load_file(tmp_path / "out/model.safetensors") if "value" in name]
    page = (tmp_path / "out-run/report.html").read_text()
    assert f"<strong>{results['reward']:.3f}</strong>" in page
    assert f"<strong>{steps[-1]['reward']:.3f}</strong>" in page


@pytest.mark.parametrize(
    "settings", [["algorithm.updates=2", "algorithm.kl=0.1"], ["data.samples=1", "adapter.rank=4"]]
)
def test_a_run_goes_on_as_if_it_had_not_stopped(recipe: Path, tmp_path: Path, settings: list[str]) -> None:  # noqa: F811
    settings = ["algorithm.kind=ppo", "algorithm.entropy=0.01", *settings]
    train(recipe, ["steps=4", *settings])
    train(recipe, ["steps=3", f"output={tmp_path}/again", *settings])
    train(recipe, ["steps=4", f"output={tmp_path}/again", *settings], resume="auto")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    ours, theirs = (records(tmp_path / f"{name}-run")[-1] for name in ("out", "again"))
    assert all(ours[key] == theirs[key] for key in ("loss", "value", "value_error", "gradient_norm"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["data.samples=1"], "data.samples = 1 leaves grpo no other answer"),
        (["algorithm.trace=0.5"], "algorithm.trace: .*is of kind = 'ppo', not of 'grpo'"),
        (["algorithm.kind=ppo", "algorithm.scale=group"], "algorithm.scale: .*of ppo is 'batch' or 'none'"),
        (["reward.kind=verifier", "reward.gold=number"], "reward.gold: .*is what is learnt with kind = 'verifier'"),
        (["reward.gold=regex", "prompts.most_damaged=0.0", "prompts.sources=['{folder}/odd.jsonl']"],
         'the "answer" is no regular expression'),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_one_error(recipe: Path, tmp_path: Path, settings: list[Any], says: str) -> None:  # noqa: F811
    (tmp_path / "odd.jsonl").write_text('{"prompt": "Say it.", "answer": "("}\n')
    with pytest.raises((ConfigError, InputError), match=says):
        train(recipe, [each.format(folder=tmp_path) for each in settings])


@pytest.mark.parametrize("objective", [ProximalPolicy(), PolicyGradient(), PolicyGradient(whole=True)])
def test_the_distance_of_a_later_update_is_that_of_the_model_as_it_is(objective: Objective) -> None:
    size = 7  # each token of the vocabulary was sampled once, all being as likely
    draw = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, size, generator=draw, dtype=torch.float64)
    logits[3] = -12.0  # has become rare
    model, zeros = Said(logits.expand(size, -1).clone(), torch.zeros(size)), torch.zeros(size)
    batch = {
        "tokens": zeros[:1], "rows": torch.arange(size), "next": torch.arange(size), "old": zeros - math.log(size),
        "answer": torch.arange(size), "reference": reference.log_softmax(0), "real": torch.ones(size, dtype=torch.bool),
    } | dict.fromkeys(("value", "advantage", "return", "reward", "ended", "silent"), zeros)  # fmt: skip
    total, count = objective(model, batch).counted["kl"]
    ours, theirs = (each.log_softmax(0) for each in (logits, reference))
    assert float(total / count) == pytest.approx(float((ours.exp() * (ours - theirs)).sum()))
