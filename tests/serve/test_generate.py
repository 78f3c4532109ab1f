"""The engine on model folders: `penjing generate`, the benchmark's figures, and SmolLM2 against transformers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penjing.core.cli import _run
from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError, RequestError
from penjing.serve.bench.engine import bench_engine
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.request import Request
from penjing.serve.generate import generate_stream, generate_to_terminal
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from tests.serve.tiny import ids_of, run_all, text_of

PROMPTS = ["The bonsai tree", "def fibonacci(n):\n", "Q: What is the capital of France?\nA:"]


def test_generate_streams_to_the_terminal(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = text_of(list(generate_stream(tiny_checkpoint, "in the", params)))
    generate_to_terminal(tiny_checkpoint, "in the", {"temperature": 0, "max_tokens": 12})
    shown = capsys.readouterr()
    assert shown.out == expected + "\n"
    assert "12 new tokens" in shown.err or "ended by stop" in shown.err


def test_a_prompt_from_a_pipe_may_begin_with_a_byte_order_mark(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    for text in ("in the", "\ufeffin the"):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert _run(["generate", str(tiny_checkpoint), "-", "--max-tokens", "4", "--temperature", "0"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


def test_the_commands_guess_tokens_on_demand_and_none_changes(
    make_tiny_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = make_tiny_checkpoint(max_position_embeddings=1024)
    shown = []
    for speculate in ("off", "lookup"):
        assert _run(["generate", str(folder), "in the", "--max-tokens", "12", "--speculate", speculate]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    figures = tmp_path / "figures.json"
    arguments = ["--runs", "1", "--speculate", "lookup", "--json", str(figures)]
    assert _run(["bench", "engine", str(folder), *arguments]) == 0
    found = json.loads(figures.read_text())["speculation"]
    assert found["drafter"] == "lookup"
    assert found["draft_tokens"] >= found["accepted_tokens"]
    assert found["tokens_a_step"] >= 1
    with pytest.raises(ConfigError, match="speculate"):
        parse_config(EngineConfig, {"speculate": "guess"}, "--set")


def test_chat_applies_the_template(tiny_checkpoint: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    outputs = list(generate_stream(tiny_checkpoint, "in", params, chat=True))
    template = "<|im_start|>user\nin<|im_end|>\n<|im_start|>assistant\n"
    expected = list(generate_stream(tiny_checkpoint, template, params))
    assert outputs[0].num_prompt_tokens == expected[0].num_prompt_tokens
    assert ids_of(outputs) == ids_of(expected)


def test_chat_without_a_template_and_bad_parameters_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (bare / name).write_bytes((tiny_checkpoint / name).read_bytes())
    with pytest.raises(InputError, match="no chat template"):
        next(generate_stream(bare, "in", chat=True))
    with pytest.raises(RequestError, match="top_p must be"):
        generate_to_terminal(tiny_checkpoint, "in", {"top_p": 7})


def test_the_benchmark_gives_every_figure(make_tiny_checkpoint: Callable[..., Path]) -> None:
    figures = bench_engine(make_tiny_checkpoint(max_position_embeddings=1024), runs=1)
    assert set(figures["tokens_per_second"]) == {"prefill_512", "one_stream", "streams_16", "decode_only_16"}
    assert all(value > 0 for value in figures["tokens_per_second"].values())
    assert figures["inter_token_ms"]["streams_16"]["p50"] > 0
    # 16 sequences end between 128 and 192 tokens in blocks of 16: at most 15 of the last 16 slots are empty.
    assert 0 <= figures["kv_cache"]["waste"] < 15 / 128


def test_the_benchmark_refuses_a_short_context(tiny_checkpoint: Path) -> None:
    with pytest.raises(InputError, match="513"):
        bench_engine(tiny_checkpoint, runs=1)


def test_smollm2_answers_as_transformers_does_alone_batched_and_from_the_cache(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM

    engine = load_engine(smollm2, EngineConfig(block_size=4, max_num_batched_tokens=8, max_num_sequences=4))
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    alone = {
        prompt: ids_of(run_all(engine, [Request(prompt, prompt, params)])[prompt, 0])  # one at a time
        for prompt in PROMPTS
    }
    reference: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    for prompt in PROMPTS:
        ids = torch.tensor([engine.tokenizer.encode(prompt)])
        generated = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
        assert alone[prompt] == generated[0, ids.shape[1] :].tolist()
    hits = engine.stats().prefix_cache_hits
    together = run_all(engine, [Request(prompt, prompt, params) for prompt in PROMPTS])
    assert {prompt: ids_of(together[prompt, 0]) for prompt in PROMPTS} == alone
    assert engine.stats().prefix_cache_hits > hits
