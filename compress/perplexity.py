"""Perplexity on text in windows that start afresh: exp of the mean negative log-likelihood of each next token."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.compress.stream import LOGIT_ROWS, LayerStream
from penjing.core.corpus import code_text, heldout_tokens
from penjing.core.errors import InputError
from penjing.core.models.decoder import Decoder
from penjing.core.progress import Progress, Silent
from penjing.core.tokenizer import Tokenizer

CHARS_PER_CODE_TOKEN = 16  # generous: source code has 2 to 5


def evaluation_windows(tokenizer: Tokenizer, prose_tokens: int, code_tokens: int, window: int) -> dict[str, Tensor]:
    """Held-out texts as (num_windows, window) int64 by name: "prose", and "code" unless `code_tokens` is 0.

    Raises:
        InputError: a text is shorter than asked for.
    """
    windows = {"prose": heldout_tokens(tokenizer, prose_tokens).view(-1, window)}
    if code_tokens:
        text = code_text(code_tokens * CHARS_PER_CODE_TOKEN)
        ids = tokenizer.encode(text, allow_special=False, add_special=False)[:code_tokens]
        if len(ids) < code_tokens:
            raise InputError(f"the standard library's sources gave {len(ids)} of {code_tokens} tokens; ask for fewer")
        windows["code"] = torch.tensor(ids, dtype=torch.int64).view(-1, window)
    return windows


@torch.no_grad()
def perplexity(model: Decoder, windows_WT: Tensor, progress: Progress | None = None) -> float:
    """Perplexity of a loaded model; the first token of each window is context only.

    Args:
        windows_WT: (W, T) int64, T ≥ 2.
    """
    progress = progress or Silent()
    positions_1T = torch.arange(windows_WT.shape[1])[None]
    losses: list[float] = []
    for window_T in windows_WT:
        hidden_TE = model.model(window_T[None], positions_1T, model.causal_attention)[0]
        losses.append(_negative_log_likelihood(hidden_TE, window_T, model.lm_head))
        progress.advance()
    return math.exp(math.fsum(losses) / (windows_WT.shape[0] * (windows_WT.shape[1] - 1)))


@torch.no_grad()
def streamed_perplexity(
    stream: LayerStream, windows: dict[str, Tensor], progress: Progress | None = None
) -> dict[str, float]:
    """`perplexity` of a floating checkpoint with one layer in memory at a time.

    Args:
        windows: text name → (W, T) int64, all with the same T.

    Returns:
        Text name → perplexity.
    """
    progress = progress or Silent()
    windows_WT = torch.cat(list(windows.values()))
    hidden_WTE = stream.embed(windows_WT)
    for layer in range(stream.config.num_hidden_layers):
        stream.run(layer, stream.weights(layer), hidden_WTE)
        progress.advance()
    head_VE = stream.head_weight().to(torch.float32)
    losses = [
        _negative_log_likelihood(stream.final_norm(hidden_TE), window_T, partial(F.linear, weight=head_VE))
        for hidden_TE, window_T in zip(hidden_WTE, windows_WT, strict=True)
    ]
    found: dict[str, float] = {}
    for name, part in windows.items():
        share, losses = losses[: len(part)], losses[len(part) :]
        found[name] = math.exp(math.fsum(share) / (len(part) * (windows_WT.shape[1] - 1)))
    return found


def _negative_log_likelihood(hidden_TE: Tensor, window_T: Tensor, head: Callable[[Tensor], Tensor]) -> float:
    """Of all tokens of a window but the first, summed; logits for LOGIT_ROWS positions at a time."""
    chunks = zip(hidden_TE[:-1].split(LOGIT_ROWS), window_T[1:].split(LOGIT_ROWS), strict=True)
    return sum(float(F.cross_entropy(head(rows_RE), targets_R, reduction="sum")) for rows_RE, targets_R in chunks)
