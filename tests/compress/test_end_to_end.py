"""Recipes of steps on real, tiny networks through the command line: pruned, taught, loaded again."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penjing.compress.recipe import load_recipe
from penjing.compress.samples import data
from penjing.core.checkpoint.classifier import load_classifier
from penjing.core.checkpoint.load import load_model
from penjing.core.cli import app
from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.core.family import FamilyName
from penjing.core.images.normalise import normalise
from penjing.core.manifest import read_manifest, verify
from penjing.train.data.images import ImageSet
from penjing.train.families import classifier as vision
from penjing.train.run import train
from tests import forking
from tests.compress.fakes import tiny_classifier

ROOT = Path(__file__).parents[2]
TRAIN = """
output = "{folder}/resnet"
steps = 60
device = "cpu"
[model]
architecture = "resnet"
depth = 8
width = 8
[data]
kind = "fashion-mnist"
batch_size = 32
[optimizer]
name = "sgd"
[learning_rate]
peak = 0.1
[evaluation]
every = 60
samples = 100
[monitor]
tensorboard = false
"""

CLASSIFIER = """
model = "{folder}/resnet"
output = "{folder}/pruned"
[data]
images = 320
[measure]
rounds = 1
seconds = 0
batches = [2]
onnxruntime = false
[guard]
accuracy_points = 15.0  # what a small network loses varies from one processor to the next
[[steps]]
kind = "prune"
ratio = 0.5
rank = "isomorphic"
round_to = 1
[[steps]]
kind = "distill"
steps = 30
batch_size = 32
device = "cpu"
optimizer = {{ name = "sgd", weight_decay = 0 }}
learning_rate = {{ peak = 0.02 }}
evaluation_samples = 0
"""

DECODER = """
model = "{model}"
output = "{folder}/small"
[evaluate]
prose_tokens = 512
code_tokens = 0
window = 64
[measure]
rounds = 1
seconds = 0
prefill_tokens = 16
[guard]
perplexity_ratio = 3.0
[[steps]]
kind = "prune"
ratio = 0.25
round_to = 8
[[steps]]
kind = "distill"
steps = 8
batch_size = 8
device = "cpu"
sources = ["builtin:calibration"]
sequence_length = 32
learning_rate = {{ peak = 1e-3 }}
evaluation_samples = 0
checkpoint_every = 4
"""


def made_up(split: str, progress: object = None) -> ImageSet:
    """Noise on a texture that is the class's."""
    generator = np.random.default_rng({"train": 0, "test": 1}[split])
    labels = generator.integers(0, 10, 320, dtype=np.uint8)
    textures = np.random.default_rng(7).integers(0, 150, (10, 1, 12, 12), dtype=np.uint8)
    images = textures[labels] + generator.integers(0, 100, (320, 1, 12, 12), dtype=np.uint8)
    return ImageSet(images, labels, 10)


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (vision, data):
        monkeypatch.setattr(module, "load_fashion", made_up)


def penjing(*arguments: str | Path) -> None:
    app([str(argument) for argument in arguments], standalone_mode=False)


def write(path: Path, text: str, **places: Path) -> Path:
    path.write_text(text.format(**places))
    return path


def report_of(folder: Path) -> dict[str, Any]:
    verify(folder)
    return json.loads((folder / "report.json").read_text())


@pytest.mark.usefixtures("images")
def test_a_classifier_is_pruned_taught_and_reported(tmp_path: Path) -> None:
    train(write(tmp_path / "train.toml", TRAIN, folder=tmp_path))
    penjing("compress", write(tmp_path / "recipe.toml", CLASSIFIER, folder=tmp_path))
    model, config = load_classifier(tmp_path / "pruned")
    dense, _ = load_classifier(tmp_path / "resnet")
    sizes = [sum(parameter.numel() for parameter in each.parameters()) for each in (dense, model)]
    assert sizes[1] < 0.7 * sizes[0]
    report = report_of(tmp_path / "pruned")
    first, pruned, taught = report["stages"]
    assert [each["size"]["parameters"] for each in (first, pruned, taught)] == [sizes[0], sizes[1], sizes[1]]
    assert pruned["latency"] == taught["latency"]  # one architecture, measured once
    assert pruned["record"]["batch_norms"] == 9
    # the published network reaches what the report says, on images normalised by hand
    test = made_up("test")
    inputs = torch.from_numpy(normalise(test.images, np.array(config.mean, "f4"), np.array(config.std, "f4")))
    with torch.no_grad():
        right = (model(inputs).argmax(1).numpy() == test.labels).mean()
    assert right == pytest.approx(taught["quality"]["value"])
    assert taught["quality"]["value"] > pruned["quality"]["value"]
    assert report["decisions"][-1]["outcome"] == "kept"
    assert read_manifest(tmp_path / "pruned").kind == "checkpoint"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.usefixtures("images")
