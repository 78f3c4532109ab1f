"""Writes tests/train/reference/verl.json: advantages, losses and gradients that verl's PPO finds for the cases.py
beside it.

    bash benchmarks/peers/verl.sh
    PYTHONPATH=. build/peers/verl/venv/bin/python benchmarks/peers/verl_reference.py

The functions are verl's own, taken out of its files as they stand: importing them would import ray.
"""

from __future__ import annotations
import __future__

import ast
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.train.reference import cases

OUT = Path(__file__).parents[2] / "tests/train/reference/verl.json"
MODES = {"token": "token-mean", "answer": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
Rows = list[torch.Tensor]


def functions(path: str, names: Iterable[str], given: dict[str, Any]) -> SimpleNamespace:
    """Functions of a file of verl's, without their decorators."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / path).read_text())
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert len(wanted) == len(list(names)), f"{path} has only {[node.name for node in wanted]}"
    for node in wanted:
        node.decorator_list = []
    module = ast.Module(body=list[ast.stmt](wanted), type_ignores=[])
    space = dict(given)
    exec(compile(module, path, "exec", flags=__future__.annotations.compiler_flag), space)
    return SimpleNamespace(**{name: space[name] for name in names})


HELPERS = functions(
    "utils/torch_functional.py",
    ["masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value", "entropy_from_logits"],
    {"torch": torch},
)
VERL = functions(
    "trainer/ppo/core_algos.py",
    ["agg_loss", "compute_gae_advantage_return", "compute_policy_loss_vanilla", "compute_value_loss"],
    {"torch": torch, "verl_F": HELPERS, "AlgoConfig": tuple},
)


def padded(values_R: torch.Tensor) -> torch.Tensor:
    """(B, L), the tokens of each answer in a row."""
    rows: Any = values_R.split(cases.PPO_SIZES)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def loss(settings: dict[str, Any]) -> dict[str, Any]:
    """verl's losses of a case, and their gradients."""
    given = {name: torch.as_tensor(each) for name, each in cases.ppo_tokens().items()}
    logits, values = (given[name].clone().requires_grad_() for name in ("logits", "values"))
    logprobs = logits.log_softmax(-1).gather(1, given["next"][:, None])[:, 0]
    old = (logprobs + given["shift"]).detach()
    mask, mode = padded(torch.ones_like(old)), MODES[settings.get("aggregate", "token")]
    config = {
        "clip_ratio": 0.2,
        "clip_ratio_low": settings["clip"][0],
        "clip_ratio_high": settings["clip"][1],
        "clip_ratio_c": settings.get("dual", 1e9),
        "global_batch_info": {"loss_scale_factor": settings["most"]} if "most" in settings else {},
    }

    class Config(SimpleNamespace):
        def get(self, name: str, default: float) -> float:
            return config.get(name, default)  # type: ignore[return-value]

    policy, _ = VERL.compute_policy_loss_vanilla(
        padded(old), padded(logprobs), padded(given["advantages"]), mask, mode, Config(**config)
    )
    value, _ = VERL.compute_value_loss(
        padded(values), padded(given["returns"]), padded(given["old_values"]), mask,
        settings.get("value_clip", 0.2), mode, loss_scale_factor=settings.get("most"),
    )  # fmt: skip
    entropy = VERL.agg_loss(
        padded(HELPERS.entropy_from_logits(logits)), mask, mode, loss_scale_factor=settings.get("most")
    )
    whole = policy + settings["value_weight"] * value - settings.get("entropy", 0.0) * entropy
    whole.backward()
    assert logits.grad is not None
    assert values.grad is not None
    return {"loss": float(whole.detach()), "logits": logits.grad.tolist(), "values": values.grad.tolist()}


def advantages(discount: float, trace: float) -> dict[str, Any]:
    """verl's advantages, whitened, and returns."""
    given = {name: torch.tensor(each, dtype=torch.float64) for name, each in cases.gae().items()}
    mask = padded(torch.ones(sum(cases.PPO_SIZES), dtype=torch.float64))
    found, returns = VERL.compute_gae_advantage_return(
        given["rewards"] * mask, given["values"], mask, torch.tensor(discount), torch.tensor(trace)
    )
    return {"advantages": (found * mask).tolist(), "returns": (returns * mask).tolist()}


def main() -> None:
    version = importlib.metadata.version("verl")
    found = {
        "made by": f"benchmarks/peers/verl_reference.py with verl {version}, torch {torch.__version__}",
        "ppo": {name: loss(settings) for name, settings in cases.PPO.items()},
        "gae": {name: advantages(*both) for name, both in cases.GAE.items()},
    }
    OUT.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
