"""Let a decoder's step find its largest logit by a copy of the LM head in 4 bits."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from penjing.core.models.decoder import Decoder
from penjing.core.runtime.quantized import Int8Linear
from penjing.kernels.decoder_step import DecoderStep
from penjing.kernels.hadamard import hadamard
from penjing.kernels.screen import make_screen, why_not_screened

TOKENS, SEQUENCES = 8, 64
"""Inputs of the head that show where others will lie; longer sequences are as good for SmolLM2, worse for Gemma 3."""
PAGE = 16
LEAST_BYTES = 64 << 20  # SmolLM2's 28 MB stay in a cache: a copy made it 0.92 to 1.03 times as fast


def screen_head(step: DecoderStep, model: Decoder) -> str | None:
    """Copy the LM head for `step`, which is of `model`; why not, or None.

    Up to four greedy answers at a time read little more than half of the head then; no token changes. The copy
    takes 0.6 of the head's memory.
    """
    config = model.config
    head = model.lm_head.packed if isinstance(model.lm_head, Int8Linear) else None
    reason = why_not_screened(head, config.logit_cap)
    if reason is None and config.vocab_size * config.hidden_size < LEAST_BYTES:
        reason = "the LM head is small"
    if reason is None and config.max_position_embeddings < TOKENS:
        reason = f"sequences of {TOKENS} tokens are too long for it"
    if reason is not None:
        logging.getLogger("penjing").info("all logits are computed: %s", reason)
        return reason
    assert head is not None
    step.screen(make_screen(head, random_inputs(step, model)))
    return None


def random_inputs(step: DecoderStep, model: Decoder) -> Tensor:
    """(R, E) what the LM head reads where tokens follow each other at random."""
    config = model.config
    tokens_R = torch.randint(config.vocab_size, (SEQUENCES * TOKENS,), generator=torch.Generator().manual_seed(0))
    rows_R = torch.arange(SEQUENCES * TOKENS, dtype=torch.int32)
    attending = len(config.attention_layers)
    pool = torch.zeros(attending, 2, SEQUENCES, config.num_key_value_heads, PAGE, config.head_dim)
    row_pool = torch.zeros(config.num_hidden_layers - attending, SEQUENCES, PAGE, config.hidden_size)
    before, step.hidden_RE = step.hidden_RE, torch.empty(len(rows_R), config.hidden_size)
    step.step_top(
        1,
        tokens_R.int(),
        rows_R % TOKENS,
        rows_R.long() // TOKENS * PAGE + rows_R % TOKENS,
        torch.arange(SEQUENCES + 1, dtype=torch.int32) * TOKENS,
        torch.full((SEQUENCES,), TOKENS, dtype=torch.int32),
        torch.arange(SEQUENCES, dtype=torch.int32)[:, None],
        rows_R,
        pool,
        row_pool=row_pool if len(row_pool) else None,
    )
    hidden_RE, step.hidden_RE = step.hidden_RE, before
    return hadamard(hidden_RE, config.table_hadamard) if config.table_hadamard else hidden_RE