def test_a_sparse_classifier_loses_its_zeros_without_a_loss(tmp_path: Path) -> None:
    train(write(tmp_path / "train.toml", TRAIN, folder=tmp_path), ["steps=5"])
    head, prune, _ = CLASSIFIER.split("[[steps]]")
    sparsify = (
        '[[steps]]\nkind = "sparsify"\nsteps = 30\nbatch_size = 32\nstrength = 1.0\ndevice = "cpu"\n'
        'optimizer = {{ name = "sgd", weight_decay = 0 }}\nlearning_rate = {{ peak = 0.02, kind = "constant" }}\n'
    )
    recipe = write(tmp_path / "recipe.toml", f"{head}{sparsify}[[steps]]{prune}", folder=tmp_path)
    penjing("compress", recipe, "--set", "guard.accuracy_points=100", "--set", "steps.1.batch_norm=false")
    _, sparse, pruned = report_of(tmp_path / "pruned")["stages"]
    assert sparse["record"]["zero_share"] > 0.3
    assert pruned["size"]["parameters"] < sparse["size"]["parameters"]
    assert pruned["quality"]["record"] == sparse["quality"]["record"]  # the same answer on every image


@pytest.mark.usefixtures("images")
def test_statistics_after_a_prune_are_those_of_the_pruned_network(tmp_path: Path) -> None:
    train(write(tmp_path / "train.toml", TRAIN, folder=tmp_path), ["steps=2"])
    recipe = write(tmp_path / "recipe.toml", CLASSIFIER.partition('[[steps]]\nkind = "distill"')[0], folder=tmp_path)
    penjing("compress", recipe, "--set", "guard.accuracy_points=100")
    model, config = load_classifier(tmp_path / "pruned")
    stem = model.stem
    inputs = torch.from_numpy(
        normalise(made_up("train").images, np.array(config.mean, "f4"), np.array(config.std, "f4"))
    )
    with torch.no_grad():
        x = stem.conv(inputs)
    assert isinstance(stem.norm, nn.BatchNorm2d)
    torch.testing.assert_close(stem.norm.running_mean, x.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stem.norm.running_var, x.var((0, 2, 3)), rtol=1e-4, atol=1e-5)


def test_a_decoder_is_pruned_and_taught_and_an_override_reaches_a_step(tmp_path: Path, tiny_checkpoint: Path) -> None:
    recipe = write(tmp_path / "recipe.toml", DECODER, folder=tmp_path, model=tiny_checkpoint)
    penjing("compress", recipe, "--set", "steps.0.ratio=0.5", "--out", tmp_path / "half")
    assert not (tmp_path / "small").exists()
    config = load_model(tmp_path / "half").config
    assert config.intermediate_size == 48
    report = report_of(tmp_path / "half")
    assert report["command"].endswith(f"--set steps.0.ratio=0.5 --out {tmp_path / 'half'}")
    dense, pruned, taught = (stage["quality"]["value"] for stage in report["stages"])
    assert taught < pruned
    assert report["decisions"][0]["loss"] == pytest.approx(taught / dense, rel=1e-5)


def test_a_decoder_loses_layers_in_a_plain_hugging_face_form(tmp_path: Path, tiny_checkpoint: Path) -> None:
    recipe = write(tmp_path / "recipe.toml", DECODER.partition("[[steps]]")[0], folder=tmp_path, model=tiny_checkpoint)
    with open(recipe, "a") as file:
        file.write('[[steps]]\nkind = "prune"\nparts = ["layers"]\nlayers = 1\nguard = false\n')
        file.write("[data]\ntokens = 256\nwindow = 64\n")
    penjing("compress", recipe)
    config = json.loads((tmp_path / "small/config.json").read_text())
    assert (config["num_hidden_layers"], config["model_type"]) == (1, "llama")
    assert report_of(tmp_path / "small")["decisions"] == []


