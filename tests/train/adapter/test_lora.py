"""Adapters: where they begin, what they learn, how they merge, and that PEFT computes and writes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.decoder import Decoder
from penjing.core.progress import Silent
from penjing.train.adapter.lora import Adapted, AdapterConfig, adapt, adapted_weights, merged
from penjing.train.adapter.peft import load_adapter
from penjing.train.chat.packed import pack_rows
from penjing.train.chat.tokens import Masked
from penjing.train.families.base import build_task
from penjing.train.objective.objective import CrossEntropy
from penjing.train.recipe.load import load_train_recipe
from penjing.train.run import train
from penjing.train.state.initial import checkpoint_weights, fill_weights
from tests.train.families.test_chat import ANSWERS, RECIPE
from tests.train.reference import cases

PEFT = json.loads(Path(cases.__file__).with_name("peft.json").read_text())
CONFIG = AdapterConfig(rank=cases.RANK, alpha=cases.ALPHA, targets=("*.q_proj", "*.down_proj"))


def adapted(folder: Path, known: dict[str, torch.Tensor] | None = None) -> Decoder:
    model = Decoder(open_checkpoint(folder).config)
    adapt(model, CONFIG)
    fill_weights(model, adapted_weights(checkpoint_weights(folder), 0, known))
    return model


def drawn(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if ".lora_" in name}
    return {name: torch.tensor(values) for name, values in cases.adapter(shapes).items()}


@pytest.fixture
def recipe(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in ANSWERS.items()
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "lora.toml"
    text = RECIPE.format(folder=tmp_path, base=tiny_checkpoint)
    path.write_text(f"{text}\n[adapter]\nrank = 4\nalpha = 8.0\n")
    return path


def test_it_begins_as_its_base_in_every_bit(tiny_checkpoint: Path) -> None:
    base, model = Decoder(open_checkpoint(tiny_checkpoint).config), adapted(tiny_checkpoint)
    fill_weights(base, checkpoint_weights(tiny_checkpoint))
    tokens = torch.tensor([[5, 9, 200, 31]])
    with torch.no_grad():
        assert torch.equal(model(tokens), base(tokens))
    assert sum(isinstance(module, Adapted) for module in model.modules()) == 4
    assert all((".lora_" in name) == p.requires_grad for name, p in model.named_parameters())


def test_loss_gradients_and_merge_are_those_of_peft(tiny_checkpoint: Path) -> None:
    model = adapted(tiny_checkpoint)
    fill_weights(model, adapted_weights(checkpoint_weights(tiny_checkpoint), 0, drawn(model)))
    texts = [
        Masked(np.array(prompt + answer, np.int32), np.arange(len(prompt + answer)) >= len(prompt))
        for prompt, answer in cases.answers(6, 3)
    ]
    packed = pack_rows(texts, 40, cases.PAD)
    batch = packed.read(range(len(packed.rows)))
    objective = CrossEntropy()
    loss = objective(model, batch).total / objective.count(batch)
    assert loss.item() == pytest.approx(PEFT["loss"], abs=1e-6, rel=1e-6)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == PEFT["norms"].keys()
    for name, norm in PEFT["norms"].items():
        assert gradients[name].norm().item() == pytest.approx(norm, rel=1e-5)
    plain = Decoder(model.config)
    plain.load_state_dict(dict(merged(model.state_dict(), CONFIG.scale)))
    tokens = torch.tensor([[5, 9, 200, 31]])
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens), model(tokens), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(plain(tokens)[0, -1, :8], torch.tensor(PEFT["merged"]), rtol=1e-5, atol=1e-5)


def test_a_run_writes_the_merged_network_and_the_adapter_and_goes_on_from_it(
    recipe: Path, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    train(recipe, ["steps=5"])
    adapter = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert (adapter["peft_type"], adapter["r"], adapter["lora_alpha"]) == ("LORA", 4, 8.0)
    tensors = load_file(tmp_path / "out/adapter/adapter_model.safetensors")
    assert {name.split(".lora_")[1] for name in tensors} == {"A.weight", "B.weight"}
    names = {f"{name.split('.lora_')[0]}.lora_A.weight" for name in PEFT["names"]}
    assert names < tensors.keys()
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_checkpoint, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name]) == ("_proj" not in name), name
    further = [f"output={tmp_path}/next", "steps=1", f"adapter.initial={tmp_path}/out/adapter"]
    task = build_task(load_train_recipe(recipe, further), Silent())
    model = task.build_model()
    task.initialize(model)
    whole = dict(merged(dict(model.named_parameters()), 2.0))
    assert all(torch.equal(whole[name], after[name]) for name in after)
    state = load_file(tmp_path / "out-run/checkpoints/step-000000005/state.safetensors")
    learnt = {name for name in state if name.startswith("optimizer/")}
    assert learnt
    assert all(".lora_" in name for name in learnt)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (
            "adapter.targets=['*.router']",
            r"adapter.targets: '\*.router' matches no linear layer; they are called model",
        ),
        ("adapter.rank=64", r"adapter.rank=64 is no smaller than model.layers.0.self_attn.q_proj, which is \(64, 64\)"),
        ("adapter.targets=['lm_head']", "model.embed_tokens.weight and lm_head.weight are one matrix"),
        ("adapter.initial=/none", "/none"),
    ],
)
def test_adapters_that_cannot_be_are_refused(recipe: Path, tmp_path: Path, setting: str, says: str) -> None:
    with pytest.raises((ConfigError, InputError), match=says):
        train(recipe, [setting])
    assert not (tmp_path / "out").exists()


def test_adapters_of_another_kind_or_base_are_refused(recipe: Path, tmp_path: Path, make_tiny_checkpoint: Any) -> None:
    train(recipe, ["steps=1"])
    folder = tmp_path / "out/adapter"
    config = load_train_recipe(recipe).adapter
    assert config is not None
    with pytest.raises(ConfigError, match="has other weights; give that checkpoint"):
        load_adapter(folder, config, make_tiny_checkpoint(seed=7))
    with pytest.raises(ConfigError, match=r"has r = 4 and lora_alpha = .*; set adapter.rank and adapter.alpha to them"):
        load_adapter(folder, AdapterConfig(rank=8), make_tiny_checkpoint())
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.popitem()
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"adapter.initial has no model.layers"):
        train(recipe, [f"adapter.initial={folder}", f"output={tmp_path}/next"])
