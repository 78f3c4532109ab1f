"""`penjing.run` and the other calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penjing
from penjing.calls import _toml
from tests.compress.classifiers import made_up_images

TEXTS = {"prose_tokens": 128, "code_tokens": 64, "window": 64}


def test_run_trains_a_training_recipe(recipe: Path, tmp_path: Path) -> None:
    other = tmp_path / "other \U0001f333"  # two surrogates in JSON, which TOML has not
    assert penjing.run(recipe, {"checkpoint.every": 1}, out=other, steps=2) == other
    assert (other / "penjing.json").exists()
    assert not (tmp_path / "out").exists()
    with pytest.raises(penjing.InputError, match="already exists"):
        penjing.run(recipe, out=other, steps=2)
    assert penjing.run(recipe, out=other, force=True, steps=1, data=_data(recipe)) == other


def _data(recipe: Path) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(recipe.read_text())["data"]


def test_run_refuses_what_is_no_recipe(tmp_path: Path) -> None:
    empty = tmp_path / "empty.toml"
    empty.write_text("output = 'x'\n")
    with pytest.raises(penjing.ConfigError, match=r"empty.toml names no model: a training recipe describes one"):
        penjing.run(empty)
    with pytest.raises(penjing.ConfigError, match=r"did you mean 'decoder-tiny'"):
        penjing.run("decodr-tiny")
    with pytest.raises(penjing.ConfigError, match=r"resume='auto' is for training"):
        penjing.run("smollm2-int8", resume="auto")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.2, "0.2"),
        (True, "true"),
        ('a "b" \U0001f333', '"a \\"b\\" \U0001f333"'),
        (Path("build/x"), '"build/x"'),
        ((1, 2), "[1, 2]"),
        (np.int64(3), "3"),
        (np.float64(0.5), "0.5"),
        (torch.tensor(2), "2"),
        ({"kind": "cosine", "peak": 1e-5}, '{kind = "cosine", peak = 1e-05}'),
    ],
)
def test_values_become_toml(value: Any, text: str) -> None:
    assert _toml("key", value) == text


@pytest.mark.parametrize("value", [None, [None], {1, 2}, object(), b"bytes"])
def test_values_that_toml_has_not(value: Any) -> None:
    with pytest.raises(penjing.ConfigError, match=r"^data.shards=.* cannot be written in TOML"):
        _toml("data.shards", value)


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(penjing.InputError):
        penjing.report([])
    with pytest.raises(penjing.InputError):
        penjing.report(tmp_path)


def test_a_server_that_cannot_start_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(penjing.InputError, match="none does not exist"), penjing.serving(tmp_path / "none"):
        pass
    assert capfd.readouterr() == ("", "")


def test_import_takes_paths(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = penjing.import_model(tiny_checkpoint, tmp_path / "imported")
    assert isinstance(penjing.load(out), penjing.LoadedModel)


def test_import_takes_an_onnx_file_and_its_options(tmp_path: Path) -> None:
    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x

    penjing.Network.from_torch(Sum(), torch.zeros(2, 3)).export(tmp_path / "x.onnx")
    network = penjing.Network.load(penjing.import_model(tmp_path / "x.onnx", tmp_path / "x"))
    assert torch.equal(network(torch.ones(2, 3))[0], torch.full((2, 3), 2.0))
    with pytest.raises(penjing.InputError, match=r"no\.onnx"):
        penjing.import_model("no.onnx", tmp_path / "y")
    with pytest.raises(penjing.ConfigError, match=r"labels is for \.onnx files and modules"):
        penjing.import_model(tmp_path, tmp_path / "y", labels=tmp_path)
    with pytest.raises(penjing.ConfigError, match=r"dtype 'float16'.*leave it out"):
        penjing.import_model(tmp_path / "x.onnx", tmp_path / "y", dtype="float16")


MILD = {"guard": {"perplexity_ratio": 1000.0}, "evaluate": TEXTS, "measure": {"seconds": 0.0, "rounds": 1}}


def test_prune_makes_a_smaller_checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = penjing.prune(tiny_checkpoint, tmp_path / "pruned", 0.5, method="l2", parts=("ffn",), sections=MILD)
    before, after = penjing.load(tiny_checkpoint), penjing.load(out)
    assert isinstance(before, penjing.LoadedModel)
    assert isinstance(after, penjing.LoadedModel)
    assert after.config.intermediate_size == before.config.intermediate_size // 2
    assert next(row["stage"] for row in penjing.report(out)) == "00-model"
    with pytest.raises(penjing.ConfigError, match="sections"):
        penjing.prune(tiny_checkpoint, tmp_path / "other", 0.5, sections=MILD, sections_of="nothing")
    with pytest.raises(penjing.ConfigError, match=r"^keep=None cannot be written"):
        penjing.quantize(tiny_checkpoint, tmp_path / "other", keep=None)


def test_quantize_makes_an_artifact(classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penjing.compress.samples.data.load_fashion", made_up_images)
    sections = {"guard": {"accuracy_points": 100.0}, "measure": {"seconds": 0.0, "rounds": 1}}
    out = penjing.quantize(classifier, tmp_path / "int8", sections=sections, observer="minmax", parity_bound=1.0)
    network, floating = penjing.load(out), penjing.load(classifier)
    assert isinstance(network, penjing.ImageClassifier)
    assert isinstance(floating, penjing.ImageClassifier)
    assert network.is_artifact
    pixels = made_up_images("test").images[:64]
    assert (network(pixels).argmax(1) == floating(pixels).argmax(1)).mean() > 0.8