# Kills the process at the N-th flush to disk; every file the run writes is flushed.
KILLED = """
import os, signal, sys
flush, left = os.fsync, [int(sys.argv[2])]
def fsync(descriptor):
    left[0] -= 1
    if left[0] <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
    flush(descriptor)
os.fsync = fsync
from penjing.core.cli import app
app(["compress", sys.argv[1]], standalone_mode=False)
"""


def test_a_killed_run_leaves_nothing_under_the_name_and_goes_on_to_the_same_result(
    tmp_path: Path, tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes, flush = 0, os.fsync

    def counting(descriptor: int) -> None:
        nonlocal flushes
        flushes += 1
        flush(descriptor)

    recipe = write(tmp_path / "recipe.toml", DECODER, folder=tmp_path, model=tiny_checkpoint)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", counting)
        penjing("compress", recipe, "--out", tmp_path / "whole")
    killed = forking.run([sys.executable, "-c", KILLED, str(recipe), str(flushes // 2)])  # in training
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "small").exists()
    capfd.readouterr()
    penjing("compress", recipe)
    assert re.search(r"\d complete steps of an earlier run lie in \.small\.work", capfd.readouterr().err)
    hashes, whole = (read_manifest(tmp_path / name).sha256 for name in ("small", "whole"))
    assert hashes["model.safetensors"] == whole["model.safetensors"]
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_is_one_clear_error_and_the_run_goes_on_later(tmp_path: Path, tiny_checkpoint: Path) -> None:
    recipe = write(tmp_path / "recipe.toml", DECODER.partition("[[steps]]")[0], folder=tmp_path, model=tiny_checkpoint)
    with open(recipe, "a") as file:
        file.write('[[steps]]\nkind = "prune"\nratio = 0.25\n')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # else the signal ends the process before EFBIG is seen
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(SetupError, match=r"cannot write .*file-size limit"):
            penjing("compress", recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not (tmp_path / "small").exists()
    assert not list(tmp_path.rglob("*.partial-*"))
    penjing("compress", recipe)
    assert load_model(tmp_path / "small").config.intermediate_size == 72


@pytest.mark.parametrize("name", ["resnet-fashion-pruned", "smollm2-pruned", "smollm2-shallow"])
def test_the_recipes_of_the_repository_are_valid(name: str) -> None:
    family: FamilyName = "classifier" if name.startswith("resnet") else "decoder"
    recipe = load_recipe(ROOT / "recipes" / f"{name}.toml", family=family)
    assert [step.kind for step in recipe.steps] == ["prune", "distill"]
    assert recipe.output.name == name


def test_bad_input_is_one_line_and_nothing_appears(tmp_path: Path, tiny_checkpoint: Path) -> None:
    recipe = write(tmp_path / "recipe.toml", DECODER, folder=tmp_path, model=tiny_checkpoint)
    for override, message in (
        (f"model={tmp_path}/missing", r"missing does not exist"),
        (f"model={tiny_checkpoint}/config.json", r"is a file, not a model folder"),
        (f"output={tiny_checkpoint}", r"is the model itself; choose another output"),
        ("steps.1.pad=2", r"steps.1: .* is a decoder, which has no use for pad; leave it out"),
        ("steps.1.sources=[]", r"steps.1: .* is a decoder: give the step sources"),
        ("evaluate.window=1024", r"window=1024"),
    ):
        with pytest.raises((InputError, ConfigError), match=message) as found:
            penjing("compress", recipe, "--set", override, "--force")
        assert "\n" not in str(found.value)
    assert verify(tiny_checkpoint)
    assert not (tmp_path / "small").exists()


def test_what_only_decoders_have_is_refused_before_the_first_step(tmp_path: Path) -> None:
    tiny_classifier(tmp_path / "resnet")
    recipe = write(tmp_path / "recipe.toml", CLASSIFIER, folder=tmp_path)
    with open(recipe, "a") as file:
        file.write('[[steps]]\nkind = "prune"\nratio = 0.1\nparts = ["heads"]\n')
    with pytest.raises(ConfigError, match=r"steps.2: parts=\['heads'\]: decoders have parts"):
        penjing("compress", recipe)
    assert not list(tmp_path.glob(".*"))
