"""Layers with a short convolution: nothing leaks between documents, and what continues is what a whole text gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penjing.compress.measure.generate import Sequences
from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.models.hf_config import with_windows
from tests.conftest import random_tensors, tiny_config

CONV: dict[str, Any] = {
    "model_type": "penjing",
    "num_hidden_layers": 3,
    "layer_types": ("short_conv", "full_attention", "short_conv"),
    "conv_taps": 3,
    "qk_norm": True,
}


def filled(**changes: Any) -> Decoder:
    config = tiny_config(**CONV | changes)
    model = Decoder(config)
    model.load_state_dict(dict(random_tensors(config)), strict=False)
    model.tie_weights()
    return model.double().requires_grad_(False)


@pytest.mark.parametrize("taps", [1, 2, 3, 9])
@pytest.mark.parametrize("conv_bias", [False, True])
def test_documents_of_a_row_are_as_if_each_stood_alone(taps: int, conv_bias: bool) -> None:
    model = filled(conv_taps=taps, conv_bias=conv_bias)
    ids = torch.randint(0, 320, (2, 17), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 5 + [1] + [2] * 11, [2] * 8 + [3] * 9])
    found = model(ids, documents=documents)
    for row, begin, end in ((0, 0, 5), (0, 5, 6), (0, 6, 17), (1, 0, 8), (1, 8, 17)):
        torch.testing.assert_close(found[row, begin:end], model(ids[row, begin:end]))


def test_a_token_reads_so_many_before_it_through_convolutions_alone() -> None:
    model = filled(layer_types=("full_attention", "short_conv", "short_conv"))
    config = model.config.model_copy(update={"layer_types": ("sliding_attention", "short_conv", "short_conv")})
    model = Decoder(DecoderConfig.model_validate(config.model_dump() | {"sliding_window": 1}))
    ids = torch.arange(40, 60)
    other = ids.clone()
    other[4] += 1
    changed = (model(ids) != model(other)).any(-1).nonzero().flatten().tolist()
    assert changed == [4, 5, 6, 7, 8]  # two more a convolution of three


@pytest.mark.parametrize("prompts", [[[5]], [[7, 8, 9, 10, 11], [12, 13]]])
def test_what_goes_on_token_by_token_is_the_whole_text(prompts: list[list[int]]) -> None:
    model = filled().float()
    sequences, texts = Sequences(model, prompts), [list(prompt) for prompt in prompts]
    found = sequences.logits
    for step in range(5):
        torch.testing.assert_close(found, torch.stack([model(torch.tensor(text))[-1] for text in texts]))
        new = [(31 * step + 7 * row) % 320 for row in range(len(texts))]
        found = sequences.following(new)
        texts = [[*text, token] for text, token in zip(texts, new, strict=True)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_taps": 0}, "conv_taps=0, and layer_types names a layer of short_conv"),
        ({"layer_types": None}, "conv_taps=3, and layer_types names no short_conv"),
        ({"layer_types": ("short_conv",)}, "a layer with attention is needed besides"),
        ({"model_type": "qwen3"}, "conv_taps=3: only the model_type 'penjing' has that"),
        ({"shared_layers": 2}, "conv_taps=3: not beside moe, latent_attention or shared_layers"),
    ],
)
def test_what_is_no_network_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**CONV | changes)


def test_windows_leave_convolutions_as_they_are() -> None:
    config = tiny_config(**CONV)
    made = with_windows(config, [None, 20, None])
    assert made.layer_types == ("short_conv", "sliding_attention", "short_conv")
    assert (made.sliding_window, made.conv_taps) == (20, 3)
    with pytest.raises(ConfigError, match="conv_taps=3, and layer_types names no short_conv"):
        with_windows(config, [20, 20, 20])
