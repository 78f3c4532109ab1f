"""Mixtures: shares, the rule of perplexity as scripted, noise, and the same batches on any number of processes."""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Silent
from penjing.train.checks import with_steps
from penjing.train.data.mixing import Mixing, MixingConfig
from penjing.train.data.mixture import MixtureOrder, mixed, quotas
from penjing.train.data.prefetch import Prefetched
from penjing.train.data.shards import ShardIndex, ShardWriter, TokenShards, write_index
from penjing.train.data.stream import OrderedStream
from penjing.train.families.base import build_task
from penjing.train.objective.objective import IGNORED
from penjing.train.processes.world import World
from penjing.train.recipe.load import load_train_recipe

ANY = {"a": True, "b": True, "c": True}


@given(
    weights=st.lists(st.floats(0, 1), min_size=1, max_size=6).filter(lambda each: sum(each) > 0.01),
    batch=st.integers(1, 40),
    turn=st.integers(0, 20),
)
@settings(max_examples=100, deadline=None)
def test_quotas_follow_the_weights_within_a_sample(weights: list[float], batch: int, turn: int) -> None:
    owed = np.zeros(len(weights))
    first, then = np.array(weights) / sum(weights), np.array(weights[::-1]) / sum(weights)
    total = np.zeros(len(weights))
    wanted = np.zeros(len(weights))
    for step in range(40):
        now = first if step < turn else then
        given_ = quotas(now, batch, owed)
        assert given_.sum() == batch
        assert given_.min() >= 0
        total += given_
        wanted += now * batch
        assert np.abs(total - wanted).max() <= len(weights)
        assert (np.abs(given_ - now * batch) <= 1 + len(weights)).all()
    if turn == 0:
        assert np.abs(total - wanted).max() <= 1 + 1e-6


def weights_after(config: MixingConfig, perplexities: list[dict[str, float]]) -> list[dict[str, float]]:
    mixing = Mixing(config, dict.fromkeys(perplexities[0], 100))
    found = []
    for each in perplexities:
        mixing.hear({name: math.log(value) for name, value in each.items()}, ANY)
        found.append(dict(mixing.weights))
    return found


def test_three_rises_in_a_row_multiply_the_odds() -> None:
    config = MixingConfig(kind="perplexity", weights={"a": 0.9, "b": 0.1}, min_rise=0, max_share=1)
    series = [10, 11, 12, 11, 12, 13, 14, 15, 16, 17, 17]  # the third rise in a row comes 7th, then 10th
    found = weights_after(config, [{"a": 10.0, "b": float(value)} for value in series])
    odds = [each["b"] / each["a"] for each in found]
    expected = [1.0] * 6 + [1.15] * 3 + [1.15**2] * 2
    assert odds == pytest.approx([each / 9 for each in expected])
    assert all(sum(each.values()) == pytest.approx(1) for each in found)


def test_a_raise_rests_has_a_ceiling_and_needs_data() -> None:
    rising = [{"a": 10.0, "b": 10.0 + step} for step in range(9)]
    rested = MixingConfig(kind="perplexity", weights={"a": 0.5, "b": 0.5}, min_rise=0, cooldown=3)
    assert [each["b"] > 0.5 for each in weights_after(rested, rising)] == [False] * 3 + [True] * 6
    assert weights_after(rested, rising)[-1]["b"] == pytest.approx(1.15**2 / (1 + 1.15**2))
    ceiling = MixingConfig(kind="perplexity", weights={"a": 0.5, "b": 0.5}, min_rise=0, max_share=0.52)
    assert weights_after(ceiling, rising)[-1] == {"a": 0.5, "b": 0.5}
    mixing = Mixing(MixingConfig(kind="perplexity", min_rise=0), {"a": 1, "b": 1})
    for each in rising:
        mixing.hear({name: math.log(value) for name, value in each.items()}, {"a": True, "b": False})
    assert mixing.weights == {"a": 0.5, "b": 0.5}


