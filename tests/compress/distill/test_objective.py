"""The parts of the distillation loss against formulas written out, and their independence of how a batch is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from penjing.compress.distill.features import AttentionRelations, HiddenStates, even_map
from penjing.compress.distill.objective import Distillation, DistillWeights, Teacher, captured
from penjing.compress.distill.task import PROJECTIONS
from penjing.compress.steps.train import Distill
from penjing.core.checkpoint.classifier import load_classifier
from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.models.resnet_config import cifar_resnet
from penjing.train.objective.objective import IGNORED, Batch, CrossEntropy
from tests.compress.classifiers import write_classifier
from tests.compress.conftest import Notes
from tests.compress.distill.conftest import STEPS, do

CPU = torch.device("cpu")


def network(seed: int, hidden: int, layers: int, **changes: Any) -> tuple[Decoder, DecoderConfig]:
    config = DecoderConfig.model_validate(
        {
            "vocab_size": 50, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers,
            "num_attention_heads": hidden // 8, "num_key_value_heads": hidden // 16, "head_dim": 8,
            "max_position_embeddings": 32,
        }
        | changes
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Decoder(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model, config


def tokens(rows: int, length: int, documents: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    targets = torch.randint(0, 50, (rows, length), generator=generator)
    for row in range(rows):
        targets[row, length - 1 - row % 4 :] = IGNORED
    batch = {"tokens": torch.randint(0, 50, (rows, length), generator=generator), "targets": targets}
    if documents:
        batch["documents"] = (torch.arange(length) >= 4).long().expand(rows, -1).contiguous()
    return batch


def both(*windows: int | None) -> tuple[Decoder, Decoder, HiddenStates, AttentionRelations]:
    """A student and its teacher; `windows`: of their layers."""
    mine, other = ({"sliding_window": window} for window in windows or (None, None))
    (student, ours), (teacher, theirs) = network(0, 16, 2, **mine), network(1, 32, 4, **other)
    hidden = HiddenStates(ours, theirs)
    student.add_module(PROJECTIONS, hidden.projections())
    return student, teacher, hidden, AttentionRelations.between(ours, theirs, None)


def test_logits_and_targets_are_the_usual_mixture() -> None:
    """alpha × CE + (1 - alpha) × T² × KLDivLoss("batchmean"), as in transformers' distillation examples."""
    student, teacher, *_ = both()
    batch, temperature, alpha = tokens(4, 9), 3.0, 0.4
    weights = DistillWeights(logits=1 - alpha, cross_entropy=alpha)
    objective = Distillation(CrossEntropy(), Teacher(teacher, "tokens", CPU), weights, temperature)
    total = objective(student, batch).total / objective.count(batch)
    with torch.no_grad():
        counted = batch["targets"] != IGNORED
        s, t = student(batch["tokens"])[counted], teacher(batch["tokens"])[counted]
        soft = nn.KLDivLoss(reduction="batchmean")(F.log_softmax(s / temperature, -1), F.softmax(t / temperature, -1))
        hard = F.cross_entropy(s, batch["targets"][counted])
    assert total.item() == pytest.approx((alpha * hard + (1 - alpha) * temperature**2 * soft).item(), rel=1e-5)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("windows", "seen_at_most"), [((None, None), 8), ((3, 3), 3), ((None, 2), 2), ((2, 4), 2)])
def test_hidden_states_and_relations_are_what_they_say(
    documents: bool, windows: tuple[int | None, int | None], seen_at_most: int
) -> None:
    student, teacher, hidden, relations = both(*windows)
    batch = tokens(3, 8, documents)
    answers = Teacher(teacher, "tokens", CPU, names=(*hidden.teacher, *relations.teacher))
    weights = DistillWeights(logits=0.0, hidden=1.0, relations=1.0)
    loss = Distillation(CrossEntropy(), answers, weights, 1.0, ((hidden, 1.0), (relations, 1.0)))(student, batch)
    assert hidden.student == ("model.layers.0", "model.layers.1")
    assert hidden.teacher == ("model.layers.1", "model.layers.3")
    inside = {"documents": batch["documents"]} if documents else {}
    with torch.no_grad(), captured(student, [*hidden.student, *relations.student]) as seen:
        student(batch["tokens"], **inside)
    with torch.no_grad(), captured(teacher, [*hidden.teacher, *relations.teacher]) as taught:
        teacher(batch["tokens"], **inside)
    states = related = 0.0
    for row, place in (batch["targets"] != IGNORED).nonzero().tolist():
        for index, (mine, other) in enumerate(zip(hidden.student, hidden.teacher, strict=True)):
            h, t = seen[mine][row, place].double(), taught[other][row, place].double()
            projected = student.get_parameter(f"{PROJECTIONS}.{index}.weight").detach().double() @ h
            states += ((projected - t).norm() / t.norm()).item() ** 2 / 2
        first = max(4 if documents and place >= 4 else 0, place + 1 - seen_at_most)
        for mine, other in zip(relations.student, relations.teacher, strict=True):
            for head in range(relations.heads):
                rows = []
                for values in (taught[other], seen[mine]):
                    x = values[row].double().chunk(relations.heads, -1)[head]
                    rows.append(F.softmax(x[first : place + 1] @ x[place] / x.shape[-1] ** 0.5, -1))
                related += F.kl_div(rows[1].log(), rows[0], reduction="sum").item() / (3 * relations.heads)
    assert loss.metrics["hidden"].item() == pytest.approx(states, rel=1e-4)
    assert loss.metrics["relations"].item() == pytest.approx(related, rel=1e-4)
    assert loss.total.item() == pytest.approx(states + related, rel=1e-4)


