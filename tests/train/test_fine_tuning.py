"""A run that begins with a checkpoint: its model, what of it learns, how long, and which weights it ends with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.config import load_recipe
from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.train.monitor.monitor import MonitorConfig, open_sinks
from penjing.train.monitor.samples import greedy
from penjing.train.recipe.load import load_train_recipe
from penjing.train.recipe.recipe import TrainRecipe
from penjing.train.run import train
from tests.train.conftest import RECIPE

Losses = Callable[[Path], dict[int, float]]


@pytest.fixture
def base(recipe: Path, tmp_path: Path) -> Path:
    """A checkpoint of a few steps, with settings that a fine-tuning run must not lose."""
    train(recipe, ["steps=4", "model.rope_theta=5000.0", f"output={tmp_path}/base"])
    config = json.loads((tmp_path / "base/config.json").read_text())
    (tmp_path / "base/config.json").write_text(json.dumps(config | {"bos_token_id": 5, "pad_token_id": 7}))
    return tmp_path / "base"


@pytest.fixture
def further(base: Path, tmp_path: Path, shards: Path) -> Path:
    """A recipe without [model] that begins with `base`."""
    text = RECIPE.format(folder=tmp_path, shards=shards)
    head, _, rest = text.partition("[model]")
    path = tmp_path / "further.toml"
    path.write_text(f'{head}initial = "{base}"\n\n[data]{rest.partition("[data]")[2]}')
    return path


def test_the_model_comes_from_the_checkpoint(further: Path, base: Path, tmp_path: Path) -> None:
    train(further, ["steps=1"])
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (base, tmp_path / "out"))
    assert after == before
    assert after["rope_theta"] == 5000.0
    assert (after["bos_token_id"], after["pad_token_id"]) == (5, 7)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model.rope_theta=10000.0", r"model.rope_theta = 10000.0 \(there 5000.0\).*leave \[model\] out"),
        ("model.num_hidden_layers=1", r"model.num_hidden_layers = 1 \(there 2\)"),
    ],
)
def test_a_model_that_differs_is_refused_by_name(recipe: Path, base: Path, setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        train(recipe, [f"initial={base}", setting])
    train(recipe, [f"initial={base}", "steps=1"], force=True)  # what [model] leaves out is the checkpoint's


def test_bad_beginnings_are_one_clear_error(further: Path, base: Path, tmp_path: Path) -> None:
    text = further.read_text()
    further.write_text(text.replace(f'initial = "{base}"\n', ""))
    with pytest.raises(ConfigError, match=r"has no model; describe one in \[model\], or name a checkpoint by initial"):
        load_train_recipe(further)
    further.write_text(text)
    with pytest.raises(InputError, match="initial = /nonexistent does not exist"):
        load_train_recipe(further, ["initial=/nonexistent"])
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="were made with another tokenizer"):
        train(further)
    (base / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer.json.*data.tokenizer"):
        train(further)
    assert not (tmp_path / "out").exists()


def test_text_is_written_in_the_tokens_of_the_checkpoint(
    further: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a tokenizer of the new text would be trained, whose tokens mean something else."""
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for name in "abcdef":
        (tmp_path / f"texts/{name}.txt").write_text(f"zq xv {name} " * 90)
    text = further.read_text()
    shards = next(line for line in text.splitlines() if line.startswith("shards"))
    further.write_text(text.replace(shards, f'sources = ["{tmp_path}/texts"]\nheld_out = 0.5'))
    train(further, ["steps=1"])
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_frozen_parameters_keep_every_bit_and_groups_have_rates_of_their_own(
    further: Path, base: Path, tmp_path: Path
) -> None:
    groups = "optimizer.groups=[{match='*.mlp.*', factor=0.0}]"
    plain = ["optimizer.name=sgd", "optimizer.momentum=0.0", "optimizer.weight_decay=0.0", "steps=1"]
    train(further, [*plain, "freeze=['model.embed_tokens.*', '*norm.weight']", groups])
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    for name in before:
        frozen = "embed_tokens" in name or name.endswith("norm.weight") or ".mlp." in name
        assert torch.equal(before[name], after[name]) == frozen, name
    twice = [*plain, "optimizer.groups=[{match='*', factor=1.0}, {match='*q_proj*', factor=2.0}]"]
    train(further, [*plain, f"output={tmp_path}/one"])
    train(further, [*twice, f"output={tmp_path}/two"])
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name in before:
        factor = 2.0 if "q_proj" in name else 1.0
        torch.testing.assert_close(two[name] - before[name], factor * (one[name] - before[name]), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("freeze=['*.router.*']", r"freeze: '\*.router.\*' matches no parameter; they are called model.embed_tokens"),
        ("freeze=['*']", "nothing is left to train"),
        ("optimizer.groups=[{match='value.*', factor=2.0}]", r"optimizer.groups: 'value.\*' matches no parameter"),
        ("epochs=1", "a run has one length; set steps above 0, or epochs"),
        ("steps=0", "a run has one length"),
        ("evaluation.metric=bleu", "evaluation.metric = 'bleu' is not measured; an evaluation has loss"),
    ],
)
def test_settings_of_fine_tuning_that_cannot_be_meant(further: Path, setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        train(further, [setting, "evaluation.best=true"])


def test_epochs_are_a_length(further: Path, tmp_path: Path, losses: Losses) -> None:
    text = further.read_text().replace("steps = 8\n", "")
    further.write_text(text)
    train(further, ["epochs=1.5", "data.batch_size=256", "data.micro_batch=64"])
    state = sorted((tmp_path / "out-run/checkpoints").glob("step-*"))[-1] / "state.json"
    order = json.loads(state.read_text())["stream"]
    assert max(losses(tmp_path / "out-run")) == -(-3 * order["num_samples"] // (2 * 256))


def test_the_best_weights_are_exported_and_patience_ends_a_run(further: Path, tmp_path: Path) -> None:
    rising = ["learning_rate.kind=constant", "learning_rate.peak=0.002", "evaluation.every=2", "steps=60"]
    rising += ["evaluation.best=true", "evaluation.patience=2", "checkpoint.every=2"]
    text = further.read_text()  # a rate that is right at first, and far too large after a third of the run
    further.write_text(text.replace("[evaluation]", "[learning_rate]\n[evaluation]"))
    rising += ["learning_rate.warmup=0.9", "learning_rate.peak=3.0", "clip.norm=1000.0"]
    results = train(further, rising)
    records = [json.loads(line) for line in (tmp_path / "out-run/metrics.jsonl").read_text().splitlines()]
    evaluations = {record["step"]: record["eval/loss"] for record in records if "eval/loss" in record}
    best = min(evaluations, key=lambda step: evaluations[step])
    assert results["loss"] == evaluations[best]
    assert max(evaluations) == best + 4 < 60
    kept = load_file(tmp_path / f"out-run/best/step-{best:09d}/state.safetensors")
    exported = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(exported["model.norm.weight"], kept["model/model.norm.weight"])
    (tmp_path / "out").rename(tmp_path / "first")
    assert train(further, rising, resume="auto") == results  # it is over, and stays so
    again = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(again[name], exported[name]) for name in exported)


def test_a_new_run_takes_no_best_weights_of_a_killed_one(further: Path, tmp_path: Path) -> None:
    (tmp_path / "out-run/best").mkdir(parents=True)  # it was killed before its first state was saved
    for step in (8, 9):
        (tmp_path / f"out-run/best/step-{step:09d}").mkdir()
    train(further, ["steps=4", "evaluation.every=2", "evaluation.best=true"], resume="auto")
    names = {path.name for path in (tmp_path / "out-run/best").iterdir()}
    assert "step-000000002" in names
    assert not {"step-000000008", "step-000000009"} & names


def test_a_run_keeps_best_weights_from_where_it_is_told_to(further: Path, tmp_path: Path) -> None:
    worse = ["evaluation.every=2", "learning_rate.peak=2.0", "learning_rate.warmup=0.9"]
    train(further, [*worse, "evaluation.patience=50"], until=5)
    result = train(further, [*worse, "evaluation.best=true"], resume="auto")
    records = [json.loads(line) for line in (tmp_path / "out-run/metrics.jsonl").read_text().splitlines()]
    evaluations = {record["step"]: record["eval/loss"] for record in records if "eval/loss" in record}
    assert min(evaluations, key=lambda step: evaluations[step]) <= 4
    assert result["loss"] == min(loss for step, loss in evaluations.items() if step > 5)


def test_samples_are_shown_at_every_evaluation_also_the_last(further: Path, tmp_path: Path) -> None:
    changes = ["steps=6", "evaluation.prompts=['The import', 'a']", "evaluation.max_tokens=5", "checkpoint.every=2"]
    train(further, changes)
    shown = [json.loads(line) for line in (tmp_path / "out-run/samples.jsonl").read_text().splitlines()]
    assert [(each["step"], each["prompt"]) for each in shown] == [(s, p) for s in (4, 6) for p in ("The import", "a")]
    assert all(each["answer"] for each in shown)
    train(further, changes, resume=str(tmp_path / "out-run/checkpoints/step-000000004"))
    again = [json.loads(line) for line in (tmp_path / "out-run/samples.jsonl").read_text().splitlines()]
    assert again == shown  # what is done again is there once


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "evaluation.prompts: '' has no tokens"),
        ("import " * 99, r"evaluation.prompts: 'import .* tokens, .* sees 64"),
    ],
)
def test_prompts_that_cannot_be_gone_on_with_are_refused_before_the_run(
    further: Path, tmp_path: Path, prompt: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        train(further, [f"evaluation.prompts=['{prompt}']"])
    assert len(str(raised.value)) < 200
    assert not (tmp_path / "out-run").exists()


@pytest.mark.parametrize(
    ("window", "cap", "taps"), [(None, None, 0), (3, None, 0), (None, 0.05, 0), (3, 0.05, 0), (None, None, 7)]
)
def test_greedy_samples_are_what_the_whole_text_gives(window: int | None, cap: float | None, taps: int) -> None:
    torch.manual_seed(0)
    types = ("short_conv", "full_attention") if taps else None
    config = DecoderConfig(
        model_type="penjing", vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=24, sliding_window=window,
        attention_cap=cap, conv_taps=taps, layer_types=types,
    )  # fmt: skip
    model = Decoder(config).to(torch.float64)
    for name, weight in model.named_parameters():
        weight.data *= 50 if ".q_proj." in name else 1  # scores that a cap changes
    made = greedy(model, config, [3, 1, 4, 1, 5], 12)
    text = [3, 1, 4, 1, 5]
    for _ in range(12):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert made == text[5:]
    stopping = config.model_copy(update={"eos_token_ids": (made[4],)})
    assert greedy(model, stopping, [3, 1, 4, 1, 5], 12) == made[: made.index(made[4])]
    assert len(greedy(model, config, [1] * 20, 12)) == 5  # the context is full


def test_trackers_get_numbers_where_they_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match=r"monitor.wandb = 'p' needs the package wandb: pip install wandb"):
        open_sinks(tmp_path, MonitorConfig(tensorboard=False, wandb="p"), 0)
    with pytest.raises(SetupError, match="needs the package mlflow"):
        open_sinks(tmp_path, MonitorConfig(tensorboard=False, mlflow="e"), 0)
    heard: list[object] = []
    run = SimpleNamespace(id="w1", log=lambda *a, **k: heard.append((a, k)), finish=lambda: heard.append("finished"))
    wandb = SimpleNamespace(init=lambda **settings: heard.append(settings["project"]) or run)
    mlflow = SimpleNamespace(
        set_experiment=heard.append,
        start_run=lambda known, run_name: heard.append(run_name) or SimpleNamespace(info=SimpleNamespace(run_id="m1")),
        log_metrics=lambda *a, **k: heard.append((a, k)),
        end_run=lambda: heard.append("ended"),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    sinks = open_sinks(tmp_path, MonitorConfig(tensorboard=False, wandb="p", mlflow="e"), 0)
    for sink in sinks:
        sink.write({"step": 3, "loss": 1.5, "precision": "bf16"})
        sink.close()
    logged = (({"loss": 1.5},), {"step": 3})
    assert heard == ["p", "e", tmp_path.name, logged, "finished", logged, "ended"]


def test_a_recipe_without_model_is_one_of_training(further: Path) -> None:
    from penjing.core.config import read_recipe
    from penjing.core.recipes import stage_of

    assert stage_of(read_recipe(further), "further") == "train"
    assert load_recipe(TrainRecipe, further).model is None
    assert isinstance(open_checkpoint(load_train_recipe(further).initial or Path()).config, DecoderConfig)


def test_frozen_weights_stay_out_of_the_optimiser(further: Path, tmp_path: Path) -> None:
    train(further, ["freeze=['model.layers.*']", "steps=2"])
    state = load_file(tmp_path / "out-run/checkpoints/step-000000002/state.safetensors")
    assert [name for name in state if name.startswith("optimizer/")]
    assert not [name for name in state if name.startswith("optimizer/model.layers")]
