"""Answers of a decoder, or of its INT8 artifact in the layers and kernels that penjing's engine runs: texts that go on,
and how likely given texts are.

Shapes: R sequences, T tokens, V vocabulary; H heads, KV key-value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.compress.decoder.stream import LOGIT_ROWS
from penjing.core.models.attention import Attend, attend_last, causal_attention
from penjing.core.models.decoder import Decoder

TOGETHER = 16  # sequences that go on side by side


class Sequences:
    """Sequences whose keys and values are kept, and what convolutions read, so that one more token of each costs one
    token's work.

    Args:
        prompts: token ids, one or more each.

    Attributes:
        logits: (R, V) of what follows each sequence.
    """

    def __init__(self, model: Decoder, prompts: Sequence[Sequence[int]]) -> None:
        self._model = model
        self._kept: list[dict[int, tuple[Tensor, ...]]] = [{} for _ in prompts]
        self.lengths = [len(prompt) for prompt in prompts]
        causal = causal_attention(model.config)
        rows = []
        for kept, prompt in zip(self._kept, prompts, strict=True):
            attend = _kept_in(kept, causal)
            rows.append(model(torch.tensor([list(prompt)]), attend=attend, logit_rows=torch.tensor([len(prompt) - 1])))
        self.logits = torch.cat(rows)

    def following(self, tokens: Sequence[int], rows: Sequence[int] | None = None, *, keep: bool = True) -> Tensor:
        """(R, V) logits of what follows one more token of the sequences `rows`; all when None.

        Args:
            keep: the token stays part of its sequence.
        """
        chosen = list(range(len(self._kept))) if rows is None else list(rows)
        grown: list[dict[int, tuple[Tensor, ...]]] = [{} for _ in chosen]

        def grow(layer: int, *new: Tensor) -> list[tuple[Tensor, ...]]:
            """Per sequence what it kept of the layer and its row of each of `new`."""
            for place, row in enumerate(chosen):
                pairs = zip(self._kept[row][layer], new, strict=True)
                grown[place][layer] = tuple(torch.cat([old, x[place, None]]) for old, x in pairs)
            return [each[layer] for each in grown]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            kept = zip(q, grow(layer, k, v), strict=True)
            rows = [(x[None], both[0], both[1], sinks) for x, both in kept]
            return torch.cat([attend_last(self._model.config, layer, *row) for row in rows])

        def before(layer: int, x: Tensor, count: int) -> list[Tensor]:
            last = [F.pad(kept, (0, 0, count, 0))[-count - 1 :] for (kept,) in grow(layer, x)]
            return list(torch.stack(last, 1)[:count])

        positions = torch.tensor([self.lengths[row] for row in chosen])
        logits = self._model(torch.tensor(list(tokens)), positions, Attend(attend, before))
        if keep:
            for row, kept in zip(chosen, grown, strict=True):
                self._kept[row] = kept
                self.lengths[row] += 1
        return logits


def _kept_in(kept: dict[int, tuple[Tensor, ...]], sees: Attend) -> Attend:
    """`sees` of one sequence, which keeps what its later tokens will read, by layers."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        kept[layer] = k[0], v[0]
        return sees(layer, q, k, v, sinks)

    def before(layer: int, x: Tensor, count: int) -> list[Tensor]:
        kept[layer] = (x[0],)
        return sees.before(layer, x, count)

    return Attend(attend, before)


@torch.no_grad()
def continue_greedily(
    model: Decoder, prompts: Sequence[Sequence[int]], tokens: int, stops: frozenset[int], done: Callable[[], None]
) -> list[list[int]]:
    """What follows each prompt: the likeliest token each time, at most `tokens`, up to and with one of `stops`.

    Args:
        done: called for each prompt that is done.
    """
    answers: list[list[int]] = []
    for begin in range(0, len(prompts), TOGETHER):
        part = prompts[begin : begin + TOGETHER]
        sequences, given = Sequences(model, part), [[] for _ in part]
        logits, open_ = sequences.logits, list(range(len(part)))
        while open_:
            for row, token in zip(open_, logits.argmax(-1).tolist(), strict=True):
                given[row].append(token)
            going = [row for row in open_ if len(given[row]) < tokens and given[row][-1] not in stops]
            for _ in range(len(open_) - len(going)):
                done()
            open_ = going
            if open_:
                logits = sequences.following([given[row][-1] for row in open_], open_)
        answers += given
    return answers


@torch.no_grad()
def next_choices(model: Decoder, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """The likeliest token at each place of `answer`, given the prompt and the answer so far."""
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    logits_RV: Tensor = model(ids, logit_rows=torch.arange(len(prompt) - 1, ids.shape[1]))
    return logits_RV.argmax(-1).tolist()


@torch.no_grad()
def log_likelihoods(model: Decoder, texts: Sequence[tuple[Sequence[int], int]]) -> list[float]:
    """For each text, ids and how many of them are context (one or more), the summed log-probability in nats of the
    others, each given what stands before it.

    All texts run as one batch, padded behind: attention is causal, so that padding changes nothing.
    """
    longest = max(len(ids) for ids, _ in texts)
    padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in texts])
    positions = torch.arange(longest).expand(padded.shape)
    hidden_RTE = model.model(padded, positions, causal_attention(model.config))
    found = []
    for hidden_TE, (ids, context) in zip(hidden_RTE, texts, strict=True):
        rows, targets = hidden_TE[context - 1 : len(ids) - 1], torch.tensor(list(ids[context:]))
        pairs = zip(rows.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True)
        found.append(-sum(float(F.cross_entropy(model.logits(x), y, reduction="sum")) for x, y in pairs))
    return found
