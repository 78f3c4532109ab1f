"""Attention variants inside the decoder, and the decoder under `torch.compile`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from penjing.core.models.attention import attend_last, causal_attention
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from tests.conftest import tiny_config

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"sliding_window": 11},
    "lsh": {"layer_types": ["lsh_attention"], "lsh": {"chunk_size": 4, "rounds": 2}},
    "gates": {"model_type": "penjing", "attention_gate": "head", "attention_gate_function": "softplus"},
    "mixed": {
        "layer_types": ["lsh_attention", "sliding_attention"],
        "lsh": {"chunk_size": 8, "rounds": 1},
        "sliding_window": 7,
    },
}


def decoder(name: str) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig.model_validate(tiny_config().model_dump() | VARIANTS[name]))


@pytest.mark.parametrize("name", ["lsh", "mixed"])
def test_layers_differ_from_full_attention_only_where_the_sequence_is_long(name: str) -> None:
    tokens = torch.randint(0, 50, (2, 150))
    full, other = decoder("full"), decoder(name)
    other.load_state_dict(full.state_dict())
    assert torch.equal(full(tokens[:, :7]), other(tokens[:, :7]))
    assert not torch.allclose(full(tokens), other(tokens), atol=1e-3)
    assert torch.equal(other(tokens), other(tokens))


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.full) for name in ("full", "gates")), "mixed"])
def test_training_compiles_into_one_graph(name: str) -> None:
    torch._dynamo.reset()
    tokens = torch.randint(0, 50, (2, 150))
    model = decoder(name)

    def gradients(forward: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        loss = F.cross_entropy(forward(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        return loss, list(torch.autograd.grad(loss, list(model.parameters())))

    expected, expected_gradients = gradients(model)
    # "aot_eager" traces forward and backward as inductor does, without calling a C++ compiler.
    loss, found = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
    for mine, theirs in zip(found, expected_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_documents_are_computed_as_if_alone(name: str) -> None:
    torch.manual_seed(1)
    lengths = [[3, 90, 57], [150], [150], [1, 1, 148]]
    tokens = torch.randint(0, 50, (4, 150))
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    model = decoder(name)
    packed = model(tokens, documents=documents)
    for row, sizes in enumerate(lengths):
        parts = zip(tokens[row].split(sizes), packed[row].split(sizes), strict=True)
        for alone, logits in parts:
            torch.testing.assert_close(logits, model(alone[None])[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(packed[1:3], model(tokens[1:3]), rtol=1e-6, atol=1e-5)
    assert not torch.allclose(packed[0], model(tokens[:1])[0], atol=1e-3)


def test_documents_must_fit_the_tokens() -> None:
    with pytest.raises(ValueError, match="documents has shape"):
        decoder("full")(torch.zeros(2, 3, dtype=torch.int64), documents=torch.zeros(2, 2, dtype=torch.int64))


@pytest.mark.parametrize("new", [1, 6, 40])
@pytest.mark.parametrize("cap", [None, 0.3])
@pytest.mark.parametrize("window", [None, 4, 11, 90])
def test_the_last_tokens_see_what_they_see_in_the_whole_text(window: int | None, cap: float | None, new: int) -> None:
    torch.manual_seed(2)
    further = {"model_type": "penjing", "sliding_window": window, "attention_cap": cap}
    config = DecoderConfig.model_validate(tiny_config().model_dump() | further)
    q, k, v = (torch.randn(2, 40, heads, 16) for heads in (4, 2, 2))
    for sinks in (None, torch.tensor([-1.0, 0.0, 1.0, 3.0])):
        whole = causal_attention(config)(0, q, k, v, sinks)
        torch.testing.assert_close(attend_last(config, 0, q[:, -new:], k, v, sinks), whole[:, -new:])
        torch.testing.assert_close(attend_last(config, 0, q[0, -new:], k[0], v[0], sinks), whole[0, -new:])
