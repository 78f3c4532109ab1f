"""Perplexity on text in windows that start afresh: exp of the mean negative log-likelihood of each next token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.compress.decoder.stream import LOGIT_ROWS, Beside, LayerStream
from penjing.compress.samples.text import EVALUATE, spread
from penjing.core.errors import InputError
from penjing.core.progress import Progress, Silent
from penjing.core.text.corpus import code_text, first_windows, heldout_text
from penjing.core.text.documents import Documents
from penjing.core.text.tokenizer import Tokenizer

CHARS_PER_CODE_TOKEN = 16  # generous: source code has 2 to 5
LARGEST_LOSS = 100.0  # guessing blindly among all tokens costs ln(vocabulary), about 12


def evaluation_windows(tokenizer: Tokenizer, prose_tokens: int, code_tokens: int, window: int) -> dict[str, Tensor]:
    """Held-out texts as (num_windows, window) int64 by name: "prose", and "code" unless `code_tokens` is 0.

    Raises:
        InputError: a text is shorter than asked for.
    """
    windows = {"prose": first_windows(tokenizer, heldout_text(), prose_tokens, window)}
    if code_tokens:
        text = code_text(code_tokens * CHARS_PER_CODE_TOKEN)
        windows["code"] = first_windows(tokenizer, text, code_tokens, window)
    return windows


def own_windows(
    folder: Path, texts: Mapping[str, Path], num_tokens: int, window: int, setting: str = f"{EVALUATE}."
) -> dict[str, Tensor]:
    """The user's own held-out texts as (num_windows, window) int64 by name, evenly spread windows of each.

    Args:
        folder: the model's: its tokenizer and chat template.
        num_tokens: of each text, at most.
        setting: whom errors name, before the name of the text.

    Raises:
        InputError: a text cannot be read, or is shorter than a window.
    """
    if not texts:
        return {}
    documents, found = Documents(folder), dict[str, Tensor]()
    for name, path in texts.items():
        named = f"{setting}{name}"
        tokens = documents.tokens([path], named)
        found[name] = spread(documents.tokenizer, tokens, num_tokens // window, window, named)
    return found


@torch.no_grad()
def streamed_losses(
    stream: LayerStream,
    windows: dict[str, Tensor],
    progress: Progress | None = None,
    weights_alone: bool = False,
) -> dict[str, list[float]]:
    """Mean negative log-likelihood a token of each window, of a checkpoint or of an artifact in the INT8 runtime, with
    one layer in memory at a time.

    The first token of each window is context only.

    Args:
        windows: text name → (W, T) int64, T ≥ 2 and the same for all.
        weights_alone: activations stay floating, weights are as the artifact has them.

    Returns:
        Text name → W losses in nats.
    """
    progress = progress or Silent()
    windows_WT = torch.cat(list(windows.values()))
    hidden_WTE, beside = stream.embed(windows_WT), Beside(windows_WT)
    for layer in range(stream.config.num_hidden_layers):
        module = stream.float_layer(layer, stream.weights(layer)) if weights_alone else stream.stored_layer(layer)
        stream.run(module, hidden_WTE, beside=beside)
        progress.advance()
    head = stream.floating_head() if weights_alone else stream.stored_head()
    losses = [
        _negative_log_likelihood(stream.final_norm(hidden_TE), window_T, head) / (len(window_T) - 1)
        for hidden_TE, window_T in zip(hidden_WTE, windows_WT, strict=True)
    ]
    found: dict[str, list[float]] = {}
    for name, part in windows.items():
        found[name], losses = losses[: len(part)], losses[len(part) :]
    return found


def exponential(loss: float, text: str) -> float:
    """The perplexity of a mean loss in nats.

    Raises:
        InputError: it is so large that there is no finite perplexity: the model is damaged.
    """
    if not loss < LARGEST_LOSS:  # NaN too
        raise InputError(f"the model's loss on {text} is {loss:.3g} a token: it is damaged, or its training diverged")
    return math.exp(loss)


def _negative_log_likelihood(hidden_TE: Tensor, window_T: Tensor, head: Callable[[Tensor], Tensor]) -> float:
    """Of all tokens of a window but the first, summed; logits for LOGIT_ROWS positions at a time."""
    chunks = zip(hidden_TE[:-1].split(LOGIT_ROWS), window_T[1:].split(LOGIT_ROWS), strict=True)
    return sum(float(F.cross_entropy(head(rows_RE), targets_R, reduction="sum")) for rows_RE, targets_R in chunks)
