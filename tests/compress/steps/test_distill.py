"""Steps that distill and fine-tune tiny checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penjing.compress.distill.classifier import images
from penjing.compress.distill.decoder import text as decoder_text
from penjing.compress.run import run_recipe
from penjing.compress.samples.data import DataSettings
from penjing.compress.steps.registry import STEPS as KINDS
from penjing.compress.steps.train import Distill, Finetune, TrainedStep
from penjing.core.checkpoint.classifier import classifier_config, load_classifier
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.core.manifest import verify
from penjing.core.models.resnet_config import cifar_resnet
from tests.compress.classifiers import write_classifier
from tests.compress.distill.conftest import STEPS, do

MakeStep = Callable[..., Distill]
MakeCheckpoint = Callable[..., Path]


def distill(student: Path, teacher: Path | None, folder: Path, step: TrainedStep) -> dict[str, object]:
    partial = folder / "partial"
    partial.mkdir(parents=True)
    return do(step, student, teacher or student, partial, folder / "work")


@pytest.fixture
def student(make_tiny_checkpoint: MakeCheckpoint) -> Path:
    return make_tiny_checkpoint(intermediate_size=24, seed=7)


def test_a_decoder_comes_nearer_to_its_teacher(
    tiny_checkpoint: Path, student: Path, text_step: MakeStep, tmp_path: Path
) -> None:
    record = distill(student, tiny_checkpoint, tmp_path, text_step(steps=60, temperature=2.0))
    assert json.loads(json.dumps(record)) == record
    losses = record["losses"]
    assert isinstance(losses, dict)
    assert losses["last"]["divergence"] < 0.8 * losses["first"]["divergence"]
    assert record["teacher"] == str(tiny_checkpoint)
    verify(tmp_path / "partial")
    before, after = open_checkpoint(student), open_checkpoint(tmp_path / "partial")
    assert after.config == before.config
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "partial" / name).read_bytes() == (student / name).read_bytes()
    tokens = torch.randint(0, 256, (8, 16), generator=torch.Generator().manual_seed(0))
    teacher, first, last = (load_model(f).model for f in (tiny_checkpoint, student, tmp_path / "partial"))
    with torch.no_grad():
        wanted = teacher(tokens).log_softmax(-1)
        apart = [(wanted.exp() * (wanted - model(tokens).log_softmax(-1))).sum(-1).mean() for model in (first, last)]
    assert apart[1] < 0.9 * apart[0]  # on tokens that it never saw


@pytest.mark.parametrize("base", ["float", "int8"])
def test_a_decoder_heals_by_an_adapter(
    tiny_checkpoint: Path, student: Path, text_step: MakeStep, tmp_path: Path, base: str
) -> None:
    adapter = {"rank": 8, "alpha": 16.0, "targets": ["*.self_attn.?_proj", "*.mlp.*"], "base": base}
    step = text_step(steps=20, temperature=2.0, adapter=adapter, learning_rate={"peak": 1e-2})
    losses = distill(student, tiny_checkpoint, tmp_path, step)["losses"]
    assert isinstance(losses, dict)
    assert losses["last"]["divergence"] < 0.9 * losses["first"]["divergence"]
    verify(tmp_path / "partial")
    before, after = (load_file(folder / "model.safetensors") for folder in (student, tmp_path / "partial"))
    small = load_file(tmp_path / "partial/adapter/adapter_model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        parts = [f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight" for part in "BA"]
        if "_proj" in name:
            b, a = (small.pop(part) for part in parts)
            torch.testing.assert_close(after[name], tensor + 2.0 * b @ a)
        else:
            assert torch.equal(after[name], tensor)
    assert not small


def test_a_training_that_was_stopped_does_not_go_on_over_other_text(
    tiny_checkpoint: Path, student: Path, text_step: MakeStep, tmp_path: Path
) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("zebras and yaks " * 400)
    step = text_step(steps=2, sources=(str(text),))

    def weights(name: str) -> bytes:
        (tmp_path / name).mkdir()
        do(step, student, tiny_checkpoint, tmp_path / name, tmp_path / "work")
        return (tmp_path / name / "model.safetensors").read_bytes()

    first = weights("first")
    assert weights("again") == first
    text.write_text("quite another text " * 400)
    assert weights("other") != first


@pytest.mark.parametrize(
    ("adapter", "says"),
    [({"targets": ["*.nothing"]}, "matches no linear layer"), ({"rank": 4096}, "is no smaller than")],
)
def test_an_adapter_that_does_not_fit_is_refused_before_the_run(
    tiny_checkpoint: Path, text_step: MakeStep, adapter: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        decoder_text(tiny_checkpoint, text_step(adapter=adapter), DataSettings())


def test_a_classifier_has_no_use_for_an_adapter(tmp_path: Path) -> None:
    step = KINDS["finetune"]("classifier").model_validate(STEPS | {"kind": "finetune", "adapter": {"rank": 4}})
    assert isinstance(step, TrainedStep)
    with pytest.raises(ConfigError, match="no use for adapter"):
        images(write_classifier(tmp_path / "model"), step, DataSettings())


@pytest.mark.usefixtures("small_images")
def test_a_teacher_lowers_the_held_out_loss(tmp_path: Path) -> None:
    settings = STEPS | {"checkpoint_every": 100}

    def run(name: str, student: Path, teacher: Path | None, **changes: object) -> float:
        kind = "finetune" if teacher is None else "distill"
        step = KINDS[kind]("classifier").model_validate(settings | {"kind": kind} | changes)
        assert isinstance(step, TrainedStep)
        record = distill(student, teacher, tmp_path / name, step)
        assert isinstance(record["evaluation"], dict)
        return record["evaluation"]["loss"]

    rough = write_classifier(tmp_path / "rough")
    assert run("teacher", rough, None, steps=60, learning_rate={"peak": 3e-3}) < 0.6
    teacher = tmp_path / "teacher/partial"
    student = write_classifier(tmp_path / "student", model=cifar_resnet(8, width=4, in_channels=1), seed=3, scale=0.0)
    before = run("b", student, None, steps=1, learning_rate={"peak": 1e-9})
    after = run("a", student, teacher, steps=40, temperature=2.0, average=0.8, learning_rate={"peak": 1e-2})
    assert after < 0.8 * before
    model, config = load_classifier(tmp_path / "a/partial")
    assert config == classifier_config(student)
    assert model.state_dict().keys() == load_classifier(student)[0].state_dict().keys()


def test_a_student_that_is_its_teacher_stays(tiny_checkpoint: Path, text_step: MakeStep, tmp_path: Path) -> None:
    step = text_step(steps=2, optimizer={"name": "sgd", "weight_decay": 0.0}, evaluation_samples=0)
    record = distill(tiny_checkpoint, tiny_checkpoint, tmp_path, step)
    losses = record["losses"]
    assert isinstance(losses, dict)
    assert max(losses["first"]["loss"], losses["last"]["loss"]) < 1e-6  # attention with a graph rounds otherwise
    assert record["evaluation"] == {}
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tiny_checkpoint, tmp_path / "partial"))
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) < 1e-6


CALL = """
import sys; from pathlib import Path
from penjing.compress.steps.registry import STEPS as KINDS
from penjing.compress.steps.train import Distill, Finetune, TrainedStep
from penjing.compress.steps.train import Distill
from tests.compress.distill.conftest import do
student, teacher, partial, work = map(Path, sys.argv[1:5])
do(Distill.model_validate_json(sys.argv[5]), student, teacher, partial, work)
"""


def test_a_killed_step_goes_on_to_the_same_weights(
    tiny_checkpoint: Path, student: Path, text_step: MakeStep, tmp_path: Path
) -> None:
    step = text_step(steps=24, checkpoint_every=8, average=0.9, weights={"logits": 1.0, "cross_entropy": 0.3})
    distill(student, tiny_checkpoint, tmp_path / "whole", step)
    killed = tmp_path / "killed"
    (killed / "partial").mkdir(parents=True)
    arguments = [str(path) for path in (student, tiny_checkpoint, killed / "partial", killed / "work")]
    process = subprocess.Popen(
        [sys.executable, "-c", CALL, *arguments, step.model_dump_json()], env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 60
    while process.poll() is None and not (killed / "work/run/checkpoints/step-000000008").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not list((killed / "partial").iterdir())
    record = do(step, student, tiny_checkpoint, killed / "partial", killed / "work")
    whole, resumed = (load_file(tmp_path / name / "partial/model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    lines = (killed / "work/run/metrics.jsonl").read_text().splitlines()
    assert sorted({json.loads(line)["step"] for line in lines}) == list(range(1, 25))
    again = tmp_path / "again"
    again.mkdir()
    began = time.monotonic()
    repeated = do(step, student, tiny_checkpoint, again, killed / "work")
    assert repeated["evaluation"] == record["evaluation"]
    assert time.monotonic() - began < 1.0  # nothing is trained twice


def test_other_settings_start_anew(tiny_checkpoint: Path, student: Path, text_step: MakeStep, tmp_path: Path) -> None:
    distill(student, tiny_checkpoint, tmp_path, text_step(steps=2, evaluation_samples=0))
    (tmp_path / "other").mkdir()
    step = text_step(steps=3, evaluation_samples=0)
    record = do(step, student, tiny_checkpoint, tmp_path / "other", tmp_path / "work")
    assert record["settings"]["steps"] == 3
    lines = [json.loads(line) for line in (tmp_path / "work/run/metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]  # alarms of a busy machine are lines too
    assert steps == [1, 2, 3]


def damaged(source: Path, folder: Path) -> Path:
    import shutil

    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    (folder / "penjing.json").unlink()
    return folder


def other_tokens(source: Path, folder: Path) -> Path:
    import shutil

    shutil.copytree(source, folder)
    (folder / "penjing.json").unlink()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["content"] = "<other>"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize(
    ("teacher", "says"),
    [
        ({"intermediate_size": 16}, r"layers.0.mlp.gate_proj.weight of the student is \(24, .*wider than in teacher"),
        ({"num_hidden_layers": 1}, "the student has 2 layers, teacher .* 1; take a teacher at least as deep"),
        ({"vocab_size": 328}, "has a vocabulary of 320, teacher .* of 328"),
        (other_tokens, "tokenizer.json is another tokenizer"),
        (damaged, "model.norm.weight holds NaN"),
        ("/nonexistent", "/nonexistent"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(
    teacher: object,
    says: str,
    student: Path,
    tiny_checkpoint: Path,
    make_tiny_checkpoint: MakeCheckpoint,
    text_step: MakeStep,
    tmp_path: Path,
) -> None:
    if isinstance(teacher, dict):
        folder = make_tiny_checkpoint(**teacher)
    else:
        folder = Path(teacher) if isinstance(teacher, str) else teacher(tiny_checkpoint, tmp_path / "teacher")  # type: ignore[operator]
    with pytest.raises(InputError, match=says):
        distill(student, folder, tmp_path / "out", text_step())
    assert not list((tmp_path / "out/partial").iterdir())


@pytest.mark.usefixtures("small_images")
def test_classifiers_that_do_not_fit_are_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    step = Distill.model_validate(STEPS | {"kind": "distill"})
    student = write_classifier(tmp_path / "student")
    with pytest.raises(InputError, match="is no image classifier"):
        distill(student, tiny_checkpoint, tmp_path / "a", step)
    steps = [STEPS | {"kind": "distill", "teacher": str(tiny_checkpoint)}]
    with pytest.raises(ConfigError, match=r"steps\.0\.teacher=.* is a decoder, .* is an image classifier; name a"):
        run_recipe({"model": str(student), "output": str(tmp_path / "out"), "steps": steps})
    narrow = write_classifier(tmp_path / "narrow", model=cifar_resnet(8, width=4, in_channels=1))
    with pytest.raises(InputError, match=r"stem.conv.weight of the student is \(8, 1, 3, 3\), wider"):
        distill(student, narrow, tmp_path / "b", step)
    with pytest.raises(ConfigError, match="is an image classifier, which has no use for sources"):
        distill(student, student, tmp_path / "c", step.model_copy(update={"sources": ("x",)}))


def test_data_and_settings_that_do_not_fit_are_refused(
    student: Path, tiny_checkpoint: Path, text_step: MakeStep, tmp_path: Path
) -> None:
    def refused(error: type[Exception], says: str, **changes: object) -> None:
        with pytest.raises(error, match=says):
            distill(student, tiny_checkpoint, tmp_path / str(len(list(tmp_path.iterdir()))), text_step(**changes))

    (tmp_path / "empty").mkdir()
    (tmp_path / "tiny.txt").write_text("A few words.")
    refused(ConfigError, r"sources = \[folders of text\]", sources=())
    refused(InputError, "holds no file that is read here", sources=(str(tmp_path / "empty"),))
    refused(InputError, "no complete sample", sources=(str(tmp_path / "tiny.txt"),), evaluation_samples=0)
    refused(ConfigError, "is a decoder, which has no use for flip", flip=True)
    for wrong, says in (
        ({"weights": {"logits": 0.0}}, "nothing comes from the teacher"),
        ({"temperature": 0.0}, "greater than 0"),
        ({"temprature": 1.0}, "Extra inputs"),
    ):
        with pytest.raises(ValueError, match=says):
            text_step(**wrong)
    with pytest.raises(ValueError, match=r"temperature\n *Extra inputs"):
        Finetune(steps=1, temperature=2.0)  # pyright: ignore[reportCallIssue]


def test_a_full_disk_is_one_error(
    student: Path, tiny_checkpoint: Path, text_step: MakeStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penjing.train.state.checkpoint.save_tensors", full)
    with pytest.raises(SetupError, match="the disk is full; free some space and run again"):
        distill(student, tiny_checkpoint, tmp_path, text_step(steps=6))
    assert not list((tmp_path / "partial").iterdir())
