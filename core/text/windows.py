"""Windows of text, each of which a decoder reads afresh.

A decoder whose tokenizer puts a token before every text has learnt to read no text without it: its first layers rest
their attention there, and Gemma 3 270M guesses the next token of French 2.3 times worse where it is missing.
So a window begins as a text does, wherever it was cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penjing.core.errors import InputError
from penjing.core.text.tokenizer import Tokenizer


def text_room(tokenizer: Tokenizer, window: int) -> int:
    """Tokens of text in a window.

    Raises:
        InputError: what the tokenizer puts before a text fills it.
    """
    before = len(tokenizer.begin)
    if window <= before:
        raise InputError(f"a window of {window} tokens has no room for text behind the {before} that begin it")
    return window - before


def text_windows(tokenizer: Tokenizer, tokens: Sequence[int], window: int) -> Tensor:
    """(whole windows, window) int64: `tokens` cut up, each piece behind what the tokenizer puts before a text.

    Args:
        tokens: of a text, with what the tokenizer puts before it or without.

    Raises:
        InputError: as `text_room`.
    """
    begin, room = tokenizer.begin, text_room(tokenizer, window)
    if begin and tuple(tokens[: len(begin)]) == begin:
        tokens = tokens[len(begin) :]
    whole = len(tokens) // room
    rows_WT = torch.tensor(tokens[: whole * room], dtype=torch.int64).view(whole, room)
    return torch.cat([torch.tensor(begin, dtype=torch.int64).expand(whole, -1), rows_WT], 1)
