"""ResNets beside transformers' definition, on copied weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from penjing.core.checkpoint.classifier import ClassifierConfig, load_classifier, save_classifier
from penjing.core.errors import InputError
from penjing.core.models.resnet import Block, ResNet
from penjing.core.models.resnet_config import BlockConfig, ResNetConfig, StageConfig, cifar_resnet, imagenet_resnet


def randomize(model: nn.Module) -> None:
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)


@pytest.mark.parametrize("depth", [18, 34, 50, 101])
def test_outputs_equal_transformers_on_copied_weights(depth: int) -> None:
    from transformers import ResNetConfig as TheirConfig
    from transformers import ResNetForImageClassification

    config = imagenet_resnet(depth, 11)
    theirs = ResNetForImageClassification(
        TheirConfig(
            embedding_size=64,
            hidden_sizes=[stage.channels for stage in config.stages],
            depths=[len(stage.blocks) for stage in config.stages],
            layer_type=config.block,
            num_labels=11,  # pyright: ignore[reportCallIssue]
        )
    ).eval()
    randomize(theirs)
    ours = ResNet(config).eval()
    # Both list their tensors in the order of computation, but for the shortcuts.
    given = list(theirs.state_dict().items())
    source = {name: tensor for name, tensor in given if ".shortcut." not in name}
    shortcuts = [tensor for name, tensor in given if ".shortcut." in name]
    mine = ours.state_dict()
    for name, tensor in zip([n for n in mine if ".shortcut." not in n], source.values(), strict=True):
        mine[name].copy_(tensor)
    for name, tensor in zip([n for n in mine if ".shortcut." in n], shortcuts, strict=True):
        mine[name].copy_(tensor)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(ours(images), theirs(images).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "millions"),
    [
        (imagenet_resnet(18), 11.690),
        (imagenet_resnet(34), 21.798),
        (imagenet_resnet(50), 25.557),
        (imagenet_resnet(101), 44.549),
        (imagenet_resnet(152), 60.193),
        (imagenet_resnet(50, groups=32, width_per_group=4), 25.029),
        (imagenet_resnet(101, groups=32, width_per_group=8), 88.791),
    ],
)
def test_published_sizes(config: ResNetConfig, millions: float) -> None:
    assert sum(p.numel() for p in ResNet(config).parameters()) / 1e6 == pytest.approx(millions, abs=5e-4)


@pytest.mark.parametrize("depth", [8, 20, 56])
def test_cifar_networks_have_their_depth(depth: int) -> None:
    model = ResNet(cifar_resnet(depth, in_channels=1))
    main_path = [
        m for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and "shortcut" not in name
    ]
    assert len(main_path) == depth
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    with pytest.raises(ValueError, match="is not 6·n"):
        cifar_resnet(10)
    with pytest.raises(ValueError, match="not one of 18, 34, 50, 101, 152"):
        imagenet_resnet(102)


def test_a_resnext_block_equals_its_branches_added_up() -> None:
    """Figure 3 of the paper: a grouped convolution is a sum over branches, each with its own channels."""
    torch.manual_seed(0)
    block = Block(8, 8, BlockConfig(hidden=(12, 12)), 4).eval()
    x = torch.randn(2, 8, 5, 5)
    first, middle, last = block.layers
    assert isinstance(last.conv, nn.Conv2d)
    h = torch.relu(first(x))
    total = torch.zeros(2, 8, 5, 5)
    grouped = middle.conv
    assert isinstance(grouped, nn.Conv2d)
    for branch in range(4):
        part = slice(3 * branch, 3 * branch + 3)
        y = torch.conv2d(h[:, part], grouped.weight[part], padding=1)
        y = torch.relu(y / (1 + 1e-5) ** 0.5)  # a fresh batch norm
        total += torch.conv2d(y, last.conv.weight[:, part])
    assert torch.allclose(block(x), torch.relu(x + total / (1 + 1e-5) ** 0.5), atol=1e-6)


def test_every_layer_may_have_its_own_width() -> None:
    blocks = (BlockConfig(hidden=(5,)), BlockConfig(hidden=(7,), stride=2))
    config = ResNetConfig(
        num_classes=3, stem="cifar", stem_channels=6, block="basic", stages=(StageConfig(channels=6, blocks=blocks),)
    )
    model = ResNet(config)
    assert isinstance(model.blocks[0].shortcut, nn.Identity)
    assert model(torch.randn(1, 3, 8, 8)).shape == (1, 3)
    with pytest.raises(ValueError, match="not divisible by groups=4"):
        ResNetConfig.model_validate(
            config.model_dump()
            | {"block": "bottleneck", "groups": 4, "stages": [{"channels": 6, "blocks": [{"hidden": [5, 8]}]}]}
        )
    with pytest.raises(ValueError, match="a basic block needs 1 positive widths"):
        ResNetConfig.model_validate(config.model_dump() | {"stages": [{"channels": 6, "blocks": [{"hidden": [0]}]}]})


def test_a_saved_classifier_comes_back(tmp_path: Path) -> None:
    model = ResNet(cifar_resnet(8, 4, width=4, in_channels=1)).eval()
    randomize(model)
    config = ClassifierConfig(
        model=model.config, image_size=(8, 8), mean=(0.5,), std=(0.25,), labels=("a", "b", "c", "d")
    )
    save_classifier(tmp_path, config, model.to(memory_format=torch.channels_last), {})  # pyright: ignore[reportCallIssue]
    back, read = load_classifier(tmp_path)
    assert read == config
    images = torch.randn(2, 1, 8, 8)
    assert torch.allclose(back(images), model(images), atol=1e-6)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(InputError, match="was changed or damaged"):
        load_classifier(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="is no image classifier"):
        load_classifier(tmp_path)
