"""Adapters beside a network in INT8: products and gradients, what is written, and that the engine serves it alike."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from penjing.compress.decoder.artifact import make_weights
from penjing.compress.decoder.settings import Int8Settings
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.safetensors_writer import SafetensorsWriter
from penjing.core.errors import ConfigError
from penjing.core.manifest import verify
from penjing.core.models.decoder import Decoder
from penjing.core.progress import Silent
from penjing.core.runtime.quantized import Int8Linear
from penjing.core.work import Tasks
from penjing.kernels.quantize import quantize_above, quantize_per_token_torch
from penjing.train.adapter.int8 import FrozenInt8, read_int8_base
from penjing.train.adapter.lora import AdaptedInt8, AdapterConfig, adapt, adapted_weights
from penjing.train.chat.reference import reference_logprobs
from penjing.train.chat.tokens import ChatTokens
from penjing.train.run import train
from penjing.train.state.initial import fill_weights
from tests.kernels.cpu import needs_extension
from tests.serve.engine.test_adapters import answers, engine_of, request
from tests.train.families.test_chat import ANSWERS, RECIPE

CONFIG = AdapterConfig(rank=4, alpha=8.0, base="int8")


@pytest.fixture(scope="session")
def int8(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """The tiny checkpoint rotated, smoothed and in INT8, with zero points, its head too."""
    folder = tmp_path_factory.mktemp("int8")
    windows = torch.randint(0, 320, (4, 24), generator=torch.Generator().manual_seed(3))
    transform = {"rotate": True, "smooth_down": 0.5, "smooth_output": 0.5, "search_steps": 0}
    wanted = {"lm_head": "int8", "embedding_dtype": "float16", "zero_points": ["*.down_proj"], "transform": transform}
    return make_weights(tiny_checkpoint, Int8Settings.model_validate(wanted), windows, Tasks(folder), Silent())[0]


@pytest.fixture
def recipe(int8: Path, tmp_path: Path) -> Path:
    chats = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in ANSWERS.items()
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    path = tmp_path / "qlora.toml"
    adapter = '[adapter]\nrank = 4\nalpha = 8.0\nbase = "int8"\n'
    path.write_text(f"{RECIPE.format(folder=tmp_path, base=int8)}\n{adapter}")
    return path


def passed(x_MK: Tensor, zero_points: bool) -> Tensor:
    """The input as it is rounded, with the gradient of one that is not."""
    with torch.no_grad():
        if zero_points:
            q_MK, scale_M1, zero_M1 = quantize_above(x_MK)  # of fewer inputs than a block has
            rounded = (q_MK - zero_M1) * scale_M1
        else:
            q_MK, scale_M = quantize_per_token_torch(x_MK)
            rounded = q_MK * scale_M[:, None]
    return x_MK + (rounded - x_MK).detach()


def network(folder: Path) -> Decoder:
    """The network of `folder` with adapters that have learnt something."""
    config = open_checkpoint(folder).config
    base, model = read_int8_base(folder, config), Decoder(config)
    base.apply(model)
    adapt(model, CONFIG)
    fill_weights(model, adapted_weights(base.weights(), 0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.02, generator=generator)
    return model


class Reference(nn.Module):
    """The same layer in floating point: its weight as the integers stand for it, its input rounded on the way."""

    def __init__(self, layer: FrozenInt8) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight.float() * layer.weight_scale, layer.bias
        if isinstance(layer, AdaptedInt8):
            self.lora_A, self.lora_B = layer.lora_A, layer.lora_B
        self.zero_points, self.scale = layer.zero_points, getattr(layer, "scale", 0.0)

    def forward(self, x: Tensor) -> Tensor:
        rows = passed(x.reshape(-1, x.shape[-1]), self.zero_points).view(x.shape)
        y = F.linear(rows, self.weight, self.bias)
        return y + self.scale * self.lora_B(self.lora_A(x)) if self.scale else y


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_computes_what_is_served_and_its_gradient_is_of_the_dequantized_weight(
    zero_points: bool, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    layer = FrozenInt8(40, 24, bias, zero_points)
    layer.weight.copy_(torch.randint(-127, 128, (24, 40), generator=generator))
    layer.weight_scale.copy_(torch.rand(24, 1, generator=generator) / 100)
    if layer.bias is not None:
        layer.bias.copy_(torch.randn(24, generator=generator))
    x = torch.randn(3, 300, 40, generator=generator, requires_grad=True)  # more rows than are computed together
    upstream = torch.randn(3, 300, 24, generator=generator)
    y = layer(x)
    served = Int8Linear(layer.weight.data, layer.weight_scale.data, layer.bias, zero_points)
    torch.testing.assert_close(y, served(x.detach()), rtol=1e-6, atol=1e-6)
    (found,) = torch.autograd.grad(y, x, upstream)
    float_layer = F.linear(x, layer.weight.float() * layer.weight_scale)
    (wanted,) = torch.autograd.grad(float_layer, x, upstream)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(x)
        (rough,) = torch.autograd.grad(half, x, upstream.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, y.bfloat16())  # rounded once, at the end
    assert rough.dtype == x.dtype
    torch.testing.assert_close(rough, wanted, rtol=0.05, atol=0.02)


def test_gradients_of_a_network_are_those_of_a_floating_reference(int8: Path) -> None:
    model = network(int8)
    tokens = torch.randint(0, 320, (2, 20), generator=torch.Generator().manual_seed(4))

    def gradients() -> dict[str, Tensor]:
        learnt = {name: p for name, p in model.named_parameters() if p.requires_grad}
        loss = F.cross_entropy(model(tokens).flatten(0, 1)[:-1], tokens.flatten()[1:])
        return dict(zip(learnt, torch.autograd.grad(loss, list(learnt.values())), strict=True)) | {"loss": loss}

    found = gradients()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, FrozenInt8):
            model.set_submodule(name, Reference(layer))
    wanted = gradients()
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        # A last bit may round an activation to the next integer.
        assert (found[name] - gradient).norm() <= 2e-3 * gradient.norm(), name


@needs_extension
def test_a_run_writes_the_adapter_alone_and_the_engine_serves_it(recipe: Path, int8: Path, tmp_path: Path) -> None:
    before = {file: file.read_bytes() for file in int8.glob("*.safetensors")}
    train(recipe, ["steps=20"])
    out = tmp_path / "out"
    assert {file.name for file in out.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "penjing.json",
    }  # fmt: skip
    assert verify(out).kind == "adapter"
    assert {file: file.read_bytes() for file in int8.glob("*.safetensors")} == before
    model = network(int8)
    tensors = {
        name.removeprefix("base_model.model."): t for name, t in load_file(out / "adapter_model.safetensors").items()
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in tensors:
                parameter.copy_(tensors[name])
        prompt = ChatTokens.from_folder(int8, None).prompt({"prompt": "How many trees?"})
        known = model(torch.tensor([prompt]))[0, -1].log_softmax(-1)
    engine = engine_of(int8, {"alice": out}, adapter_dtype="float32", kv_dtype="float32")
    found = answers(engine, [request("r", "alice", prompt, max_tokens=1), request("s", None, prompt, max_tokens=1)])
    ((token, entry),) = found["r"]
    assert token == int(known.argmax())
    assert entry[token].logprob == pytest.approx(float(known[token]), abs=2e-3)
    ((_, plain),) = found["s"]
    assert entry[token].logprob > max(each.logprob for each in plain.values()) or token not in plain


def test_a_run_beside_an_artifact_goes_on_from_an_adapter(recipe: Path, tmp_path: Path) -> None:
    train(recipe, ["steps=2"])
    train(recipe, ["steps=1", f"output={tmp_path}/next", f"adapter.initial={tmp_path}/out"])
    with pytest.raises(ConfigError, match=r"has r = 4 and lora_alpha = .*; set adapter.rank and adapter.alpha to them"):
        train(recipe, ["adapter.rank=8", f"output={tmp_path}/more", f"adapter.initial={tmp_path}/out"])


def test_a_checkpoint_is_rounded_as_it_is_read_and_merged_as_it_was(
    recipe: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    base = read_int8_base(tiny_checkpoint, open_checkpoint(tiny_checkpoint).config)
    weights, stored = base.weights(), load_file(tiny_checkpoint / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    q, scale = weights(f"{name}.weight", (64, 96)), weights(f"{name}.weight_scale", (64, 1))
    whole = slice(0, 64), slice(0, 96)
    near = q[whole] * scale[slice(0, 64), slice(0, 1)]
    assert (near - stored[f"{name}.weight"]).abs().max() <= stored[f"{name}.weight"].abs().max() / 253
    assert torch.equal(q[slice(8, 16), slice(3, 9)], q[whole][8:16, 3:9])  # a part alone is that of the whole
    train(recipe, ["steps=3", f"initial={tiny_checkpoint}"])
    merged, small = (
        load_file(tmp_path / "out" / file) for file in ("model.safetensors", "adapter/adapter_model.safetensors")
    )
    assert merged.keys() == stored.keys()
    a, b = (small[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    assert b.abs().max() > 0
    torch.testing.assert_close(merged[f"{name}.weight"], stored[f"{name}.weight"] + 2.0 * b @ a)
    assert torch.equal(merged["model.norm.weight"], stored["model.norm.weight"])


def test_one_merged_tensor_is_in_memory_at_a_time(
    recipe: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[weakref.ref[Tensor]] = []
    add = SafetensorsWriter.add

    def watched(writer: SafetensorsWriter, name: str, tensor: Tensor) -> None:
        assert all(each() is None for each in before), f"{name} is made while others are kept"
        before.append(weakref.ref(tensor))
        add(writer, name, tensor)

    monkeypatch.setattr(SafetensorsWriter, "add", watched)
    train(recipe, ["steps=1", f"initial={tiny_checkpoint}"])
    assert len(before) == len(load_file(tiny_checkpoint / "model.safetensors"))


def test_the_reference_of_pairs_may_be_the_artifact(
    int8: Path, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    pair = ChatTokens.from_folder(int8, None).pair({"prompt": "How many?", "chosen": "Seven.", "rejected": "None."})
    ours, theirs = (
        reference_logprobs(folder, int8, [pair], torch.device("cpu"), Silent()) for folder in (int8, tiny_checkpoint)
    )
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.2)
    assert not torch.equal(ours, theirs)


def test_what_lies_in_no_such_integers_is_refused(recipe: Path, tmp_path: Path, int8: Path) -> None:
    def refused(says: str, *settings: str) -> None:
        with pytest.raises(ConfigError, match=says):
            train(recipe, list(settings))
        assert not (tmp_path / "out").exists()

    refused("is quantized; set adapter.base = 'int8' to learn beside its integers", "adapter.base=float")
    four = tmp_path / "four"
    four.mkdir()
    for file in int8.iterdir():
        if file.is_file():
            (four / file.name).write_bytes(file.read_bytes())
    values: dict[str, Any] = json.loads((four / "config.json").read_text())
    group = values["quantization_config"]["config_groups"]["group_0"]
    values["quantization_config"]["format"] = "pack-quantized"
    values["quantization_config"]["config_groups"] = {"group_0": group}
    group["weights"] |= {"num_bits": 4, "strategy": "group", "group_size": 32}
    (four / "config.json").write_text(json.dumps(values))
    refused("has weights of 4 bits, and an adapter learns beside 8", f"initial={four}")
