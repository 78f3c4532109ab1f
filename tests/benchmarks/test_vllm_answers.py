"""What `run_vllm_answers.py` makes of two engines' answers, and the LM head that vLLM is given."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from peers import floating_head
from run_vllm_answers import Answered, ask, equal_share, form_rows, our_engine
from safetensors.torch import load_file, save_file


def test_shares_and_distances_are_of_what_both_read():
    here = Answered("penjing", [[1, 2, 3, 4]], [[(-1.0, 1), (-2.0, 3), (-0.5, 1)]])
    there = Answered("vLLM", [[1, 2, 9, 4]], [[(-1.2, 1), (-2.0, 2), (-0.6, 1)]])
    found = {row.metric: row.value for row in form_rows("w8a8/vllm", here, there, length=2)}
    assert found["w8a8/vllm/equal_tokens"] == 50
    assert found["w8a8/vllm/likeliest"] == 50  # of the two tokens behind a prompt of two
    assert found["w8a8/vllm/nats_apart"] == 0.1
    assert found["w8a8/vllm/perplexity_rise"] == pytest.approx(100 * (math.exp(-0.2) - 1), rel=1e-3)


def test_tokens_count_up_to_the_first_that_differs():
    assert equal_share([1, 2, 3], [1, 2, 3]) == 1
    assert equal_share([7, 2, 3], [1, 2, 3]) == 0


def test_our_engine_reads_what_it_answered(tiny_checkpoint: Path):
    engine = our_engine(tiny_checkpoint, 2)
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    answers, _ = ask(engine, prompts, 4)
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    read = ask(engine, texts, 1)[1]
    assert [len(text) for text in read] == [6, 7]
    assert all(rank == 1 for text, prompt in zip(read, prompts, strict=True) for _, rank in text[len(prompt) - 1 :])


def test_the_head_is_its_integers_times_their_scales(tmp_path: Path):
    artifact, out = tmp_path / "int8", tmp_path / "out"
    artifact.mkdir()
    head = {"lm_head.weight": torch.tensor([[2, -4]], dtype=torch.int8), "lm_head.weight_scale": torch.tensor([[0.5]])}
    save_file(head | {"other": torch.ones(2)}, artifact / "model.safetensors")
    (artifact / "config.json").write_text(json.dumps({"quantization_config": {"ignore": []}}))
    floating_head.main(artifact, out)
    tensors = load_file(out / "model.safetensors")
    assert set(tensors) == {"lm_head.weight", "other"}
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    assert tensors["lm_head.weight"].tolist() == [[1, -2]]
    assert json.loads((out / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]
