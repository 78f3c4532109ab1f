"""The decoder against transformers on random weights, one small model of each family and each feature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.models.hf_config import decoder_config_from_hf
from penjing.core.runtime.batch_invariant import apply_batch_invariance
from tests.core.models.paged_decoder import Pages

SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 6}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "linear_rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "smollm2": ("llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "qwen3_yarn": ("qwen3", {"head_dim": 16, "rope_parameters": YARN}),
    "yarn_settings": (
        "llama",
        {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.7, "truncate": False}},
    ),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "wide_heads": ("llama", {"head_dim": 20}),
    "mistral": ("mistral", {"sliding_window": 11}),
    "mistral_full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
}


def build(family: str, seed: int = 0) -> tuple[Any, Decoder]:
    """A random transformers model and ours with its weights; biases and norms are random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, changes = FAMILIES[family]
    values = SMALL | changes
    if model_type == "qwen2":
        values = {key: value for key, value in values.items() if key != "head_dim"}
    hf_config = AutoConfig.for_model(model_type, **values)
    torch.manual_seed(seed)
    reference = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    config = decoder_config_from_hf(hf_config.to_dict() | {"architectures": [type(reference).__name__]}, family)
    model = Decoder(config).eval()
    model.load_state_dict(reference.state_dict())
    return reference, model


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, SMALL["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_equal_transformers(family: str) -> None:
    reference, model = build(family)
    ids = tokens(2, 97)
    expected, actual = reference(ids).logits, model(ids)
    assert expected.std() > 0.5
    assert (actual - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen3"])
@torch.inference_mode()
def test_positions_shift_the_rotation(family: str) -> None:
    reference, model = build(family)
    ids, positions = tokens(1, 30), torch.arange(100, 400, 10)[None]
    mask = torch.ones(30, 30, dtype=torch.bool).tril()
    if model.config.sliding_window is not None:
        mask &= ~mask.tril(-model.config.sliding_window)
    additive = torch.zeros(30, 30).masked_fill(~mask, -torch.inf)[None, None]
    expected = reference(ids, position_ids=positions, attention_mask=additive).logits
    assert (model(ids, positions) - expected).abs().max() <= 1e-4
    assert (model(ids) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama3", "yarn", "smollm2", "mistral", "qwen2", "qwen3"])
@torch.inference_mode()
def test_paged_steps_equal_transformers(family: str) -> None:
    reference, model = build(family)
    ids = tokens(3, 60)
    expected = reference(ids).logits
    pages = Pages(model.config, 20, 16)
    blocks = [[3, 1, 4, 15], [9, 2, 6, 5], [8, 0, 7, 11]]
    done, outputs = [0, 0, 0], [[], [], []]
    for step in ([60, 7, 0], [0, 20, 1], [0, 1, 33], [0, 32, 26]):  # rows of each sequence
        rows = [row for row in range(3) if step[row]]
        logits = pages.run(model, [(ids[r, done[r] : done[r] + step[r]], done[r], blocks[r]) for r in rows])
        for row, part in zip(rows, logits.split([step[r] for r in rows]), strict=True):
            outputs[row].append(part)
            done[row] += step[row]
    assert done == [60, 60, 60]
    for row in range(3):
        assert (torch.cat(outputs[row]) - expected[row]).abs().max() <= 1e-4


@pytest.mark.parametrize("family", ["smollm2", "mistral", "qwen3"])
@torch.inference_mode()
def test_served_rows_are_bit_equal_in_any_batch_and_chunking(family: str) -> None:
    _, model = build(family)
    apply_batch_invariance(model)
    ids = tokens(12, 45)
    blocks = torch.randperm(40).tolist()
    alone = Pages(model.config, 40, 16).run(model, [(ids[0], 0, blocks[:3])])

    together = Pages(model.config, 40, 16)
    batch = [(ids[row], 0, blocks[3 * row : 3 * row + 3]) for row in range(12)]
    assert torch.equal(together.run(model, batch)[:45], alone)

    chunks = Pages(model.config, 40, 32)
    start, parts = 0, []
    for size in (1, 2, 17, 5, 20):
        others = [(ids[row, start : start + 1], start, [10 + 2 * row, 11 + 2 * row]) for row in (1, 2)]
        parts.append(chunks.run(model, [*others, (ids[0, start : start + size], start, [0, 5])])[2:])
        # The others decode on: fill what their next step will look back on.
        for row in (1, 2):
            chunks.run(model, [(ids[row, : start + size], 0, [10 + 2 * row, 11 + 2 * row])])
        start += size
    assert torch.equal(torch.cat(parts), alone)


@torch.inference_mode()
def test_logit_rows_picks_tokens() -> None:
    _, model = build("llama2")
    ids = tokens(2, 9)
    rows = torch.tensor([17, 0, 8])
    expected = model(ids).flatten(0, 1)[rows]
    torch.testing.assert_close(model(ids, logit_rows=rows), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(ids[0], logit_rows=rows[1:]), expected[1:], rtol=1e-5, atol=1e-5)


def test_gradients_equal_transformers() -> None:
    reference, model = build("qwen3")
    ids = tokens(2, 21)
    for network in (reference, model):
        output = network(ids)
        logits = output if isinstance(output, Tensor) else output.logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5)


def test_tied_embeddings_share_one_parameter() -> None:
    _, tied = build("smollm2")
    _, untied = build("llama2")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_refuses_no_tokens_and_other_positions() -> None:
    model = Decoder(DecoderConfig(**SMALL))
    with pytest.raises(ValueError, match=r"\(0,\)"):
        model(torch.empty(0, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"positions has shape \(4,\)"):
        model(torch.zeros(3, dtype=torch.int64), torch.arange(4))
