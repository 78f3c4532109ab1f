"""Any graph loses units, and then computes what the whole one does with the same units at zero."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penjing.compress.prune.graph import Group, analyse
from penjing.compress.prune.surgery import mask
from penjing.compress.prune_graph.groups import trusted
from penjing.compress.prune_graph.rewrite import rewritten
from penjing.core.graph.network import Network
from penjing.core.graph.trace import from_torch
from tests.compress.prune_graph.traits import TRAITS

FROZEN = {"tagger": "aten.lstm.input in lstm"}
MEANS = {"windows": ("embed",), "gates": ("second",), "volumes": ("first",), "encoder layer": ("table",)}
"""Weights whose units are under a mean or a norm over units: there zeros are no absence."""


def network(name: str) -> Network:
    torch.manual_seed(sum(map(ord, name)))
    make, example, _ = TRAITS[name]
    return from_torch(make().eval(), (example(),))


def fresh(name: str, batch: int = 3) -> Tensor:
    example = TRAITS[name][1]()
    return torch.cat([example, TRAITS[name][1]()])[:batch]


def under_a_mean(name: str, group: Group) -> bool:
    return any(mark in place.tensor for place in group.places for mark in MEANS.get(name, ()))


@pytest.mark.parametrize("name", TRAITS)
def test_every_group_leaves(name: str) -> None:
    """None is kept whole, and another batch gives what the network gives whose weights are zero."""
    whole = network(name)
    analysis = analyse(whole.module, whole.inputs())
    assert all(FROZEN[name] in reason for reason in analysis.found.reasons)
    assert bool(analysis.found.reasons) == (name in FROZEN)
    places = [
        (place, group)
        for group in analysis.found.groups
        for place in group.places
        if place.dim == 0 or place.tensor == "table.weight"
    ]
    found = {place.tensor: len(group) for place, group in places}
    assert {tensor: found.get(tensor) for tensor in TRAITS[name][2]} == TRAITS[name][2]
    trust = trusted(whole.module, analysis, analysis.found.groups, whole.inputs())
    assert trust.kept_whole == ()
    assert len(trust.groups) == len(analysis.found.groups)

    selection = [(group, list(range(0, len(group) - 1, 2))) for group in trust.groups if not under_a_mean(name, group)]
    pruned, masked = rewritten(whole.module, analysis, selection).module, copy.deepcopy(whole.module)
    mask(masked, selection)
    with torch.no_grad():
        x = fresh(name)
        for found_, expected in zip(pruned(x), masked(x), strict=True):
            torch.testing.assert_close(found_, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)
    parameters = [sum(p.numel() for p in module.parameters()) for module in (whole.module, pruned)]
    assert not selection or parameters[1] < parameters[0]
    pruned.train()
    pruned(x)[0].square().mean().backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in pruned.parameters())


class Distances(nn.Module):
    """exp(0) is 1: units at zero still count in a product of features, so that none can leave."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x).exp() @ self.k(x).exp().mT) @ self.down(self.up(x).relu())


def test_a_group_that_fails_stays_whole_and_the_others_leave() -> None:
    torch.manual_seed(0)
    whole = from_torch(Distances().eval(), (torch.randn(2, 5, 6),))
    analysis = analyse(whole.module, whole.inputs())
    trust = trusted(whole.module, analysis, analysis.found.groups, whole.inputs())
    assert [group.name for group in trust.groups] == ["up.weight[dim 0]"]
    ((group, why),) = trust.kept_whole
    assert group.name == "k.weight[dim 0]"
    assert "aten.matmul.default" in why
    assert "its values differ" in why


SMALL: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
T5 = "body.encoder.block.1.layer."


def t5() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=30, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4))


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTModel

    return OPTModel(OPTConfig(vocab_size=30, ffn_dim=40, word_embed_proj_dim=24, max_position_embeddings=16, **SMALL))


class First(nn.Module):
    """A model of transformers as a function of one tensor to one tensor, with a head."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(24, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens)[0])


@pytest.mark.parametrize(
    ("make", "heads", "ffn"),
    [
        (t5, f"{T5}0.SelfAttention.q.weight", f"{T5}1.DenseReluDense.wi.weight"),
        (opt, "body.decoder.layers.0.self_attn.q_proj.weight", "body.decoder.layers.0.fc1.weight"),
    ],
)
def test_heads_and_widths_of_transformers_leave(make: Callable[[], nn.Module], heads: str, ffn: str) -> None:
    """T5's heads of all layers go together, because one table of positions has a column for each."""
    torch.manual_seed(0)
    whole = from_torch(First(make()).eval(), (torch.randint(2, 30, (2, 6)),))
    analysis = analyse(whole.module, whole.inputs())
    assert analysis.found.reasons == ()
    trust = trusted(whole.module, analysis, analysis.found.groups, whole.inputs())
    assert trust.kept_whole == ()
    found = {place.tensor: len(group) for group in trust.groups for place in group.places if place.dim == 0}
    assert (found[heads], found[ffn]) == (4, 40)
