"""What learning from own answers keeps beside the model that learns is counted before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError
from penjing.core.progress import Silent
from penjing.train.align.sampler import EngineSampler, cache_bytes, float_bytes
from penjing.train.families.base import KeepingTask, build_task
from penjing.train.plan.estimate import MemoryEstimate, check_memory
from penjing.train.processes.world import World
from penjing.train.recipe.load import load_train_recipe

RECIPE = """
output = "out"
initial = "{base}"
steps = 1
device = "cpu"
[prompts]
sources = ["prompts.jsonl"]
[data]
kind = "rollouts"
batch_size = 4
samples = 4
max_tokens = 4
[reward]
kind = "verifier"
[evaluation]
every = 0
"""


def kept(base: Path, *changes: str, device: str = "cpu") -> int:
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n}?", "answer": n}) + "\n" for n in range(20)))
    Path("recipe.toml").write_text(RECIPE.format(base=base))
    task = build_task(load_train_recipe(Path("recipe.toml"), list(changes)), Silent())
    assert isinstance(task, KeepingTask)
    return task.kept_bytes(World(device=torch.device(device)))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_reference_and_what_an_adapter_changes_are_counted(tiny_checkpoint: Path) -> None:
    whole = float_bytes(tiny_checkpoint)
    assert whole == sum(4 * each.numel() for each in load_model(tiny_checkpoint).model.parameters())
    alone = kept(tiny_checkpoint, "algorithm.kl=0")
    assert kept(tiny_checkpoint, "algorithm.kl=0.1") == alone + whole
    changed = kept(tiny_checkpoint, "algorithm.kl=0", "adapter.rank=2", "adapter.targets=['*.q_proj']") - alone
    config = open_checkpoint(tiny_checkpoint).config
    rows = config.num_attention_heads * config.head_dim
    assert changed == 4 * config.num_hidden_layers * rows * config.hidden_size


def test_the_cache_is_as_large_as_the_engine_makes_it(tiny_checkpoint: Path) -> None:
    loaded = load_model(tiny_checkpoint)
    for longest in (5, 16, 17, 60):
        engine = EngineSampler(loaded, longest)._engine
        assert cache_bytes(loaded.config, longest) == engine.config.kv_cache_bytes


def test_what_is_kept_beside_counts_and_is_named() -> None:
    size = MemoryEstimate(
        parameters=100, gradients=100, optimizer=200, average=0, reduction=0, activations=90, beside=60
    )
    check_memory(size, 550)
    assert "beside" in str(size)
    with pytest.raises(ConfigError, match=r"lower data\.micro_batch to about 44%"):
        check_memory(size, 500)
    with pytest.raises(ConfigError, match=r"what is kept beside the model, .* takes the rest"):
        check_memory(size, 450)
    with pytest.raises(ConfigError, match="the model alone is too large"):
        check_memory(size, 300)


def test_weights_on_a_device_are_copied(tiny_checkpoint: Path) -> None:
    whole = kept(tiny_checkpoint, "algorithm.kl=0") + float_bytes(tiny_checkpoint)
    assert kept(tiny_checkpoint, "algorithm.kl=0", device="cuda") == whole
