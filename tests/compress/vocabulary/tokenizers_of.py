"""Small tokenizers that the `tokenizers` library learns, of the kinds that decoders have."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from penjing.core.text.corpus import calibration_text

CONTROL = ["<|start|>", "<|end|>", "<unused0>", "<unused1>"]


@cache
def byte_level() -> str:
    """`tokenizer.json` as GPT-2, Llama 3 and Qwen have it: 512 tokens, bytes as characters."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _learnt(tokenizer, initial_alphabet=alphabet)


@cache
def byte_fallback() -> str:
    """As SentencePiece's of Gemma and Llama 2 become: whole texts are words, and unknown characters are bytes."""
    tokenizer: Any = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for learning alone
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    learnt = json.loads(_learnt(tokenizer, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), size=768))
    learnt["pre_tokenizer"] = None
    plain = {*CONTROL, "<unk>"}
    learnt["added_tokens"] = [token for token in learnt["added_tokens"] if token["content"] in plain]
    tokenizer = Tokenizer.from_str(json.dumps(learnt))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", learnt["model"]["vocab"]["<|start|>"])]
    )
    return tokenizer.to_str()


@cache
def space_before() -> str:
    """As Llama 2's: a space is written before each text, and taken away again."""
    values = json.loads(byte_fallback())
    values["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "▁"}, values["normalizer"]],
    }
    values["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return json.dumps(values)


def _learnt(tokenizer: Any, *more: str, size: int = 512, **settings: Any) -> str:
    special = [AddedToken(token, special=True) for token in (*CONTROL, *more)]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False, **settings)
    tokenizer.train_from_iterator(calibration_text()[:60_000].splitlines(keepends=True), trainer)
    return tokenizer.to_str()
