"""Sequences that share their beginnings give what each gives by itself: logits and gradients, for each kind of
attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penjing.core.models.attention import positions_and_attention
from penjing.core.models.decoder import Decoder
from tests.conftest import random_tensors, tiny_config

# Two prompts, of 5 and 2 tokens, with two answers and one; the answers have 3, 1 and 4 tokens.
TOKENS = torch.tensor([[9, 8, 7, 6, 5, 11, 12, 13, 21, 3, 4, 31, 32, 33, 34]])
SEQUENCES = ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 8], [9, 10, 11, 12, 13, 14])
PATHS = torch.tensor([(each + 8 * each[-1:])[:8] for each in SEQUENCES])
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "windows": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3},
    "convolutions": {
        "model_type": "penjing",
        "num_hidden_layers": 3,
        "layer_types": ("short_conv", "full_attention", "short_conv"),
        "conv_taps": 4,
    },
    "capped": {"model_type": "penjing", "attention_cap": 5.0},
}


def filled(**settings: Any) -> Decoder:
    config = tiny_config(**settings)
    model = Decoder(config)
    model.load_state_dict(dict(random_tensors(config)), strict=False)
    model.tie_weights()
    return model.double()  # so that nothing but what is seen makes a difference


def gradients(model: Decoder, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_give_what_each_gives_by_itself(kind: str) -> None:
    model = filled(**KINDS[kind])
    ends = torch.tensor([4, 7, 4, 8, 10, 14])  # what follows the prompt is asked for once for each answer
    found = model(TOKENS, logit_rows=ends, paths=PATHS)
    alone = [model(TOKENS[:, sequence])[0] for sequence in SEQUENCES]
    expected = torch.stack([alone[0][4], alone[0][-1], alone[1][4], alone[1][-1], alone[2][1], alone[2][-1]])
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for mine, theirs in zip(
        gradients(model, (found * weights).sum()), gradients(model, (expected * weights).sum()), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_an_answer_sees_no_other() -> None:
    model, other = filled(), TOKENS.clone()
    other[0, 5] += 1  # of the first answer
    changed = (model(TOKENS, paths=PATHS) != model(other, paths=PATHS)).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == [5, 6, 7]


def test_places_are_counted_along_the_paths() -> None:
    positions, _ = positions_and_attention(tiny_config(), TOKENS, PATHS)
    assert positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 5, 0, 1, 2, 3, 4, 5]]
