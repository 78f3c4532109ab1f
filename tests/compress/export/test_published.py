"""Networks of folded families as other engines read them: in integers and in floating point."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penjing.compress.decoder.parity import Computed
from penjing.compress.export import compressed_tensors
from penjing.compress.export.floating import export_floating
from penjing.compress.exports import export_artifact
from penjing.compress.run import run_recipe
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.cli import _run
from penjing.core.errors import ConfigError, InputError
from penjing.core.imports.importer import import_model
from penjing.core.progress import Silent
from tests.compress.conftest import write_recipe
from tests.compress.export.test_weights_only import widened
from tests.core.folded.test_families import CASES, save

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
PLAIN = ["steps.0.transform.search_steps=0", "guard.perplexity_ratio=9"]
STILL = [*PLAIN, "steps.0.transform.rotate=false"]
FOUR = ["steps.0.weights_bits=4", "steps.0.group=32"]
# What its norms and fused matrices ask of a form; "rotate" where they let a rotation through.
INT8 = {
    "gemma3": [*STILL, 'steps.0.embedding_dtype="int8"'],
    "phi3_partial": PLAIN,
    "glm4": STILL,
    "cohere": STILL,
    "smollm3": PLAIN,
}
IDS = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(0))


def imported(case: str, tmp_path: Path, tokenizer: Path) -> Path:
    kind, changes, _ = CASES[case]
    rotates = {"no_rope_layers": [1, 0]} if kind == "smollm3" else {}
    save(tmp_path / "hf", tokenizer, kind, changes | WIDE | rotates)
    return import_model(str(tmp_path / "hf"), tmp_path / "floats")


@pytest.mark.parametrize("case", INT8)
def test_transformers_reads_a_folded_family_in_int8(case: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = imported(case, tmp_path, tiny_checkpoint)
    artifact = run_recipe(write_recipe(tmp_path, folder, tmp_path / "int8"), INT8[case])
    out = tmp_path / "out"
    record = export_artifact(artifact, "compressed-tensors", out, force=False, progress=Silent())
    layers, answers = record.differences
    assert layers.between == ("fake_quantized", "transformers")
    assert layers.mean < 0.02  # they round by another scale, and layers are 64 wide
    assert answers.mean < 0.2
    values = json.loads((out / "config.json").read_text())
    assert values["model_type"] == CASES[case][0]
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    with torch.no_grad():
        wanted, found = whole(IDS).logits, theirs(IDS).logits
    assert float((wanted - found).square().mean().sqrt()) < 0.1 * float(wanted.std())


@pytest.mark.parametrize("case", ["gemma3", "phi3_partial", "glm4"])
def test_transformers_reads_a_folded_family_in_four_bits(case: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = imported(case, tmp_path, tiny_checkpoint)
    artifact = run_recipe(write_recipe(tmp_path, folder, tmp_path / "int4"), [*STILL, *FOUR])
    out = tmp_path / "out"
    record = export_artifact(artifact, "compressed-tensors-weights", out, force=False, progress=Silent())
    assert record.differences[0].mean < 1e-5
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ours, _ = widened(open_checkpoint(artifact))
    with torch.no_grad():
        wanted, found = ours(IDS), theirs(IDS).logits
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_packed_zero_points_of_turned_rows_are_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = imported("glm4", tmp_path, tiny_checkpoint)
    settings = [*STILL, *FOUR, 'steps.0.offsets="whole"']
    artifact = run_recipe(write_recipe(tmp_path, folder, tmp_path / "int4"), settings)
    with pytest.raises(InputError, match=r"zero points of .* compress with offsets=false, or export --to gguf"):
        export_artifact(artifact, "compressed-tensors-weights", tmp_path / "out", force=False, progress=Silent())
    assert not (tmp_path / "out").exists()


def test_parts_of_one_matrix_with_other_bits_are_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = imported("phi3_partial", tmp_path, tiny_checkpoint)
    settings = [*STILL, *FOUR, "steps.0.keep_int8=['*.0.self_attn.k_proj']"]
    artifact = run_recipe(write_recipe(tmp_path, folder, tmp_path / "mixed"), settings)
    with pytest.raises(InputError, match=r"parts of model.layers.0.self_attn.qkv_proj have weights of different bits"):
        export_artifact(artifact, "compressed-tensors-weights", tmp_path / "out", force=False, progress=Silent())


def test_a_rotated_network_whose_norms_subtract_a_mean_is_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = imported("cohere", tmp_path, tiny_checkpoint)
    artifact = run_recipe(write_recipe(tmp_path, folder, tmp_path / "int8"), PLAIN)
    with pytest.raises(InputError, match=r"was rotated, .* compress with transform.rotate=false"):
        export_artifact(artifact, "compressed-tensors", tmp_path / "out", force=False, progress=Silent())


def test_a_floating_family_goes_back_by_command(
    tmp_path: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = imported("gemma2", tmp_path, tiny_checkpoint), tmp_path / "out"
    arguments = ["export", str(folder), str(out), "--to", "transformers"]
    assert _run(arguments) == 0
    assert "transformers against dequantized" in capsys.readouterr().err
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted, found = load_model(folder).model(IDS), theirs(IDS).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=3e-5 * float(wanted.abs().max()))
    assert _run(arguments) != 0
    assert "--force" in capsys.readouterr().err
    assert _run([*arguments, "--force"]) == 0
    # What is written comes in again, the same numbers but for the last bit of a factor.
    again = open_checkpoint(import_model(str(out), tmp_path / "again"))
    for name in again.tensor_names:
        torch.testing.assert_close(again.get(name), open_checkpoint(folder).get(name), rtol=1e-6, atol=1e-7)


def test_a_plain_network_is_written_as_it_is(tmp_path: Path, tiny_checkpoint: Path) -> None:
    record = export_artifact(tiny_checkpoint, "transformers", tmp_path / "out", force=False, progress=Silent())
    assert record.differences[0].mean < 1e-5
    assert not (tmp_path / "out" / "penjing.json").exists()


def test_what_has_no_floating_form_is_refused(tmp_path: Path, tiny_checkpoint: Path, tiny_int8: Path) -> None:
    def refused(folder: Path, match: str) -> None:
        with pytest.raises(InputError, match=match):
            export_artifact(folder, "transformers", tmp_path / "out", force=False, progress=Silent())
        assert not (tmp_path / "out").exists()

    refused(tiny_int8, "holds integers")
    refused(imported("starcoder2", tmp_path, tiny_checkpoint), "no type of network that transformers reads")
    with pytest.raises(ConfigError, match="transformers has one form"):
        export_artifact(
            tiny_checkpoint,
            "transformers",
            tmp_path / "out",
            target="onnxruntime-cpu",
            force=False,
            progress=Silent(),
        )
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        os.link(tiny_checkpoint / name, bare / name)
    refused(bare, "is a folder of Hugging Face's as it lies")


@pytest.mark.parametrize(("part", "what"), [(0, "in the embedding"), (-1, "in the logits")])
def test_the_gate_sees_both_ends(
    part: int, what: str, tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = compressed_tensors.read_sequences

    def wrong(folder: Path, sequences: list[tuple[list[int], int]]) -> list[Computed]:
        readings = read(folder, sequences)
        scaled = (readings[0].hidden[0] if part == 0 else readings[0].logits_TV).mul_(1.01)
        assert scaled.numel()
        return readings

    monkeypatch.setattr(compressed_tensors, "read_sequences", wrong)
    with pytest.raises(InputError, match=what):
        export_floating(tiny_checkpoint, tmp_path / "out", False, Silent())
    assert not (tmp_path / "out").exists()


def test_without_transformers_the_record_says_so(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed_tensors, "can_read", lambda *_: False)
    record = export_floating(tiny_checkpoint, tmp_path / "out", False, Silent())
    assert record.differences == ()
    assert (
        "pip install transformers"
        in json.loads((tmp_path / "out" / "export.json").read_text())["unmeasured"]["transformers"]
    )
