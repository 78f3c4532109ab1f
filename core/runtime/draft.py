"""A small network that guesses what a decoder says next, so that one step of the decoder can check several tokens.

It reads the decoder's last hidden state, which knows what is meant, and the token that was chosen from it, and makes
the state that it expects to follow; from that state and the next token the one after, and so on. It has no attention
and keeps nothing of a text: a state is all. (Hydra, https://arxiv.org/abs/2402.05109, and EAGLE,
https://arxiv.org/abs/2401.15077, draft from the same state.) It knows a part of the vocabulary, since a head of all
tokens costs several times what the rest of it does.

Shapes: R rows, E the decoder's hidden size, K known tokens.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from penjing.core.config import Config
from penjing.core.models.mlp import MLP
from penjing.core.models.norm import RMSNorm

EPS = 1e-5


class DraftConfig(Config):
    """The shape of a draft network."""

    hidden_size: int = Field(ge=1, description="That of the decoder.")
    intermediate_size: int = Field(ge=1, description="Inner size of each MLP.")
    num_layers: int = Field(ge=1, description="MLPs, one after the other.")
    vocab_size: int = Field(ge=1, description="Of the decoder.")
    num_known: int = Field(ge=1, description="Tokens that can be guessed.")


class DraftLayer(nn.Module):
    """An MLP behind a norm, added to the residual."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, EPS)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Draft(nn.Module):
    """(The state before a token, the token) → the state behind it, whose `lm_head` says what follows.

    Tokens are numbered among the known ones, 0 … K − 1; K stands for every other token.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.embed_tokens = nn.Embedding(config.num_known + 1, size)
        self.state_norm, self.token_norm = RMSNorm(size, EPS), RMSNorm(size, EPS)
        self.joint = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(size, EPS)
        self.lm_head = nn.Linear(size, config.num_known, bias=False)

    def forward(self, state_RE: Tensor, known_R: Tensor) -> tuple[Tensor, Tensor]:
        """The next states (R, E) and the logits of the tokens behind them (R, K)."""
        embedded = self.embed_tokens(known_R)
        x = state_RE + self.joint(torch.cat([self.state_norm(state_RE), self.token_norm(embedded)], -1))
        for layer in self.layers:
            x = layer(x)
        return x, self.lm_head(self.norm(x))


def known_numbers(token_ids_K: Tensor, vocab_size: int) -> Tensor:
    """(V,) int64: the number of each token of the vocabulary among the known ones, K for the others."""
    numbers = torch.full((vocab_size,), len(token_ids_K), dtype=torch.int64)
    numbers[token_ids_K] = torch.arange(len(token_ids_K))
    return numbers
