"""Stages one behind the other are the network that they were cut from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penjing.core.models.decoder import Decoder
from penjing.train.pipeline.pipeline import DecoderStage
from tests.conftest import tiny_config


@pytest.mark.parametrize(
    "overrides", [{}, {"model_type": "penjing", "table_hadamard": 32}, {"model_type": "penjing", "logit_cap": 0.1}]
)
def test_stages_give_the_logits_of_the_whole(overrides: dict[str, Any]) -> None:
    torch.manual_seed(0)
    decoder = Decoder(tiny_config(num_hidden_layers=3, **overrides))
    ids = torch.randint(0, decoder.config.vocab_size, (2, 20))
    wanted, x = decoder(ids), ids
    for layers in (range(1), range(1, 3)):
        x = DecoderStage(decoder, layers, 1, None)(x)
    assert torch.allclose(x, wanted, atol=1e-6)
    assert wanted.std() > 0.01
