"""Adapters in the engine: as PEFT and as the merged model, several in a batch, each with a cache of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penjing.core.checkpoint.decoder import open_checkpoint, save_checkpoint
from penjing.core.errors import ConfigError, RequestError
from penjing.core.manifest import write_manifest
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.engine.request import Request
from penjing.serve.engine.sequence import NO_ADAPTER, Batch, Sequence
from penjing.serve.runner.adapters import load_adapters
from penjing.serve.runner.load import load_engine
from penjing.serve.runner.step_inputs import StepInputs
from penjing.serve.sampling.params import SamplingParams
from penjing.serve.speculate.rows import StepCosts
from tests.core.artifact.adapters import adapter_tensors, merge, write_adapter
from tests.kernels.cpu import needs_extension
from tests.serve.tiny import CONVOLUTIONS, ids_of, run_all
from tests.train.reference import cases

pytestmark = needs_extension
SIZES = {"num_blocks": 100, "block_size": 4, "max_num_batched_tokens": 64, "max_num_sequences": 16}
PROMPT = list(range(40, 61))
NAMES = (None, "alice", "bob")
FORM = {"kind": "choice", "value": ["what a form forces is guessed, and comes true"]}


def engine_of(base: Path, adapters: dict[str, Path] | None = None, **settings: Any) -> LLMEngine:
    return load_engine(base, EngineConfig.model_validate(SIZES | {"adapters": adapters or {}} | settings))


def request(name: str, adapter: str | None, prompt: list[int] | None = None, **params: Any) -> Request:
    values = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 3, "lora_name": adapter} | params
    return Request(name, prompt or PROMPT, SamplingParams(**values))


def answers(engine: LLMEngine, requests: list[Request]) -> dict[str, list[Any]]:
    """Tokens with their log probabilities, which are exact functions of the logits."""
    found = run_all(engine, requests)
    return {
        f"{name}" if index == 0 else f"{name}.{index}": [
            (token, entry) for o in outputs for token, entry in zip(o.token_ids, o.logprobs or [], strict=True)
        ]
        for (name, index), outputs in found.items()
    }


@pytest.fixture
def adapters(tiny_checkpoint: Path, tmp_path: Path) -> dict[str, Path]:
    ranks = {"alice": 4, "bob": 9}
    return {
        name: write_adapter(tmp_path / name, adapter_tensors(tiny_checkpoint, rank, seed=rank), rank)
        for name, rank in ranks.items()
    }


def test_it_gives_what_peft_gives(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The merged logits of `benchmarks/peers/peft_reference.py`, as log probabilities of their tokens."""
    shapes = {name: tuple(t.shape) for name, t in adapter_tensors(tiny_checkpoint, of=("q_proj", "down_proj")).items()}
    bare = {name.removeprefix("base_model.model."): shape for name, shape in shapes.items()}
    drawn = {f"base_model.model.{n}": torch.tensor(v) for n, v in cases.adapter(bare).items()}
    rank = cases.RANK
    drawn = {name: tensor.float() for name, tensor in drawn.items()}
    folder = write_adapter(tmp_path / "a", drawn, rank, lora_alpha=cases.ALPHA)
    engine = engine_of(tiny_checkpoint, {"a": folder})
    expected = json.loads(Path(cases.__file__).with_name("peft.json").read_text())["merged"]
    tokens = [5, 9, 200, 31]
    found = []
    for token in range(8):  # the log probability of each as the next token
        (outputs,) = run_all(
            engine, [request(f"r{token}", "a", [*tokens, token], prompt_logprobs=0, max_tokens=1)]
        ).values()
        scores = next(o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None)
        assert scores[4] is not None
        found.append(scores[4][token].logprob)
    shifted = torch.tensor(found) - found[0] + expected[0]
    torch.testing.assert_close(shifted, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_equal_tokens_to_the_merged_model_and_bits_as_before_without_one(
    tiny_checkpoint: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    requests = [request(f"{name}", name) for name in NAMES]
    together = answers(engine_of(tiny_checkpoint, adapters), requests)
    assert answers(engine_of(tiny_checkpoint), requests[:1])["None"] == together["None"]
    base = open_checkpoint(tiny_checkpoint)
    for name, folder in adapters.items():
        merged = tmp_path / f"merged-{name}"
        merged.mkdir()
        weights = merge(
            load_file(tiny_checkpoint / "model.safetensors"), load_file(folder / "adapter_model.safetensors"), 2.0
        )
        save_checkpoint(merged, base.config, weights.items(), tokenizer_from=tiny_checkpoint)
        write_manifest(merged, "checkpoint", {"command": "tests"})
        expected = answers(engine_of(merged), [request(name, None)])[name]
        assert [token for token, _ in expected] == [token for token, _ in together[name]]
        for (token, known), (_, got) in zip(expected, together[name], strict=True):
            assert got[token].logprob == pytest.approx(known[token].logprob, abs=1e-4)


GATES = {"model_type": "penjing", "attention_gate": "head", "attention_gate_function": "softplus"}


@pytest.mark.parametrize(
    ("layers", "part", "count"),
    [(CONVOLUTIONS, ".conv.in_proj.", 6), (GATES, ".g_proj.", 4), (GATES | {"attention_gate": "channel"}, ".g_", 4)],
    ids=["convolutions", "gates of heads", "gates of channels"],
)
def test_layers_of_other_kinds_take_adapters(
    make_tiny_checkpoint: Callable[..., Path], tmp_path: Path, layers: dict[str, Any], part: str, count: int
) -> None:
    checkpoint = make_tiny_checkpoint(**layers)
    tensors = adapter_tensors(checkpoint, 4)
    assert sum(part in name for name in tensors) == count
    adapter = {"alice": write_adapter(tmp_path / "alice", tensors, 4)}
    requests = [request(f"{i}", NAMES[i % 2], PROMPT[: 3 + 2 * i]) for i in range(8)]
    engine = engine_of(checkpoint, adapter)
    alone = {each.request_id: answers(engine, [each])[each.request_id] for each in requests}
    assert answers(engine_of(checkpoint, adapter, max_num_batched_tokens=17), requests) == alone
    (tmp_path / "merged").mkdir()
    weights = merge(load_file(checkpoint / "model.safetensors"), tensors, 2.0)
    config = open_checkpoint(checkpoint).config
    save_checkpoint(tmp_path / "merged", config, weights.items(), tokenizer_from=checkpoint)
    write_manifest(tmp_path / "merged", "checkpoint", {"command": "tests"})
    merged = engine_of(tmp_path / "merged")
    for each in requests[1::2]:
        without = each.params.model_copy(update={"lora_name": None})
        expected = answers(merged, [replace(each, params=without)])[each.request_id]
        for (token, known), (_, got) in zip(expected, alone[each.request_id], strict=True):
            assert got[token].logprob == pytest.approx(known[token].logprob, abs=1e-4)


def test_any_company_chunks_and_preemption_leave_every_bit(tiny_checkpoint: Path, adapters: dict[str, Path]) -> None:
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 320, (n,), generator=random).tolist() for n in (1, 3, 8, 21, 30, 37, 44, 50, 9)]
    requests = [request(f"r{i}", NAMES[i % 3], prompt, max_tokens=10 + i) for i, prompt in enumerate(prompts)]
    engine = engine_of(tiny_checkpoint, adapters)
    alone = {r.request_id: answers(engine, [r])[r.request_id] for r in requests}
    for settings in ({}, {"max_num_batched_tokens": 16}, {"num_blocks": 40}, {"enable_prefix_caching": False}):
        crowd = engine_of(tiny_checkpoint, adapters, **settings)
        assert answers(crowd, requests) == alone
        if "num_blocks" in settings:
            assert crowd.stats().num_preemptions > 0


