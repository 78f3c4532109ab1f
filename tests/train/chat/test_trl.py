"""Labels, losses and gradients are those of TRL, whose numbers lie in tests/train/reference/trl.json (see there how
they were made)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.models.decoder import Decoder
from penjing.core.models.reward import RewardModel
from penjing.core.text.chat import ChatTemplate
from penjing.core.text.tokenizer import Tokenizer
from penjing.train.align.advantages import group_advantages, leave_one_out
from penjing.train.chat.packed import pack_rows
from penjing.train.chat.preferences import pair_batch
from penjing.train.chat.tokens import ChatTokens, Masked, Pair
from penjing.train.objective.objective import Batch, CrossEntropy, Objective
from penjing.train.objective.policy import PolicyGradient, answer_tokens
from penjing.train.objective.preference import DirectPreference, RewardModeling
from penjing.train.state.initial import checkpoint_weights, fill_weights
from tests.train.reference import cases

TRL = json.loads(Path(cases.__file__).with_name("trl.json").read_text())


@pytest.fixture
def decoder(tiny_checkpoint: Path) -> Decoder:
    model = Decoder(open_checkpoint(tiny_checkpoint).config)
    fill_weights(model, checkpoint_weights(tiny_checkpoint))
    return model


def check(model: nn.Module, objective: Objective, batch: Batch, expected: dict[str, Any]) -> None:
    loss = objective(model, batch).total / objective.count(batch)
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6, rel=1e-6)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([each.double().norm() for each in gradients.values()]).norm()
    assert float(norm) == pytest.approx(expected["norm"], rel=1e-5)
    assert expected["gradients"]
    for name, values in expected["gradients"].items():
        torch.testing.assert_close(
            gradients[name].flatten()[: len(values)], torch.tensor(values), rtol=1e-4, atol=1e-5 * float(norm)
        )


@pytest.mark.parametrize("name", cases.TEMPLATES)
def test_labels_of_a_thousand_chats(tiny_checkpoint: Path, name: str) -> None:
    writer = ChatTokens(Tokenizer.from_folder(tiny_checkpoint), ChatTemplate(cases.TEMPLATES[name], name), "last")
    digest = hashlib.sha256()
    for prompt, completion in cases.chats(1000):
        found = writer.masked({"messages": prompt + completion})
        begin = int(found.learnt.argmax())
        assert found.learnt[begin:].all()
        digest.update(found.ids.tobytes() + np.array(begin, np.int32).tobytes())
    assert digest.hexdigest() == TRL["labels"][name]


def test_fine_tuning(decoder: Decoder) -> None:
    texts = [
        Masked(np.array(prompt + answer, np.int32), np.arange(len(prompt + answer)) >= len(prompt))
        for prompt, answer in cases.answers(6, 3)
    ]
    packed = pack_rows(texts, 40, cases.PAD)
    assert len(packed.rows) < 6
    check(decoder, CrossEntropy(), packed.read(range(len(packed.rows))), TRL["sft"])


def given_pairs() -> list[Pair]:
    pairs = []
    for (prompt, chosen, rejected), margin in zip(cases.pairs(), cases.MARGINS, strict=True):
        pairs.append(Pair(*(np.array(part, np.int32) for part in (prompt, chosen, rejected)), margin=margin))
    return pairs


@pytest.mark.parametrize("name", cases.DPO)
def test_direct_preference(decoder: Decoder, name: str) -> None:
    settings: dict[str, Any] = {"loss": name} | cases.DPO[name]
    objective = DirectPreference(**settings)
    batch = pair_batch(given_pairs(), cases.PAD, reference=torch.tensor(cases.REFERENCE))
    check(decoder, objective, batch, TRL["dpo"][name])


def test_rewards(tiny_checkpoint: Path) -> None:
    model = RewardModel(open_checkpoint(tiny_checkpoint).config)
    stored = checkpoint_weights(tiny_checkpoint)
    fill_weights(model.model, lambda name, shape: stored(f"model.{name}", shape))
    model.score.weight.data = torch.linspace(-1, 1, model.score.weight.numel())[None]
    check(model, RewardModeling(cases.CENTRING), pair_batch(given_pairs(), cases.PAD), TRL["reward"])


def sampled() -> Batch:
    """The answers of `cases` as a batch, with what TRL was told of them."""
    answers = cases.answers(len(cases.ADVANTAGES), 3)
    sizes = [len(answer) for _, answer in answers]
    tokens = np.full((len(answers), max(len(prompt + answer) for prompt, answer in answers)), cases.PAD)
    rows, owner = list[int](), np.repeat(np.arange(len(answers)), sizes)
    for place, (prompt, answer) in enumerate(answers):
        tokens[place, : len(prompt + answer)] = prompt + answer
        begin = place * tokens.shape[1] + len(prompt) - 1
        rows += range(begin, begin + len(answer))
    zeros = torch.zeros(len(answers))
    batch = {name: torch.from_numpy(np.asarray(each)) for name, each in (("tokens", tokens), ("answer", owner))}
    batch |= {"rows": torch.tensor(rows), "next": torch.tensor([token for _, answer in answers for token in answer])}
    for name, seed in (("old", 4), ("reference", 5)):
        batch[name] = torch.tensor([value for row in cases.old_logprobs(seed, sizes) for value in row])
    batch |= {"advantage": torch.tensor(cases.ADVANTAGES), "real": torch.ones(len(answers), dtype=torch.bool)}
    return batch | dict.fromkeys(("reward", "ended", "silent"), zeros)


@pytest.mark.parametrize("name", cases.GRPO)
def test_group_relative_policies(decoder: Decoder, name: str) -> None:
    settings, batch = dict(cases.GRPO[name]), sampled()
    if "old" in settings:
        batch.pop(settings.pop("old") or "old")
    check(decoder, PolicyGradient(**settings), batch, TRL["grpo"][name])


def test_policies_of_whole_answers(decoder: Decoder) -> None:
    batch = sampled()
    with torch.no_grad():
        found, _ = answer_tokens(decoder, batch)
    sizes = torch.bincount(batch["answer"])
    shifts = torch.tensor(cases.rloo_shifts(len(sizes)))
    batch["old"] = found - (shifts / sizes)[batch["answer"]]
    check(decoder, PolicyGradient(cases.RLOO_CLIP, whole=True, aggregate="answer"), batch, TRL["rloo"])


@pytest.mark.parametrize("name", TRL["advantages"])
def test_advantages(name: str) -> None:
    kind, _, scale = name.partition(", ")
    ways: dict[str, Any] = {"grpo": group_advantages, "rloo": leave_one_out}
    found = ways[kind](torch.tensor(cases.REWARDS), scale)
    torch.testing.assert_close(found.flatten(), torch.tensor(TRL["advantages"][name]), rtol=1e-6, atol=1e-6)
