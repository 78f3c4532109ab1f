"""Adapters of a checkpoint beside artifacts whose layers were rotated, smoothed or transformed before rounding."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penjing.compress.decoder.artifact import make_weights
from penjing.compress.decoder.settings import Int8Settings
from penjing.core.artifact.lora import BASE, ORIGINALS, AdapterFolder, base_hash
from penjing.core.artifact.transform import FILE, HEAD, RESIDUAL, read_transforms
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.decoder import Decoder
from penjing.core.progress import Silent
from penjing.core.work import Tasks
from penjing.kernels.hadamard import hadamard
from tests.compress.decoder.test_transforms import ARCHITECTURES, TRANSFORMS
from tests.core.artifact.adapters import adapter_tensors, merge, write_adapter
from tests.serve.engine.test_adapters import answers, engine_of, request

FLOATS: dict[str, Any] = {"keep": ["*"], "lm_head": "keep", "embedding_dtype": "float32"}


def made(folder: Path, source: Path, transform: Mapping[str, object], **settings: Any) -> Path:
    """What the transforms make of `source`; nothing is rounded unless `settings` say so."""
    folder.mkdir(parents=True)
    vocabulary = open_checkpoint(source).config.vocab_size
    windows = torch.randint(0, vocabulary, (4, 24), generator=torch.Generator().manual_seed(3))
    chosen = Int8Settings.model_validate({"transform": transform} | (settings or FLOATS))
    return make_weights(source, chosen, windows, Tasks(folder), Silent())[0]


def network(folder: Path, tensors: dict[str, Tensor]) -> Decoder:
    model = Decoder(open_checkpoint(folder).config)
    model.load_state_dict(tensors, strict=False)
    return model


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_they_add_what_they_add_to_the_original(
    make_tiny_checkpoint: Callable[..., Path], tmp_path: Path, architecture: str, transform: str
) -> None:
    sizes = {"intermediate_size": 96} if transform == "hadamard" else {}  # whole blocks
    if architecture == "inner norms" and TRANSFORMS[transform]["rotate"]:
        pytest.skip("no rotation passes these norms")
    source = make_tiny_checkpoint(**ARCHITECTURES[architecture] | sizes)
    base = made(tmp_path / "work", source, TRANSFORMS[transform] | {"search_steps": 0})
    drawn = adapter_tensors(source)
    merged = merge(load_file(source / "model.safetensors"), drawn, scale=2.0)
    tensors, block = load_file(base / "model.safetensors"), open_checkpoint(base).config.mlp_hadamard
    alone = network(base, tensors)
    for layer, pair in (
        AdapterFolder("alice", write_adapter(tmp_path / "a", drawn), open_checkpoint(base)).load().items()
    ):
        added = pair.scale * (pair.b_NR @ pair.a_RK)
        is_spread = block > 0 and layer.endswith("down_proj")
        tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"] + (hadamard(added, block) if is_spread else added)
    token_ids = torch.randint(0, 320, (4, 24), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        wanted, found = network(source, merged)(token_ids), network(base, tensors)(token_ids)
        assert (found - wanted).abs().max() < 5e-5 * wanted.abs().max()
        assert (alone(token_ids) - wanted).abs().max() > 1e-2 * wanted.abs().max()


@pytest.mark.parametrize("transform", ["all", "hadamard", "smooth"])
def test_the_engine_answers_as_the_merged_original(
    make_tiny_checkpoint: Callable[..., Path], tmp_path: Path, transform: str
) -> None:
    inner = ARCHITECTURES["inner norms"] if transform == "smooth" else {}
    source = make_tiny_checkpoint(intermediate_size=96, **inner)
    drawn = adapter_tensors(source)
    folder = write_adapter(tmp_path / "a", drawn)
    base = made(tmp_path / "work", source, TRANSFORMS[transform] | {"search_steps": 0})
    asked = [request("r", "alice")]
    wanted = answers(engine_of(source, {"alice": folder}), asked)["r"]
    found = answers(engine_of(base, {"alice": folder}), asked)["r"]
    assert [token for token, _ in found] == [token for token, _ in wanted]
    for (token, known), (_, got) in zip(wanted, found, strict=True):
        assert got[token].logprob == pytest.approx(known[token].logprob, abs=1e-4)


def test_integers_lose_no_more_with_one(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """What INT8 moves in the log probabilities of a prompt, with an adapter and without."""
    folder = write_adapter(tmp_path / "a", adapter_tensors(tiny_checkpoint))
    base = made(tmp_path / "work", tiny_checkpoint, TRANSFORMS["all"], lm_head="int8")
    assert open_checkpoint(base).quantization is not None

    def scores(of: Path, adapter: str | None) -> Tensor:
        asked = request("r", adapter, prompt_logprobs=0, max_tokens=1)
        engine = engine_of(of, {"alice": folder}, kv_dtype="float32")
        engine.add(asked)
        found = next(output.prompt_logprobs for output in engine.step() if output.prompt_logprobs is not None)
        return torch.tensor([next(iter(each.values())).logprob for each in found if each])

    loss = {
        name: float((scores(base, name) - scores(tiny_checkpoint, name)).square().mean()) for name in (None, "alice")
    }
    moved = float((scores(tiny_checkpoint, "alice") - scores(tiny_checkpoint, None)).square().mean())
    assert loss["alice"] < 2 * loss[None]
    assert moved > 20 * loss["alice"]


def test_they_fit_channels_whose_sign_changed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    settings = FLOATS | {"zero_points": ["*.down_proj"]}
    base = made(tmp_path / "work", tiny_checkpoint, TRANSFORMS["all"] | {"search_steps": 2}, **settings)
    drawn = adapter_tensors(tiny_checkpoint)
    merged = merge(load_file(tiny_checkpoint / "model.safetensors"), drawn, scale=2.0)
    tensors = load_file(base / "model.safetensors")
    for layer, pair in (
        AdapterFolder("alice", write_adapter(tmp_path / "a", drawn), open_checkpoint(base)).load().items()
    ):
        tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"] + pair.scale * (pair.b_NR @ pair.a_RK)
    token_ids = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        wanted, found = network(tiny_checkpoint, merged)(token_ids), network(base, tensors)(token_ids)
    assert (load_file(base / FILE)["model.layers.0.mlp.down_proj.divided"] < 0).any()
    assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()


def test_an_artifact_without_transforms_keeps_none(tiny_checkpoint: Path, tmp_path: Path) -> None:
    off = {"rotate": False, "smooth_norm": 0, "smooth_down": 0, "smooth_output": 0}
    base = made(tmp_path / "work", tiny_checkpoint, off)
    assert not (base / FILE).exists()
    assert read_transforms(base, open_checkpoint(base).config) is None


def test_a_run_keeps_them_and_names_its_originals(tiny_int8: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    base = open_checkpoint(tiny_int8)
    assert base.manifest is not None
    assert base.manifest.sha256.keys() >= {str(FILE)}
    assert base.manifest.extra[ORIGINALS] == [base_hash(tiny_checkpoint)]
    drawn = adapter_tensors(tiny_checkpoint)
    said: dict[str, Any] = {BASE: base_hash(tiny_checkpoint)}
    pairs = AdapterFolder("alice", write_adapter(tmp_path / "a", drawn, **said), base).load()
    name = "model.layers.0.self_attn.q_proj"
    assert not torch.allclose(pairs[name].a_RK, drawn[f"base_model.model.{name}.lora_A.weight"], atol=1e-3)
    beside: dict[str, Any] = {BASE: base_hash(tiny_int8)}  # trained beside the artifact itself: as it is
    pairs = AdapterFolder("bob", write_adapter(tmp_path / "b", drawn, **beside), base).load()
    assert torch.equal(pairs[name].a_RK, drawn[f"base_model.model.{name}.lora_A.weight"])
    other: dict[str, Any] = {BASE: "0" * 64, "base_model_name_or_path": "build/other"}
    with pytest.raises(ConfigError, match=r"eve .* was trained beside build/other"):
        AdapterFolder("eve", write_adapter(tmp_path / "c", drawn, **other), base)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path, vectors: path.write_bytes(path.read_bytes()[:100]), "cannot be read"),
        (lambda path, vectors: path.write_bytes(b""), "cannot be read"),
        (lambda path, vectors: save_file({RESIDUAL: vectors[RESIDUAL]}, path), f"has no {HEAD}"),
        (lambda path, vectors: save_file(vectors | {"x": torch.ones(1)}, path), "x does not belong"),
        (lambda path, vectors: save_file(vectors | {HEAD: torch.ones(3)}, path), f"{HEAD} does not belong"),
        (
            lambda path, vectors: save_file(
                vectors | {"model.layers.1.mlp.down_proj.divided": torch.full((96,), torch.nan)}, path
            ),
            "down_proj.divided does not belong",
        ),
    ],
)
def test_damaged(tiny_int8: Path, tmp_path: Path, damage: Callable[[Path, dict[str, Tensor]], Any], says: str) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_int8, base)
    damage(base / FILE, load_file(base / FILE))
    with pytest.raises(InputError, match=says):
        read_transforms(base, open_checkpoint(base).config)
