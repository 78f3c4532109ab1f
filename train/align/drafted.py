"""A decoder that stays as it is, and a small network beside it that learns to guess what it says."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penjing.core.models.attention import Attend, causal_attention
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.runtime.draft import Draft, DraftConfig, known_numbers


class Guess(NamedTuple):
    """What was guessed so many tokens ahead, behind N rows of answers."""

    logits_NK: Tensor  # noqa: N815
    """Of the known tokens, by the draft network."""
    wanted_NK: Tensor  # noqa: N815
    """The same, by the decoder."""
    inside_N: Tensor  # noqa: N815
    """Whether the guessed token is still of the same answer."""


class Drafted(Decoder):
    """A `Decoder`, and `draft`, a network for it.

    Args:
        token_ids_K: (K,) int64, the tokens that can be guessed.
    """

    numbers: Tensor
    token_ids: Tensor

    def __init__(self, config: DecoderConfig, shape: DraftConfig, token_ids_K: Tensor) -> None:
        super().__init__(config)
        self.draft = Draft(shape)
        self.register_buffer("token_ids", token_ids_K.clone(), persistent=False)
        self.register_buffer("numbers", known_numbers(token_ids_K, config.vocab_size), persistent=False)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # guesses where they are asked for
        self,
        token_ids: Tensor,
        positions: Tensor | None = None,
        attend: Attend | None = None,
        logit_rows: Tensor | None = None,
        *,
        following: Tensor | None = None,
        owner: Tensor | None = None,
        guesses: int = 0,
    ) -> Tensor | list[Guess]:
        """As `Decoder`; or with `guesses`, what the draft network guesses 1, 2 … `guesses` tokens behind the token
        that follows each of `logit_rows`.

        Args:
            following: (R,) int64, the token of the answer that follows each of `logit_rows`.
            owner: (R,) int64, which answer each is of; rows of one stand in order.
        """
        if not guesses:
            return super().forward(token_ids, positions, attend, logit_rows)
        assert logit_rows is not None
        assert following is not None
        assert owner is not None
        positions = torch.arange(token_ids.shape[-1], device=token_ids.device).expand(token_ids.shape)
        with torch.no_grad():
            hidden = self.model(token_ids, positions, causal_attention(self.config)).flatten(0, -2)[logit_rows]
            wanted_RK = hidden.float() @ self.lm_head.weight[self.token_ids].float().T
        state, known, found = hidden, self.numbers[following], list[Guess]()
        for ahead in range(1, min(guesses, len(following) - 1) + 1):
            count = len(following) - ahead
            state, logits = self.draft(state[:count], known[ahead - 1 : ahead - 1 + count])
            found.append(Guess(logits, wanted_RK[ahead:], owner[ahead:] == owner[:count]))
        return found