def test_noise_raises_nothing_and_a_real_rise_is_found() -> None:
    dice, raised = np.random.default_rng(3), 0
    for _ in range(100):
        mixing = Mixing(MixingConfig(kind="perplexity"), {"a": 1, "b": 1})
        for _ in range(100):
            losses = dict(zip("ab", np.log(10 + dice.normal(0, 0.1, 2)).tolist(), strict=True))
            raised += len(mixing.hear(losses, ANY))
    assert raised / 200 <= 0.1  # of 100 evaluations of a domain; 3.2 without the guard
    config = MixingConfig(kind="perplexity", weights={"a": 0.5, "b": 0.5})
    flat = [10.0, 10.1, 9.9, 10.0, 10.1, 9.95, 10.05, 9.9, 10.1, 10.0]
    found = weights_after(config, [{"a": 10.0, "b": value} for value in [*flat, 10.4, 10.8, 11.2]])
    assert found[-1]["b"] == pytest.approx(1.15 / 2.15)
    assert found[-2]["b"] == 0.5


def test_first_weights_of_each_kind() -> None:
    sizes = {"a": 900, "b": 100}
    first = {
        kind: Mixing(parse_config(MixingConfig, {"kind": kind}, ""), sizes).weights
        for kind in ("fixed", "temperature", "stratified", "perplexity", "odm")
    }
    assert first["fixed"] == first["perplexity"] == {"a": 0.9, "b": 0.1}
    assert first["temperature"] == {"a": 0.75, "b": 0.25}
    assert first["stratified"] == first["odm"] == {"a": 0.5, "b": 0.5}
    with pytest.raises(ConfigError, match="weights name a, c, the domains are a, b; give each its weight"):
        Mixing(MixingConfig(kind="fixed", weights={"a": 1, "c": 1}), sizes)
    with pytest.raises(ConfigError, match="weights are for fixed and perplexity"):
        parse_config(MixingConfig, {"kind": "odm", "weights": {"a": 1}}, "")
    with pytest.raises(ConfigError, match="must be 0 or more"):
        parse_config(MixingConfig, {"kind": "fixed", "weights": {"a": -1}}, "")


def test_the_bandit_prefers_high_losses_and_explores_less() -> None:
    mixing = Mixing(MixingConfig(kind="odm"), {"a": 1, "b": 1, "c": 1})
    lowest = []
    for _ in range(30):
        mixing.hear({"a": 5.0, "b": 2.0, "c": 2.0}, ANY)
        lowest.append(mixing.weights["b"])
        assert sum(mixing.weights.values()) == pytest.approx(1)
    assert mixing.weights["a"] > mixing.weights["b"] == pytest.approx(mixing.weights["c"])
    assert lowest[0] == pytest.approx(1 / 3)
    assert min(lowest) > 0.1


def test_a_loss_that_is_no_number_is_named() -> None:
    with pytest.raises(InputError, match="the held-out loss of domain 'b' is nan"):
        Mixing(MixingConfig(kind="perplexity"), {"a": 1, "b": 1}).hear({"a": 1.0, "b": math.nan}, ANY)


@pytest.fixture
def shards(tmp_path: Path) -> dict[str, TokenShards]:
    """Domains of 400, 100 and 60 tokens; a token tells its domain and place."""
    splits = {}
    for place, (name, tokens) in enumerate({"a": 400, "b": 100, "c": 60}.items()):
        writer = ShardWriter(tmp_path, f"train-{name}", 4000)
        writer.add([1000 * place + token for token in range(tokens)])
        splits[name] = writer.close()
    write_index(tmp_path, ShardIndex(dtype="uint16", vocab_size=4000, end_of_text=0, splits=splits))
    return {name: TokenShards(tmp_path, name) for name in splits}


def stream(
    shards: dict[str, TokenShards], world: int = 1, rank: int = 0, micro: int = 4, **more: object
) -> OrderedStream[MixtureOrder]:
    config = MixingConfig(kind="perplexity", weights={"a": 0.5, "b": 0.3, "c": 0.2}, min_rise=0, rises=1, max_epochs=99)
    mixing = Mixing(config, dict.fromkeys(shards, 1))
    return mixed(
        shards,
        mixing,
        8,
        batch_size=8,
        micro_batch=micro,
        rank=rank,
        world_size=world,
        seed=5,
        **more,  # type: ignore[arg-type]
    )


