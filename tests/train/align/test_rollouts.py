"""Learning from a model's own answers: what a run reaches, that it goes on as if it had not stopped, and what it
refuses."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Silent
from penjing.train.align.rollouts import RolloutStream
from penjing.train.checks import check_machine
from penjing.train.families.base import build_task
from penjing.train.families.rollouts import RolloutTuning
from penjing.train.launch.launch import launch
from penjing.train.monitor.alarms import AlarmConfig, Alarms
from penjing.train.processes.world import World
from penjing.train.recipe.load import load_train_recipe
from penjing.train.run import train
from tests.serve.tiny import CONVOLUTIONS

RECIPE = """
output = "{folder}/out"
initial = "{base}"
steps = 4
device = "cpu"
seed = 1

[prompts]
sources = ["{folder}/prompts.jsonl"]
held_out = 0.2

[data]
kind = "rollouts"
batch_size = 4
samples = 6
max_tokens = 4

[reward]
kind = "{folder}/reward.py:vowels"
unended = "scored"

[learning_rate]
kind = "constant"
peak = 5e-3

[optimizer]
weight_decay = 0.0

[precision]
mode = "fp32"

[evaluation]
every = 0

[monitor]
every = 1
tensorboard = false
"""
CODE = """
print("what the file prints is no answer")

def vowels(prompt, answer, row):
    assert prompt == row["prompt"]
    return sum(letter in "aeiou" for letter in answer) / 4

def starts(prompt, answer, row):
    return answer[:1] in "aeiou"

def same(prompt, answer, row):
    return 0.3
"""


@pytest.fixture
def recipe(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    rows = [{"prompt": f"Say {place}.", "answer": place} for place in range(20)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(CODE)
    path = tmp_path / "rollouts.toml"
    path.write_text(RECIPE.format(folder=tmp_path, base=tiny_checkpoint))
    return path


def records(folder: Path) -> list[dict[str, Any]]:
    """Of the steps, without alarms and evaluations."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if "loss" in record]


@pytest.mark.parametrize("settings", [[], ["algorithm.kind=rloo", "adapter.rank=4", "learning_rate.peak=2e-2"]])
def test_the_reward_rises_and_the_engine_follows_the_learner(recipe: Path, tmp_path: Path, settings: list[str]) -> None:
    results = train(recipe, ["steps=20", "evaluation.every=20", *settings])
    steps = records(tmp_path / "out-run")
    first, last = (sum(record["reward"] for record in some) / 5 for some in (steps[:5], steps[-5:]))
    assert last > first + 0.2
    assert results["reward"] > first + 0.2
    assert results["loss"] == -results["reward"]
    # The engine samples by the weights of this very update, and with the learner's probabilities.
    assert max(record["gap"] for record in steps) < 1e-4
    answers = [json.loads(line) for line in (tmp_path / "out-run/answers.jsonl").read_text().splitlines()]
    assert {"step", "prompt", "answer", "reward"} == set(answers[0])
    assert (tmp_path / "out/adapter").exists() == bool(settings)


def test_the_engine_follows_convolutions_too(
    recipe: Path, tmp_path: Path, make_tiny_checkpoint: Callable[..., Path]
) -> None:
    base = make_tiny_checkpoint(**CONVOLUTIONS)
    train(recipe, ["steps=4", "learning_rate.peak=2e-2", f"initial={base}"])
    assert max(record["gap"] for record in records(tmp_path / "out-run")) < 1e-4
    taps = "model.layers.0.conv.taps.weight"
    assert not torch.equal(open_checkpoint(base).get(taps), open_checkpoint(tmp_path / "out").get(taps))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["algorithm.redraws=1"], marks=pytest.mark.full),
        ["algorithm.updates=2", "algorithm.kl=0.1"],
        ["data.ahead=true", "algorithm.kl=0.1", "algorithm.redraws=1"],
        pytest.param(["data.ahead=true", "algorithm.updates=2"], marks=pytest.mark.full),
    ],
)
def test_a_run_goes_on_as_if_it_had_not_stopped(recipe: Path, tmp_path: Path, settings: list[str]) -> None:
    train(recipe, ["steps=5", *settings])
    whole = [f"output={tmp_path}/again", *settings]
    train(recipe, ["steps=3", *whole])  # of two updates a rollout this is between them
    train(recipe, ["steps=5", *whole], resume="auto")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    for ours, theirs in zip(*(records(tmp_path / f"{name}-run")[-2:] for name in ("out", "again")), strict=True):
        assert all(ours[key] == theirs[key] for key in ("loss", "reward", "length", "entropy", "gradient_norm"))


