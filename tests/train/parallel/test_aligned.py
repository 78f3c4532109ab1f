"""Conversations, adapters, preferences, reward models, rollouts and frozen parameters on meshes: each gives the
losses, metrics, evaluation and weights of one process, and goes on in every bit where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from penjing.core.errors import ConfigError
from penjing.core.progress import Silent
from penjing.train.checks import check_machine
from penjing.train.families.base import build_task
from penjing.train.recipe.load import load_train_recipe
from tests.conftest import write_tiny_checkpoint
from tests.train.parallel.worlds import run_world

pytestmark = pytest.mark.xdist_group("aligned")  # one world for all that runs by default

LIMIT = 1e-5  # that of float32 in parity.py
ROUNDED = 1e-3  # where a last bit may round an activation to the next of 255 integers
SCRIPT = Path(__file__).with_name("aligned.py")
RECIPE = """
initial = "{folder}/base"
output = "{folder}/out"
steps = 4
device = "cpu"
seed = 1

[data]
kind = "{kind}"
sources = ["{folder}/{kind}.jsonl"]
sequence_length = 48
batch_size = 4
held_out = 0.2

[optimizer]
name = "sgd"
weight_decay = 0.0

[learning_rate]
kind = "constant"
peak = 0.05

[precision]
mode = "fp32"

[evaluation]
every = 2

[monitor]
activations_every = 0
every = 1
tensorboard = false
"""
ROLLOUTS = """
[prompts]
sources = ["{folder}/prompts.jsonl"]
held_out = 0.2

