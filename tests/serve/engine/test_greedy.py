"""Greedy answers are those of transformers, for prompts of one token, of several blocks and of several chunks."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from penjing.core.checkpoint.load import LoadedModel
from penjing.serve.engine.request import Request, SamplingParams
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
