"""The files of a tokenizer with fewer tokens, which are numbered anew."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penjing.core.checkpoint.decoder import TOKENIZER_FILES
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text
from penjing.core.manifest import read_json_object
from penjing.core.models.hf_config import token_ids
from penjing.core.text.byte_pairs import Pair

TOKENIZER = "tokenizer.json"

Numbers = Mapping[int, int]  # old id → new id of what stays


def named_tokens(source: Path) -> tuple[frozenset[int], str]:
    """(The ids that files beside the tokenizer name, all that they say of tokens): control tokens, the chat template.

    Raises:
        InputError: a file is malformed.
    """
    texts, ids = [], set[int]()
    for name in ("config.json", *TOKENIZER_FILES):
        path = source / name
        if name == TOKENIZER or not path.is_file():
            continue
        if path.suffix == ".json":
            values = read_json_object(path)
            values.pop("added_tokens_decoder", None)  # it lists them all
            named = (token_ids(value) for key, value in values.items() if _names_ids(key))
            ids.update(number for numbers in named for number in numbers if type(number) is int)
            texts.append(json.dumps(values, ensure_ascii=False))
        else:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return frozenset(ids), "\n".join(texts)


def smaller_tokenizer(
    tokenizer: Mapping[str, Any], kept: frozenset[str], joined: frozenset[Pair], numbers: Numbers, where: str
) -> dict[str, Any]:
    """The parsed `tokenizer.json` with the tokens `kept` and the pairs `joined` alone.

    Raises:
        InputError: its post-processor is of a kind whose ids are not known, or names an id that no token has.
    """
    model = tokenizer["model"]
    vocab = {token: numbers[number] for token, number in model["vocab"].items() if token in kept}
    merges = [pair for pair in model["merges"] if _pair(pair) in joined]
    added = [
        token | {"id": numbers[token["id"]]}
        for token in tokenizer.get("added_tokens") or ()
        if token["content"] in kept
    ]
    small = {**tokenizer, "added_tokens": added, "model": {**model, "vocab": vocab, "merges": merges}}
    if tokenizer.get("post_processor") is not None:
        small["post_processor"] = _processor(tokenizer["post_processor"], numbers, where)
    if isinstance(padding := tokenizer.get("padding"), dict):
        filler = numbers.get(padding.get("pad_id", -1))
        small["padding"] = None if filler is None else padding | {"pad_id": filler}
    return small


def write_beside(source: Path, into: Path, numbers: Numbers) -> None:
    """Number anew what `tokenizer_config.json` and `generation_config.json` of `source` say of tokens. A file that does
    not exist is left out, and so is an id that no token has, such as -1."""
    path = source / "tokenizer_config.json"
    if path.is_file():
        values = read_json_object(path)
        if isinstance(table := values.get("added_tokens_decoder"), dict):
            known = {int(number): token for number, token in table.items() if str(number).isdecimal()}
            values["added_tokens_decoder"] = {
                str(numbers[number]): token for number, token in known.items() if number in numbers
            }
        _write(into / path.name, values)
    path = source / "generation_config.json"
    if path.is_file():
        values = read_json_object(path)
        for name, value in values.items():
            if _names_ids(name):
                found = [numbers[number] for number in token_ids(value) if type(number) is int and number in numbers]
                values[name] = found if isinstance(value, list) else next(iter(found), None)
        _write(into / path.name, values)


def _processor(processor: dict[str, Any], numbers: Numbers, where: str) -> dict[str, Any]:
    kind = processor.get("type")
    if kind == "Sequence":
        return processor | {"processors": [_processor(part, numbers, where) for part in processor["processors"]]}
    if kind == "TemplateProcessing":
        tokens = {
            name: token | {"ids": [_known(number, numbers, f"{where}: {name}") for number in token["ids"]]}
            for name, token in processor["special_tokens"].items()
        }
        return processor | {"special_tokens": tokens}
    if kind in ("BertProcessing", "RobertaProcessing"):
        ends = {
            name: [processor[name][0], _known(processor[name][1], numbers, f"{where}: {name}")]
            for name in ("sep", "cls")
        }
        return processor | ends
    if kind == "ByteLevel":
        return processor
    raise InputError(f"{where}: which ids a post-processor of kind {kind!r} writes is not known; it is not taken")


def _names_ids(key: str) -> bool:
    return key.endswith("_token_id") or key in ("suppress_tokens", "begin_suppress_tokens")


def _known(number: int, numbers: Numbers, where: str) -> int:
    if number not in numbers:
        raise InputError(f"{where} names token {number!r}, which is none; get or make it again")
    return numbers[number]


def _pair(stored: Any) -> Pair:
    left, right = stored.split(" ", 1) if isinstance(stored, str) else stored
    return left, right


def _write(path: Path, values: dict[str, Any]) -> None:
    atomic_write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
