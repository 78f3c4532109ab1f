"""Decoders that see get smaller and learn from their teacher about images, and go on into integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penjing.compress.distill.objective import DistillWeights
from penjing.compress.distill.seeing import SightDistillation
from penjing.compress.run import run_recipe
from penjing.core.artifact.base import read_report_file
from penjing.core.checkpoint.vision_language import load_vision_language
from penjing.core.errors import ConfigError
from penjing.core.family import family_of
from penjing.train.objective.answers import Answers
from penjing.train.objective.objective import IGNORED
from tests.serve.seeing import ROWS, TOKEN_ID, write_asked, write_seeing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeing")
    write_seeing(made, tied=True)
    write_asked(made, "rows.jsonl", range(8))
    return made


def compressed(folder: Path, output: Path, *steps: dict[str, Any]) -> Path:
    return run_recipe(
        {
            "model": str(folder), "output": str(output), "data": {"tokens": 128, "window": 16},
            "evaluate": {"prose_tokens": 128, "code_tokens": 0, "window": 32}, "measure": {"rounds": 0},
            "guard": {"perplexity_ratio": 10.0}, "steps": list(steps),
        }
    )  # fmt: skip


def learning(folder: Path, kind: str = "distill", **settings: Any) -> dict[str, Any]:
    return {
        "kind": kind, "steps": 12, "batch_size": 4, "sources": [str(folder / "rows.jsonl")], "images": str(folder),
        "sequence_length": 32, "held_out": 0.25, "learning_rate": {"peak": 3e-3}, **settings,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "shape"),
    [
        ({"parts": ["ffn"], "ratio": 0.34}, (32, 32, 2)),
        ({"parts": ["heads", "layers"], "ratio": 0.5, "layers": [1], "round_to": 1}, (32, 48, 1)),
        ({"parts": ["hidden"], "ratio": 0.25}, (24, 48, 2)),
    ],
)
def test_a_smaller_one_is_read_by_transformers_and_sees_as_the_whole_without_what_left(
    folder: Path, tmp_path: Path, parts: dict[str, Any], shape: tuple[int, int, int]
) -> None:
    from transformers import Idefics3ForConditionalGeneration

    out = compressed(folder, tmp_path / "out", {"kind": "prune", "method": "l2", **parts})
    assert family_of(out) == "vision_language"
    whole, small = load_vision_language(folder), load_vision_language(out)
    config = small.config.decoder
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == shape
    theirs = Idefics3ForConditionalGeneration.from_pretrained(out).eval()
    tokens, images = torch.tensor([[5, *[TOKEN_ID] * ROWS, 6]]), torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        logits = small(tokens, images)
        torch.testing.assert_close(
            logits, theirs(input_ids=tokens, pixel_values=images[None]).logits, atol=1e-4, rtol=1e-4
        )
        rows, before = small.see(images), whole.see(images)
        if shape[0] == 32:
            assert torch.equal(rows, before)
        else:  # the columns that stay, in their order
            kept = [int((before[0, 0] - value).abs().argmin()) for value in rows[0, 0]]
            assert kept == sorted(set(kept))
            torch.testing.assert_close(rows, before[..., kept])
            embedding = whole.decoder.model.embed_tokens.weight[:, kept]
            torch.testing.assert_close(small.decoder.model.embed_tokens.weight, embedding)


def test_finetuning_learns_the_answers(folder: Path, tmp_path: Path) -> None:
    out = compressed(folder, tmp_path / "out", learning(folder, "finetune", steps=25))
    stage = read_report_file(out)["stages"][-1]["record"]
    assert stage["losses"]["last"]["loss"] < 0.5 * stage["losses"]["first"]["loss"]


def test_the_divergence_is_torchs_and_a_teacher_that_is_the_student_teaches_nothing(folder: Path) -> None:
    torch.manual_seed(0)
    student, teacher = load_vision_language(folder), load_vision_language(folder)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    batch = {
        "tokens": torch.tensor([[TOKEN_ID] * ROWS + [5, 6, 7]] * 2), "images": torch.randn(2, 3, 16, 16),
        "seen": torch.arange(2), "rows": torch.tensor([4, 5, 11, 12]), "targets": torch.tensor([6, 7, 6, IGNORED]),
        "sample": torch.tensor([0, 0, 1, 1]),
    }  # fmt: skip
    objective = SightDistillation(teacher, DistillWeights(cross_entropy=0.25), 2.0, 0.0)
    assert objective.count(batch) == 3
    found = objective(student, batch)
    ours, theirs = (
        network(batch["tokens"], batch["images"], logit_rows=batch["rows"])[:3] for network in (student, teacher)
    )
    soft = torch.nn.functional.kl_div(
        (ours / 2).log_softmax(-1), (theirs / 2).log_softmax(-1), log_target=True, reduction="sum"
    )
    hard = torch.nn.functional.cross_entropy(ours, batch["targets"][:3], reduction="sum")
    torch.testing.assert_close(found.total, 4 * soft + 0.25 * hard, rtol=1e-4, atol=1e-4)
    alike = SightDistillation(load_vision_language(folder), DistillWeights(), 1.0, 0.0)
    assert float(alike(teacher, batch).total) == pytest.approx(0.0, abs=1e-5)
    assert isinstance(objective.evaluation(), Answers)


def test_what_cannot_be_done_with_one_is_refused_by_name(folder: Path, tmp_path: Path, tiny_checkpoint: Path) -> None:
    prune = {"kind": "prune", "ratio": 0.3}
    for steps, error, said in (
        ([{**prune, "reconstruct": True}], ConfigError, "reconstruct is for decoders"),
        ([{**prune, "method": "obs"}], ConfigError, "obs"),
        ([prune, learning(folder, sources=[])], ConfigError, "rows with images"),
        ([prune, learning(folder, sources=["builtin:own"])], ConfigError, "texts without images"),
        ([prune, learning(folder, flip=True)], ConfigError, "has no use for flip"),
        ([prune, learning(folder, weights={"hidden": 1.0})], ConfigError, "leave hidden out"),
        ([prune, learning(folder, cache_top_k=4)], ConfigError, "cache_top_k is for decoders"),
        ([prune, learning(folder, teacher=str(tiny_checkpoint))], ConfigError, "name a teacher of the same kind"),
        ([learning(folder, "sparsify", strength=0.1), prune], ConfigError, "sparsify is not for"),
        ([{"kind": "window", "windows": [8]}], ConfigError, "'window' are for decoders"),
    ):
        with pytest.raises(error, match=said):
            compressed(folder, tmp_path / "other", *steps)
