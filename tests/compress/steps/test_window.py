"""Layers that see fewer tokens back: the same network as transformers' with masks, and served as such."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penjing.compress.run import run_recipe
from penjing.compress.steps.window import narrowed
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import decoder_config_from_hf, decoder_config_to_hf
from penjing.serve.engine.request import Request
from penjing.serve.sampling.params import SamplingParams
from tests.compress.search.test_decoder import base
from tests.serve.tiny import ids_of, run_all, tiny_engine


def windowed(model: Path, folder: Path, *windows: int) -> Path:
    values = base(model, folder / "out") | {"steps": [{"kind": "window", "windows": list(windows)}]}
    run_recipe(values)
    return folder / "out"


@torch.no_grad()
def with_masks(model: Path, tokens_1T: torch.Tensor, windows: list[int]) -> torch.Tensor:
    """Logits of transformers' Llama, whose layers get a mask each."""
    llama: Any = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    places = torch.arange(tokens_1T.shape[1])
    back_TT = places[:, None] - places
    hidden = llama.model.embed_tokens(tokens_1T)
    turns = llama.model.rotary_emb(hidden, places[None])
    for layer, window in zip(llama.model.layers, windows, strict=True):
        seen = (back_TT >= 0) & (back_TT < (window or len(places)))
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        hidden = layer(hidden, attention_mask=mask, position_embeddings=turns)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return llama.lm_head(llama.model.norm(hidden))


def test_each_layer_sees_its_window(make_tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = make_tiny_checkpoint(num_hidden_layers=3)
    made = windowed(model, tmp_path, 5, 0, 12)
    tokens = torch.randint(0, 200, (1, 40), generator=torch.Generator().manual_seed(1))
    loaded = load_model(made)
    assert loaded.config.model_type == "penjing"  # Llama has no windows
    with torch.no_grad():
        own = loaded.model(tokens)
    torch.testing.assert_close(own, with_masks(model, tokens, [5, 0, 12]), atol=1e-4, rtol=1e-4)
    engine = tiny_engine(loaded)
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    outputs = run_all(engine, [Request("a", tokens[0].tolist(), greedy)])
    row = tokens
    for _ in range(6):
        row = torch.cat([row, with_masks(model, row, [5, 0, 12])[:, -1:].argmax(-1)], dim=1)
    assert ids_of(outputs["a", 0]) == row[0, 40:].tolist()


def test_a_type_that_has_windows_is_kept(make_tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = make_tiny_checkpoint(model_type="mistral", sliding_window=64)
    made = load_model(windowed(model, tmp_path, 16)).config
    assert (made.model_type, made.sliding_window, made.layer_types) == ("mistral", 16, None)


def config_of(**given: Any) -> DecoderConfig:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
    return DecoderConfig.model_validate(sizes | heads | given)


def test_a_short_list_repeats() -> None:
    made = narrowed(config_of(), (16, 0))
    assert [made.layer_window(layer) for layer in range(4)] == [16, None, 16, None]
    assert made.sliding_windows is None  # they are alike
    made = narrowed(config_of(sliding_window=64), (16, 0))
    assert [made.layer_window(layer) for layer in range(4)] == [16, 64, 16, 64]
    assert made.sliding_windows == (16, 64, 16, 64)
    assert made.model_type == "penjing"
    assert decoder_config_from_hf(decoder_config_to_hf(made), "config.json") == made
    with pytest.raises(InputError, match="sliding_windows"):
        decoder_config_to_hf(made.model_copy(update={"model_type": "mistral", "layer_types": None}))


@pytest.mark.parametrize(
    ("given", "windows", "said"),
    [
        ({}, (1, 2, 3, 4, 5), "windows has 5 numbers, and the network 4 layers"),
        ({}, (512,), "layer 0 sees 512 tokens as it is; give fewer than 512, or 0"),
        ({"sliding_window": 8}, (0, 8), "layer 1 sees 8 tokens as it is"),
        ({}, (0, -3), "-3 of layer 1 is negative"),
        ({"layer_types": ["lsh_attention", "full_attention"]}, (8,), "layer 0 has lsh_attention"),
    ],
)
def test_windows_that_do_not_fit_are_refused(given: dict[str, Any], windows: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        narrowed(config_of(**given), windows)


@pytest.mark.parametrize("sizes", [[8, 0, 8], [8, 0, 8, 0], [4, 0, 4, 4], [0, 0, 8, 8]])
def test_sizes_by_layer_fit_the_types(sizes: list[int]) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="the largest of them sliding_window=8"):
        config_of(sliding_window=8, layer_types=types, sliding_windows=sizes)


def test_layers_leave_with_their_windows(make_tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = make_tiny_checkpoint(num_hidden_layers=4)
    values = base(model, tmp_path / "out")
    values["steps"] = [
        {"kind": "window", "windows": [5, 0, 12, 7]},
        {"kind": "prune", "parts": ["layers"], "layers": [2]},
    ]
    run_recipe(values)
    made = load_model(tmp_path / "out").config
    assert [made.layer_window(layer) for layer in range(3)] == [5, None, 7]