@pytest.mark.parametrize("parts", [3, 6])
def test_gradients_do_not_depend_on_accumulation(parts: int) -> None:
    student, teacher, hidden, relations = both()
    answers = Teacher(teacher, "tokens", CPU, names=(*hidden.teacher, *relations.teacher))
    weights = DistillWeights(logits=1.0, cross_entropy=0.5, hidden=0.3, relations=0.7)
    objective = Distillation(CrossEntropy(), answers, weights, 2.0, ((hidden, 0.3), (relations, 0.7)))
    batch = tokens(6, 8)

    def gradients(pieces: int) -> dict[str, torch.Tensor]:
        student.zero_grad(set_to_none=True)
        rows = zip(*(tensor.chunk(pieces) for tensor in batch.values()), strict=True)
        for row in rows:
            (objective(student, dict(zip(batch, row, strict=True))).total / objective.count(batch)).backward()
        return {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}

    whole, cut = gradients(1), gradients(parts)
    assert whole.keys() == dict(student.named_parameters()).keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-4, atol=1e-6)
    assert not any(p.requires_grad for p in teacher.parameters())


def test_layers_are_mapped_evenly() -> None:
    assert even_map(3, 3) == [0, 1, 2]
    assert even_map(2, 6) == [2, 5]
    assert even_map(4, 5) == [1, 2, 3, 4]
    for student in range(1, 9):
        for teacher in range(student, 12):
            mapped = even_map(student, teacher)
            assert mapped[-1] == teacher - 1
            assert sorted(set(mapped)) == mapped


def test_relation_heads_must_divide_all_widths() -> None:
    (_, ours), (_, theirs) = network(0, 16, 2), network(1, 32, 4)
    assert AttentionRelations.between(ours, theirs, None).heads == 4
    with pytest.raises(ConfigError, match=r"relation_heads=3 does not divide all of .*take a divisor of 8"):
        AttentionRelations.between(ours, theirs, 3)
    with pytest.raises(ConfigError, match="is for decoders with plain attention"):
        AttentionRelations.between(cifar_resnet(8), theirs, None)


def test_projections_are_trained_and_stay_behind(
    make_tiny_checkpoint: Callable[..., Path],
    tiny_checkpoint: Path,
    text_step: Callable[..., Distill],
    tmp_path: Path,
    notes: Notes,
) -> None:
    narrow = make_tiny_checkpoint(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    step = text_step(
        steps=20, weights={"hidden": 1.0, "relations": 1.0}, checkpoint_every=20, document_mask=True, average=0.5
    )
    (tmp_path / "partial").mkdir()
    record = do(step, narrow, tiny_checkpoint, tmp_path / "partial", tmp_path / "work", notes)
    assert any(line.startswith("20 steps, ") for line in notes.lines)
    assert not any(str(tmp_path / "work") in line for line in notes.lines)  # which goes
    for part in ("divergence", "hidden", "relations"):
        assert record["losses"]["last"][part] < record["losses"]["first"][part]
    (state,) = (tmp_path / "work/run/checkpoints").glob("step-*")
    assert f"model/{PROJECTIONS}.0.weight" in load_file(state / "state.safetensors")
    given, made = (load_file(folder / "model.safetensors") for folder in (narrow, tmp_path / "partial"))
    assert {name: t.shape for name, t in made.items()} == {name: t.shape for name, t in given.items()}


@pytest.mark.usefixtures("small_images")
def test_feature_maps_of_a_classifier_are_matched(tmp_path: Path) -> None:
    teacher = write_classifier(tmp_path / "teacher")
    student = write_classifier(tmp_path / "student", model=cifar_resnet(8, width=4, in_channels=1), scale=0.0)
    step = Distill.model_validate(
        STEPS | {"kind": "distill", "steps": 15, "checkpoint_every": 100, "weights": {"logits": 0.0, "hidden": 1.0}}
    )
    (tmp_path / "partial").mkdir()
    record = do(step, student, teacher, tmp_path / "partial", tmp_path / "work")
    assert record["losses"]["last"]["hidden"] < record["losses"]["first"]["hidden"]
    load_classifier(tmp_path / "partial")
