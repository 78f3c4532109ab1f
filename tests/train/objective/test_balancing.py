"""Experts in training: the auxiliary loss beside transformers', router biases, recomputation, memory, processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.decoder import Decoder
from penjing.core.models.moe import MoE, Routing, watch_routing
from penjing.train.loop import Trainer
from penjing.train.monitor.flops import forward_flops
from penjing.train.numerics.recompute import apply_recompute
from penjing.train.objective.balancing import Balanced, BalancingConfig, balance_loss
from penjing.train.objective.objective import CrossEntropy
from penjing.train.optim.optimizer import OptimizerConfig, build_optimizer
from penjing.train.plan.estimate import estimate_memory
from penjing.train.processes.world import World
from penjing.train.run import train
from penjing.train.state.initial import decoder_weights, fill_weights
from tests.conftest import tiny_config
from tests.train.conftest import ListStream, token_batch
from tests.train.launched import Launched

EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "scoring_func": "sigmoid",
    "router_bias": True,
}
SECTIONS = """
[model.moe]
num_experts = 8
num_experts_per_tok = 2
moe_intermediate_size = 16
scoring_func = "sigmoid"
router_bias = true
shared_expert_intermediate_size = 16

[balancing]
bias_rate = 0.01
"""


def decoder(**moe: Any) -> Decoder:
    model = Decoder(tiny_config(model_type="penjing", moe=EXPERTS | moe))
    fill_weights(model, decoder_weights(0.2, 2, seed=7))
    return model


def moe_recipe(recipe: Path, **changes: str) -> Path:
    text = recipe.read_text().replace(
        'architecture = "decoder"\n', 'architecture = "decoder"\nmodel_type = "penjing"\n'
    )
    for old, new in changes.items():
        text = text.replace(old, new)
    recipe.write_text(text + SECTIONS)
    return recipe


@pytest.mark.parametrize("masked", [False, True])
def test_auxiliary_loss_and_its_gradient_are_those_of_transformers(masked: bool) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model = decoder(scoring_func="softmax", router_bias=False)
    ids = token_batch(3, 30, 4)["tokens"]
    counted = torch.rand(3, 30, generator=torch.Generator().manual_seed(3)) > 0.3 if masked else None
    logits: list[torch.Tensor] = []
    gates = [module.gate for module in model.modules() if isinstance(module, MoE)]
    handles = [gate.register_forward_hook(lambda *given: logits.append(given[2])) for gate in gates]
    with watch_routing() as routings:
        model(ids)
    for handle in handles:
        handle.remove()
    assert len(routings) == len(logits) == 2
    for gate, routing, layer_logits in zip(gates, routings, logits, strict=True):
        mask = None if counted is None else counted.long()
        expected = torch.as_tensor(load_balancing_loss_func((layer_logits,), 8, 2, mask))
        actual = balance_loss(routing, None if counted is None else counted.flatten())
        assert float(actual.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
        theirs = torch.autograd.grad(expected, gate.weight, retain_graph=True)[0]
        ours = torch.autograd.grad(actual, gate.weight, retain_graph=True)[0]
        assert theirs.abs().max() > 1e-3
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_even_load_has_the_least_loss() -> None:
    even = Routing(torch.full((8, 4), 0.25), torch.arange(16).view(8, 2) % 4)
    crowd = Routing(torch.tensor([[0.7, 0.1, 0.1, 0.1]]).expand(8, 4), torch.tensor([[0, 1]]).expand(8, 2))
    assert float(balance_loss(even)) == pytest.approx(2.0)
    assert float(balance_loss(crowd)) == pytest.approx(4 * (0.7 + 0.1))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_gradients_with_recomputation_and_auxiliary_loss(recompute: Any) -> None:
    batch = token_batch(4, 20, 1, ragged=True)
    objective = Balanced(CrossEntropy(), BalancingConfig(auxiliary_loss=0.1))
    gradients = []
    for chosen in ("none", recompute):
        model = decoder()
        apply_recompute(model, chosen)
        loss = objective(model, batch)
        (loss.total / objective.count(batch)).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        assert loss.metrics["balance_loss"] > 0
        assert float(loss.total.detach()) > float(loss.metrics["language_loss"])
    for name, gradient in gradients[0].items():
        assert gradient is not None, name  # an expert without tokens too
        assert torch.allclose(gradients[1][name], gradient, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("accumulation", [1, 2])
def test_biases_move_against_the_load_of_the_whole_step(accumulation: int) -> None:
    batch = token_batch(4, 20, 1, ragged=True)
    model = decoder()
    objective = Balanced(CrossEntropy(), BalancingConfig(bias_rate=0.25))
    with watch_routing() as routings:
        model(batch["tokens"])
    counted = (batch["targets"] >= 0).flatten()
    loads = [routing.load(counted) for routing in routings]
    halves = [{name: x.chunk(accumulation)[i] for name, x in batch.items()} for i in range(accumulation)]
    Trainer(
        model, objective, ListStream(halves), torch.optim.SGD(model.parameters(), 0.0), 1, accumulation=accumulation,
        after_update=(objective.bias_update(model, World()),),
    ).fit()  # fmt: skip
    moes = [module for module in model.modules() if isinstance(module, MoE)]
    for moe, load in zip(moes, loads, strict=True):
        assert load.sum() == 2 * counted.sum()
        assert torch.equal(moe.e_score_correction_bias.detach(), 0.25 * torch.sign(load.mean() - load))


def test_biases_even_out_the_load() -> None:
    busiest: dict[float, float] = {}
    for rate in (0.0, 0.01):
        model = decoder()
        for module in model.modules():
            if isinstance(module, MoE):
                module.e_score_correction_bias.data[3] = 0.5  # everybody's choice
        objective = Balanced(CrossEntropy(), BalancingConfig(bias_rate=rate))
        optimizer = build_optimizer(model, OptimizerConfig(), 1e-4)
        batches = [token_batch(4, 32, seed) for seed in range(4)]
        hooks = (objective.bias_update(model, World()),)
        Trainer(model, objective, ListStream(batches), optimizer, 60, after_update=hooks).fit()
        with torch.no_grad(), watch_routing() as routings:
            model(torch.cat([batch["tokens"] for batch in batches]))
        busiest[rate] = max(float(routing.load().amax() / routing.load().mean()) for routing in routings)
    assert busiest[0.01] < 1.5 < 3 < busiest[0.0], busiest


def test_floating_point_operations_count_the_chosen_experts() -> None:
    objective, batch = Balanced(CrossEntropy(), BalancingConfig()), token_batch(1, 32, 0)
    few, many = decoder(num_experts=4), decoder(num_experts=16)
    counts = [forward_flops(model, objective, batch) for model in (few, many)]
    routers = 2 * 2 * 32 * 64 * (16 - 4)  # two layers, tokens, width: only the routers grow
    assert counts[1] - counts[0] == routers


def test_memory_is_estimated_with_all_experts_and_an_even_load() -> None:
    objective, batch = Balanced(CrossEntropy(), BalancingConfig()), token_batch(2, 32, 0)
    estimates = [
        estimate_memory(lambda n=n: decoder(num_experts=n), objective, batch, optimizer="adamw", averaged=False,
                        replicated=False)
        for n in (4, 16)
    ]  # fmt: skip
    added = 4 * 2 * (12 * 3 * 64 * 16 + 12 * 64)  # experts and rows of the routers, float32
    assert estimates[1].gradients - estimates[0].gradients == added
    assert estimates[1].activations == pytest.approx(estimates[0].activations, rel=0.1)


def test_a_resumed_run_is_the_same_and_the_biases_are_exported(
    recipe: Path, tmp_path: Path, losses: Callable[[Path], dict[int, float]]
) -> None:
    path = moe_recipe(recipe)
    train(path)
    whole = losses(tmp_path / "out-run")
    exported = load_model(tmp_path / "out").model
    biases = [module.e_score_correction_bias for module in exported.modules() if isinstance(module, MoE)]
    assert len(biases) == 2
    assert all(bias.detach().abs().max() >= torch.tensor(0.01) for bias in biases)  # float32(0.01) is below 0.01
    for step in (6, 8):
        shutil.rmtree(tmp_path / "out-run" / "checkpoints" / f"step-{step:09d}")
    train(path, resume="auto")
    assert losses(tmp_path / "out-run") == whole
    records = [json.loads(line) for line in (tmp_path / "out-run" / "metrics.jsonl").read_text().splitlines()]
    assert all(record["expert_load_max"] >= 1 >= record["expert_load_min"] for record in records if "loss" in record)


def test_two_processes_learn_as_one_though_experts_stay_idle(
    recipe: Path, tmp_path: Path, losses: Callable[[Path], dict[int, float]]
) -> None:
    # Eight experts and four tokens a micro-batch: in many of them an expert gets none.
    path = moe_recipe(recipe, **{"sequence_length = 24": "sequence_length = 2\nmicro_batch = 2"})
    train(path)
    alone = losses(tmp_path / "out-run")
    launched = Launched(path, "--force", processes=2)
    assert launched.finish(150) == 0, launched.said
    together = losses(tmp_path / "out-run")
    assert together == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[balancing]\nbias_rate = 0.1\n", ConfigError, r"\[balancing\] is for experts"),
        (SECTIONS.replace("router_bias = true", ""), ConfigError, "set model.moe.router_bias = true"),
        (SECTIONS, InputError, "no Hugging Face architecture of type 'llama' has moe; .*'penjing' has everything"),
        (SECTIONS.replace("num_experts = 8", "num_experts = 1"), ConfigError, "num_experts_per_tok=2 is above"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(
    recipe: Path, text: str, error: type[Exception], message: str
) -> None:
    if "router_bias" not in text:
        recipe = moe_recipe(recipe)
    recipe.write_text(recipe.read_text().replace(SECTIONS, "") + text)
    with pytest.raises(error, match=message):
        train(recipe)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at every tensor
def test_a_compiled_model_learns_the_same(
    recipe: Path, tmp_path: Path, losses: Callable[[Path], dict[int, float]]
) -> None:
    path = moe_recipe(recipe)
    train(path)
    plain = losses(tmp_path / "out-run")
    train(path, ["compile=true"], force=True)
    assert losses(tmp_path / "out-run") == pytest.approx(plain, abs=1e-4)
