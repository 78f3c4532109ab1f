"""Initial weights: a part has the numbers of the whole, and what is built without data is then as if built with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penjing.core.models.decoder import Decoder
from penjing.train.state.initial import Normal, decoder_weights, fill_weights, materialize, without_data
from tests.conftest import tiny_config

SHAPE = (300, 5, 100)  # three blocks


@given(data=st.data())
def test_a_part_has_the_numbers_of_the_whole(data: st.DataObject) -> None:
    region = []
    for size in SHAPE:
        begin = data.draw(st.integers(0, size))
        region.append(slice(begin, data.draw(st.integers(begin, size))))
    whole = Normal(SHAPE, 0.5, 3, "a")[tuple(slice(0, size) for size in SHAPE)]
    assert torch.equal(Normal(SHAPE, 0.5, 3, "a")[tuple(region)], whole[tuple(region)])


def test_numbers_are_normal_and_independent() -> None:
    everything = tuple(slice(0, size) for size in SHAPE)
    one, name, seed = (Normal(SHAPE, 0.5, s, n)[everything] for n, s in (("a", 3), ("b", 3), ("a", 4)))
    assert abs(one.mean()) < 0.005
    assert one.std() == pytest.approx(0.5, rel=0.01)
    rows = one.flatten(1)
    for other in (name.flatten(1), seed.flatten(1), rows.roll(131, 0)):  # 131 rows are a block
        assert abs((rows * other).mean()) < 0.005


def test_taps_of_convolutions_keep_the_size_of_what_they_sum() -> None:
    weights = decoder_weights(0.02, 8, seed=1)
    for name, shape, size in (("taps", (4096, 1, 4), 0.5), ("out_proj", (256, 256), 0.02 / 4)):
        values = weights(f"model.layers.0.conv.{name}.weight", shape)[tuple(slice(0, length) for length in shape)]
        assert values.std() == pytest.approx(size, rel=0.05)


@pytest.mark.parametrize("model", [{"tie_word_embeddings": True}, {"shared_layers": 2, "model_type": "penjing"}])
def test_a_model_built_without_data_is_as_one_built_with(model: dict[str, Any]) -> None:
    config = tiny_config(**model)
    with without_data():
        late = Decoder(config)
    assert all(parameter.is_meta for parameter in late.parameters())
    parameters = dict(late.named_parameters())
    materialize(late, torch.device("cpu"))
    assert all(parameters[name] is parameter for name, parameter in late.named_parameters())  # tied as before
    early = Decoder(config)
    for decoder in (early, late):
        fill_weights(decoder, decoder_weights(0.02, config.num_hidden_layers, seed=1))
    assert late.state_dict().keys() == early.state_dict().keys()
    assert all(torch.equal(value, late.state_dict()[name]) for name, value in early.state_dict().items())
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(early(tokens), late(tokens))
