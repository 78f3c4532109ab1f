"""A recipe to INT8 that dies in every stage, one after the other: nothing is published, and each run goes on.

Stages die after their work, when most of it lies on disk; the removal of partial folders is off, as after SIGKILL.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penjing.compress import outcome
from penjing.compress import run as whole_run
from penjing.compress.decoder import artifact as weights
from penjing.compress.distill.task import WrappedTask
from penjing.compress.graph import task as graph_task
from penjing.compress.measure import evaluate
from penjing.compress.measure import graph as outputs
from penjing.compress.parity.classifier import ClassifierParity
from penjing.compress.parity.graph import GraphParity
from penjing.compress.quantizers import classifier, decoder, graph
from penjing.compress.quantizers import onnx as onnx_artifact
from penjing.compress.run import run_recipe
from penjing.compress.samples import data
from penjing.compress.steps import prune
from penjing.compress.verify import verify_artifact
from penjing.core import files
from penjing.core.errors import InputError, SetupError
from penjing.core.graph.network import Network, tensors_of
from penjing.core.graph.trace import from_torch
from penjing.core.manifest import read_manifest
from penjing.train import run as train_run
from penjing.train.families import classifier as vision
from penjing.train.plan.estimate import MemoryEstimate
from tests.compress.graph.networks import randomised
from tests.compress.graphs import write_graph
from tests.compress.quantize.folders import vision_folder
from tests.compress.steps.test_quantize import made_up
from tests.core.graph.networks import Residual

HEAD = """
model = "{model}"
output = "{output}"
[measure]
rounds = 1
seconds = 0
"""
CLASSIFIER = """
batches = [2]
onnxruntime = false
[data]
images = 64
[evaluate]
images = 64
resamples = 100
[guard]
accuracy_points = 100.0
[[steps]]
kind = "prune"
ratio = 0.25
round_to = 2
[[steps]]
kind = "distill"
steps = 4
batch_size = 16
device = "cpu"
evaluation_samples = 0
checkpoint_every = 2
learning_rate = {{ peak = 0.01 }}
[[steps]]
kind = "quantize"
steps = 4
batch_size = 16
device = "cpu"
evaluation_samples = 0
checkpoint_every = 2
learning_rate = {{ peak = 0.01 }}
"""
GRAPH = (
    CLASSIFIER.replace("onnxruntime = false\n", "")
    .replace("images = 64", 'source = "{data}"', 1)
    .replace("images = 64", "images = 32")
    .replace("peak = 0.01", "peak = 1e-3")
    .replace("accuracy_points = 100.0", "similarity_loss = 2.0")
)
DECODER = """
prefill_tokens = 8
[evaluate]
prose_tokens = 64
code_tokens = 0
window = 64
resamples = 100
[guard]
perplexity_ratio = 2.0
[[steps]]
kind = "quantize"
steps = 4
batch_size = 4
sequence_length = 16
held_out = 0.2
sources = ["{texts}"]
device = "cpu"
evaluation_samples = 0
checkpoint_every = 2
learning_rate = {{ peak = 3e-5 }}
[steps.transform]
search_steps = 2
[data]
tokens = 128
window = 64
"""


class Killed(BaseException):
    """No handler of ours takes it, as none takes SIGKILL."""


FULL = OSError(errno.ENOSPC, "No space left on device")
Fault = tuple[Any, str, int, BaseException]  # where, what, at which call (or step of training), how
CLASSIFIER_FAULTS: tuple[Fault, ...] = (
    (prune, "prune_checkpoint", 1, Killed()),
    (WrappedTask, "after_update", 3, Killed()),  # distillation
    (graph_task, "prepare_graph", 1, Killed()),
    (graph_task.QuantizedTask, "after_update", 3, Killed()),  # training in INT8
    (classifier, "export_network", 1, Killed()),
    (classifier, "export_network", 1, FULL),
    (ClassifierParity, "measure_network", 1, Killed()),
    (onnx_artifact, "write_manifest", 1, Killed()),
    (evaluate, "accuracy", 1, Killed()),
    (whole_run, "write_reports", 1, FULL),
    (whole_run, "write_manifest", 1, Killed()),
)
GRAPH_FAULTS: tuple[Fault, ...] = (
    (prune, "prune_checkpoint", 1, Killed()),
    (WrappedTask, "after_update", 3, Killed()),  # distillation
    (graph_task, "prepare_graph", 1, Killed()),
    (graph_task.QuantizedTask, "after_update", 3, Killed()),  # training in INT8
    (graph, "export_network", 1, FULL),
    (GraphParity, "measure_network", 1, Killed()),
    (onnx_artifact, "write_manifest", 1, Killed()),
    (outputs, "scores_of", 1, Killed()),
    (whole_run, "write_manifest", 1, Killed()),
)
DECODER_FAULTS: tuple[Fault, ...] = (
    (weights, "compress_layer", 2, Killed()),  # calibration, in the last layer
    (weights, "save_checkpoint", 1, FULL),
    (WrappedTask, "after_update", 3, Killed()),
    (decoder, "save_checkpoint", 1, Killed()),
    (decoder, "measure", 1, Killed()),
    (decoder, "write_manifest", 1, Killed()),
    (whole_run, "write_reports", 1, Killed()),
)


@dataclass
class Watch:
    """What was done over all runs: updates of training by task, and calls of what is watched."""

    updates: list[tuple[str, int]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch, fault: Fault | None) -> None:
        watched = (prune, "prune_checkpoint"), (weights, "compress_layer"), (graph_task, "prepare_graph")
        for module, name in watched:
            patch.setattr(module, name, self._counting(name, getattr(module, name)))
        patch.setattr(WrappedTask, "after_update", self._updating(WrappedTask.after_update))
        if fault is None:
            return
        where, name, at, error = fault
        if name == "after_update":
            patch.setattr(where, name, self._updating(getattr(where, name), at, error))
        else:
            patch.setattr(where, name, _dying(getattr(where, name), at, error))
        if isinstance(error, Killed):
            patch.setattr(files, "shutil", SimpleNamespace(rmtree=lambda *_, **__: None, disk_usage=shutil.disk_usage))

    def steps(self, task: str) -> list[int]:
        """Updates of one kind of task, in order."""
        return [step for name, step in self.updates if name == task]

    def _counting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **named: Any) -> Any:
            self.calls.append(name)
            return original(*arguments, **named)

        return counting

    def _updating(self, original: Callable[..., Any], at: int = 0, error: BaseException | None = None) -> Any:
        def after_update(task: Any, *arguments: Any) -> Any:
            def update(step: int) -> None:
                if error is None:
                    self.updates.append((type(task).__name__, step))
                elif step == at:
                    raise error

            return (*original(task, *arguments), update)

        return after_update


def _dying(original: Callable[..., Any], at: int, error: BaseException) -> Callable[..., Any]:
    calls = 0

    def dying(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*arguments, **named)
        if calls == at:
            raise error
        return result

    return dying


def export_each_once(patch: pytest.MonkeyPatch) -> None:
    """From here on torch's exporter gets the same network once: each run that dies behind it would wait seconds."""
    known: dict[str, bytes] = {}

    def once(original: Callable[..., int]) -> Callable[..., int]:
        def export(network: Network, path: Path, about: dict[str, str], target: Any = None) -> int:
            said = hashlib.sha256(f"{network.module.graph}{network.config}{about}{target}".encode())
            for name, tensor in tensors_of(network.module).items():
                said.update(name.encode())
                said.update(tensor.detach().contiguous().numpy().tobytes())
            if (key := said.hexdigest()) in known:
                path.write_bytes(known[key])
                return len(known[key])
            size = original(network, path, about, target)
            known[key] = path.read_bytes()
            return size

        return export

    for module in (classifier, graph):
        patch.setattr(module, "export_network", once(module.export_network))


