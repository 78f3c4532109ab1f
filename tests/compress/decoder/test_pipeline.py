"""`penjing compress` from end to end on a tiny model: what it writes, what it keeps, what it refuses."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penjing.compress.decoder.pipeline import compress
from penjing.compress.verify import verify_artifact
from penjing.core.artifact.decoder import open_artifact
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.cli import _run
from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.core.manifest import read_manifest
from penjing.core.work import WorkFolder
from tests.compress.conftest import Notes, write_recipe

# Runs `penjing compress` and is killed at the N-th flush to disk; every file the run writes is flushed.
KILLED = """
import os, signal, sys
flush, left = os.fsync, [int(sys.argv[2])]
def fsync(descriptor):
    left[0] -= 1
    if left[0] <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
    flush(descriptor)
os.fsync = fsync
from pathlib import Path
from penjing.compress.decoder.pipeline import compress
compress(Path(sys.argv[1]))
"""


def test_the_artifact_is_complete_verified_and_smaller(tiny_int8: Path, tiny_checkpoint: Path) -> None:
    artifact = open_artifact(tiny_int8)
    hashed = set(artifact.manifest.sha256)
    assert {"recipe.toml", "report.json", "report.html", "parity.json", "model.safetensors", "tokenizer.json"} <= hashed
    assert artifact.report["bytes_int8"] * 2 < artifact.report["bytes_fp32"]
    stored = sum(artifact.checkpoint.get(name).nbytes for name in artifact.checkpoint.tensor_names)
    assert artifact.report["bytes_int8"] == stored
    assert artifact.report["source"] == read_manifest(tiny_checkpoint).created_by
    assert not list(tiny_int8.parent.glob(".*"))  # no work folder, no partial one


def test_every_linear_layer_is_int8_with_a_scale_a_channel(tiny_int8: Path) -> None:
    checkpoint = open_checkpoint(tiny_int8)
    linears = [name for name in checkpoint.tensor_names if name.endswith(("_proj.weight", "lm_head.weight"))]
    assert len(linears) == 15
    for name in linears:
        assert checkpoint.dtype(name) == "I8"
        assert checkpoint.dtype(f"{name}_scale") == "F32"
        assert checkpoint.shape(f"{name}_scale") == (checkpoint.shape(name)[0], 1)
    assert checkpoint.dtype("model.embed_tokens.weight") == "F16"
    assert not checkpoint.config.tie_word_embeddings


def test_the_artifact_answers_nearly_as_the_model(tiny_int8: Path, tiny_checkpoint: Path) -> None:
    token_ids = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, found = load_model(tiny_checkpoint).model(token_ids), load_model(tiny_int8).model(token_ids)
    assert (found - wanted).square().mean().sqrt() < 0.1 * wanted.std()


def test_report_has_what_the_summary_needs(tiny_int8: Path) -> None:
    report = json.loads((tiny_int8 / "report.json").read_text())
    for text in ("prose", "code"):
        row = report["perplexity"][text]
        assert row["change"] == pytest.approx(row["int8"] / row["fp32"] - 1)
    assert report["perplexity_int8"] == report["perplexity"]["prose"]["int8"]
    assert len(report["linears"]) == 15
    assert all(0 < row["output"] < 0.2 and 0 < row["weight"] < 0.05 for row in report["linears"])
    assert [step["name"] for step in report["steps"]] == [
        "check", "fp32", "layer_000", "layer_001", "head", "assemble", "int8", "parity",
    ]  # fmt: skip
    seconds = {step["name"]: step["seconds"] for step in report["steps"]}
    assert report["seconds_measuring"] == pytest.approx(seconds["fp32"] + seconds["int8"])
    assert report["versions"]["torch"] == torch.__version__
    assert report["command"].startswith("penjing compress ")


def test_report_page_stands_alone(tiny_int8: Path) -> None:
    page = (tiny_int8 / "report.html").read_text()
    assert page.count("<svg") == 4
    assert not re.search(r"(src|href)=\"(?!#)", page.replace('xlink:href="#', 'xlink_href="#'))
    assert "<script" not in page
    assert "model.layers.1.mlp.down_proj" in page


def test_the_recipe_in_the_artifact_makes_it_again_bit_by_bit(tiny_int8: Path, tmp_path: Path) -> None:
    again = compress(tiny_int8 / "recipe.toml", out=tmp_path / "again")
    hashes, first = read_manifest(again).sha256, read_manifest(tiny_int8).sha256
    assert hashes["model.safetensors"] == first["model.safetensors"]
    assert hashes["parity.json"] == first["parity.json"]


def test_a_second_run_keeps_the_artifact_and_says_so(tiny_int8: Path, tmp_path: Path, notes: Notes) -> None:
    before = (tiny_int8 / "penjing.json").stat().st_mtime_ns
    compress(tiny_int8 / "recipe.toml", progress=notes)
    assert notes.lines == [f"{tiny_int8} is already done: kept (--force makes it again)"]
    assert not notes.tasks
    assert (tiny_int8 / "penjing.json").stat().st_mtime_ns == before


def test_another_recipe_needs_force(tiny_int8: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(tiny_int8, out)
    with pytest.raises(InputError, match="was made from another recipe, input or version; replace it with --force"):
        compress(tiny_int8 / "recipe.toml", ["quantize.lm_head=keep"], out=out)
    compress(tiny_int8 / "recipe.toml", ["quantize.lm_head=keep"], out=out, force=True)
    artifact = open_artifact(out)
    assert artifact.checkpoint.dtype("lm_head.weight") == "F16"
    assert artifact.checkpoint.config_json["quantization_config"]["ignore"] == ["lm_head"]


def test_a_tied_head_that_is_kept_stays_tied(tiny_int8: Path, tmp_path: Path) -> None:
    out = compress(tiny_int8 / "recipe.toml", ["quantize.lm_head=keep", "transform.rotate=false"], out=tmp_path / "out")
    checkpoint = open_checkpoint(out)
    assert checkpoint.config.tie_word_embeddings
    assert "lm_head.weight" not in checkpoint.tensor_names
    load_model(out)


def test_a_hadamard_transform_stays_in_the_network(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = compress(write_recipe(tmp_path, tiny_checkpoint, tmp_path / "out"), ["transform.hadamard_down=32"])
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["mlp_hadamard"]) == ("penjing", 32)
    ids = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, floating = load_model(out).model(ids), load_model(tiny_checkpoint).model(ids)
    assert (ours - floating).square().mean().sqrt() < 0.1 * floating.std()
    verify_artifact(out)
    assert _run(["export", str(out), str(tmp_path / "onnx"), "--to", "onnx"]) == 0  # its gate has compared them
    for form in ("gguf", "compressed-tensors"):
        assert _run(["export", str(out), str(tmp_path / "refused"), "--to", form]) == 3
        said = " ".join(capsys.readouterr().err.split())
        assert f"has a Hadamard transform, which {form} does not" in said
        assert "transform.hadamard_down=0" in said
        assert not (tmp_path / "refused").exists()


def test_a_network_with_such_a_transform_is_not_compressed_again(
    make_tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_tiny_checkpoint(model_type="penjing", mlp_hadamard=32)
    with pytest.raises(InputError, match="has a Hadamard transform"):
        compress(write_recipe(tmp_path, model, tmp_path / "out"))


def test_layers_can_be_kept(tiny_int8: Path, tmp_path: Path) -> None:
    out = compress(tiny_int8 / "recipe.toml", ['quantize.keep=["*.down_proj", "model.layers.0.*"]'], out=tmp_path / "o")
    checkpoint = open_checkpoint(out)
    assert checkpoint.dtype("model.layers.1.mlp.down_proj.weight") == "F32"
    assert checkpoint.dtype("model.layers.0.mlp.up_proj.weight") == "F32"
    assert checkpoint.dtype("model.layers.1.mlp.up_proj.weight") == "I8"
    load_model(out)


def test_a_folder_of_someone_else_is_never_replaced(tiny_int8: Path, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(InputError, match="is no penjing folder, so it is not replaced"):
            compress(tiny_int8 / "recipe.toml", out=tmp_path, force=force)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_damaged_artifact_is_not_taken_for_done(tiny_int8: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(tiny_int8, out)
    with open(out / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    with pytest.raises(InputError, match=r"model.safetensors has SHA-256"):
        compress(tiny_int8 / "recipe.toml", out=out)


def test_a_killed_run_leaves_nothing_under_the_name_and_goes_on(
    tiny_int8: Path, tiny_checkpoint: Path, tmp_path: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = read_manifest(tiny_int8).sha256["model.safetensors"]
    flushes = _count_flushes(write_recipe(tmp_path, tiny_checkpoint, tmp_path / "counted"), monkeypatch)
    assert flushes > 20
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "out")
    # The first kill early in the layers, the second while the artifact is published.
    for left in (9, flushes - 12):
        process = subprocess.run([sys.executable, "-c", KILLED, str(recipe), str(left)], check=False)
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "out").exists()
    compress(recipe, progress=notes)
    assert any(re.fullmatch(r"going on after \w+: \d+ steps were complete", line) for line in notes.lines)
    assert "perplexity of the model" not in notes.tasks
    artifact = open_artifact(tmp_path / "out")
    assert artifact.manifest.sha256["model.safetensors"] == wanted
    assert artifact.report["steps_resumed"] > 2
    assert not list(tmp_path.glob(".*"))


def _count_flushes(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    count, flush = 0, os.fsync

    def counting(descriptor: int) -> None:
        nonlocal count
        count += 1
        flush(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", counting)
        compress(recipe)
    return count


def test_a_changed_recipe_does_not_go_on_with_old_steps(tmp_path: Path) -> None:
    with WorkFolder(tmp_path / "out", "one") as work:
        assert work.run("first", lambda: {"value": 1}).result == {"value": 1}
    with WorkFolder(tmp_path / "out", "one") as work:
        assert (work.num_resumed, work.last_step) == (1, "first")
        assert work.run("first", lambda: {"value": 2}).result == {"value": 1}
    with WorkFolder(tmp_path / "out", "two") as work:
        assert work.num_resumed == 0
        assert work.run("first", lambda: {"value": 2}).result == {"value": 2}


def test_two_runs_on_one_output_do_not_meet(tmp_path: Path) -> None:
    with (
        WorkFolder(tmp_path / "out", "key"),
        pytest.raises(SetupError, match="another process is working in"),
        WorkFolder(tmp_path / "out", "key"),
    ):
        pass


def test_a_full_disk_is_one_clear_error_and_the_run_goes_on_later(
    tiny_checkpoint: Path, tmp_path: Path, notes: Notes
) -> None:
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "out")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # else the signal ends the process before EFBIG is seen
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(SetupError, match=r"cannot write .*file-size limit"):
            compress(recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not (tmp_path / "out").exists()
    compress(recipe, progress=notes)
    assert any(line.startswith("going on after") for line in notes.lines)


def test_too_little_disk_is_refused_before_work_starts(
    tiny_int8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # pyright: ignore
    with pytest.raises(SetupError, match=r"has 0 MB free, compression needs .*; free some space"):
        compress(tiny_int8 / "recipe.toml", out=tmp_path / "out")


def test_too_little_memory_is_refused_before_work_starts(
    tiny_int8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penjing.compress.decoder.check.available_bytes", lambda: 1000)
    with pytest.raises(SetupError, match="of memory are available, compression needs about"):
        compress(tiny_int8 / "recipe.toml", out=tmp_path / "out")


def test_preflight_says_what_will_be_written_where(tiny_int8: Path, tmp_path: Path, notes: Notes) -> None:
    compress(tiny_int8 / "recipe.toml", out=tmp_path / "out", progress=notes)
    assert re.search(r"in FP32\) → .*/out \(about .* INT8\); steps are kept in \.out\.work", notes.lines[0])
    assert "memory" in notes.lines[0]
    assert "disk" in notes.lines[0]


Damage = Callable[[dict[str, torch.Tensor]], object]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda tensors: tensors[UP].__setitem__((3, 4), float("nan")),
            f"{UP} holds 1 values that are NaN or infinite",
        ),
        (lambda tensors: tensors[UP].__setitem__(3, float("inf")), f"{UP} holds 64 values that are NaN or infinite"),
        (lambda tensors: tensors.pop(UP), f"lacks {UP}, which config.json promises"),
        (lambda tensors: tensors.update(surprise=torch.ones(1)), "1 tensors have no place.*the first is surprise"),
        (
            lambda tensors: tensors.update({UP: torch.ones(96, 63)}),
            r"has shape \(96, 63\), config.json asks for \(96, 64\)",
        ),
        (lambda tensors: tensors.update({UP: torch.ones(96, 64, dtype=torch.int8)}), "is I8; compression starts from"),
    ],
)
def test_a_damaged_model_is_refused_by_name(
    tiny_checkpoint: Path, tmp_path: Path, damage: Damage, message: str
) -> None:
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    damage(tensors)
    model = _plain_folder(tiny_checkpoint, tmp_path / "model", tensors)
    with pytest.raises(InputError, match=message):
        compress(write_recipe(tmp_path, model, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_channels_of_zeros_are_compressed_to_zeros(tiny_checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    tensors[UP][5] = 0
    tensors["model.layers.0.self_attn.v_proj.weight"].zero_()
    model = _plain_folder(tiny_checkpoint, tmp_path / "model", tensors)
    out = compress(write_recipe(tmp_path, model, tmp_path / "out"))
    checkpoint = open_checkpoint(out)
    assert not checkpoint.get(UP)[5].any()
    assert not checkpoint.get("model.layers.0.self_attn.v_proj.weight").any()
    with torch.no_grad():
        assert torch.isfinite(load_model(out).model(torch.arange(20)[None])).all()


def test_a_model_that_predicts_nothing_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    tensors["model.norm.weight"] *= 1e5
    model = _plain_folder(tiny_checkpoint, tmp_path / "model", tensors)
    with pytest.raises(InputError, match=r"the model's loss on prose is .* a token: it is damaged"):
        compress(write_recipe(tmp_path, model, tmp_path / "out"))


def test_an_artifact_is_not_compressed_again(tiny_int8: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is quantized already \(compressed-tensors\); compress the checkpoint"):
        compress(write_recipe(tmp_path, tiny_int8, tmp_path / "out"))


def test_an_embedding_beyond_float16_is_refused(make_tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint(tie_word_embeddings=False)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.embed_tokens.weight"][7, 7] = 1e8
    model = _plain_folder(checkpoint, tmp_path / "model", tensors)
    with pytest.raises(InputError, match=r"has values beyond float16; use --set quantize.embedding_dtype=bfloat16"):
        compress(write_recipe(tmp_path, model, tmp_path / "out"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evaluate.window=2048", "evaluate.*2048"),
        ('quantize.keep=["*.down_prj"]', r"quantize.keep: '\*.down_prj' matches no linear layer"),
        ("transform.hadamard_down=64", "hadamard_down: .* needed that divides 96"),
        ("transform.hadamard_down=3", "hadamard_down: .* power of two"),
    ],
)
def test_a_recipe_that_does_not_fit_the_model_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, override: str, message: str
) -> None:
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "out")
    overrides = (
        [override, "evaluate.prose_tokens=2048", "evaluate.code_tokens=0"] if "window" in override else [override]
    )
    with pytest.raises(ConfigError, match=message):
        compress(recipe, overrides)


def _plain_folder(checkpoint: Path, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A Hugging Face folder without penjing.json, so that hashes do not catch the damage first."""
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("penjing.json", "model.safetensors"))
    save_file(tensors, folder / "model.safetensors")
    return folder
