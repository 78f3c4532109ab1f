"""An embedding in INT8: one table with the LM head where they are tied, one of its own where a rotation parts them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penjing.compress.exports import export_artifact
from penjing.compress.run import run_recipe
from penjing.compress.verify import verify_artifact
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.imports.importer import import_model
from penjing.core.manifest import write_manifest
from penjing.core.progress import Silent
from penjing.core.runtime.embedding import CHANNEL, Int8Embedding
from tests.compress.conftest import write_recipe
from tests.core.models.paged_decoder import Pages
from tests.core.runtime.test_fused import BLOCK_SIZE, fuse, fused_step
from tests.kernels.cpu import needs_extension

pytestmark = pytest.mark.xdist_group("int8-embedding")  # what all share is made once
EIGHT = ["steps.0.embedding_dtype=int8", "guard.perplexity_ratio=9", "steps.0.rounding=nearest"]
PLAIN = ["steps.0.transform.rotate=false", "steps.0.transform.search_steps=0"]
FOUR = ["steps.0.weights_bits=4", "steps.0.group=32", "steps.0.offsets=true"]
FOUR += [f"steps.0.transform.smooth_{name}=0" for name in ("down", "output")]
TABLE = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def tied(make_tiny_checkpoint: Callable[..., Path]) -> Path:
    return make_tiny_checkpoint(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def one_table(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-table")
    return run_recipe(write_recipe(folder, tied, folder / "out"), [*EIGHT, *PLAIN, *FOUR])


@pytest.fixture(scope="module")
def two_tables(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-tables")
    return run_recipe(write_recipe(folder, tied, folder / "out"), [*EIGHT, "steps.0.transform.search_steps=0"])


def logits(folder: Path, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return load_model(folder).model(ids)


IDS = torch.tensor([[5, 17, 40, 99, 7, 250]])


def test_a_tied_table_is_stored_once(one_table: Path, two_tables: Path, tied: Path) -> None:
    once, twice = open_checkpoint(one_table), open_checkpoint(two_tables)
    assert once.config.tie_word_embeddings
    assert once.dtype(TABLE) == "I8"
    assert CHANNEL in once.tensor_names
    assert not any(name.startswith("lm_head") for name in once.tensor_names)
    assert twice.dtype(TABLE) == twice.dtype("lm_head.weight") == "I8"
    assert CHANNEL not in twice.tensor_names
    table = load_model(one_table).model.model.embed_tokens
    assert isinstance(table, Int8Embedding)
    wanted = open_checkpoint(tied).get(TABLE).float()
    error = (table(torch.arange(len(wanted))) - wanted).norm() / wanted.norm()
    assert 0 < error < 0.02


def test_one_huge_number_of_a_channel_hardly_moves_the_smoothing_of_a_table(tied: Path, tmp_path: Path) -> None:
    factors = []
    for size in (1.0, 50.0):
        folder = shutil.copytree(tied, tmp_path / f"model{size}")
        tensors = load_file(folder / "model.safetensors")
        tensors[TABLE][311, 5] = size * tensors[TABLE][:, 5].abs().max()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        write_manifest(folder, "checkpoint", {"command": "tests"})
        made = run_recipe(write_recipe(folder.parent, folder, tmp_path / f"out{size}"), [*EIGHT, *PLAIN])
        factors.append(open_checkpoint(made).get(CHANNEL))
    change = (factors[1] / factors[0])[5]
    assert 1 < change < 4  # its root of the mean square grows sevenfold, its largest fiftyfold; both enter as a root


def test_smoothing_behind_norms_leaves_one_table(tied: Path, tmp_path: Path) -> None:
    smooth = [*EIGHT, *PLAIN, "steps.0.transform.smooth_norm=0.5"]
    checkpoint = open_checkpoint(run_recipe(write_recipe(tmp_path, tied, tmp_path / "out"), smooth))
    assert checkpoint.dtype(TABLE) == "I8"
    assert not any(name.startswith("lm_head") for name in checkpoint.tensor_names)
    before, after = (each.get("model.layers.0.input_layernorm.weight") for each in (open_checkpoint(tied), checkpoint))
    assert not torch.equal(before, after)


@pytest.mark.parametrize(("kind", "most"), [("one_table", 0.4), ("two_tables", 0.2)])  # 4 and 8 bits
def test_it_answers_nearly_as_its_original(kind: str, most: float, tied: Path, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    verify_artifact(folder, Silent())
    wanted = logits(tied, IDS)
    assert (logits(folder, IDS) - wanted).square().mean().sqrt() < most * wanted.std()


@needs_extension
@pytest.mark.parametrize("kind", ["one_table", "two_tables"])
def test_the_fused_step_looks_the_same_rows_up(kind: str, request: pytest.FixtureRequest) -> None:
    loaded = load_model(request.getfixturevalue(kind))
    pages, paged = (Pages(loaded.config, 4, BLOCK_SIZE) for _ in range(2))
    parts = [(torch.cat([IDS[0], torch.tensor([0, 319])]), 0, [2])]
    with torch.no_grad():
        assert torch.equal(fused_step(fuse(loaded.model), pages, parts), paged.run(loaded.model, parts))


def test_gguf_has_the_same_weights_and_one_table(one_table: Path, tied: Path, tmp_path: Path) -> None:
    from gguf import GGUFReader

    out = tmp_path / "model.gguf"
    export_artifact(one_table, "gguf", out, force=False, progress=Silent())
    tensors = {tensor.name: tensor for tensor in GGUFReader(out).tensors}
    assert (
        tensors["blk.0.attn_q.weight"].tensor_type.name == tensors["blk.1.ffn_down.weight"].tensor_type.name == "Q4_1"
    )
    assert tensors["token_embd.weight"].tensor_type.name == "Q8_0"
    assert "output.weight" not in tensors
    import_model(str(out), tmp_path / "back", progress=Silent())
    back, stored = open_checkpoint(tmp_path / "back"), load_model(one_table).model
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        identity = torch.eye(stored.get_submodule(name).in_features)  # type: ignore[arg-type]
        weight = back.get(f"{name}.weight").float()
        assert (stored.get_submodule(name)(identity).t() - weight).abs().max() < 1e-5
    wanted = logits(one_table, IDS)
    assert (logits(tmp_path / "back", IDS) - wanted).square().mean().sqrt() < 0.05 * wanted.std()


def test_transformers_reads_it_with_a_floating_embedding(two_tables: Path, tied: Path, tmp_path: Path) -> None:
    untied = export_artifact(two_tables, "compressed-tensors", tmp_path / "two", force=False, progress=Silent())
    assert untied.unmeasured == {}
    recipe = write_recipe(tmp_path, tied, tmp_path / "eight")
    eight = run_recipe(recipe, [*EIGHT, *PLAIN])
    record = export_artifact(eight, "compressed-tensors", tmp_path / "out", force=False, progress=Silent())
    assert record.unmeasured == {}
    for form in ("onnx",):
        assert export_artifact(eight, form, tmp_path / form, force=False, progress=Silent()).differences
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported["tie_word_embeddings"] is False
    assert open_checkpoint(tmp_path / "out").dtype(TABLE) == "F16"


@pytest.mark.parametrize("form", ["onnx", "compressed-tensors"])
def test_offsets_go_to_gguf_alone(one_table: Path, tmp_path: Path, form: str) -> None:
    with pytest.raises(InputError, match=f"4-bit weights with offsets, which {form} does not have: export --to gguf, "):
        export_artifact(one_table, form, tmp_path / "out", force=False, progress=Silent())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (CHANNEL, lambda x: x[:-1], "weight_channel is"),
        (CHANNEL, lambda x: x * torch.nan, "weight_channel holds values that are not positive"),
        (f"{TABLE}_scale", lambda x: -x, "weight_scale holds values that are not positive"),
        (TABLE, lambda x: x.float(), "int8"),
        (TABLE, lambda x: x[:, :-1].contiguous(), "weight_channel is|has shape"),
        (CHANNEL, None, "weight_channel is missing"),
    ],
)
def test_damaged_tables_are_refused_by_name(
    one_table: Path, tmp_path: Path, name: str, change: Callable[[Tensor], Tensor] | None, message: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(one_table, folder)
    (folder / "penjing.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["steps.0.lm_head=keep"], "embedding_dtype=.int8. needs lm_head"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tied: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_recipe(write_recipe(tmp_path, tied, tmp_path / "out"), [*EIGHT, *overrides])