LOSSES = [{"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1.0, "b": 1.1, "c": 1.0}, {"a": 1.0, "b": 1.2, "c": 1.1}]


def steps_of(streams: list[OrderedStream[MixtureOrder]], parts: int, steps: int, every: int = 3) -> list[list[int]]:
    """The first tokens of the real rows of each step, heard losses after every third."""
    found = []
    for step in range(1, steps + 1):
        rows: list[int] = []
        for _ in range(parts):
            for each in streams:
                batch = next(each)
                real = (batch["targets"] != IGNORED).any(1)
                rows += batch["tokens"][:, 0][real].tolist()
        found.append(rows)
        if step % every == 0 and step // every <= len(LOSSES):
            for each in streams:
                each.order.hear(LOSSES[step // every - 1])
    return found


@pytest.mark.parametrize(("world", "micro"), [(2, 4), (4, 2), (4, 1), (3, 2), (1, 8), (1, 3)])
def test_batches_are_the_same_on_any_number_of_processes(
    shards: dict[str, TokenShards], world: int, micro: int
) -> None:
    one = steps_of([stream(shards)], 2, 20)
    parts = -(-8 // (world * micro))
    many = steps_of([stream(shards, world, rank, micro) for rank in range(world)], parts, 20)
    assert many == one
    counts = np.array([np.bincount(np.array(step) // 1000, minlength=3) for step in one])
    assert np.abs(counts[:6].sum(0) - 48 * np.array([0.5, 0.3, 0.2])).max() <= 1
    assert counts[9:].sum(0)[1] > counts[9:].sum(0)[0] * 0.65  # 0.3/0.5 = 0.6 before the raises
    flat = [token for step in one[:12] for token in step if token < 1000]
    assert len(set(flat)) == min(len(flat), 49)  # no sample twice before its epoch is over


def test_a_run_goes_on_with_the_same_batches_and_weights(shards: dict[str, TokenShards]) -> None:
    whole = steps_of([stream(shards)], 2, 9)
    first = stream(shards)
    begun = steps_of([first], 2, 6)
    state = json.loads(json.dumps(first.state_dict()))
    second = stream(shards, micro=8)
    second.load_state_dict(state)
    rest = [next(second)["tokens"][:, 0].tolist() for _ in range(3)]
    assert begun + rest == whole
    assert second.order.mixing.weights == first.order.mixing.weights != stream(shards).order.mixing.weights


def test_what_was_read_ahead_is_dropped_when_weights_change(shards: dict[str, TokenShards]) -> None:
    def heard(mixture: OrderedStream[MixtureOrder], losses: dict[str, float]) -> list[str]:
        return mixture.order.hear(losses)

    plain, ahead = stream(shards, micro=8), Prefetched(stream(shards, micro=8), depth=4)
    for _ in range(3):
        assert torch.equal(next(plain)["tokens"], next(ahead)["tokens"])
    for losses in LOSSES[:2]:
        assert plain.order.hear(losses) == ahead.change(partial(heard, losses=losses))
    for _ in range(5):
        assert torch.equal(next(plain)["tokens"], next(ahead)["tokens"])
    ahead.close()


def test_what_does_not_fit_is_refused(shards: dict[str, TokenShards]) -> None:
    sizes = dict.fromkeys(shards, 1)
    state = stream(shards).state_dict()
    few = {name: each for name, each in shards.items() if name != "c"}
    other = mixed(few, Mixing(MixingConfig(kind="fixed"), {"a": 1, "b": 1}), 8, batch_size=8, micro_batch=8)
    with pytest.raises(InputError, match="made with the domains a, b, c, this run has a, b"):
        other.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"100 steps would repeat domain 'b' 53.3 times, more than max_epochs = 4"):
        mixed(
            shards, Mixing(MixingConfig(kind="fixed", weights={"a": 0.2, "b": 0.8, "c": 0.0}), sizes),
            8, batch_size=8, micro_batch=8, steps=100,
        )  # fmt: skip
    with pytest.raises(InputError, match="domain 'c' has less than one sequence of 64 tokens"):
        mixed(shards, Mixing(MixingConfig(kind="fixed"), sizes), 64, batch_size=8, micro_batch=8)


RECIPE_CHANGES = [
    "steps=6", "evaluation.every=2", "evaluation.samples=8", "checkpoint.every=2", "data.batch_size=4",
    "data.sequence_length=16", "data.held_out=0.1",
]  # fmt: skip


def mixed_recipe(recipe: Path, folder: Path, sources: list[str]) -> Path:
    """`recipe` on `sources`, in `folder`."""
    text = recipe.read_text()
    begin = text.index("shards = ")
    mixed = folder / "mixed.toml"
    mixed.write_text(text[:begin] + f"sources = {json.dumps(sources)}" + text[text.index("\n", begin) :])
    return mixed


def run(recipe: Path, folder: Path, sources: list[str]) -> list[dict[str, float]]:
    """The records of a run on `sources` by the rule of perplexity, every rise taken."""
    from penjing.train.run import train

    mixed = mixed_recipe(recipe, folder, sources)
    mixing = {"kind": "perplexity", "min_rise": 0, "rises": 1, "max_epochs": 1000}
    changes = [*RECIPE_CHANGES, *(f"data.mixing.{name}={json.dumps(value)}" for name, value in mixing.items())]
    train(mixed, [*changes, f"output={folder}/out", "learning_rate.peak=0.05"])
    return [json.loads(line) for line in (folder / "out-run" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_records_each_domain_and_moves_the_mixture(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"number {n} " * 30, "domain": "one/two"}) + "\n" for n in range(40))
    )
    (tmp_path / "b.txt").write_text("\n\n".join(f"line {n * 7919 % 1000} of another text" for n in range(300)))
    records = run(recipe, tmp_path, [str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")])
    heard = [each for each in records if "mixing/b.txt" in each]
    losses = [each for each in records if "eval/loss/b.txt" in each]
    assert len(heard) == len(losses) == 3
    assert all(each["mixing/b.txt"] + each["mixing/one/two"] == pytest.approx(1) for each in heard)
    rose = {"b.txt": 0, "one/two": 0}
    for each in losses:
        low, high = sorted(each[f"eval/loss/{name}"] for name in rose)
        assert low <= each["eval/loss"] <= high
    for before, after in pairwise(losses):
        for name in rose:
            rose[name] += after[f"eval/loss/{name}"] > before[f"eval/loss/{name}"]
    odds = [each["mixing/b.txt"] / each["mixing/one/two"] for each in heard]
    assert odds[-1] == pytest.approx(odds[0] * 1.15 ** (rose["b.txt"] - rose["one/two"]))


def test_a_domain_without_text_to_train_on_is_refused(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "a.jsonl"
    rows = [{"text": f"number {n * 7919 % 1000} " * 30, "domain": "main"} for n in range(40)]
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"text": "x", "domain": "one letter"}]))
    with pytest.raises(ConfigError, match=r"domains one letter are held out as a whole, with nothing to train on"):
        run(recipe, tmp_path, [str(source)])


def test_epochs_are_steps_by_which_repeated_domains_are_refused(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    for name, count in (("small", 20), ("large", 200)):
        texts = (" ".join(f"{n * place * 7919 % 1009}" for place in range(40)) for n in range(1, count))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    mixed = mixed_recipe(recipe, tmp_path, [str(tmp_path / "small.jsonl"), str(tmp_path / "large.jsonl")])
    settings = [*RECIPE_CHANGES, "data.mixing.kind=stratified", "data.mixing.max_epochs=1.5", "steps=0"]
    few, many = (load_train_recipe(mixed, [*settings, f"epochs={epochs}"]) for epochs in (0.1, 1))
    task = build_task(few, Silent())
    steps = with_steps(few, task).steps
    assert steps > 0
    stream = task.stream(4, World())
    assert isinstance(stream, OrderedStream)
    assert stream.order._steps == steps
    with pytest.raises(ConfigError, match=r"[0-9,]+ steps would repeat domain 'small.jsonl' [0-9.]+ times"):
        with_steps(many, build_task(many, Silent()))
