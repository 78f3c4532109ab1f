"""Checkpoint folders beside the safetensors package; shards; folders that must be refused."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penjing.core.checkpoint.decoder import open_checkpoint, save_checkpoint
from penjing.core.checkpoint.safetensors_writer import SafetensorsWriter
from penjing.core.errors import InputError
from tests.conftest import random_tensors, tiny_config


@pytest.fixture
def folder(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


def test_every_dtype_and_shape_is_read_by_safetensors(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64]
    tensors = {f"t{index}": torch.arange(6).reshape(2, 3).to(dtype) for index, dtype in enumerate(dtypes)}
    tensors |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "flag": torch.tensor([True, False]),
        "strided": torch.arange(12.0).reshape(3, 4).T[1:],
    }
    with SafetensorsWriter(tmp_path) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert writer.total_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_sharded_equals_whole(tmp_path: Path) -> None:
    config = tiny_config()
    save_checkpoint(tmp_path, config, random_tensors(config), max_shard_bytes=60_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    checkpoint = open_checkpoint(tmp_path)
    expected = dict(random_tensors(config))
    assert set(checkpoint.tensor_names) == set(expected)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.get(name), tensor)
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.dtype(name) == "F32"


def test_a_full_header_begins_a_new_shard(tmp_path: Path) -> None:
    names = [f"model.layers.{index}.with_a_rather_long_name_of_a_weight" for index in range(3000)]
    with SafetensorsWriter(tmp_path) as writer:
        for index, name in enumerate(names):
            writer.add(name, torch.tensor([float(index)]))
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    merged = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert [int(merged[name]) for name in names] == list(range(3000))


def test_an_error_while_writing_names_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"), SafetensorsWriter(tmp_path) as writer:  # noqa: PT012
        writer.add("a", torch.ones(3))
        raise ValueError("broken")
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_plain_folder_has_no_manifest(folder: Path) -> None:
    (folder / "penjing.json").unlink()
    checkpoint = open_checkpoint(folder)
    assert checkpoint.manifest is None
    assert checkpoint.get("model.norm.weight").shape == (64,)
    with pytest.raises(InputError, match=r"holds no tensor 'model.nose.weight'"):
        checkpoint.get("model.nose.weight")


def test_stops_of_generation_config_are_added(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5, 7]}')
    assert open_checkpoint(folder).config.eos_token_ids == (2, 5, 7)
    (folder / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(InputError, match="eos_token_id must be a token id"):
        open_checkpoint(folder)


def test_pickled_weights_are_refused_with_the_next_step(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin, a pickle.*save_pretrained"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "bert"}, "holds a text encoder, as its"),
        ({"task": "classification"}, "holds an image classifier"),
    ],
)
def test_a_network_of_another_family_is_told_as_what_it_is(tmp_path: Path, config: dict[str, str], says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=says):
        open_checkpoint(tmp_path)


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist; check the path: 'penjing import"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(InputError, match=r"holds no model\.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        open_checkpoint(tmp_path / "file")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not safetensors",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 8) + b"{{{{{{{{",
        struct.pack("<Q", 66) + b'{"a":{"dtype":"F32","shape":[1000000],"data_offsets":[0,4000000]}}',
    ],
)
def test_malformed_weights(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="is not a complete safetensors file"):
        open_checkpoint(folder)


def test_truncated_weights(folder: Path) -> None:
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate((folder / "model.safetensors").stat().st_size - 1)
    with pytest.raises(InputError, match="is not a complete safetensors file"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"model.norm.weight": "../other/model.safetensors"}, "outside its folder; refused"),
        ({"model.norm.weight": "/etc/passwd"}, "outside its folder; refused"),
        ({"model.norm.weight": "none.safetensors"}, "does not exist"),
        ({"model.norm.weight": 7}, "has no weight_map"),
        ("abc", "has no weight_map"),
        ({"ghost": "shard.safetensors"}, "lacks 'ghost'"),
    ],
)
def test_hostile_index(folder: Path, weight_map: Any, message: str) -> None:
    (folder / "model.safetensors").unlink()
    save_file({"model.norm.weight": torch.ones(64)}, folder / "shard.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"model_type": "llama"}', '{"model_type": "bert"}'])
def test_malformed_config(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(InputError, match=r"config\.json"):
        open_checkpoint(folder)
