"""A draft network that learns what a model says: what it reaches, what it leaves alone, and what is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from penjing.core.checkpoint.draft import load_draft, save_draft
from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Silent
from penjing.core.runtime.draft import Draft, DraftConfig, known_numbers
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from penjing.serve.speculate.drafter import NO_DRAFT
from penjing.serve.speculate.rows import StepCosts
from penjing.train.align.drafted import Drafted
from penjing.train.align.learner import Learner
from penjing.train.chat.tokens import ChatTokens
from penjing.train.families.base import build_task
from penjing.train.families.draft import known_tokens
from penjing.train.objective.draft import DraftDistillation
from penjing.train.objective.objective import Batch, Loss
from penjing.train.recipe.load import load_train_recipe
from penjing.train.run import train
from tests.conftest import write_tiny_checkpoint
from tests.train.align.test_rollouts import records

RECIPE = """
output = "{folder}/out"
initial = "{base}"
steps = 24
device = "cpu"
seed = 1

[prompts]
sources = ["{folder}/prompts.jsonl"]
held_out = 0.2

[data]
kind = "rollouts"
batch_size = 8
samples = 1
max_tokens = 12
temperature = 0.02

[algorithm]
kind = "draft"
updates = 8
known_tokens = 300

[learning_rate]
kind = "constant"
peak = 1e-2

[precision]
mode = "fp32"

[evaluation]
every = 24
samples = 4

[monitor]
every = 1
tensorboard = false
"""


@pytest.fixture
def recipe(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    rows = [{"prompt": f"Say {word}."} for word in ("one", "two", "three", "four", "five", "six", "seven", "eight")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "draft.toml"
    path.write_text(RECIPE.format(folder=tmp_path, base=tiny_checkpoint))
    return path


def test_it_learns_what_the_model_says_and_an_engine_says_the_same_in_fewer_steps(
    recipe: Path, tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = train(recipe)
    steps = records(tmp_path / "out-run")
    assert steps[-1]["tokens_a_step"] > steps[0]["tokens_a_step"] + 0.5
    assert 1 <= results["tokens_a_step"] <= 4
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"draft.json", "draft.safetensors", "penjing.json"}

    cheap = StepCosts({1: 1.0, 2: 1.0, 64: 1.01})
    monkeypatch.setattr("penjing.serve.runner.load.measure_costs", lambda *_: cheap)
    monkeypatch.setattr(
        "penjing.serve.speculate.network.DraftNetwork._measured", lambda *_: StepCosts({1: 0.0, 2: 0.0})
    )
    monkeypatch.setattr("penjing.serve.speculate.lookup.LookupDrafter.draft", lambda *_: NO_DRAFT)
    prompt = ChatTokens.from_folder(tiny_checkpoint, None).prompt({"prompt": "Say one."})
    found = {}
    for speculate, draft in (("off", None), ("draft", tmp_path / "out")):
        engine = load_engine(tiny_checkpoint, EngineConfig(num_blocks=200, speculate=speculate, draft=draft))  # pyright: ignore[reportArgumentType]
        for number, temperature in enumerate((0.0, 0.02, 0.7)):
            sampling = SamplingParams(temperature=temperature, seed=number, max_tokens=12, ignore_eos=True)
            engine.add(Request(str(number), prompt, sampling))
        said: dict[str, list[int]] = {}
        while engine.has_work():
            for output in engine.step():
                said.setdefault(output.request_id, []).extend(output.token_ids)
        found[speculate] = said
    assert found["draft"] == found["off"]
    stats = engine.stats()
    assert stats.spec_decode_num_accepted_tokens > 6
    assert stats.spec_decode_num_draft_tokens > stats.spec_decode_num_accepted_tokens


def test_known_tokens_are_those_that_end_a_text_then_those_of_the_prompts() -> None:
    assert known_tokens([9, 7, 9, 30], (50,), 3, 60).tolist() == [7, 9, 50]
    assert known_tokens([9], (2, 50), 6, 60).tolist() == [0, 1, 2, 3, 9, 50]
    assert known_tokens([], (), 10, 4).tolist() == [0, 1, 2, 3]
    assert known_numbers(torch.tensor([2, 5]), 7).tolist() == [2, 2, 0, 2, 2, 1, 2]


def test_what_is_counted_is_what_a_step_would_give(tiny_checkpoint: Path, recipe: Path) -> None:
    """Two answers, of which the network knows the first by heart and nothing of the second."""
    task = build_task(load_train_recipe(recipe), Silent())
    model = task.build_model()
    assert isinstance(model, Drafted)
    task.initialize(model)
    assert {name for name, each in model.named_parameters() if each.requires_grad} == {
        f"draft.{name}" for name, _ in model.draft.named_parameters()
    }
    answers, prompt = [[10, 11, 12, 13], [20, 21]], [5, 6]
    rows = torch.tensor([1, 2, 3, 4, 7, 8])
    batch = {
        "tokens": torch.tensor([prompt + answers[0], [*prompt, *answers[1], 0, 0]]), "rows": rows,
        "next": torch.tensor([*answers[0], *answers[1]]), "answer": torch.tensor([0, 0, 0, 0, 1, 1]),
        "real": torch.tensor([True, True]), "ended": torch.tensor([1.0, 0.0]),
    }  # fmt: skip

    def guessed(state: torch.Tensor, known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows each known token by counting on from it: right in the first answer, wrong in the second."""
        ids = model.token_ids[known] + torch.where(model.token_ids[known] < 20, 1, 2)
        return state, torch.nn.functional.one_hot(model.numbers[ids], len(model.token_ids)).float()

    model.draft.forward = guessed  # type: ignore[method-assign]
    loss = DraftDistillation(guesses=2)(model, batch)
    mean = {name: float(total / count) for name, (total, count) in loss.counted.items()}
    # Behind 10: 11 and 12 come, behind 11: 12 and 13, behind 12: 13, behind 13 nothing is left, nor behind 21.
    assert mean["tokens_a_step"] == pytest.approx((3 + 3 + 2 + 1 + 1 + 1) / 6)
    assert mean["guessed_1"] == pytest.approx(3 / 4)
    assert mean["guessed_2"] == pytest.approx(1)
    assert mean["ended"] == 0.5
    assert mean["length"] == 3


