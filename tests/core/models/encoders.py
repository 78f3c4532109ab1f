"""Tiny text encoders, as sentence-transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel

WORDS = (
    *("a", "the", "of", "and", "is", "in", "to", "it", "that", "for", "on", "with"),
    *("value", "function", "class", "object", "python", "returns", "list", "name"),
)


def write_sentence_transformer(folder: Path, *, layers: int = 2, max_tokens: int = 40, seed: int = 0) -> Path:
    """A BERT of transformers with random weights, large enough that texts differ, and a word tokenizer."""
    torch.manual_seed(seed)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(chr(97 + letter) for letter in range(26)), *WORDS[1:]]
    words += [f"##{chr(97 + letter)}" for letter in range(26)]
    vocabulary = {word: index for index, word in enumerate(words)}
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=48,
        initializer_range=0.3,
    )
    model = BertModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "LayerNorm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(words[:4])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "1_Pooling").mkdir()
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling", "Normalize")]
    for name, content in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}),
        ("sentence_bert_config.json", {"max_seq_length": max_tokens}),
    ):
        (folder / name).write_text(json.dumps(content))
    return folder


def small_recipe(model: Path, output: Path) -> dict[str, Any]:
    """INT8 of a random encoder with few texts; it is rounded further away than a trained one."""
    return {
        "model": str(model),
        "output": str(output),
        "data": {"texts": 16},
        "evaluate": {"texts": 16},
        "measure": {"rounds": 0},
        "guard": {"similarity_loss": 0.1},
        "steps": [{"kind": "quantize", "parity_bound": 0.1}],
    }
