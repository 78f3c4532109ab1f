"""Learning from pairs of answers: what a run reaches, what it keeps, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penjing.core.checkpoint.reward import load_reward
from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Silent
from penjing.train.chat.preferences import pair_batch
from penjing.train.families.base import build_task
from penjing.train.monitor.alarms import AlarmConfig, Alarms
from penjing.train.objective.preference import answer_logprobs
from penjing.train.plan.preflight import check_run
from penjing.train.processes.world import World
from penjing.train.recipe.load import load_train_recipe
from penjing.train.run import train
from tests.conftest import write_tiny_checkpoint
from tests.train.families.test_chat import RECIPE as CHAT

RECIPE = (
    CHAT.replace('"chat"', '"preference"')
    .replace("chats", "pairs")
    .replace("[data]", '[objective]\nkind = "dpo"\n\n[data]')
)


@pytest.fixture
def recipe(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pairs whose better answer says yes, of 40 prompts."""
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    rows = [
        {"prompt": [{"role": "user", "content": f"Is {place} a number?"}], "chosen": f"yes, {place}", "rejected": "no"}
        for place in range(40)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "pairs.toml"
    path.write_text(RECIPE.format(folder=tmp_path, base=tiny_checkpoint))
    return path


def test_the_better_answer_becomes_likelier_on_prompts_never_seen(recipe: Path, tmp_path: Path) -> None:
    settings = ["steps=40", "data.held_out=0.3", "evaluation.every=20", "data.batch_size=8"]
    results = train(recipe, [*settings, "learning_rate.peak=5e-4", "monitor.every=1"])
    assert results["preference_accuracy"] == 1.0
    assert results["reward_margin"] > 0.5
    records = [json.loads(line) for line in (tmp_path / "out-run/metrics.jsonl").read_text().splitlines()]
    assert records[0]["loss"] == pytest.approx(0.6931472, abs=1e-5)  # ln 2: the model is its own reference
    assert len(list((tmp_path / "cache/reference").glob("*.safetensors"))) == 1


def test_the_reference_is_asked_once_and_answers_as_if_it_were_live(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = build_task(load_train_recipe(recipe), Silent())
    model = task.build_model()
    task.initialize(model)
    with torch.no_grad():
        live, _ = answer_logprobs(model, pair_batch(task._learnt.pairs, 2))  # type: ignore[attr-defined]
    torch.testing.assert_close(task._learnt.reference, live, rtol=1e-5, atol=1e-4)  # type: ignore[attr-defined]
    monkeypatch.setattr("penjing.train.chat.reference._asked", None)
    build_task(load_train_recipe(recipe), Silent())
    (kept,) = (tmp_path / "cache/reference").glob("*.safetensors")
    kept.write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"is damaged .*delete it, and the reference answers anew"):
        build_task(load_train_recipe(recipe), Silent())


def test_a_reward_model_orders_unseen_pairs_and_loads_elsewhere(recipe: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    settings = ["objective.kind=reward", "steps=40", "data.held_out=0.3", "evaluation.every=40", "data.batch_size=8"]
    results = train(recipe, [*settings, "objective.centring=0.01"])
    assert results["preference_accuracy"] == 1.0
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours = load_reward(tmp_path / "out")
    batch = pair_batch(build_task(load_train_recipe(recipe), Silent())._learnt.pairs[:3], 2)  # type: ignore[attr-defined]
    with torch.no_grad():
        scores = ours(batch["tokens"], batch["last"])
        width = batch["tokens"].shape[1]
        for row, last in enumerate(batch["last"].tolist()):
            text = batch["tokens"][row : row + 1, : last - row * width + 1]
            assert theirs(text).logits.item() == pytest.approx(scores[row].item(), abs=1e-4)
    with pytest.raises(InputError, match="names LlamaForCausalLM, and a reward model is one of …"):
        load_reward(load_train_recipe(recipe).initial or tmp_path)


def test_a_sum_and_its_own_count_are_reported(recipe: Path, tmp_path: Path) -> None:
    """Of 40 pairs none is of equal length, until the worse answer is as long as the better one."""
    settings = ["objective.kind=reward", "steps=1", "monitor.every=1"]
    train(recipe, settings)
    (record, *_) = [json.loads(line) for line in (tmp_path / "out-run/metrics.jsonl").read_text().splitlines()]
    assert "loss" in record
    assert "accuracy_of_equal_length" not in record
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    alike = [row | {"rejected": row["chosen"].replace(",", ";")} for row in rows]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in alike))
    train(recipe, settings, force=True)
    (record, *_) = [json.loads(line) for line in (tmp_path / "out-run/metrics.jsonl").read_text().splitlines()]
    assert record["accuracy_of_equal_length"] in (0.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("objective.kind=cross_entropy", "pairs of answers, which objective.kind = 'cross_entropy' does not compare"),
        ("objective.centring=0.1", r"objective.centring: .*is of kind = 'reward', not of 'dpo'"),
        ("objective.label_smoothing=0.5", "below 0.5"),
        ("parallel={pp=2, dp=1}", "needs 2 processes"),
        ("compile=true", "compile = true is not for data.kind = 'preference'"),
        ("data.kind=chat", r"objective.kind = 'dpo' compares pairs of answers; give data.kind = 'preference'"),
    ],
)
def test_what_cannot_be_meant_is_one_error(recipe: Path, setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        train(recipe, [setting])


@pytest.mark.parametrize("kind", ["dpo", "reward"])
@pytest.mark.parametrize("setting", ["auxiliary_loss=1.0", "bias_rate=0.01"])
def test_experts_are_not_balanced_by_pairs(recipe: Path, tmp_path: Path, kind: str, setting: str) -> None:
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    moe = {**shape, "router_bias": True, "scoring_func": "sigmoid"}
    folder = write_tiny_checkpoint(tmp_path / "moe", tie_word_embeddings=False, model_type="penjing", moe=moe)
    settings = [f"initial={folder}", f"objective.kind={kind}"]
    build_task(load_train_recipe(recipe, settings), Silent())
    with pytest.raises(ConfigError, match=r"\[balancing\] is not for data.kind = 'preference'.*leave it out"):
        build_task(load_train_recipe(recipe, [*settings, f"balancing.{setting}"]), Silent())


def test_a_reference_of_another_tokenizer_is_refused(recipe: Path, tmp_path: Path) -> None:
    other = write_tiny_checkpoint(tmp_path / "other", pre="smollm")
    with pytest.raises(ConfigError, match="has another tokenizer than initial"):
        build_task(load_train_recipe(recipe, [f"objective.reference={other}"]), Silent())


def test_a_reference_that_cannot_see_the_longest_pair_is_refused(recipe: Path, tmp_path: Path) -> None:
    short = write_tiny_checkpoint(tmp_path / "short", max_position_embeddings=32)
    with pytest.raises(ConfigError, match=r"objective.reference = .*short sees 32 tokens, and a pair has \d+"):
        build_task(load_train_recipe(recipe, [f"objective.reference={short}"]), Silent())


def test_an_alarm_tells_of_chosen_answers_that_are_unlearnt() -> None:
    alarms = Alarms(AlarmConfig(patience=2))
    rung = [alarms.on_record({"chosen_change": change}) for change in (-0.1, -0.6, -0.7, -0.8)]
    assert [len(each) for each in rung] == [0, 0, 1, 0]
    assert "the model unlearns both answers" in rung[2][0].message


def test_two_processes_see_the_pairs_of_one(recipe: Path) -> None:
    task = build_task(load_train_recipe(recipe, ["data.batch_size=4"]), Silent())
    whole = next(task.stream(4, World()))
    parts = [next(task.stream(2, World(rank, 2))) for rank in (0, 1)]
    known = torch.cat([part["reference"] for part in parts])
    assert torch.equal(whole["reference"], known)
    model = task.build_model()
    task.initialize(model)
    sums = sum(task.objective(model, part).total.item() for part in parts)
    assert task.objective(model, whole).total.item() == pytest.approx(sums, rel=1e-6)


def test_many_processes_are_not_refused_for_want_of_text(recipe: Path) -> None:
    check_run(load_train_recipe(recipe), 2, 1 << 30)


def test_training_leaves_the_reference_alone(recipe: Path, tmp_path: Path, tiny_checkpoint: Path) -> None:
    train(recipe, ["steps=2"])
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_checkpoint, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])
