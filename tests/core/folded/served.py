"""What an engine says of a text, and what transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from tests.serve.tiny import run_all


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float(expected.std()) > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-5 * float(expected.abs().max()))


def served(folder: Path, tokens: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Log-probabilities of the tokens after the first, in steps of 16 tokens, as the engine gives them."""
    limits: dict[str, Any] = {
        "max_num_batched_tokens": 16,
        "max_num_sequences": 4,
        "num_blocks": 40,
        "enable_prefix_caching": False,
    }
    engine = load_engine(folder, EngineConfig(**(limits | settings)))
    ids = tokens[0].tolist()
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    (outputs,) = run_all(engine, [Request("a", ids, params)]).values()
    scores = [score for output in outputs for score in output.prompt_logprobs or ()]
    return torch.tensor([each[token].logprob for each, token in zip(scores[1:], ids[1:], strict=True) if each])


def of_transformers(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(tokens).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