def test_answers_of_a_single_token_teach_nothing_and_stop_nothing(recipe: Path, tmp_path: Path) -> None:
    sizes = ["data.max_tokens=1", "data.batch_size=1", "algorithm.updates=1", "evaluation.every=1"]
    results = train(recipe, [*sizes, "steps=1", "monitor.activations_every=1"])
    lines = [json.loads(line) for line in (tmp_path / "out-run/metrics.jsonl").read_text().splitlines()]
    only = next(line for line in lines if "loss" in line)
    assert only["loss"] == only["gradient_norm"] == 0
    assert only["tokens_a_step"] == results["tokens_a_step"] == 1
    # Nothing could be guessed, so no share came true: none is told, neither as NaN nor as 0.
    assert not [name for told in (results, *lines) for name in told if "guessed_" in name]


def test_what_the_decoder_makes_of_answers_is_found_once_and_changes_no_bit(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, states, learn = list[int](), Learner.states, DraftDistillation.__call__
    monkeypatch.setattr(Learner, "states", lambda *given: asked.append(1) or states(*given))
    settings = ["steps=4", "algorithm.updates=2", "data.micro_batch=4", "evaluation.every=0", "precision.mode=bf16"]
    train(recipe, settings)
    assert len(asked) == 4  # of two rollouts, in two micro-batches each
    kept = (tmp_path / "out" / "draft.safetensors").read_bytes()

    def anew(self: DraftDistillation, model: nn.Module, batch: Batch) -> Loss:
        return learn(self, model, {name: each for name, each in batch.items() if name != "states"})

    monkeypatch.setattr(DraftDistillation, "__call__", anew)
    train(recipe, [*settings, f"output={tmp_path}/other"])
    assert (tmp_path / "other" / "draft.safetensors").read_bytes() == kept


def test_another_model_answers_in_place_of_the_one_that_is_read(recipe: Path, tmp_path: Path) -> None:
    other = write_tiny_checkpoint(tmp_path / "other", seed=5)
    settings = ["steps=1", "data.temperature=1", "evaluation.every=1"]
    said = {}
    for name, more in (("own", []), ("other", [f"algorithm.answers={other}"])):
        train(recipe, [*settings, *more, f"output={tmp_path}/{name}-draft"])
        lines = (tmp_path / f"{name}-draft-run" / "answers.jsonl").read_text().splitlines()
        said[name] = [json.loads(line)["answer"] for line in lines]
    engine = load_engine(other, EngineConfig(num_blocks=40))
    writer = ChatTokens.from_folder(other, None)
    for line, answer in zip(lines, said["other"], strict=True):
        prompt = writer.prompt({"prompt": json.loads(line)["prompt"]})
        engine.add(Request(answer, prompt, SamplingParams(temperature=0.0, max_tokens=12)))
        tokens = list[int]()
        while engine.has_work():
            tokens += [token for output in engine.step() for token in output.token_ids]
        assert writer.tokenizer.decode(tokens) == answer
    assert said["own"] != said["other"]
    command = build_task(load_train_recipe(recipe, more), Silent()).next_command(tmp_path / "mine, first")
    assert f"serve {other} " in command
    assert shlex.split(command)[-1] == f"draft={tmp_path}/mine, first"
    with pytest.raises(ConfigError, match=r"algorithm\.answers = .* is no checkpoint"):
        build_task(load_train_recipe(recipe, [f"algorithm.answers={tmp_path}"]), Silent())
    with pytest.raises(ConfigError, match=r"algorithm\.answers and data\.servers both say who answers"):
        build_task(load_train_recipe(recipe, [f"algorithm.answers={other}", 'data.servers=["a:1"]']), Silent())
    with pytest.raises(ConfigError, match=r"answers.* is of kind = 'draft'"):
        load_train_recipe(recipe, ["algorithm.kind=grpo", "algorithm.known_tokens=8192", f"algorithm.answers={other}"])


def test_a_network_finds_the_states_of_a_rotated_head_and_refuses_another_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = DraftConfig(hidden_size=8, intermediate_size=12, num_layers=1, vocab_size=64, num_known=16)
    head = torch.randn(64, 8)
    save_draft(tmp_path, Draft(config), torch.arange(16), head, {})
    stored = load_draft(tmp_path)
    rotation, _ = torch.linalg.qr(torch.randn(8, 8))
    state = torch.randn(5, 8)
    basis = stored.basis((head @ rotation)[stored.anchor_ids_A])
    # head · state are the logits of head · rotation, if its states are rotated too
    torch.testing.assert_close((state @ rotation) @ basis.T, state)
    with pytest.raises(InputError, match="trained for another model"):
        stored.basis(torch.randn(64, 8)[stored.anchor_ids_A])


def test_damaged_and_foreign_folders_are_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    config = DraftConfig(hidden_size=8, intermediate_size=12, num_layers=1, vocab_size=64, num_known=16)
    save_draft(tmp_path, Draft(config), torch.arange(16), torch.randn(64, 8), {})
    with pytest.raises(InputError, match="is no draft network"):
        load_draft(tiny_checkpoint)
    settings = EngineConfig(num_blocks=20, speculate="draft", draft=tmp_path)
    with pytest.raises(InputError, match="64 tokens and 8 channels"):
        load_engine(tiny_checkpoint, settings)
    (tmp_path / "penjing.json").unlink()
    values = json.loads((tmp_path / "draft.json").read_text())
    (tmp_path / "draft.json").write_text(json.dumps(values | {"num_known": 15}))
    with pytest.raises(InputError, match="make it again"):
        load_draft(tmp_path)
    (tmp_path / "draft.json").write_text(json.dumps(values))
    (tmp_path / "draft.safetensors").write_bytes((tmp_path / "draft.safetensors").read_bytes()[:-100])
    with pytest.raises(InputError, match="make it again"):
        load_draft(tmp_path)


def test_a_draft_trained_beside_other_weights_is_refused(recipe: Path, tmp_path: Path) -> None:
    train(recipe, ["steps=1", "evaluation.every=0"])
    other = write_tiny_checkpoint(tmp_path / "other", seed=5)
    with pytest.raises(InputError, match="trained for another model"):
        load_engine(other, EngineConfig(num_blocks=20, speculate="draft", draft=tmp_path / "out"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm.kl=0.1"], "kl"),
        (["algorithm.scale=batch"], "divides advantages"),
        (["adapter.rank=4"], "changes nothing of the model"),
        (["algorithm.kind=grpo"], "is of kind = 'draft'"),
    ],
)
def test_settings_of_other_ways_to_learn_are_refused(recipe: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_task(load_train_recipe(recipe, settings), Silent())


def test_an_engine_wants_both_settings() -> None:
    for values in ({"speculate": "draft"}, {"draft": Path("x")}):
        with pytest.raises(ValueError, match="speculate=draft"):
            EngineConfig.model_validate(values)