def test_what_is_sampled_ahead_is_of_one_update_before(recipe: Path, tmp_path: Path) -> None:
    settings = ["steps=3", "learning_rate.peak=2e-2"]
    train(recipe, settings)
    train(recipe, [*settings, "data.ahead=true", f"output={tmp_path}/ahead"])
    now, ahead = (records(tmp_path / f"{name}-run") for name in ("out", "ahead"))
    # The first answers are the same; the second ones were sampled before anything was learnt from them.
    assert now[0]["loss"] == pytest.approx(ahead[0]["loss"], abs=1e-6)
    assert now[0]["reward"] == ahead[0]["reward"]
    assert max(record["gap"] for record in (*now, ahead[0])) < 1e-4
    assert min(record["gap"] for record in ahead[1:]) > 1e-3


def test_a_run_learns_from_answers_that_are_sampled_ahead(recipe: Path, tmp_path: Path) -> None:
    results = train(recipe, ["steps=20", "evaluation.every=20", "data.ahead=true"])
    steps = records(tmp_path / "out-run")
    first = sum(record["reward"] for record in steps[:5]) / 5
    assert results["reward"] > first + 0.2


def test_equal_rewards_change_no_bit(recipe: Path, tmp_path: Path, tiny_checkpoint: Path) -> None:
    train(recipe, [f"reward.kind={tmp_path}/reward.py:same"])
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_checkpoint, tmp_path / "out"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {record["silent"] for record in records(tmp_path / "out-run")} == {1.0}


def test_prompts_whose_answers_are_worth_the_same_are_replaced(recipe: Path, tmp_path: Path) -> None:
    # Few answers begin with a vowel, so that most groups of two are of equal rewards.
    given = [f"reward.kind={tmp_path}/reward.py:starts", "data.samples=2", "steps=3", "learning_rate.peak=1e-9"]
    silent = []
    for redraws in (0, 4):
        train(recipe, [*given, f"algorithm.redraws={redraws}"], force=True)
        found = records(tmp_path / "out-run")[-3:]
        silent.append(sum(record["silent"] for record in found))
    assert silent[1] < silent[0]
    assert "asked" not in found[0] or all(1 <= record["asked"] <= 5 for record in found)
    assert max(record["asked"] for record in found) > 1
    # What was replaced counts in the mean reward, which else would be higher than the model deserves.
    assert all(0 <= record["reward"] <= 1 for record in found)


