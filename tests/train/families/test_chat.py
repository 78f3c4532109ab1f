"""Teaching a decoder to answer: a run from conversations to a checkpoint that says them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Silent
from penjing.core.text.documents import Documents
from penjing.serve.engine.request import SamplingParams
from penjing.serve.generate import generate_stream
from penjing.train.chat.held_out import held_out_places, judged_places
from penjing.train.families.base import build_task
from penjing.train.processes.world import World
from penjing.train.recipe.load import load_train_recipe
from penjing.train.run import train

RECIPE = """
output = "{folder}/out"
initial = "{base}"
steps = 60
device = "cpu"
seed = 1

[data]
kind = "chat"
sources = ["{folder}/chats.jsonl"]
sequence_length = 64
batch_size = 2
held_out = 0.0

[learning_rate]
peak = 3e-3

[evaluation]
every = 0

[monitor]
tensorboard = false
"""
ANSWERS = {"How many trees?": "Seven.", "Which colour?": "Green, always.", "Who asks?": "You do."}


@pytest.fixture
def recipe(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in ANSWERS.items()
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "chat.toml"
    path.write_text(RECIPE.format(folder=tmp_path, base=tiny_checkpoint))
    return path


def test_a_decoder_learns_to_say_what_it_was_told_and_to_stop(recipe: Path, tmp_path: Path) -> None:
    train(recipe)
    documents = Documents(tmp_path / "out")
    for question, answer in ANSWERS.items():
        prompt = documents.conversation([{"role": "user", "content": question}], prompt=True)
        text = documents.tokenizer.decode(prompt, skip_special=False)
        outputs = list(generate_stream(tmp_path / "out", text, SamplingParams(max_tokens=30, temperature=0.0)))
        assert "".join(output.text for output in outputs) == answer
        assert outputs[-1].finish_reason == "stop"


def test_packed_rows_give_the_loss_of_single_ones(recipe: Path) -> None:
    losses = []
    for packing in ("true", "false"):
        task = build_task(load_train_recipe(recipe, [f"data.packing={packing}", "data.batch_size=1"]), Silent())
        model = task.build_model()
        task.initialize(model)
        rows = task.stream(1, World()).state_dict()["num_samples"]
        batches = [batch for batch, _ in zip(task.stream(1, World()), range(rows), strict=False)]
        with torch.no_grad():
            total = sum(float(task.objective(model, batch).total) for batch in batches)
        losses.append((sum(task.objective.count(batch) for batch in batches), total))
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] == pytest.approx(losses[1][1], rel=1e-6)


def test_equal_prompts_are_held_out_together(recipe: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{place // 2}", "completion": f"{place}"} for place in range(400)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["data.held_out=0.2", "evaluation.every=1", "data.packing=false", "evaluation.samples=400"]
    task = build_task(load_train_recipe(recipe, settings), Silent())
    learnt, held = task._learnt, task._held  # type: ignore[attr-defined]
    prompts = [{text.ids[~text.learnt].tobytes() for text in each.texts} for each in (learnt, held)]
    assert not prompts[0] & prompts[1]
    assert len(learnt.texts) + len(held.texts) == 400
    assert 40 < len(held.texts) < 130
    assert sum(task.objective.count(batch) for batch in task.held_out(8, World())) > 0


def test_an_evaluation_takes_conversations_from_everywhere(recipe: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{place}", "completion": f"{place}"} for place in range(200)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["data.held_out=0.2", "evaluation.every=1", "data.packing=false"]
    every, some = (
        [text.ids.tolist() for text in build_task(load_train_recipe(recipe, more), Silent())._held.texts]  # type: ignore[attr-defined]
        for more in ([*settings, "evaluation.samples=200"], [*settings, "evaluation.samples=3"])
    )
    assert some == [every[0], every[len(every) // 3], every[2 * len(every) // 3]]
    assert judged_places({5, 1, 3}, 256) == [1, 3, 5]
    assert judged_places(set(), 256) == []


def test_a_run_without_evaluations_cannot_go_on_with_some(recipe: Path) -> None:
    """Its settings of [data] are the same, and what it learns from is not."""
    settings = ["data.held_out=0.3", "data.packing=false"]
    train(recipe, [*settings, "steps=1"])
    with pytest.raises(InputError, match=r"num_samples=3, this run has 2; .* are evaluations \(evaluation.every\)"):
        train(recipe, [*settings, "steps=2", "evaluation.every=1"], resume="auto")


def test_conversations_that_are_learnt_whole_are_held_out_too(recipe: Path) -> None:
    settings = ["data.learn=all", "data.held_out=0.3", "evaluation.every=1"]
    task = build_task(load_train_recipe(recipe, settings), Silent())
    learnt, held = task._learnt, task._held  # type: ignore[attr-defined]
    assert len(learnt.texts) + len(held.texts) == len(ANSWERS)
    assert learnt.texts
    assert held.texts


def test_one_prompt_is_held_out_however_few_there_are() -> None:
    """Prompts are held out by their hashes, of which none may lie below the share."""
    for number in range(40):
        keys = [f"{number} {place}".encode() for place in range(3)]
        assert len(held_out_places(keys, 1e-6)) == 1
        assert len(held_out_places([*keys, *keys], 1e-6)) == 2
    with pytest.raises(ConfigError, match="holds out all 4 rows"):
        held_out_places([b"the same"] * 4, 0.1)


@pytest.mark.parametrize(
    ("setting", "error", "says"),
    [
        ("compile=true", ConfigError, "compile = true is not for data.kind = 'chat'"),
        ("data.sequence_length=513", ConfigError, "more than the 512 tokens that .* can see"),
        ("evaluation.every=5", ConfigError, "data.held_out = 0 leaves nothing to evaluate on"),
        ("data.sequence_length=8", InputError, "3 left out because they are longer than a sequence"),
        ("data.template=/none.jinja", ConfigError, "data.template: /none.jinja cannot be read"),
        ("data={kind='chat', sources=[], batch_size=1, sequence_length=9}", ConfigError, "data.sources"),
    ],
)
def test_what_cannot_be_learnt_is_one_error(
    recipe: Path, tmp_path: Path, setting: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as raised:
        train(recipe, [setting])
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_template_of_the_user_is_exported(recipe: Path, tmp_path: Path) -> None:
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}"
    (tmp_path / "mine.jinja").write_text(text + "assistant: {% endif %}")
    train(recipe, ["steps=1", f"data.template={tmp_path}/mine.jinja"])
    assert (tmp_path / "out/chat_template.jinja").read_text() == text + "assistant: {% endif %}"
    written = Documents(tmp_path / "out")
    prompt = written.conversation([{"role": "user", "content": "a"}], prompt=True)
    assert written.tokenizer.decode(prompt, skip_special=False) == "user: a<|im_end|>assistant: "


def test_samples_are_answers_to_a_user(recipe: Path, tmp_path: Path) -> None:
    settings = ["steps=40", "data.held_out=0.3", "evaluation.every=40", "evaluation.prompts=['Who asks?']"]
    train(recipe, settings)
    (sample,) = [json.loads(line) for line in (tmp_path / "out-run/samples.jsonl").read_text().splitlines()]
    assert sample["prompt"] == "Who asks?"


def test_the_speed_counts_what_is_computed_and_tells_what_is_learnt(recipe: Path, tmp_path: Path) -> None:
    train(recipe, ["steps=3", "monitor.every=1"])
    lines = [json.loads(line) for line in (tmp_path / "out-run/metrics.jsonl").read_text().splitlines()]
    records = [line for line in lines if "step_s" in line]
    assert len(records) == 3
    for record in records:
        assert record["tokens_per_s"] * record["step_s"] == pytest.approx(2 * 64)
        assert record["learnt_tokens_per_s"] * record["step_s"] == pytest.approx(record["count"])


def test_a_chat_comes_next_where_there_is_a_template_to_chat_by(
    recipe: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    task = build_task(load_train_recipe(recipe, []), Silent())
    assert task.next_command(tiny_checkpoint) == f"penjing serve {tiny_checkpoint}, then penjing chat"
    assert task.next_command(tmp_path / "without").startswith(f"penjing generate {tmp_path}/without ")
