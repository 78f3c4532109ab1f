"""The compressed-tensors export: read by transformers with the compressed-tensors package, neither of them ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from penjing.compress.decoder.parity import Computed
from penjing.compress.export import compressed_tensors
from penjing.compress.export.gate import measure, sequences
from penjing.compress.exports import export_artifact
from penjing.compress.run import run_recipe
from penjing.core.artifact.decoder import open_decoder_artifact
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.cli import _run
from penjing.core.errors import InputError
from penjing.core.progress import Silent
from tests.compress.conftest import write_recipe


@pytest.fixture(scope="module")
def export(tiny_int8: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "compressed"
    export_artifact(tiny_int8, "compressed-tensors", out, force=False, progress=Silent())
    return out


def test_it_holds_what_other_loaders_read_and_a_record(export: Path, tiny_int8: Path) -> None:
    names = {path.name for path in export.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "export.json"}
    for name in names - {"export.json"}:
        assert (export / name).read_bytes() == (tiny_int8 / name).read_bytes()
        assert (export / name).stat().st_ino != (tiny_int8 / name).stat().st_ino  # a change leaves the artifact alone
    record = json.loads((export / "export.json").read_text())
    layers, answers = record["differences"]
    assert layers["between"] == ["fake_quantized", "transformers"]
    assert 0 < layers["mean"] < record["bound"]["value"]  # 127.5 against 127: never equal to the last bit
    assert answers["mean"] < 0.2
    assert record["unmeasured"] == {}


def test_bars_of_other_libraries_are_not_shown(
    tiny_int8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_artifact(tiny_int8, "compressed-tensors", tmp_path / "out", force=False, progress=Silent())
    assert capsys.readouterr().err == ""


def test_the_integers_are_the_artifact_s_and_weights_give_equal_logits(export: Path, tiny_int8: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    checkpoint, compared = open_checkpoint(tiny_int8), 0
    for name, layer in theirs.named_modules():
        if isinstance(layer, nn.Linear):
            assert torch.equal(layer.weight, checkpoint.get(f"{name}.weight")), name
            layer.quantization_scheme.input_activations = None  # pyright: ignore
            compared += 1
    assert compared == 15
    ids = torch.tensor([sequences(open_decoder_artifact(tiny_int8))[0][0]])
    ours = load_model(tiny_int8).model
    for layer in ours.modules():  # the same integers with activations as they are
        if hasattr(layer, "packed"):
            widened = layer.packed.weight_NK.float() * layer.packed.scale_N[:, None]  # type: ignore[union-attr]
            layer.forward = lambda x, weight=widened: nn.functional.linear(x, weight)  # type: ignore[method-assign]
    with torch.no_grad():
        wanted, found = theirs(ids).logits, ours(ids)
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_it_loads_in_penjing_again_without_a_manifest(export: Path, tiny_int8: Path) -> None:
    ids = torch.tensor([[5, 17, 40, 99]])
    with torch.no_grad():
        assert torch.equal(load_model(export).model(ids), load_model(tiny_int8).model(ids))


def test_without_the_packages_the_record_says_so(
    tiny_int8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compressed_tensors, "can_read", lambda *_: False)
    assert _run(["export", str(tiny_int8), str(tmp_path / "out"), "--to", "compressed-tensors"]) == 0
    assert "pip install transformers compressed-tensors" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "export.json").read_text())["differences"] == []


def test_the_gate_refuses_other_layers_and_nan(tiny_int8: Path) -> None:
    artifact = open_decoder_artifact(tiny_int8)
    pairs = sequences(artifact)
    for value, message in ((1.5, "loader differs from fake_quantized"), (float("nan"), "loader computes NaN")):
        readings = [
            Computed(
                [torch.ones(len(ids), 64), torch.full((len(ids), 64), value), torch.ones(len(ids), 64)],
                torch.zeros(len(ids), 320),
            )
            for ids, _ in pairs
        ]
        with pytest.raises(InputError, match=message):
            measure(artifact, "loader", readings)


def test_an_architecture_of_our_own_is_refused(
    tiny_int8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = open_decoder_artifact(tiny_int8)
    changes = {"model_type": "penjing", "intermediate_sizes": (128, 96)}
    config = artifact.checkpoint.config.model_copy(update=changes)
    monkeypatch.setattr(artifact.checkpoint, "config", config)
    with pytest.raises(InputError, match="no type of network that transformers reads"):
        compressed_tensors.write_compressed_tensors(artifact, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_hadamard_transform_is_why_such_artifacts_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The package itself computes it from a `transform_config`; transformers drops that field and answers wrongly. When
    this fails for the second part, the export can be written."""
    from compressed_tensors.transform import TransformConfig, apply_transform_config
    from transformers import AutoModelForCausalLM

    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "spread")
    transform = ["steps.0.transform.hadamard_down=8", "steps.0.transform.search_steps=0", "guard.perplexity_ratio=9"]
    artifact, folder = run_recipe(recipe, transform), tmp_path / "theirs"
    with pytest.raises(InputError, match="hadamard_down=0"):
        export_artifact(artifact, "compressed-tensors", folder, force=False, progress=Silent())
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((artifact / "model.safetensors").read_bytes())
    config = json.loads((artifact / "config.json").read_text())
    del config["mlp_hadamard"]
    spread = {"targets": [r"re:.*mlp\.down_proj$"], "location": "input"}
    groups = {"config_groups": {"down": {"type": "hadamard", "head_dim": 8, "apply": [spread]}}}
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    config["quantization_config"]["transform_config"] = groups
    (folder / "config.json").write_text(json.dumps(config))
    theirs, ids = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), torch.arange(20)[None] + 5
    with torch.no_grad():
        ours = load_model(artifact).model(ids)
        without = theirs(ids).logits
        apply_transform_config(theirs, TransformConfig.model_validate(groups))
        whole = theirs(ids).logits
    assert (whole - ours).abs().mean() < 0.1 * ours.std()
    assert torch.equal(whole.argmax(-1), ours.argmax(-1))
    assert (without - ours).abs().mean() > 0.5 * ours.std()
