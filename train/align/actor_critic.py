"""A decoder that also says how much reward it expects: a linear layer on its hidden state, beside the head."""

from __future__ import annotations

from torch import Tensor, nn

from penjing.core.models.attention import Attend, positions_and_attention
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder


class ActorCritic(Decoder):
    """A `Decoder`, and a head for values, `value.weight` (1, E) and `value.bias` (1,)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.value = nn.Linear(config.hidden_size, 1)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # two results where both are asked for
        self,
        token_ids: Tensor,
        positions: Tensor | None = None,
        attend: Attend | None = None,
        logit_rows: Tensor | None = None,
        *,
        paths: Tensor | None = None,
        valued: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As `Decoder`. If `valued`, the logits (R, V) and the expected rewards (R,) of `logit_rows`, of each of which
        the tokens up to it are seen."""
        if not valued:
            return super().forward(token_ids, positions, attend, logit_rows, paths=paths)
        assert logit_rows is not None, "values are of certain rows"
        seen = positions_and_attention(self.config, token_ids, paths)
        hidden = self.model(token_ids, *seen).flatten(0, -2)[logit_rows]
        return self.logits(hidden), self.value(hidden)[:, 0]
