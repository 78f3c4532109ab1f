"""The windows of text that a decoder is calibrated on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from penjing.core.errors import InputError
from penjing.core.text.corpus import CONVERSATIONS, calibration_windows
from penjing.core.text.documents import Documents
from penjing.core.text.tokenizer import Tokenizer
from penjing.core.text.windows import text_windows

CALIBRATE, EVALUATE = "data.calibrate", "evaluate.own"  # the settings that name the user's own texts
CHAT = 1 / 12  # of the windows, where the model has a chat template


def decoder_windows(
    folder: Path, num_tokens: int, window: int, code: float, own: Sequence[Path] = (), share: float = 0.5
) -> Tensor:
    """(num_tokens / window, window) int64: the user's own text, conversations, and `calibration_windows`.

    Args:
        folder: the model's: its tokenizer, and its chat template if it has one.
        code: share of code in what is neither the user's nor a conversation.
        own: the user's texts; see `Documents.tokens`.
        share: of the windows, rounded to whole ones, that are taken from `own`.

    Raises:
        InputError: the user's text is shorter than a window, or there is less text than asked for.
    """
    documents, left = Documents(folder), num_tokens // window
    parts: list[Tensor] = []
    if own:
        tokens = documents.tokens(own, CALIBRATE)
        parts.append(spread(documents.tokenizer, tokens, max(1, round(share * left)), window, CALIBRATE))
    if documents.template is not None:
        count = min(round(CHAT * left), left - sum(map(len, parts)))
        parts.append(text_windows(documents.tokenizer, _conversations(documents), window)[:count])
    left -= sum(map(len, parts))
    if left:
        parts.append(calibration_windows(documents.tokenizer, left * window, window, code))
    return torch.cat(parts)


def spread(tokenizer: Tokenizer, tokens: list[int], count: int, window: int, named: str = "the text") -> Tensor:
    """(≤ count, window) int64: some of `text_windows`, evenly spread over `tokens`; all where there are fewer.

    Args:
        named: the setting that the text is of, for the message.

    Raises:
        InputError: there is not even one.
    """
    rows_WT = text_windows(tokenizer, tokens, window)
    if not (whole := len(rows_WT)):
        raise InputError(
            f"{named} has {len(tokens)} tokens, and a window has {window}; give more text, or smaller windows"
        )
    count = min(count, whole)
    return rows_WT[[index * whole // count for index in range(count)]]


def _conversations(documents: Documents) -> list[int]:
    lines = CONVERSATIONS.read_text(encoding="utf-8").splitlines()
    return [token for line in lines for token in documents.conversation(json.loads(line)["messages"])]
