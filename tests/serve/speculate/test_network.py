"""The draft network as the engine runs it: as it was trained up to the rounding of its weights, and no longer than it
pays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penjing.core.checkpoint.draft import load_draft, save_draft
from penjing.core.runtime.draft import Draft, DraftConfig
from penjing.serve.speculate.drafter import CONFIDENCES, FIRST_CONFIDENCE, NUM_KINDS
from penjing.serve.speculate.network import DraftNetwork
from penjing.serve.speculate.rows import StepCosts
from penjing.serve.speculate.worth import PAUSE, Worth, saved_seconds

SIZE, VOCAB, KNOWN = 64, 200, 50


@pytest.fixture
def made(tmp_path: Path) -> tuple[Draft, DraftNetwork]:
    torch.manual_seed(0)
    config = DraftConfig(hidden_size=SIZE, intermediate_size=96, num_layers=2, vocab_size=VOCAB, num_known=KNOWN)
    network, head = Draft(config), torch.randn(VOCAB, SIZE)
    for name, parameter in network.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2 if parameter.dim() > 1 else 0.1)
        if parameter.dim() == 1:
            parameter.data += 1
        assert "head" not in name or parameter.shape == (KNOWN, SIZE)
    network.lm_head.weight.data *= 3  # clear preferences
    save_draft(tmp_path, network, 2 * torch.arange(KNOWN), head, {})
    stored = load_draft(tmp_path)
    return stored.network, DraftNetwork(stored, head[stored.anchor_ids_A])


def test_it_guesses_what_the_trained_network_guesses(made: tuple[Draft, DraftNetwork]) -> None:
    network, served = made
    hidden, last = torch.randn(40, SIZE), [2 * (place % KNOWN) for place in range(39)] + [199]
    found = served.guess(list(hidden), last, 3, 0.0)
    state, known = hidden, torch.tensor([each // 2 for each in last[:-1]] + [KNOWN])  # the last one is unknown
    same = torch.ones(40, dtype=torch.bool)
    for ahead in range(3):
        state, logits = network(state, known)
        sure, known = logits.softmax(-1).max(-1)
        guessed = torch.tensor([draft.token_ids[ahead] for draft in found])
        same &= guessed == 2 * known
        kinds = torch.tensor([draft.kinds[ahead] for draft in found])
        assert ((kinds >= FIRST_CONFIDENCE) & (kinds < NUM_KINDS)).all()
        if ahead == 0:
            assert ((kinds - FIRST_CONFIDENCE - sure * CONFIDENCES).abs()[same] < 2).all()
        assert same.float().mean() > 0.9 - 0.1 * ahead  # INT8 changes close calls
    assert served.guess([hidden[3]], [last[3]], 3, 0.0) == [found[3]]  # whoever else is there


def test_it_stops_when_guesses_are_unlikely(made: tuple[Draft, DraftNetwork]) -> None:
    _, served = made
    hidden = list(torch.randn(3, SIZE))
    assert [len(draft.token_ids) for draft in served.guess(hidden, [0, 2, 4], 6, 1.1)] == [1] * 3
    assert [len(draft.token_ids) for draft in served.guess(hidden, [0, 2, 4], 6, 0.0)] == [6] * 3


def test_a_network_that_does_not_pay_is_asked_rarely_and_comes_back() -> None:
    worth, asked = Worth(), 0
    for _ in range(1000):
        if worth.ask():
            asked += 1
            worth.note(0.0, 1.0)
    assert asked == -(-1000 // (PAUSE + 1))
    assert not worth.pays
    while not worth.pays:
        if worth.ask():
            asked += 1
            worth.note(2.0, 1.0)
    assert [worth.ask() for _ in range(10)] == [True] * 10


def test_one_guess_for_nothing_does_not_end_a_network_that_pays() -> None:
    worth = Worth()
    worth.note(0.0, 1.0)
    for _ in range(PAUSE):
        worth.ask()
    for saved in (4.0, 0.0, 4.0, 0.0, 4.0):
        assert worth.ask()
        worth.note(saved, 1.0)


def test_guesses_save_their_tokens_share_of_a_step_less_what_their_rows_cost() -> None:
    costs = StepCosts({1: 1.0, 5: 1.4})
    assert saved_seconds([], 1, costs) == 0
    assert saved_seconds([0.5, 0.25], 1, costs) == pytest.approx(0.75 - 0.2)
    assert saved_seconds([0.5], 4, costs) == pytest.approx(0.5 * 1.3 / 4 - 0.1)
