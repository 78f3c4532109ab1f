"""Guesses by a small trained network, for several answers at once; see `penjing.core.runtime.draft`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from penjing.core.checkpoint.draft import StoredDraft
from penjing.core.runtime.draft import Draft as DraftModel
from penjing.core.runtime.draft import DraftLayer, known_numbers
from penjing.kernels.int8_linear import PackedInt8, int8_linear, prepack_int8
from penjing.kernels.quantize import quantize_per_token
from penjing.serve.speculate.drafter import CONFIDENCES, FIRST_CONFIDENCE, Draft
from penjing.serve.speculate.rows import StepCosts

TRIES = 5


class DraftNetwork:
    """Runs a draft network in INT8, rounded to nearest: a wrong guess costs time and nothing else.

    Args:
        head_AE: rows `stored.anchor_ids_A` of the served model's head.

    Raises:
        InputError: the network was trained for another model.
    """

    def __init__(self, stored: StoredDraft, head_AE: Tensor) -> None:
        network: DraftModel = stored.network
        config = network.config
        self._basis = stored.basis(head_AE).T.contiguous()
        self._token_ids = stored.token_ids_K.numpy()
        self._numbers = known_numbers(stored.token_ids_K, config.vocab_size)
        # What a token adds to the state is one row of a table, however many layers there are.
        size = config.hidden_size
        joint = network.joint.weight
        embedded = network.token_norm(network.embed_tokens.weight)
        self._of_token_KE = embedded @ joint[:, size:].T
        self._state_norm, self._norm = network.state_norm, network.norm
        self._joint = _packed(joint[:, :size])
        self._layers = list[tuple[DraftLayer, PackedInt8, PackedInt8, PackedInt8]]()
        for layer in network.layers:
            assert isinstance(layer, DraftLayer)
            mlp = layer.mlp
            gate, up, down = (_packed(each.weight) for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
            self._layers.append((layer, gate, up, down))
        self._head = _packed(network.lm_head.weight)
        self.costs = self._measured(size)

    @torch.inference_mode()
    def guess(self, hidden: Sequence[Tensor], last_ids: Sequence[int], most: int, least: float) -> list[Draft]:
        """What may follow the last token of each of S answers.

        Args:
            hidden: (E,) float32 of each, what the served model's head was given when it chose these tokens.
            most: guesses of each at most.
            least: no answer is guessed further when the mean of their chances, by the network itself, is below.
        """
        state = torch.stack(list(hidden)) @ self._basis
        known = self._numbers[torch.tensor(last_ids)]
        found = [Draft([], []) for _ in last_ids]
        chance = torch.ones(len(last_ids))
        for _ in range(most):
            state, logits = self._step(state, known)
            top, known = logits.log_softmax(-1).max(-1)
            sure = top.exp()
            chance = chance * sure
            ids = self._token_ids[known.numpy()].tolist()
            kinds = (sure * CONFIDENCES).long().clamp(max=CONFIDENCES - 1) + FIRST_CONFIDENCE
            for draft, token_id, kind in zip(found, ids, kinds.tolist(), strict=True):
                draft.token_ids.append(token_id)
                draft.kinds.append(kind)
            if float(chance.mean()) < least:
                break
        return found

    def _measured(self, size: int) -> StepCosts:
        """Seconds of one guess for each of some answers, the fastest of a few tries."""
        seconds = dict[int, float]()
        for rows in (1, 16):
            hidden = list(torch.zeros(rows, size))
            for _ in range(TRIES):
                started = time.perf_counter()
                self.guess(hidden, [0] * rows, 1, 0.0)
                seconds[rows] = min(seconds.get(rows, float("inf")), time.perf_counter() - started)
        return StepCosts(seconds)

    def _step(self, state_SE: Tensor, known_S: Tensor) -> tuple[Tensor, Tensor]:
        """`Draft.forward`."""
        x = state_SE + int8_linear(self._state_norm(state_SE), self._joint) + self._of_token_KE[known_S]
        for layer, gate, up, down in self._layers:
            y = layer.norm(x)
            x = x + int8_linear(torch.nn.functional.silu(int8_linear(y, gate)) * int8_linear(y, up), down)
        return x, int8_linear(self._norm(x), self._head)


def _packed(weight_NK: Tensor) -> PackedInt8:
    return prepack_int8(*quantize_per_token(weight_NK.contiguous()))


def head_rows(head: object, ids: Tensor) -> Tensor | None:
    """Rows `ids` of a model's LM head in float32; None where it is kept in a way that is not read here."""
    if isinstance(head, torch.nn.Linear):
        return head.weight[ids].detach().float().cpu()
    packed = getattr(head, "packed", None)
    if isinstance(packed, PackedInt8):
        return packed.weight_NK[ids].float() * packed.scale_N[ids, None]
    return None