[reward]
kind = "verifier"
check = "regex"
unended = "scored"
"""
# Of another reference: beside itself, a model that has not learnt yet prefers what rounding says.
DPO = ["objective.kind=dpo", "objective.reference=other"]
OBJECTIVES: dict[str, dict[str, Any]] = {
    "chat": {"recipe": "chat.toml", "settings": ["data.micro_batch=1"]},
    "chat, frozen": {"recipe": "chat.toml", "settings": ["freeze=['model.embed_tokens.*', 'model.layers.0.*']"]},
    "adapter": {"recipe": "chat.toml", "settings": ["adapter={rank=4, targets=['*.q_proj', '*.down_proj']}"]},
    "adapter, int8": {"recipe": "chat.toml", "settings": ["adapter={rank=4, base='int8'}"]},
    "dpo": {"recipe": "preference.toml", "settings": [*DPO, "data.micro_batch=1"]},
    "dpo, adapter": {
        "recipe": "preference.toml", "settings": [*DPO, "objective.sft=0.2", "adapter={rank=4}"],
    },
    "reward": {"recipe": "preference.toml", "settings": ["objective.kind=reward", "objective.centring=0.01"]},
    "grpo": {"recipe": "rollouts.toml", "settings": ["algorithm={kind='grpo', kl=0.02, updates=2}"]},
    "grpo, adapter": {
        "recipe": "rollouts.toml", "settings": ["algorithm={kind='grpo', redraws=1}", "adapter={rank=4}"],
    },
    "grpo, ahead": {
        "recipe": "rollouts.toml", "settings": ["algorithm={kind='grpo', kl=0.02, redraws=1}", "data.ahead=true"],
    },
    "rloo": {"recipe": "rollouts.toml", "settings": ["algorithm={kind='rloo', kl=0.02, updates=2}"]},
    "ppo": {"recipe": "rollouts.toml", "settings": ["algorithm={kind='ppo', kl=0.05, updates=2}"]},
    "distill": {"recipe": "rollouts.toml", "settings": ["algorithm={kind='distill', teacher='other'}"]},
}  # fmt: skip
MESHES = {mesh: f"parallel.{mesh.replace(' ', '=')}" for mesh in ("dp 2", "zero 3", "tp 2", "pp 2")}
RESUMED = (
    "chat on pp 2",
    "chat, frozen on tp 2",
    "adapter on zero 3",
    "adapter, int8 on zero 3",
    "dpo on dp 2",
    "dpo on tp 2",
    "reward on zero 3",
    "grpo on zero 3",
    "grpo, adapter on tp 2",
    "grpo, ahead on zero 3",
)
# Parts of the names of what keeps every bit, in what is exported.
_BESIDE = ("norm", "embed_tokens", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
STILL = {
    "chat, frozen": ("embed_tokens", "layers.0."),
    "adapter": _BESIDE,
    "adapter, int8": _BESIDE[:2],
    "dpo, adapter": _BESIDE[:2],
    "grpo, adapter": _BESIDE[:2],
}
# Each objective on a mesh, each mesh with several objectives: the others are long variants.
BY_DEFAULT = (
    "chat on pp 2",
    "chat, frozen on tp 2",
    "adapter on dp 2",
    "adapter, int8 on zero 3",
    "dpo on tp 2",
    "dpo, adapter on zero 3",
    "reward on zero 3",
    "grpo on dp 2",
    "grpo, adapter on tp 2",
    "ppo on zero 3",
    "distill on tp 2",
)
# What an objective is refused on is below.
CASES: dict[str, dict[str, Any]] = {
    (name := f"{objective} on {mesh}"): {
        **OBJECTIVES[objective], "mesh": [MESHES[mesh]], "folder": name.replace(" ", "-"), "resumed": name in RESUMED,
    }
    for objective, meshes in {
        "chat": ("dp 2", "zero 3", "tp 2", "pp 2"),
        "chat, frozen": ("dp 2", "zero 3", "tp 2"),
        "adapter": ("dp 2", "zero 3", "tp 2"),
        "adapter, int8": ("dp 2", "zero 3"),
        "dpo": ("dp 2", "zero 3", "tp 2"),
        "dpo, adapter": ("zero 3", "tp 2"),
        "reward": ("dp 2", "zero 3", "tp 2"),
        "grpo": ("dp 2", "zero 3", "tp 2"),
        "grpo, adapter": ("zero 3", "tp 2"),
        "grpo, ahead": ("dp 2", "zero 3"),
        "rloo": ("dp 2",),
        "ppo": ("dp 2", "zero 3", "tp 2"),
        "distill": ("zero 3", "tp 2"),
    }.items()
    for mesh in meshes
}  # fmt: skip


def prepare(folder: Path) -> None:
    """A checkpoint, recipes, and rows of unequal lengths."""
    write_tiny_checkpoint(folder / "base")
    write_tiny_checkpoint(folder / "other", seed=1)
    for kind in ("chat", "preference"):
        (folder / f"{kind}.toml").write_text(RECIPE.format(folder=folder, kind=kind))
    rollouts = (RECIPE + ROLLOUTS).format(folder=folder, kind="rollouts")
    begin, end = rollouts.index("sources"), rollouts.index("\n\n[optimizer]")
    rollouts = rollouts[:begin] + "batch_size = 4\nsamples = 4\nmax_tokens = 4" + rollouts[end:]
    (folder / "rollouts.toml").write_text(rollouts)
    prompts = [{"prompt": f"Say {place}.", "answer": "[aeiou]"} for place in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    chats, pairs = [], []
    for place in range(24):
        prompt = [{"role": "user", "content": f"{place} " * (1 + place % 4)}]
        answer = [{"role": "assistant", "content": "the rain " * (1 + place % 3)}]
        chats.append({"messages": [*prompt, *answer]})
        pairs.append({"prompt": prompt, "chosen": answer, "rejected": f"no {place}" * (1 + place % 2)})
    for kind, rows in (("chat", chats), ("preference", pairs)):
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def results(folder: Path, names: Collection[str]) -> dict[str, Any]:
    prepare(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENJING_CACHE", str(folder / "cache"))
        return run_world(folder, 2, {name: CASES[name] for name in names}, script=SCRIPT)


@pytest.fixture(scope="session")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results(tmp_path_factory.mktemp("aligned"), BY_DEFAULT)


@pytest.fixture(scope="session")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results(tmp_path_factory.mktemp("more-aligned"), CASES.keys() - set(BY_DEFAULT))


def check(result: dict[str, Any], name: str) -> None:
    limit = ROUNDED if "int8" in name else LIMIT
    records = result["records"]
    assert {"loss", "gradient_norm"} <= records.keys()
    assert max(records.values()) <= limit, records
    assert max(result["evaluation"].values()) <= limit, result["evaluation"]
    assert result["names"]
    assert result["weights"] <= limit
    for parameter, distance in result["moved"].items():
        still = any(part in parameter for part in STILL.get(name.rpartition(" on ")[0], ()))
        assert (distance == 0.0) == still, parameter
    assert max(result["moved"].values()) > 1e-3  # so that the limit means something
    if name in RESUMED:
        assert result["resumed"] == {"evaluation": True, "records": True, "weights": True}


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_two_processes_learn_as_one_and_go_on_in_every_bit(aligned: dict[str, Any], name: str) -> None:
    check(aligned[name], name)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(CASES.keys() - set(BY_DEFAULT)))
def test_more_of_two_processes_learn_as_one_and_go_on_in_every_bit(more: dict[str, Any], name: str) -> None:
    check(more[name], name)


REFUSED = {
    "dpo": ("pp 2", "data.kind = 'preference' takes parallel.dp, zero and tp; set parallel.pp, cp and ep to 1"),
    "chat, frozen": ("pp 2", "freeze is not for pipelines; set parallel.pp = 1, or leave freeze out"),
    "adapter": ("pp 2", "[adapter] takes parallel.dp, zero and tp; set parallel.pp, cp and ep to 1"),
    "adapter, int8": ("tp 2", "adapter.base = 'int8' takes parallel.dp and zero; set parallel.tp to 1"),
    "grpo": ("pp 2", "data.kind = 'rollouts' takes parallel.dp, zero and tp; set parallel.pp, cp and ep to 1"),
}


def begin(recipe: Path, settings: list[str]) -> None:
    """What a run of two processes does before they meet."""
    settled = load_train_recipe(recipe, settings)
    check_machine(settled, 2, is_new=True)
    build_task(settled, Silent())


@pytest.mark.parametrize("objective", REFUSED)
def test_meshes_that_an_objective_does_not_take_are_refused_by_name(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    mesh, says = REFUSED[objective]
    case = OBJECTIVES[objective]
    with pytest.raises(ConfigError) as raised:
        begin(tmp_path / case["recipe"], [*case["settings"], MESHES[mesh]])
    assert says in str(raised.value)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out-run").exists()
