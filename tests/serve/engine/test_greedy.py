"""Greedy answers are those of transformers, for prompts of one token, of several blocks and of several chunks."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from penjing.core.checkpoint.load import LoadedModel
from penjing.serve.engine.request import Request
from penjing.serve.sampling.params import SamplingParams
from tests.serve.tiny import CONTEXT, VOCAB_SIZE, ids_of, run_all, tiny_engine, tiny_model


@pytest.mark.parametrize("window", [None, 12])
def test_greedy_answers_equal_transformers_generate(window: int | None) -> None:
    loaded = tiny_model(seed=1, sliding_window=window, model_type="llama" if window is None else "mistral")
    reference = _transformers_model(loaded, window)
    engine = tiny_engine(loaded, max_num_batched_tokens=32)
    random = Random(1)
    for length in (1, 40, 90):
        prompt = [random.randrange(256) for _ in range(length)]
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
        )[0, length:].tolist()
        (outputs,) = run_all(
            engine, [Request("r", prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))]
        ).values()
        assert ids_of(outputs) == expected


@pytest.mark.parametrize("caching", [True, False])
def test_scores_of_a_prompt_equal_transformers(caching: bool) -> None:
    loaded = tiny_model(seed=2)
    reference = _transformers_model(loaded, None)
    engine = tiny_engine(loaded, max_num_batched_tokens=32, enable_prefix_caching=caching)
    random = Random(2)
    for length in (1, 2, 33, 70):
        prompt = [random.randrange(256) for _ in range(length)]
        with torch.no_grad():
            expected = torch.log_softmax(reference(torch.tensor([prompt])).logits[0].double(), -1)
        params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, ignore_eos=True, n=2)
        for _ in range(2):  # the second time the prompt is in the cache
            outputs = run_all(engine, [Request("r", prompt, params), Request("s", prompt[::-1], SamplingParams())])
            scores = outputs["r", 0][0].prompt_logprobs
            assert scores is not None
            assert scores[0] is None
            assert len(scores) == length
            for position, entry in enumerate(scores[1:], start=1):
                assert entry is not None
                row = expected[position - 1]
                assert prompt[position] in entry
                assert len(entry) in (2, 3)
                for token, score in entry.items():
                    assert score.logprob == pytest.approx(float(row[token]), abs=2e-5)
                    assert score.rank == 1 + int((row > row[token]).sum())
            rest = [*outputs["r", 0][1:], *outputs["r", 1], *outputs["s", 0]]
            assert all(output.prompt_logprobs is None for output in rest)


def _transformers_model(loaded: LoadedModel, window: int | None) -> Any:
    config = loaded.config
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if window is None:
        model: Any = LlamaForCausalLM(LlamaConfig(**common))
    else:
        model = MistralForCausalLM(MistralConfig(**common, sliding_window=window))
    model.load_state_dict(loaded.model.state_dict())
    return model.eval()
