"""SmolLM2-135M-Instruct: paged greedy decoding of prompts, one batch, beside transformers on the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from penjing.core.checkpoint.load import load_model
from penjing.core.models.decoder import Decoder
from penjing.kernels.dispatch import force_torch
from tests.core.models.paged_decoder import Pages

PROMPTS = [
    "Once upon a time, in a village by the sea,",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about snow.<|im_end|>\n<|im_start|>assistant\n",
    "La vie est belle parce que",
    "盆景是一种",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
    "The three laws of thermodynamics are as follows. First,",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\ndef softmax(x):",
    "SELECT name, age FROM users WHERE",
    "Ingredients:\n- 2 eggs\n- 100 g flour\n",
    "a",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "🙂 means",
    "In 1969, Neil Armstrong",
    "To be, or not to be, that is the question:",
]
NEW_TOKENS = 64
BLOCK_SIZE = 16


def greedy(model: Decoder, prompts: list[list[int]]) -> tuple[list[list[int]], list[Tensor]]:
    """All tokens of each sequence, and the logits (tokens − 1, V) that chose or scored them, in batched paged steps."""
    blocks_each = -(-(max(map(len, prompts)) + NEW_TOKENS) // BLOCK_SIZE)
    order = torch.randperm(blocks_each * len(prompts), generator=torch.Generator().manual_seed(0)).tolist()
    tables = [order[row * blocks_each : (row + 1) * blocks_each] for row in range(len(prompts))]
    pages = Pages(model.config, len(order), BLOCK_SIZE)

    sequences, logits = [list(prompt) for prompt in prompts], [[] for _ in prompts]
    pending = [(torch.tensor(prompt), 0) for prompt in prompts]
    for _ in range(NEW_TOKENS):
        step = pages.run(model, [(ids, past, table) for (ids, past), table in zip(pending, tables, strict=True)])
        for row, part in enumerate(step.split([len(ids) for ids, _ in pending])):
            logits[row].append(part)
            sequences[row].append(int(part[-1].argmax()))
            pending[row] = (torch.tensor(sequences[row][-1:]), len(sequences[row]) - 1)
    return sequences, [torch.cat(parts) for parts in logits]


@pytest.mark.xdist_group("smollm2")
@pytest.mark.parametrize("texts", [PROMPTS[::5], pytest.param(PROMPTS, marks=pytest.mark.full)], ids=["some", "all"])
@torch.inference_mode()
def test_logits_and_64_greedy_tokens_equal_transformers(smollm2: Path, texts: list[str]) -> None:
    from transformers import AutoModelForCausalLM

    loaded = load_model(smollm2)
    prompts = [loaded.tokenizer.encode(prompt) for prompt in texts]
    sequences, logits = greedy(loaded.model, prompts)
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for index, (prompt, sequence, ours) in enumerate(zip(prompts, sequences, logits, strict=True)):
        ids = torch.tensor([sequence[:-1]])
        expected = reference(ids).logits[0]
        # Each token being transformers' choice after the ones before it, its own greedy run writes the same.
        assert expected[len(prompt) - 1 :].argmax(-1).tolist() == sequence[len(prompt) :]
        assert ours.shape == expected.shape
        # Logits reach 45. Against float64, transformers' own are off by up to 0.9e-4 and those of the C++ kernels by
        # 1.1e-4; the torch path sums in the order of transformers and stays nearer to it.
        assert (ours - expected).abs().max() <= 2e-4
        if index % 3 == 0:
            with force_torch():
                assert (loaded.model(ids)[0] - expected).abs().max() <= 1e-4