def test_guessed_tokens_have_the_adapter_of_their_answer(
    tiny_checkpoint: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penjing.serve.runner.load.measure_costs", lambda *_: StepCosts({1: 1.0, 2: 1.0, 64: 1.01}))
    requests = [request(f"r{i}", NAMES[1 + i % 2], max_tokens=40, ignore_eos=False, guided=FORM) for i in range(4)]
    fill = StepInputs.fill

    def fill_afresh(inputs: StepInputs, batch: Batch) -> list[Sequence]:
        inputs.adapter.fill_(NO_ADAPTER)  # what the step before left there is often right
        return fill(inputs, batch)

    monkeypatch.setattr(StepInputs, "fill", fill_afresh)
    guessing = engine_of(tiny_checkpoint, adapters, speculate="lookup")
    assert answers(guessing, requests) == answers(engine_of(tiny_checkpoint, adapters), requests)
    assert guessing.stats().spec_decode_num_accepted_tokens > 0


def test_they_come_and_go_while_answers_run(tiny_checkpoint: Path, adapters: dict[str, Path]) -> None:
    alone = answers(engine_of(tiny_checkpoint, adapters), [request(str(name), name, max_tokens=30) for name in NAMES])
    engine = engine_of(tiny_checkpoint)
    pairs = {
        name: load_adapters(tiny_checkpoint, EngineConfig(adapters={name: folder}))[name]
        for name, folder in adapters.items()
    }
    removed: list[int] = []
    remove = engine.runner.remove_adapter
    engine.runner.remove_adapter = lambda slot: (removed.append(slot), remove(slot))[1]  # type: ignore[method-assign]

    def begin(name: str, adapter: str | None) -> None:
        engine.add(request(name, adapter, max_tokens=30))
        found[name] = []
        go(4)

    def go(steps: int) -> None:
        for _ in range(steps):
            for o in engine.step():
                found[o.request_id] += list(zip(o.token_ids, o.logprobs or [], strict=True))

    found: dict[str, list[Any]] = {}
    engine.adapters.add("alice", pairs["alice"])
    begin("first", "alice")
    engine.adapters.add("alice", pairs["bob"])  # other weights of the same name, beside an answer with the old ones
    begin("second", "alice")
    prepared = engine.prepare(request("late", "alice", max_tokens=30))
    engine.adapters.remove("alice")
    with pytest.raises(RequestError, match="no adapter 'alice'; this model has none"):
        engine.prepare(request("third", "alice"))
    begin("plain", None)
    assert removed == []
    go(24)
    assert removed == [0]  # the first answer has ended
    engine.adapters.add("carol", pairs["alice"])  # in the slot that is free
    engine.add_prepared(prepared)  # its adapter has gone since, but not from under it
    del prepared
    found["late"] = []
    begin("carol", "carol")
    go(60)
    assert found == {
        "first": alone["alice"],
        "second": alone["bob"],
        "late": alone["bob"],
        "plain": alone["None"],
        "carol": alone["alice"],
    }
    assert removed == [0, 1]
    assert engine.adapters.names == ["carol"]
    assert not engine.broken_invariants()


def test_each_has_its_own_prefixes(tiny_checkpoint: Path, adapters: dict[str, Path]) -> None:
    engine = engine_of(tiny_checkpoint, adapters)
    cached = {}
    for again in (False, True):
        for name in NAMES:
            (outputs,) = run_all(engine, [request(f"{name}{again}", name)]).values()
            cached[name, again] = outputs[-1].num_cached_tokens
    assert [cached[name, False] for name in NAMES] == [0, 0, 0]
    assert [cached[name, True] for name in NAMES] == [20, 20, 20]


def test_several_answers_to_one_prompt(tiny_checkpoint: Path, adapters: dict[str, Path]) -> None:
    engine = engine_of(tiny_checkpoint, adapters)
    found = answers(engine, [request("r", "alice", n=3), request("other", None)])
    assert found["r"] == found["r.1"] == found["r.2"]
    assert ids_of(run_all(engine, [request("s", "alice")])[("s", 0)]) == [token for token, _ in found["r"]]


def test_who_is_not_there(tiny_checkpoint: Path, adapters: dict[str, Path]) -> None:
    with pytest.raises(RequestError, match="no adapter 'eve'; there are alice, bob"):
        engine_of(tiny_checkpoint, adapters).add(request("r", "eve"))
    with pytest.raises(RequestError, match="this model has none"):
        engine_of(tiny_checkpoint).add(request("r", "eve"))


def test_a_model_without_the_fused_step(
    tiny_checkpoint: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penjing.serve.runner.runner.fuse_decoder", lambda model: None)
    with pytest.raises(ConfigError, match="adapters are for the C\\+\\+ step alone"):
        engine_of(tiny_checkpoint, adapters)


@pytest.mark.parametrize("name", ["1", "2b", "a.b", "a:b", "", "ä", "a" * 64])
def test_names(name: str) -> None:
    with pytest.raises(ValueError, match="adapters"):
        EngineConfig.model_validate({"adapters": {name: "folder"}})


def test_types(tiny_checkpoint: Path, adapters: dict[str, Path]) -> None:
    """In bfloat16 the tokens of a tiny model may differ; the numbers are near."""
    floats = answers(engine_of(tiny_checkpoint, adapters), [request("r", "alice", max_tokens=1)])["r"]
    halves = answers(
        engine_of(tiny_checkpoint, adapters, adapter_dtype="bfloat16"), [request("r", "alice", max_tokens=1)]
    )
    (token, known), (_, got) = floats[0], halves["r"][0]
    assert got != known
    assert got[token].logprob == pytest.approx(known[token].logprob, abs=0.1)
