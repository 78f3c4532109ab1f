from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.core.manifest import verify
from penjing.core.progress import Silent
from penjing.serve.generate import generate_stream
from penjing.serve.sampling.params import SamplingParams
from penjing.train import run as run_module
from penjing.train.data.stream import OrderedStream
from penjing.train.families.base import build_task
from penjing.train.monitor.alarms import AlarmError
from penjing.train.numerics.compiled import compile_model
from penjing.train.parallel.traffic import read_trace
from penjing.train.processes.stop import InterruptedRunError
from penjing.train.processes.world import World
from penjing.train.recipe.load import load_train_recipe
from penjing.train.run import train
from tests.train.launched import Launched

Losses = Callable[[Path], dict[int, float]]


class Notes:
    """A progress that keeps what was noted."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def start(self, task: str, total: int) -> None: ...

    def advance(self, parts: int = 1) -> None: ...

    def finish(self) -> None: ...

    def status(self, text: str) -> None:
        self.lines.append(text)

    def note(self, message: str) -> None:
        self.lines.append(message)


@pytest.mark.parametrize(("others", "mode"), [(0, "fp32"), (1, "bf16")])
def test_auto_is_one_mode_in_all_processes(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, others: int, mode: str
) -> None:
    """Beside another process, whose device has instructions for bfloat16 or not."""
    monkeypatch.setattr(run_module, "multiplies_bfloat16", lambda device: True)
    monkeypatch.setattr(World, "sum", lambda self, values: values + others)
    found = load_train_recipe(recipe, ["precision.mode=auto"])
    run = run_module._Run(found, build_task(found, Silent()), World(size=2), Silent())
    assert run.recipe.precision.mode == mode


def test_a_recipe_becomes_a_checkpoint_that_transformers_loads(recipe: Path, tmp_path: Path, losses: Losses) -> None:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    notes = Notes()
    results = train(recipe, ["steps=60", "learning_rate.peak=0.01", "average=0.8"], progress=notes)
    curve = losses(tmp_path / "out-run")
    assert curve[60] < curve[1] - 1.0
    first = json.loads((tmp_path / "out-run/metrics.jsonl").read_text().splitlines()[0])
    assert first["activation/model.layers.1/amax"] > first["activation/model.layers.1/rms"] > 0
    assert {"gradient_log_deviation", "loss_scale_changes", "mfu", "io_wait", "memory_share"} <= first.keys()
    assert any(re.match(r"step 60/60 left 0:00 loss .* lr .* tokens/s MFU \d+%", line) for line in notes.lines)
    assert any(line.startswith("memory of a process:") for line in notes.lines)
    verify(tmp_path / "out")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    text = "The import statement"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == text
    with torch.no_grad():
        loss = theirs(ids, labels=ids).loss
    assert 2.0 < loss < 5.77  # of 320 tokens: better than chance, which is ln 320
    generate = theirs.generate  # pyright: ignore[reportAttributeAccessIssue]  (transformers types it by a protocol)
    continued = generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    outputs = list(generate_stream(tmp_path / "out", text, SamplingParams(max_tokens=8, temperature=0.0)))
    assert [token for output in outputs for token in output.token_ids] == continued
    assert any(
        line.startswith("60 steps, 0:") and f"next        penjing generate {tmp_path}" in line for line in notes.lines
    )
    saved = load_file(tmp_path / "out-run/checkpoints/step-000000060/state.safetensors")
    exported = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(exported["model.norm.weight"], saved["average/model.norm.weight"])
    manifest = json.loads((tmp_path / "out/penjing.json").read_text())
    assert manifest["created_by"]["evaluation"] == results


def test_the_environment_changes_the_precision_of_a_run(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENJING_PRECISION_MODE", "bf16")
    monkeypatch.setenv("PENJING_FP32_OPS", "head,norms")
    train(recipe, ["steps=1"])
    record = json.loads((tmp_path / "out-run/metrics.jsonl").read_text().splitlines()[0])
    assert record["precision"] == "bf16"
    monkeypatch.setenv("PENJING_FP32_OPS", "no.such.module")
    with pytest.raises(ConfigError, match=r"'no.such.module' is no group .* and matches no module"):
        train(recipe, force=True)


def test_an_alarm_stops_a_run_and_leaves_its_checkpoints(recipe: Path, tmp_path: Path) -> None:
    settings = ["steps=60", "learning_rate.kind=constant", "learning_rate.warmup=0.6", "learning_rate.peak=30.0"]
    with pytest.raises(AlarmError, match=r"alarm loss_spike at step \d+: .*alarms.loss_spike = 'stop'"):
        train(recipe, [*settings, "alarms.loss_spike=stop", "clip.norm=1000.0"])
    records = [json.loads(line) for line in (tmp_path / "out-run/metrics.jsonl").read_text().splitlines()]
    assert records[-1]["alarm"] == "loss_spike"
    assert list((tmp_path / "out-run/checkpoints").glob("step-*"))
    assert not (tmp_path / "out").exists()


def test_a_killed_run_resumes_to_the_same_losses(recipe: Path, tmp_path: Path, losses: Losses) -> None:
    settings = ["steps=48", "checkpoint.every=6", "evaluation.every=0", "precision.mode=fp16", "average=0.9"]
    train(recipe, [*settings, f"output={tmp_path}/whole"])
    expected = losses(tmp_path / "whole-run")

    flags = [flag for setting in settings for flag in ("--set", setting)]
    launched = Launched(recipe, *flags)
    launched.wait_for_step(tmp_path / "out-run", 16)
    launched.stop(signal.SIGKILL)
    assert launched.finish(60) == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    newest = max((tmp_path / "out-run/checkpoints").glob("step-*"))
    (newest / "state.safetensors").write_bytes(b"damaged")  # and the one before it is used

    notes = Notes()
    train(recipe, settings, resume="auto", progress=notes)
    assert losses(tmp_path / "out-run") == expected
    assert any("damaged; trying the checkpoint before it" in line for line in notes.lines)
    assert any(re.search(r"resumed from .*; recovered in \d+\.\d s", line) for line in notes.lines)
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_sigterm_saves_and_exits(recipe: Path, tmp_path: Path) -> None:
    launched = Launched(recipe, "--set", "steps=100000", "--set", "checkpoint.every=100000")
    launched.wait_for_step(tmp_path / "out-run", 5)
    launched.stop()
    assert launched.finish(60) == 143, launched.said
    stopped = re.search(r"error: stopped at step (\d+) as asked; --resume auto goes on from there", launched.said)
    assert stopped is not None, launched.said
    saved = list((tmp_path / "out-run/checkpoints").glob("step-*"))
    assert [path.name for path in saved] == [f"step-{int(stopped[1]):09d}"]


def test_two_processes_train_as_one_and_a_profile_tells_of_their_gradients(
    recipe: Path, tmp_path: Path, losses: Losses
) -> None:
    settings = ["steps=12", "data.micro_batch=2", "learning_rate.peak=0.005", "evaluation.every=12"]
    train(recipe, [*settings, f"output={tmp_path}/one"])
    flags = [flag for setting in settings for flag in ("--set", setting)]
    launched = Launched(recipe, *flags, "--profile", processes=2)
    assert launched.finish(240) == 0, launched.said
    output = launched.said
    one, two = losses(tmp_path / "one-run"), losses(tmp_path / "out-run")
    assert one.keys() == two.keys()
    assert max(abs(one[step] - two[step]) for step in one) < 1e-5
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "out"))
    assert max((a[name] - b[name]).abs().max().item() for name in a) < 1e-4
    evaluations = [json.loads((tmp_path / name / "penjing.json").read_text()) for name in ("one", "out")]
    first, second = (manifest["created_by"]["evaluation"]["loss"] for manifest in evaluations)
    assert abs(first - second) < 1e-5
    assert "2 processes on cpu, batch 8 = 2 × 2 × 2 accumulated" in output
    assert re.search(r"all-reduce over 2 processes with nothing else to do: [\d.]+ GB/s with 64 KiB", output)
    assert re.search(r"gradients: [\d.]+ GB/s, \d+% of the fastest all-reduce measured", output)
    traffic = read_trace(tmp_path / "out-run" / "profile" / "trace-0.json")
    communication = json.loads((tmp_path / "out-run" / "profile" / "communication-0.json").read_text())
    assert communication["overlap"] == traffic.overlap
    assert communication["gradients"] == traffic.bandwidth(2)
    assert communication["all_reduce"].keys() == {"65536", "1048576", "16777216"}
    embedding, attention, mlp = 320 * 32, 32 * (32 + 16 + 16 + 32) + 64, 3 * 32 * 48
    whole = 4 * (embedding + 2 * (attention + mlp) + 32)
    assert sum(one.size for one in traffic.reductions) == 3 * whole  # of three steps
    assert 0 <= (traffic.overlap or 0) <= 1


@pytest.mark.full  # test_watch.py has it without a run
def test_an_impossible_batch_is_one_error_of_all_processes(recipe: Path) -> None:
    launched = Launched(recipe, "--set", "data.batch_size=7", processes=2)
    assert launched.finish(120) != 0
    assert launched.said.count("error: data.batch_size=7 is not a multiple of the 2 processes; take 6") == 1


def test_an_interrupt_in_this_process_is_an_error_of_its_own(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penjing.train import run

    monkeypatch.setattr(run.Prefetched, "__next__", _interrupting(run.Prefetched.__next__))
    with pytest.raises(InterruptedRunError, match="stopped at step 3"):
        train(recipe)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def _interrupting(real: Callable[..., object]) -> Callable[..., object]:
    calls = []

    def next_(self: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self)

    return next_


@pytest.mark.parametrize("force", [False, True])
def test_an_output_that_cannot_be_made_is_refused_before_the_first_step(
    recipe: Path, tmp_path: Path, force: bool
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match=r"notes holds no penjing.json, so it is not replaced"):
        train(recipe, [f"output={tmp_path}/notes"], force=force)
    with pytest.raises(InputError, match=r"mine.txt is a file; choose another output folder"):
        train(recipe, [f"output={tmp_path}/notes/mine.txt"], force=force)
    assert not (tmp_path / "notes-run").exists()


def test_work_that_is_there_is_not_overwritten(recipe: Path, tmp_path: Path) -> None:
    results = train(recipe)
    assert train(recipe, resume="auto") == results  # nothing left to do, and the answer is the same
    with pytest.raises(InputError, match=r"output .*out already exists; replace it with --force"):
        train(recipe)
    (tmp_path / "out").rename(tmp_path / "kept")
    with pytest.raises(InputError, match=r"holds checkpoints of an earlier run; go on with --resume auto"):
        train(recipe)
    with pytest.raises(
        InputError, match=r"'model.embed_tokens.weight' has shape \(320, 32\), this model's \(320, 40\)"
    ):
        train(recipe, ["model.hidden_size=40", "model.head_dim=10"], resume="auto", accept_changes=True)
    with pytest.raises(InputError, match="made with batch_size=8, this run has 4"):
        train(recipe, ["data.batch_size=4"], resume="auto", accept_changes=True)
    with pytest.raises(InputError, match=r"holds no state of a training; those of a run lie in OUTPUT-run.checkpoints"):
        train(recipe, resume=str(tmp_path / "nowhere"))
    train(recipe, ["model.hidden_size=40", "model.head_dim=10"], force=True)
    train(recipe, ["model.hidden_size=40", "model.head_dim=10", "steps=10"], resume="auto")
    assert json.loads((tmp_path / "out/config.json").read_text())["hidden_size"] == 40


def test_a_run_goes_on_with_its_own_settings_and_data_or_says_which_are_others(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe)
    free = ["steps=9", "checkpoint.every=1", "monitor.every=2", "data.micro_batch=4", "memory.recompute=full"]
    others = ["optimizer.name=sgd", "model.rope_theta=500000.0", "model.rope_scaling={rope_type='linear', factor=2.0}"]
    others += ["parallel.gradients=int8"]
    with pytest.raises(ConfigError) as error:
        train(recipe, [*free, *others], resume="auto")
    assert str(error.value).startswith("the state of step 8 was made with other settings: ")
    listed = str(error.value).partition("settings: ")[2].partition(". Set them")[0].split("; ")
    assert sorted(listed) == [
        "model.rope_scaling.factor was 1.0, is 2.0",
        'model.rope_scaling.rope_type was "default", is "linear"',
        "model.rope_theta was 10000.0, is 500000.0",
        'optimizer.name was "adamw", is "sgd"',
        'parallel.gradients was "float32", is "int8"',
    ]
    assert "--accept-changes" in str(error.value)
    train(recipe, free, resume="auto")
    with monkeypatch.context() as patch:
        patch.setattr(OrderedStream, "_content", "of other data")
        with pytest.raises(InputError, match="the data are not those that the checkpoint was made with"):
            train(recipe, free, resume="auto")
        train(recipe, free, resume="auto", accept_changes=True)
    notes = Notes()
    changed = ["steps=10", "learning_rate.peak=0.002", "optimizer.name=sgd"]
    train(recipe, changed, resume="auto", accept_changes=True, progress=notes)
    assert [line for line in notes.lines if "other settings" in line] == [
        'goes on from step 9 with other settings: optimizer.name was "adamw", is "sgd"; '
        "learning_rate.peak was 0.001, is 0.002"
    ]
    train(recipe, changed, resume="auto")  # which are the run's now
    train(recipe, ["steps=11"], resume="auto", accept_changes=True)  # AdamW, which starts without a past

    for folder in (tmp_path / "out-run/checkpoints").glob("step-*"):
        (folder / "state.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"no checkpoint in .*checkpoints is intact \(3 tried.* delete that folder to"):
        train(recipe, changed, resume="auto")


def test_a_full_disk_while_saving_ends_the_run(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(
        SetupError, match=r"step-000000002: the disk is full, \d+ kB are needed and 1 kB are free; free"
    ):
        train(recipe)
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "out-run/checkpoints").iterdir()) == []


def test_auto_micro_batch_is_measured_and_kept(recipe: Path, tmp_path: Path) -> None:
    notes = Notes()
    train(recipe, ["data.micro_batch=auto"], progress=notes)
    found = next(match for line in notes.lines if (match := re.match(r"micro-batch (\d+) \(samples/s.*8: .*1: ", line)))
    state = json.loads((tmp_path / "out-run/checkpoints/step-000000008/state.json").read_text())
    assert state["run"]["micro_batch"] == int(found[1])


def test_a_batch_of_more_samples_than_there_are_is_told(recipe: Path) -> None:
    for size, told in ((8, 0), (4096, 1)):
        notes = Notes()
        train(recipe, ["steps=1", f"data.batch_size={size}", "data.micro_batch=8"], force=True, progress=notes)
        said = [line for line in notes.lines if "every update sees each of them" in line]
        assert len(said) == told


def test_training_starts_from_given_weights(recipe: Path, tmp_path: Path, losses: Losses) -> None:
    train(recipe, ["steps=40", "learning_rate.peak=0.01"])
    train(recipe, ["steps=1", f"initial={tmp_path}/out", f"output={tmp_path}/next"])
    before, after = losses(tmp_path / "out-run"), losses(tmp_path / "next-run")
    assert after[1] < before[1] - 0.5


def test_a_document_mask_trains_and_changes_the_losses(recipe: Path, tmp_path: Path, losses: Losses) -> None:
    longer = ["data.sequence_length=64", "data.batch_size=32"]  # some rows have the end of a document
    train(recipe, longer)
    across = losses(tmp_path / "out-run")
    train(recipe, [*longer, "data.document_mask=true"], force=True)
    inside = losses(tmp_path / "out-run")
    assert len(inside) == len(across)
    assert inside != across


def test_profile_writes_a_trace_and_a_table(recipe: Path, tmp_path: Path) -> None:
    train(recipe, profile=True)
    trace = json.loads((tmp_path / "out-run/profile/trace-0.json").read_text())
    assert any("addmm" in event.get("name", "") or "mm" in event.get("name", "") for event in trace["traceEvents"])
    assert "aten::mm" in (tmp_path / "out-run/profile/table-0.txt").read_text()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at every tensor
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled_steps_give_the_same_losses(
    backend: str, recipe: Path, tmp_path: Path, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend "aot_eager" gets the graphs that inductor gets, and takes no half minute of a C++ compiler."""
    monkeypatch.setattr("penjing.train.run.compile_model", partial(compile_model, backend=backend))
    counters.clear()
    small = ["steps=3"]  # compiling takes its time
    train(recipe, [*small, f"output={tmp_path}/plain"])
    train(recipe, [*small, "compile=true"])
    plain, compiled = losses(tmp_path / "plain-run"), losses(tmp_path / "out-run")
    assert max(abs(plain[step] - compiled[step]) for step in plain) < 1e-5
    assert counters["stats"]["unique_graphs"] == 2  # of a block, in training and in evaluation
    assert not counters["graph_break"]