def test_no_prompt_comes_twice_where_others_are_left(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All answers are worth the same, so that every prompt is replaced twice: 4 × 3 of the 16 prompts are asked.
    kind = f"reward.kind={tmp_path}/reward.py:same"
    task = build_task(load_train_recipe(recipe, [kind, "algorithm.redraws=2"]), Silent())
    assert isinstance(task, RolloutTuning)
    model = task.build_model()
    task.initialize(model)
    task.after_update(model, World())
    stream, asked = task.stream(4, World()), list[tuple[int, ...]]()
    assert isinstance(stream, RolloutStream)
    sampler = task._bound().sampler
    sample = sampler.sample

    def heard(prompts: Any, *more: Any) -> Any:
        asked.extend(map(tuple, prompts))
        return sample(prompts, *more)

    monkeypatch.setattr(sampler, "sample", heard)
    next(stream)
    assert len(asked) == len(set(asked)) == 12


def test_the_first_of_several_updates_has_ratios_of_one_and_no_distance(recipe: Path, tmp_path: Path) -> None:
    train(recipe, ["algorithm.updates=3", "algorithm.kl=0.1", "algorithm.clip=[0.01, 0.01]"])
    found = records(tmp_path / "out-run")
    assert found[0]["clipped"] == found[0]["kl"] == 0.0
    assert found[1]["clipped"] > 0
    assert found[1]["kl"] > 0
    assert found[3]["clipped"] == 0.0  # new answers


@dataclass(frozen=True)
class Meeting(World):
    """Processes that are threads: sums are made where all meet."""

    barrier_of: threading.Barrier = field(default_factory=lambda: threading.Barrier(1), compare=False)
    given: dict[int, Tensor] = field(default_factory=dict, compare=False)

    def sum(self, values: Tensor) -> Tensor:
        self.given[self.rank] = values.clone()
        self.barrier_of.wait(600)
        values.copy_(torch.stack([self.given[rank] for rank in range(self.size)]).sum(0))
        self.barrier_of.wait(600)
        return values


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.scale=batch", "algorithm.redraws=2"],
        ["algorithm.kind=rloo", "algorithm.kl=0.1"],
        ["algorithm.kind=ppo"],
    ],
)
def test_two_processes_learn_what_one_does(recipe: Path, settings: list[str]) -> None:
    loaded = load_train_recipe(recipe, ["data.batch_size=3", *settings])

    def batches(world: World, micro_batch: int, passes: int) -> list[dict[str, Tensor]]:
        task = build_task(loaded, Silent())
        model = task.build_model()
        task.initialize(model)
        task.after_update(model, world)
        stream = task.stream(micro_batch, world)
        return [next(stream) for _ in range(passes)]

    barrier, given = threading.Barrier(2), dict[int, Tensor]()
    found: dict[int, list[dict[str, Tensor]]] = {}
    worlds = [Meeting(rank, 2, barrier_of=barrier, given=given) for rank in range(2)]
    threads = [
        threading.Thread(target=lambda world=world: found.update({world.rank: batches(world, 1, 2)}))
        for world in worlds
    ]
    for thread in threads:
        thread.start()
    (whole,) = batches(World(), 3, 1)
    for thread in threads:
        thread.join()
    parts = [found[0][0], found[1][0], found[0][1], found[1][1]]
    assert [bool(part["real"].all()) for part in parts] == [True, True, True, False]
    for name in ("advantage", "reward", "ended", "silent" if "silent" in whole else "value"):
        torch.testing.assert_close(torch.cat([part[name] for part in parts[:3]]), whole[name], rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.cat([part["next"] for part in parts[:3]]), whole["next"])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["reward.kind=verifier", "reward.check=regex", "algorithm.kind=rloo", "algorithm.scale=group"],
         "algorithm.scale: .*of rloo is 'batch' or 'none'"),
        (["algorithm.kind=rloo", "algorithm.dual=2.0"],
         "algorithm.dual: .*is of kind = 'grpo' or 'ppo', not of 'rloo'"),
        (["algorithm.kind=ppo", "algorithm.redraws=1"],
         "algorithm.redraws: .*is of kind = 'grpo' or 'rloo', not of 'ppo'"),
        (["algorithm.kind=rloo", "algorithm.entropy=0.1"],
         "algorithm.entropy: .*is of kind = 'grpo' or 'ppo', not of 'rloo'"),
        (["algorithm.reference=x"], "algorithm.reference: .*is what the penalty algorithm.kl is measured from"),
        (["reward.kind=gold"], "reward.kind: .*'verifier', 'model', or a function"),
        (["reward.kind=model"], "reward.folder: .*is the reward model that kind = 'model' asks"),
        (["reward.check=exact"], "reward.check: .*leave it out"),
        (["data={kind='chat', sources=['x'], batch_size=1, sequence_length=9}"],
         "prompts: .*is of data.kind = 'rollouts', not of 'chat'"),
        (["data.samples=0"], "data.rollouts.samples|data.samples"),
        (["data.top_p=0.9"], "data: .*top_p would sample from a part of the tokens, .*leave it out"),
        (["data.temperature=0"], "data.temperature: .*greater than 0"),
        (["data.ahead=true", "data.temperature=0.5"], "data: .*ahead needs the probabilities .* not 0.5; leave out"),
        (["data.servers=['a:1', 'b:1', 'a:1']"], "data: .*servers names one twice"),
        (["data.max_tokens=512"], "leaves no room for a prompt in the 512 tokens"),
        (["prompts.held_out=0.0", "evaluation.every=1"], "prompts.held_out = 0 leaves nothing to evaluate on"),
        (["prompts.sources=['nowhere']"], "prompts.sources: nowhere does not exist"),
        (["prompts.template=/none.jinja"], "prompts.template: /none.jinja cannot be read"),
        (["compile=true"], "compile = true is not for data.kind = 'rollouts'"),
        (["objective.label_smoothing=0.1"], r"\[objective\] is not for data.kind = 'rollouts'"),
        (["algorithm={kind='draft'}", "parallel.zero=1"], "algorithm.kind = 'draft' takes data parallelism alone"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_one_error(recipe: Path, settings: list[str], says: str) -> None:
    with pytest.raises((ConfigError, InputError), match=says):
        train(recipe, settings)


def test_more_processes_than_servers_are_refused_before_they_start(recipe: Path) -> None:
    asked = ['data.servers=["127.0.0.1:9"]']
    with pytest.raises(ConfigError, match=r"data\.servers names 1, and 2 processes sample at once; name one for each"):
        launch(2, recipe, asked, [])
    with pytest.raises(ConfigError, match=r"data\.servers names 1, and 2"):
        check_machine(load_train_recipe(recipe, asked), 2, is_new=True)  # of processes that torchrun started
    check_machine(load_train_recipe(recipe, asked), 1, is_new=True)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mlp_gated": False, "activation": "xielu"}, "numbers of its activation"),
        ({"moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}}, "for dense decoders"),
    ],
)
def test_networks_whose_answers_are_not_drawn(
    recipe: Path, make_tiny_checkpoint: Callable[..., Path], fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        train(recipe, [f"initial={make_tiny_checkpoint(model_type='penjing', **fields)}"])


def test_rows_without_an_answer_are_bad_rows(recipe: Path, tmp_path: Path) -> None:
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "Say it."}\n')
    check = ["reward.kind=verifier", "prompts.most_damaged=0.1"]
    task = build_task(load_train_recipe(recipe, check), Silent())
    assert isinstance(task, RolloutTuning)
    with pytest.raises(InputError, match=r'prompts.sources: 1 of 21 rows are bad: .*"answer", a text or a number'):
        build_task(load_train_recipe(recipe, check[:1]), Silent())


def test_prompts_name_their_template_by_a_key_that_they_have(
    recipe: Path, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_checkpoint, bare, ignore=shutil.ignore_patterns("chat_template.jinja", "penjing.json"))
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "a"}]}) + "\n")
    with pytest.raises(InputError, match=r"need a chat template, .*; name one by prompts\.template"):
        train(recipe, [f"initial={bare}"])


def test_an_alarm_tells_of_answers_that_run_on() -> None:
    alarms = Alarms(AlarmConfig(patience=2))
    rung = [alarms.on_record({"ended": ended}) for ended in (0.6, 0.4, 0.3, 0.2)]
    assert [len(each) for each in rung] == [0, 0, 1, 0]
    assert "70% of the answers do not end, above 50%" in rung[2][0].message
    alarms = Alarms(AlarmConfig(patience=1))
    assert not alarms.on_record({"ended": 0.2, "tokens_a_step": 1.5})  # a draft network's model does not change


def test_an_alarm_tells_of_a_model_that_tries_nothing_else() -> None:
    alarms = Alarms(AlarmConfig(patience=2))
    rung = [alarms.on_record({"entropy": entropy, "reward": 0.2}) for entropy in (0.5, 0.01, 0.01, 0.01)]
    assert [len(each) for each in rung] == [0, 0, 1, 0]
    assert "0.010 nats, below 0.02, for 2 records, with a mean reward of 0.20" in rung[2][0].message
    assert not alarms.on_record({"entropy": 0.0})  # of a run without rewards
