"""The tokenizer of a folder as metadata of a GGUF file.

GGUF keeps a vocabulary with types, merges or scores, and the *name* of the rule that splits text. Each name is tried:
the tokenizer that our importer makes of the metadata must have the parts of `tokenizer.json` and give the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from penjing.core.errors import InputError
from penjing.core.gguf.tokenizer import RULES, merges_from_scores, tokenizer_from_gguf
from penjing.core.manifest import read_json_object
from penjing.core.models.config import DecoderConfig
from penjing.core.text.chat import ChatTemplate
from penjing.core.text.tokenizer import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type
_STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")  # llama.cpp stops at each
_SPACE = "▁"  # as SentencePiece spells it
_PROBES = (
    "The quick brown fox\n\n  jumps: 12345 times, it's 3.14; don't DON'T we'LL!\r\n\tdef f(x):\n        return x**2",
    "a", "trailing   ", "Ⅷ ǅ 你好，世界 🙂🏽 \u0301e\u0301 ½ ١٢٣ İstanbul ﬁ naïve café — \x00 \u2028",
)  # fmt: skip


def tokenizer_fields(folder: Path, config: DecoderConfig) -> dict[str, Any]:
    """Metadata of the tokenizer in `folder`, under its names in the file.

    Raises:
        InputError: damaged, of a kind that GGUF has no rule for, with more tokens than the embedding has rows, or with
            other ids of begin and end than the network's.
    """
    known = Tokenizer.from_folder(folder).backend
    values = read_json_object(folder / "tokenizer.json")
    model = values["model"]
    tokens, types = _vocabulary(known, model, folder, config.vocab_size)
    common = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        **_ids(known, config, folder),
    }
    template = ChatTemplate.from_folder(folder)
    if template is not None:
        common["tokenizer.chat_template"] = template.text
    if model["type"] == "BPE":
        own = _sentencepiece(known, model, tokens) if model.get("byte_fallback") else _byte_level(model)
        for fields in own:
            if _is_the_same(common | fields, values, known):
                return common | fields
    parts = [part.get("type") for part in _flat(values.get("pre_tokenizer"))]
    raise InputError(
        f"{folder}: a {model['type']} tokenizer that splits by {parts} is not written as GGUF; byte-level BPE of "
        f"{', '.join(RULES)} and SentencePiece BPE are"
    )


def _vocabulary(known: Backend, model: dict[str, Any], folder: Path, rows: int) -> tuple[list[str], list[int]]:
    """Text and type of each row of the embedding; rows without a token are unused, as llama.cpp's converter has it."""
    found = {index: token for token, index in known.get_vocab(with_added_tokens=True).items()}
    if max(found) >= rows:
        raise InputError(f"{folder}: the tokenizer has {max(found) + 1} tokens, the embedding {rows} rows")
    types = dict.fromkeys(found, _NORMAL)
    for index, added in known.get_added_tokens_decoder().items():
        types[index] = _CONTROL if added.special else _USER_DEFINED
    if model.get("byte_fallback"):
        types |= {index: _BYTE for index, token in found.items() if len(token) == 6 and token.startswith("<0x")}
        types |= {index: _UNKNOWN for index, token in found.items() if token == model.get("unk_token")}
    indices = range(rows)
    return [found.get(index, f"[PAD{index}]") for index in indices], [types.get(index, _UNUSED) for index in indices]


def _ids(known: Backend, config: DecoderConfig, folder: Path) -> dict[str, Any]:
    """Begin, ends and padding, and which of them the tokenizer puts around a text."""
    plain, full = (known.encode("a", add_special_tokens=add).ids for add in (False, True))
    begin = next(at for at in range(len(full) + 1) if full[at : at + len(plain)] == plain)
    around = (full[:begin], full[begin + len(plain) :])
    first = config.bos_token_id if config.bos_token_id is not None or not around[0] else around[0][0]
    last = config.eos_token_ids[0] if config.eos_token_ids else None
    if around[0] not in ([], [first]) or around[1] not in ([], [last]):
        raise InputError(
            f"{folder}: the tokenizer puts the tokens {around[0]} and {around[1]} around a text, config.json says "
            f"bos_token_id={config.bos_token_id} and eos_token_id={list(config.eos_token_ids)}; GGUF knows one each: "
            "make them equal"
        )
    if len(config.eos_token_ids) > len(_STOPS):
        raise InputError(f"{folder} has {len(config.eos_token_ids)} tokens that end a text; GGUF takes {len(_STOPS)}")
    ids = {"bos_token_id": first, "padding_token_id": config.pad_token_id}
    ids |= dict(zip(_STOPS, config.eos_token_ids, strict=False))
    return {
        "tokenizer.ggml.add_bos_token": bool(around[0]),
        "tokenizer.ggml.add_eos_token": bool(around[1]),
        **{f"tokenizer.ggml.{key}": index for key, index in ids.items() if index is not None and index >= 0},
    }


def _byte_level(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    for rule in RULES:
        yield {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": rule, "tokenizer.ggml.merges": merges}


def _sentencepiece(known: Backend, model: dict[str, Any], tokens: list[str]) -> Iterator[dict[str, Any]]:
    """Scores that put the merged pieces in the order of their merges, and all other tokens behind them."""
    merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    pairs = [(left, right) for left, right in merges]
    ranks = {piece: rank for rank, piece in enumerate(dict.fromkeys("".join(pair) for pair in pairs))}
    scores = [-float(ranks.get(token, len(ranks) + index)) for index, token in enumerate(tokens)]
    again = merges_from_scores({token: index for index, token in enumerate(tokens)}, scores)
    learned = [pair for pair in again if "".join(pair) in ranks]  # a control token may happen to be spelled by others
    if sorted(learned) == sorted(pairs) and model.get("unk_token") in tokens:
        yield {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.unknown_token_id": tokens.index(model["unk_token"]),
            "tokenizer.ggml.add_space_prefix": known.encode("a", add_special_tokens=False).tokens[0][0] == _SPACE,
        }


def _is_the_same(fields: dict[str, Any], values: dict[str, Any], known: Backend) -> bool:
    """Whether the importer makes the tokenizer `values` of `fields`."""
    again = Backend.from_str(tokenizer_from_gguf(fields, "the export")["tokenizer.json"])
    if any(known.encode(text).ids != again.encode(text).ids for text in _PROBES):
        return False
    if fields["tokenizer.ggml.model"] == "llama":  # spelled in two ways, which differ before a space (docs/limits.md)
        return True
    made = json.loads(again.to_str())
    parts = all(_flat(made[part]) == _flat(values.get(part)) for part in ("normalizer", "pre_tokenizer"))
    options = ("ignore_merges", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
    return parts and all((made["model"].get(key) or None) == (values["model"].get(key) or None) for key in options)


def _flat(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, without what moves offsets alone."""
    if part is None:
        return []
    inner = part.get("pretokenizers") or part.get("normalizers") or []
    if part.get("type") == "Sequence":
        return [step for each in inner for step in _flat(each)]
    return [{key: value for key, value in part.items() if key != "trim_offsets"}]
