"""A decoder's checkpoint with fewer tokens, and what that costs on held-out text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penjing.compress.decoder.stream import refuse_tokens
from penjing.compress.measure.evaluate import Change, EvaluateSettings, compare, perplexity
from penjing.compress.measure.generate import log_likelihoods
from penjing.compress.measure.perplexity import evaluation_windows, own_windows
from penjing.compress.vocabulary.staying import staying
from penjing.compress.vocabulary.tokenizer import TOKENIZER, named_tokens, smaller_tokenizer, write_beside
from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint, save_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import family_of
from penjing.core.files import atomic_write_text
from penjing.core.manifest import identity, read_json_object, verify, write_manifest
from penjing.core.progress import Progress
from penjing.core.text.byte_pairs import read_pairs
from penjing.core.text.documents import Documents, text_files
from penjing.core.text.tokenizer import Tokenizer

PER_TOKEN = ("model.embed_tokens.weight", "lm_head.weight", "lm_head.bias")  # a row of each is one token's
ROWS = 64  # the number of tokens is a multiple of it, as kernels and several devices like it


@dataclass(frozen=True)
class Cost:
    """What a text costs with fewer tokens.

    Attributes:
        rise: of the perplexity, both counted over the tokens of the whole vocabulary.
        longer: share of tokens that the text has more.
    """

    rise: Change
    longer: float


def open_whole(source: Path) -> Checkpoint:
    """The checkpoint `source`, if its vocabulary can become smaller.

    Raises:
        ConfigError: it is no decoder of text alone, or in integers.
        InputError: a file is missing or damaged.
    """
    if (family := family_of(source)) != "decoder":
        raise ConfigError(f"{source} is a {family}; only decoders of text get a smaller vocabulary")
    checkpoint = open_checkpoint(source)
    if checkpoint.quantization is not None:
        raise ConfigError(f"{source} is in integers; make the vocabulary of the checkpoint smaller that it was made of")
    refuse_tokens(checkpoint.config, source, "a smaller vocabulary")
    if checkpoint.manifest is not None:
        verify(source)
    return checkpoint


def tokens_of(share: float, size: int) -> int:
    """How many of `size` tokens stay: a multiple of ROWS.

    Raises:
        ConfigError: none would leave, or none would stay.
    """
    # 0.29 · 6400 is 1855.9999999999998 in floating point, and 1856 a multiple.
    room = int(round(share * size, 6)) // ROWS * ROWS if 0 < share < 1 else 0
    if room == 0:
        raise ConfigError(f"keep={share} of {size} tokens: choose a share between {ROWS / size:.4f} and 1")
    return room


def count_tokens(source: Path, paths: Sequence[Path], setting: str, progress: Progress) -> Counter[int]:
    """How often the texts in `paths`, and conversations in the model's own template, have each token.

    Raises:
        InputError: a text cannot be read.
    """
    files = [file for path in paths for file in text_files(path, setting)]
    documents, found = Documents(source), Counter[int]()
    progress.start("tokens of your texts", len(files))
    for file in files:
        found.update(documents.tokens([file], setting))
        progress.advance()
    return found


def write_smaller(
    checkpoint: Checkpoint, room: int, used: Mapping[int, int], into: Path, last: Collection[int] = frozenset()
) -> dict[str, Any]:
    """Fill `into` with the checkpoint that has at most `room` tokens, whose rows are as they were.

    Args:
        used: id → how often the user's texts have the token; these stay first.
        into: an existing folder, not yet published.
        last: ids of tokens that leave before others.

    Returns:
        What was decided, JSON-ready.

    Raises:
        InputError: its tokenizer is of another kind or damaged, or more tokens than `room` must stay.
    """
    source, config = checkpoint.folder, checkpoint.config
    path = source / TOKENIZER
    tokenizer = read_json_object(path)
    pairs = read_pairs(tokenizer, str(path), *named_tokens(source))
    if (highest := max(pairs.ids.values(), default=0)) >= config.vocab_size:
        raise InputError(
            f"{path} has a token {highest}, the embedding {config.vocab_size} rows; they do not belong together"
        )
    counts = {token: used[number] for token, number in pairs.ids.items() if number in used}
    kept, joined = staying(pairs, room, counts, str(path), last)
    rows = sorted(pairs.ids[token] for token in kept)
    numbers = {old: new for new, old in enumerate(rows)}
    begin, pad = (
        None if number is None else numbers.get(number) for number in (config.bos_token_id, config.pad_token_id)
    )
    ends = tuple(numbers[number] for number in config.eos_token_ids if number in numbers)
    named = {"vocab_size": len(rows), "bos_token_id": begin, "eos_token_ids": ends, "pad_token_id": pad}
    smaller = config.model_copy(update=named)
    dtype = checkpoint.config_json.get("dtype", "float32")
    save_checkpoint(into, smaller, _tensors(checkpoint, torch.tensor(rows)), tokenizer_from=source, dtype=dtype)
    fewer = smaller_tokenizer(tokenizer, kept, joined, numbers, str(path))
    atomic_write_text(into / TOKENIZER, json.dumps(fewer, ensure_ascii=False) + "\n")
    write_beside(source, into, numbers)
    per_token = config.hidden_size * (1 if config.tie_word_embeddings else 2) + config.head_bias
    made = {"tokens": len(rows), "tokens_before": config.vocab_size}
    made["parameters_fewer"] = per_token * (config.vocab_size - len(rows))
    created = {"command": "penjing compress vocabulary", "penjing": version("penjing"), "model": identity(source)}
    if checkpoint.manifest is not None and "license" in checkpoint.manifest.created_by:
        created["license"] = checkpoint.manifest.created_by["license"]
    write_manifest(into, "checkpoint", created | made)
    return made


def held_out_texts(source: Path, own: Mapping[str, Path], settings: EvaluateSettings) -> dict[str, list[str]]:
    """Windows of text by name, as many and as long as evaluation takes them in the tokens of `source`.

    Raises:
        InputError: a text cannot be read, or is shorter than a window.
    """
    tokenizer = Tokenizer.from_folder(source)
    windows = evaluation_windows(tokenizer, settings.prose_tokens, settings.code_tokens, settings.window)
    windows |= own_windows(source, own, settings.own_tokens, settings.window, "--judge ")
    return {
        name: [tokenizer.decode(ids, skip_special=False) for ids in part.tolist()] for name, part in windows.items()
    }


@torch.no_grad()
def costs(
    before: Path, after: Path, texts: Mapping[str, Sequence[str]], settings: EvaluateSettings, progress: Progress
) -> dict[str, Cost]:
    """What each text costs more in `after` than in `before`; both read the same characters.

    Raises:
        InputError: either is damaged.
    """
    progress.start("perplexity with both", 2 * sum(len(part) for part in texts.values()))
    counts: dict[str, list[int]] = {}
    losses: list[dict[str, list[float]]] = []
    more: dict[str, float] = {}
    for folder in (before, after):
        loaded = load_model(folder)
        starts = [loaded.tokenizer.bos_token_id, *loaded.tokenizer.eos_token_ids]
        begin = [number for number in starts if number is not None][:1]  # the same token of both
        begin = begin or loaded.tokenizer.encode("\n", add_special=False)[:1]
        found: dict[str, list[float]] = {}
        for name, part in texts.items():
            ids = [begin + loaded.tokenizer.encode(text, add_special=False) for text in part]
            lengths = counts.setdefault(name, [len(each) - 1 for each in ids])
            more[name] = sum(len(each) - 1 for each in ids) / sum(lengths) - 1.0
            found[name] = []
            for row, length in zip(ids, lengths, strict=True):
                found[name].append(-log_likelihoods(loaded.model, [(row, 1)])[0] / length)
                progress.advance()
        losses.append(found)
    each = {name: [perplexity({name: found[name]}, settings) for found in losses] for name in texts}
    return {name: Cost(compare(first, second, settings), more[name]) for name, (first, second) in each.items()}


def _tensors(checkpoint: Checkpoint, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name in checkpoint.tensor_names:
        stored = checkpoint.get(name)
        if name in PER_TOKEN and len(stored) != checkpoint.config.vocab_size:
            raise InputError(
                f"{checkpoint.folder}: {name} has {len(stored)} rows, config.json {checkpoint.config.vocab_size} "
                "tokens; get or make the folder again"
            )
        yield name, stored[rows] if name in PER_TOKEN else stored
