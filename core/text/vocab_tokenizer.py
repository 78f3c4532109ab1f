"""Builds `tokenizer.json` from GPT-2's two files, `vocab.json` and `merges.txt`, which older folders hold alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from penjing.core.errors import InputError
from penjing.core.manifest import read_json_object

VOCAB, MERGES = "vocab.json", "merges.txt"
_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
_USUAL = "<|endoftext|>"  # GPT-2's, where a folder does not say
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_MOST_BYTES = 100 << 20


def tokenizer_from_vocab(folder: Path) -> str | None:
    """The text of `tokenizer.json`; None where the folder holds no such files, or they are split by another rule.

    Raises:
        InputError: the files are damaged.
    """
    settings = _optional(folder / "tokenizer_config.json")
    if not all((folder / name).is_file() for name in (VOCAB, MERGES)):
        return None
    if settings.get("tokenizer_class", _CLASSES[0]) not in _CLASSES:
        return None
    special = _special_tokens(settings | _optional(folder / "special_tokens_map.json"), folder)
    try:
        tokenizer = Tokenizer(models.BPE(vocab=_vocab(folder), merges=_merges(folder)))
        prefix = settings.get("add_prefix_space") is True
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(list(special.values()))
        begin = special.get("bos_token")
        if settings.get("add_bos_token") is True and begin is not None:
            first, second = [f"{begin.content}:0", "$A:0"], [f"{begin.content}:1", "$B:1"]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=first,
                pair=first + second,
                special_tokens=[(begin.content, tokenizer.token_to_id(begin.content))],
            )
    except InputError:
        raise
    except Exception as error:  # the library reports everything as a bare Exception
        raise InputError(f"{folder}: {VOCAB} and {MERGES} are no tokenizer ({error}); get them again") from error
    return tokenizer.to_str(pretty=True)


def _vocab(folder: Path) -> dict[str, int]:
    vocab = read_json_object(folder / VOCAB)
    ids = sorted(value for value in vocab.values() if isinstance(value, int) and not isinstance(value, bool))
    if ids != list(range(len(vocab))):
        raise InputError(f"{folder / VOCAB} must number its tokens from 0 on without a gap; get it again")
    return vocab


def _merges(folder: Path) -> list[tuple[str, str]]:
    path = folder / MERGES
    if path.stat().st_size > _MOST_BYTES:
        raise InputError(f"{path} has more than {_MOST_BYTES >> 20} MB; get it again")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text ({error}); get it again") from None
    pairs = [tuple(line.split(" ")) for line in lines[lines[:1] != [] and lines[0].startswith("#version") :] if line]
    if wrong := [pair for pair in pairs if len(pair) != 2]:
        raise InputError(f"{path} holds {' '.join(wrong[0])!r}, not a pair of tokens; get it again")
    return pairs  # pyright: ignore[reportReturnType]


def _special_tokens(settings: dict[str, Any], folder: Path) -> dict[str, AddedToken]:
    found: dict[str, AddedToken] = {}
    for name in _SPECIAL:
        value = settings.get(name, None if name == "pad_token" else _USUAL)
        content = value.get("content") if isinstance(value, dict) else value
        if content is None:
            continue
        if not isinstance(content, str) or not content:
            raise InputError(f"{folder}: {name} must be a token (got {content!r})")
        found[name] = AddedToken(content, special=True, normalized=False)
    return found


def _optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
