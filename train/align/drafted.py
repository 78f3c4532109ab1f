"""A decoder that stays as it is, and a small network beside it that learns to guess what it says."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penjing.core.models.attention import Attend, positions_and_attention
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder, table_basis
from penjing.core.runtime.draft import Draft, DraftConfig, known_numbers


class Guess(NamedTuple):
    """What was guessed so many tokens ahead, behind N rows of answers."""

    logits_NK: Tensor  # noqa: N815
    """Of the known tokens, by the draft network."""
    wanted_NK: Tensor  # noqa: N815
    """The same, by the decoder."""
    likeliest_N: Tensor  # noqa: N815
    """(N,) int64, the token that the draft network finds likeliest."""
    inside_N: Tensor  # noqa: N815
    """Whether the guessed token is still of the same answer; the rest of a row means nothing where it is not."""


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
        paths: Tensor | None = None,
        following: Tensor | None = None,
        owner: Tensor | None = None,
        guesses: int = 0,
        states: Tensor | None = None,
        only_states: bool = False,
    ) -> Tensor | list[Guess]:
        """As `Decoder`; with `only_states` (R, E), the decoder's last hidden states at `logit_rows`; with `guesses`,
        what the draft network guesses 1, 2 … `guesses` tokens behind the token that follows each of them.

        Args:
            following: (R,) int64, the token of the answer that follows each of `logit_rows`.
            owner: (R,) int64, which answer each is of; rows of one stand in order.
            states: what `only_states` gave for the same texts; by default it is computed.
        """
        if not (guesses or only_states):
            return super().forward(token_ids, positions, attend, logit_rows, paths=paths)
        assert logit_rows is not None
        if states is None:
            states = self._states(token_ids, logit_rows, paths)
        if only_states:
            return states
        assert following is not None
        assert owner is not None
        with torch.no_grad():
            rows_KE = table_basis(self.lm_head.weight[self.token_ids].float(), self.config)
            wanted_RK = states.float() @ rows_KE.T
        state, known, found = states, self.numbers[following], list[Guess]()
        place = torch.arange(len(following), device=following.device)
        for ahead in range(1, guesses + 1):
            # All rows stay, so that no tensor is empty where answers are shorter than the guesses.
            inside = (owner.roll(-ahead) == owner) & (place < len(place) - ahead)
            state, logits = self.draft(state, known.roll(1 - ahead))
            likeliest = self.token_ids[logits.detach().argmax(-1)]
            found.append(Guess(logits, wanted_RK.roll(-ahead, 0), likeliest, inside))
        return found

    @torch.no_grad()
    def _states(self, token_ids: Tensor, rows: Tensor, paths: Tensor | None) -> Tensor:
        seen = positions_and_attention(self.config, token_ids, paths)
        return self.model(token_ids, *seen).flatten(0, -2)[rows]
