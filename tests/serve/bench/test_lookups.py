"""Layers that look things up: which are taken of given losses, and what the search asks a tiny model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penjing.core.errors import ConfigError, InputError
from penjing.core.runtime.fused import fuse_decoder
from penjing.serve.bench import lookups
from penjing.serve.bench.lookups import bench_lookups, loss_of, pass_keys, serve_command, take_layers
from penjing.serve.bench.one_sequence import OneSequence
from penjing.serve.engine.config import EngineConfig, KvDtype
from tests.kernels.cpu import needs_extension
from tests.serve.tiny import EOS, tiny_model

CONTEXT = 640  # bytes; a telling and a question are 110
FULL = "attention_full_layers"
FEW = EngineConfig(attention="window+blocks", attention_window=32, attention_budget=64)


def losses_of(table: dict[frozenset[int], float], asked: list[frozenset[int]]):
    def ask(choices: list[frozenset[int]]) -> list[float]:
        asked.extend(choices)
        return [table.get(choice, 3.0) for choice in choices]

    return ask


def test_the_best_layer_is_taken_alone_where_it_is_enough() -> None:
    asked: list[frozenset[int]] = []
    alone = {0: 1.0, 1: 0.19, 2: 0.15, 3: 0.9}
    assert take_layers(1.1, alone, 0.1, losses_of({}, asked)) == ({2}, 0.15)
    assert not asked


def test_a_second_layer_is_looked_for_beside_the_first() -> None:
    asked: list[frozenset[int]] = []
    table = {frozenset({2, 0}): 0.12}
    alone = {0: 1.0, 1: 0.9, 2: 0.5, 3: 0.9}
    assert take_layers(1.1, alone, 0.1, losses_of(table, asked)) == ({0, 2}, 0.12)
    assert set(asked) == {frozenset({2, other}) for other in (0, 1, 3)}


def test_none_is_taken_that_gives_nothing() -> None:
    asked: list[frozenset[int]] = []
    assert take_layers(1.1, {0: 1.09, 1: 1.2}, 0.1, losses_of({}, asked)) == (frozenset(), 1.1)
    assert take_layers(0.15, {0: 0.01, 1: 0.1}, 0.1, losses_of({}, asked)) == (frozenset(), 0.15)
    assert take_layers(1.1, {0: 0.5, 1: 0.6}, 0.1, losses_of({}, asked)) == ({0}, 0.5)  # not all layers
    assert take_layers(1.1, {0: 0.5, 1: 0.6, 2: 0.7}, 0.1, losses_of({}, asked)) == ({0}, 0.5)


def test_a_key_stands_at_its_depth_and_is_asked_for_at_the_end() -> None:
    tokenizer = tiny_model().tokenizer
    keys = pass_keys(tokenizer, CONTEXT, (0.8, 0.2))
    assert [key.at for key in keys] == [512, 128]
    assert [len(key.before) for key in keys] == [512, 0]
    for key in keys:
        assert key.at + len(key.text) + len(key.asked) == CONTEXT
        number = tokenizer.decode(key.asked.tolist())[-key.digits :]
        assert tokenizer.decode(key.text.tolist()).startswith(f"\n\nThe pass key is {number}. Remember")
    with pytest.raises(InputError, match=r"at 0.8 of 320 tokens there is no room for .* take a longer --context"):
        pass_keys(tokenizer, 320, (0.8,))


@needs_extension
@pytest.mark.parametrize(("int8", "kind"), [(False, "float32"), (True, "float16")])
def test_what_is_measured_is_the_loss_of_the_step_with_these_layers(
    monkeypatch: pytest.MonkeyPatch, int8: bool, kind: KvDtype
) -> None:
    """With keys and values as a server of the model keeps them."""
    loaded = tiny_model(int8=int8, max_position_embeddings=CONTEXT, num_hidden_layers=3)
    monkeypatch.setattr(lookups, "load_model", lambda folder: loaded)
    monkeypatch.setattr(lookups, "DEPTHS", (0.4,))
    monkeypatch.setattr(lookups, "MOST", 2)
    monkeypatch.setattr(lookups, "CLOSE", -100.0)  # never near enough, so that a second layer is asked about
    monkeypatch.setattr(lookups, "GAIN", -100.0)
    with pytest.raises(InputError, match=r"does not find a number in 640 tokens .* nothing tells its layers apart"):
        bench_lookups(Path("tiny"), 8192, engine_config=FEW)
    monkeypatch.setattr(lookups, "FOUND", 100.0)
    found = bench_lookups(Path("tiny"), 8192, engine_config=FEW)
    assert found["context"] == CONTEXT
    assert len(found[FULL]) == 2
    assert found["share_of_keys_read"] == pytest.approx((2 * CONTEXT + 64) / (3 * CONTEXT))

    step = fuse_decoder(loaded.model)
    assert step is not None
    (key,) = pass_keys(loaded.tokenizer, CONTEXT, (0.4,))

    def loss(layers: list[int] | None) -> float:
        """From a cache that has summaries of the other layers alone, from the start; None: full attention."""
        engine = EngineConfig() if layers is None else EngineConfig.model_validate(FEW.model_dump() | {FULL: layers})
        cache = OneSequence.make(loaded.config, step, kind, engine, CONTEXT)
        chooses = cache.blocks
        if chooses is not None:
            cache.blocks = replace(chooses, blocks=replace(chooses.blocks, budget=CONTEXT))
        cache.prefill(torch.cat([key.before, key.text]), 0)
        rows = torch.arange(len(key.asked) - key.digits - 1, len(key.asked) - 1)
        return loss_of(cache.run(key.asked, key.at + len(key.text), rows, chooses), key)

    nats = found["nats_a_token_of_the_key"]
    assert nats["full_attention"] == pytest.approx(loss(None), abs=1e-9)
    assert nats["the_first_two_layers"] == pytest.approx(loss([0, 1]), abs=1e-9)
    assert nats["these_layers"] == pytest.approx(loss(found[FULL]), abs=1e-9)
    assert nats["layer_2_alone"] == pytest.approx(loss([2]), abs=1e-9)
    assert len({round(value, 6) for value in nats.values()}) >= 4


def test_the_command_has_what_was_measured_once() -> None:
    given = ["attention_budget=1024", "attention_full_layers=3", "attention=full"]
    assert serve_command(Path("my model"), "int8", given, [7, 18]) == (
        "penjing serve 'my model' --set attention_budget=1024 --set kv_dtype=int8 --set attention=window+blocks "
        "--set 'attention_full_layers=[7,18]'"
    )
    assert serve_command(Path("m"), "auto", [], []).endswith("--set 'attention_full_layers=[]'")


def test_a_text_begins_as_the_tokenizer_begins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_model().tokenizer
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **how: encode(text) if how else [EOS, *encode(text)])
    (key,) = pass_keys(tokenizer, CONTEXT, (0.8,))
    assert (key.before[0], int((key.before == EOS).sum())) == (EOS, 1)
    assert EOS not in key.text
    assert EOS not in key.asked


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"attention_budget": 7},
            "--set: .*budget=7 is not a multiple of attention_block=16; take 16$",
        ),
        ({"attention_window": 64, "attention_budget": 64}, "--set: .*attention_budget=64 is below attention_window=64"),
        ({"tensor_parallel": 2}, "--set: .*tensor_parallel=2 does not go with attention=window"),
    ],
)
def test_settings_that_do_not_fit_are_one_error(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], says: str
) -> None:
    monkeypatch.setattr(lookups, "load_model", lambda folder: tiny_model(max_position_embeddings=CONTEXT))
    with pytest.raises(ConfigError, match=says):
        bench_lookups(Path("tiny"), CONTEXT, engine_config=EngineConfig.model_validate(settings))


def test_a_budget_that_holds_the_text_leaves_nothing_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "load_model", lambda folder: tiny_model(max_position_embeddings=CONTEXT))
    with pytest.raises(ConfigError, match="attention_budget=2048 holds the whole context of 640 tokens"):
        bench_lookups(Path("tiny"), 4096)
