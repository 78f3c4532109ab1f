"""`penjing compress inspect`, on checkpoints of both kinds."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penjing.compress.families.base import family_at
from penjing.compress.prune.inspect import inspect_network, print_inspection
from penjing.core.checkpoint.classifier import ClassifierConfig, save_classifier
from penjing.core.checkpoint.decoder import save_checkpoint
from penjing.core.errors import InputError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import cifar_resnet
from penjing.core.progress import Silent

DECODER = DecoderConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)


def decoder(folder: Path) -> Path:
    save_checkpoint(folder, DECODER, Decoder(DECODER).state_dict().items())
    return folder


def classifier(folder: Path) -> Path:
    config = cifar_resnet(8, width=8, in_channels=1)
    names = tuple("0123456789")
    vision = ClassifierConfig(model=config, image_size=(28, 28), mean=(0.5,), std=(0.5,), labels=names)
    save_classifier(folder, vision, ResNet(config), {})
    return folder


def inspected(folder: Path) -> dict[str, Any]:
    return inspect_network(folder, family_at(folder).skeleton(folder), Silent())


def test_a_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = inspected(decoder(tmp_path))
    expected = sum(p.numel() for p in Decoder(DECODER).parameters())
    assert result["parameters"] == sum(layer["parameters"] for layer in result["layers"]) == expected
    # Each weight of a linear layer is one multiply-accumulate a token.
    macs = {layer["name"]: layer["macs"] for layer in result["layers"]}
    assert macs["model.layers.2.mlp.down_proj"] == 48 * 32
    assert macs["lm_head"] == 50 * 32
    assert macs["model.embed_tokens"] == macs["model.norm"] == 0
    found = {(row["count"], row["units"], row["indices"]) for row in result["groups"]}
    assert found == {(1, 32, 1), (3, 2, 8), (3, 48, 1)}  # width; key-value groups and features of each layer
    print_inspection(result)
    assert "layers.N.mlp.gate_proj" in capsys.readouterr().err.replace("\n", "")


def test_a_classifier(tmp_path: Path) -> None:
    result = inspected(classifier(tmp_path))
    macs = {layer["name"]: layer["macs"] for layer in result["layers"]}
    assert macs["stem.conv"] == 28 * 28 * 8 * 9
    assert macs["fc"] == 32 * 10
    assert result["macs_per"] == "image"
    assert {row["units"] for row in result["groups"]} == {8, 16, 32}


def test_weights_are_not_read(tmp_path: Path) -> None:
    """So that a model larger than the memory can be looked at."""
    folder = decoder(tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) - 1000] + bytes(1000))
    before = torch.get_default_device()
    assert inspected(folder)["parameters"] > 0
    assert torch.get_default_device() == before


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=name):
        inspected(tmp_path / name)


@pytest.mark.parametrize(("make", "field"), [(decoder, "vocab_size"), (classifier, "stem_channels")])
def test_sizes_that_the_weights_do_not_have(tmp_path: Path, make: Callable[[Path], Path], field: str) -> None:
    """A number in config.json alone takes no memory."""
    folder = make(tmp_path)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(re.sub(rf'"{field}": \d+', f'"{field}": 1000000000000', text))
    with pytest.raises(InputError, match="1000000000000"):
        inspected(folder)