def recipe(folder: Path, name: str, text: str, **places: Path) -> Path:
    path = folder / f"{name}.toml"
    path.write_text((HEAD + text).format(output=folder / name, **places))
    return path


def die_in_each(path: Path, faults: tuple[Fault, ...], monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Run `path` once for each fault and then to its end."""
    watch, out = Watch(), path.with_suffix("")
    export_each_once(monkeypatch)
    beside = {entry.name for entry in path.parent.iterdir()}
    for fault in faults:
        wanted, message = (SetupError, "the disk is full; free some space") if fault[3] is FULL else (Killed, None)
        with monkeypatch.context() as patch:
            watch.install(patch, fault)
            with pytest.raises(wanted, match=message):
                run_recipe(path)
        assert not out.exists(), fault
        new = {entry.name for entry in path.parent.iterdir()} - beside
        assert {name for name in new if not name.startswith(f".{out.name}.partial-")} == {f".{out.name}.work"}, fault
    with monkeypatch.context() as patch:
        watch.install(patch, None)
        run_recipe(path)
    assert {entry.name for entry in path.parent.iterdir()} == beside | {out.name}
    verify_artifact(out)
    return watch


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr("os.fsync", lambda _: None)  # nothing here survives the machine anyway
    # What takes time and has no part in this: rates of the machine, memory, figures.
    monkeypatch.setattr(whole_run, "preflight", lambda *_: None)
    monkeypatch.setattr(train_run, "peak_flops", lambda *_: (1e11, "made up"))
    monkeypatch.setattr(train_run, "estimate_memory", lambda *_, **__: MemoryEstimate(0, 0, 0, 0, 0, 0))
    monkeypatch.setattr(outcome, "run_page", lambda _: "")
    for module in (vision, data):
        monkeypatch.setattr(module, "load_fashion", made_up)


def test_a_classifier_s_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = vision_folder(tmp_path / "model")
    whole = run_recipe(recipe(tmp_path, "whole", CLASSIFIER, model=model))
    watch = die_in_each(recipe(tmp_path, "killed", CLASSIFIER, model=model), CLASSIFIER_FAULTS, monkeypatch)
    assert watch.calls == ["prune_checkpoint", "prune_checkpoint", "prepare_graph", "prepare_graph"]  # each died once
    assert watch.steps("Distilled") == watch.steps("QuantizedTask") == [1, 2, 3, 3, 4]  # the newest state: step 2
    first, second = (read_manifest(folder).sha256["model.onnx"] for folder in (whole, tmp_path / "killed"))
    assert first == second


def test_a_graph_s_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(96, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    save_file({"images": images}, tmp_path / "data.safetensors")
    network = from_torch(randomised(Residual()), (images[:4],), meaning="classes")
    places = {"model": write_graph(tmp_path / "model", network), "data": tmp_path / "data.safetensors"}
    whole = run_recipe(recipe(tmp_path, "whole", GRAPH, **places))
    watch = die_in_each(recipe(tmp_path, "killed", GRAPH, **places), GRAPH_FAULTS, monkeypatch)
    assert watch.calls == ["prune_checkpoint", "prune_checkpoint", "prepare_graph", "prepare_graph"]  # each died once
    assert watch.steps("QuantizedTask") == [1, 2, 3, 3, 4]  # the newest state: step 2
    assert watch.steps("Taught") == 2 * [1, 2, 3, 3, 4]  # by itself, and rounded
    first, second = (read_manifest(folder).sha256["model.onnx"] for folder in (whole, tmp_path / "killed"))
    assert first == second


def test_a_decoder_s_recipe(tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in sorted(topics)[:4]:
        (texts / f"{name}.txt").write_text(topics[name], encoding="utf-8")
    places = {"model": tiny_checkpoint, "texts": texts}
    whole = run_recipe(recipe(tmp_path, "whole", DECODER, **places))
    watch = die_in_each(recipe(tmp_path, "killed", DECODER, **places), DECODER_FAULTS, monkeypatch)
    # two layers in INT8, of which the last died once, and the two of the floating network that training begins with
    assert watch.calls.count("compress_layer") == 5
    assert watch.steps("Distilled") == [1, 2, 3, 3, 4]
    first, second = (read_manifest(folder).sha256["model.safetensors"] for folder in (whole, tmp_path / "killed"))
    assert first == second


def test_what_a_killed_run_left_and_what_was_damaged_since_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(tmp_path, "killed", CLASSIFIER, model=vision_folder(tmp_path / "model"))
    with monkeypatch.context() as patch:
        Watch().install(patch, (ClassifierParity, "measure_network", 1, Killed()))
        with pytest.raises(Killed):
            run_recipe(path)
    work = tmp_path / ".killed.work"
    for name, said in (
        ("01-prune-????????????.json", r"is no record of a step; delete it, and the step is done again"),
        (
            "02-distill-*/model.safetensors",
            r"model\.safetensors has SHA-256 .*; delete \S*02-distill-\w+, and the same",
        ),
        ("02-distill-*/penjing.json", r"penjing\.json is not valid JSON .*; delete \S*02-distill-\w+, and the same"),
        ("03-quantize-*.scratch/trained/model.safetensors", r"; delete \S*\.scratch/trained, and the same command"),
    ):
        (file,) = work.glob(name)
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        with pytest.raises(InputError, match=said) as found:
            run_recipe(path)
        assert "\n" not in str(found.value)
        assert not (tmp_path / "killed").exists()
        if "trained" not in name:
            file.write_bytes(content)
    shutil.rmtree(file.parent)
    verify_artifact(run_recipe(path))
