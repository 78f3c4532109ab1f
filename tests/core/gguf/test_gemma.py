"""Gemma 3 in GGUF: a random network of transformers, laid out as llama.cpp's converter does, keeps its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.gguf.file import GgufFile
from penjing.core.imports.importer import import_model
from penjing.core.models.config import DecoderConfig
from tests.conftest import tiny_tokenizer_fields
from tests.core.gguf import gguf_files

NAMES = {  # of transformers, in place of ours
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write(path: Path, monkeypatch: pytest.MonkeyPatch, metadata: dict[str, Any] | None = None) -> Any:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=12,
        max_position_embeddings=512,
    )
    model: Any = Gemma3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    monkeypatch.setattr(gguf_files, "NAMES", gguf_files.NAMES | NAMES)
    ours = DecoderConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        rope_theta=1e6,
    )
    tensors = [
        (name, parameter.detach() + (1.0 if name.endswith("norm.weight") else 0.0))
        for name, parameter in model.named_parameters()
    ]
    metadata = {"gemma3.attention.sliding_window": 12, "gemma3.rope.dimension_count": None} | (metadata or {})
    gguf_files.write_gguf(path, ours, tensors, tiny_tokenizer_fields(), arch="gemma3", metadata=metadata)
    return model.eval()


def test_logits_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = write(tmp_path / "tiny.gguf", monkeypatch)
    out = import_model(str(tmp_path / "tiny.gguf"), tmp_path / "out")
    tokens = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
        torch.testing.assert_close(load_model(out).model(tokens), expected, rtol=1e-4, atol=1e-3)


def test_a_cap_of_logits_is_read_and_one_of_scores_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "tiny.gguf", monkeypatch, {"gemma3.final_logit_softcapping": 30.0})
    assert GgufFile(tmp_path / "tiny.gguf").config.logit_cap == 30.0
    write(tmp_path / "other.gguf", monkeypatch, {"gemma3.attn_logit_softcapping": 50.0})
    with pytest.raises(InputError, match=r"attn_logit_softcapping=50\.0 is not supported"):
        GgufFile(tmp_path / "other.gguf")
