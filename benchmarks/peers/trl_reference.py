"""Writes tests/train/reference/trl.json: labels, losses and gradients that TRL finds for the cases.py beside it.

    PYTHONPATH=build/src:. build/peers/trl/venv/bin/python benchmarks/peers/trl_reference.py MODEL_FOLDER

MODEL_FOLDER is the tiny checkpoint of the tests (`tests.conftest.write_tiny_checkpoint`). The losses are TRL's own
methods, called on transformers' model; only the trainers around them are left out.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOTrainer, GRPOTrainer, RewardTrainer, RLOOTrainer  # pyright: ignore[reportMissingImports]
from trl.data_utils import common_prefix_length  # pyright: ignore[reportMissingImports]
from trl.trainer.utils import nanstd, selective_log_softmax  # pyright: ignore[reportMissingImports]

from tests.train.reference import cases

OUT = Path(__file__).parents[2] / "tests/train/reference/trl.json"
accelerator = SimpleNamespace(
    device=torch.device("cpu"),
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    num_processes=1,
    reduce=lambda x, reduction: x,
)


def gradient(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, Any]:
    """The loss, the norm of its whole gradient, and the first numbers of the gradient of a few parameters."""
    model.zero_grad()
    loss.backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    norm = torch.stack([each.double().norm() for each in named.values()]).norm()
    shown = ("0.self_attn.q_proj.weight", "1.mlp.down_proj.weight", "norm.weight")
    some = [name for name in named if name.endswith(shown)]
    return {
        "loss": float(loss),
        "norm": float(norm),
        "gradients": {name: named[name].flatten()[:6].tolist() for name in some},
    }


def metrics() -> dict[str, dict[str, list[float]]]:
    return defaultdict(lambda: defaultdict(list))


def padded(rows: list[list[int]], value: int, left: bool = False) -> torch.Tensor:
    width = max(map(len, rows))
    fill = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([f + row if left else row + f for row, f in zip(rows, fill, strict=True)])


def labels(tokenizer: Any, template: str) -> str:
    """As SFTTrainer._prepare_dataset finds them: what follows the common prefix of prompt and whole."""
    digest = hashlib.sha256()
    for prompt, completion in cases.chats(1000):
        settings = {"tokenize": True, "return_dict": False, "chat_template": template}
        before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, **settings)
        whole = tokenizer.apply_chat_template(prompt + completion, **settings)
        begin = common_prefix_length(before, whole)
        digest.update(np.array(whole, np.int32).tobytes() + np.array(begin, np.int32).tobytes())
    return digest.hexdigest()


class WithLogprobs:
    """A language model as DPOTrainer's patch makes it: also log-probabilities of the labels."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: Any, attention_mask: Any, labels: Any, **_: Any) -> Any:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        targets = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], -100)), 1)
        logprobs = selective_log_softmax(logits, targets.clamp(min=0)) * (targets != -100)
        told = torch.zeros_like(logprobs[:, :-1].detach())  # what it only logs
        return SimpleNamespace(log_probs=logprobs[:, :-1], entropy=told, mean_logits=told, is_top1=told > 0)


def dpo(model: Any, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    rows = [(p, c) for p, c, _ in cases.pairs()] + [(p, r) for p, _, r in cases.pairs()]
    inputs = {
        "input_ids": padded([p + a for p, a in rows], cases.PAD),
        "attention_mask": padded([[1] * len(p + a) for p, a in rows], 0),
        "completion_mask": padded([[0] * len(p) + [1] * len(a) for p, a in rows], 0),
        "ref_chosen_logps": torch.tensor([c for c, _ in cases.REFERENCE]),
        "ref_rejected_logps": torch.tensor([r for _, r in cases.REFERENCE]),
    }
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[settings.get("loss", kind)],
        loss_weights=[1.0], beta=settings["beta"], label_smoothing=settings.get("label_smoothing", 0.0),
        use_weighting=False, _metrics=metrics(), _total_train_tokens=0, _tp_size=1, args=None,
    )  # fmt: skip
    return gradient(model, DPOTrainer._compute_loss(trainer, WithLogprobs(model), inputs, False))


def reward(folder: str) -> dict[str, Any]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32).eval()
    with torch.no_grad():
        model.score.weight.copy_(torch.linspace(-1, 1, model.score.weight.numel())[None])
    rows = [p + c for p, c, _ in cases.pairs()] + [p + r for p, _, r in cases.pairs()]
    inputs = {
        "input_ids": padded(rows, cases.PAD),
        "attention_mask": padded([[1] * len(row) for row in rows], 0),
        "margin": torch.tensor(cases.MARGINS),
    }

    def forward(margin: Any = None, **inputs: Any) -> Any:
        return model(**inputs)

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator, _total_train_tokens=0, _tp_size=1,
        args=SimpleNamespace(center_rewards_coefficient=cases.CENTRING), _metrics=metrics(),
    )  # fmt: skip
    return gradient(model, RewardTrainer.compute_loss(trainer, forward, inputs))


def sampled(settings: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """A batch of answers, and how long they are."""
    rows = cases.answers(len(cases.ADVANTAGES), 3)
    sizes = [len(a) for _, a in rows]
    inputs = {
        "prompt_ids": padded([p for p, _ in rows], cases.PAD, left=True),
        "prompt_mask": padded([[1] * len(p) for p, _ in rows], 0, left=True),
        "completion_ids": padded([a for _, a in rows], cases.PAD),
        "completion_mask": padded([[1] * size for size in sizes], 0),
        "advantages": torch.tensor(cases.ADVANTAGES),
        "num_items_in_batch": torch.tensor(float(sum(sizes))),
    }
    width = max(sizes)
    for name, seed in (("old_per_token_logps", 4), ("ref_per_token_logps", 5)):
        found = cases.old_logprobs(seed, sizes)
        inputs[name] = torch.tensor([row + [0.0] * (width - len(row)) for row in found])
    if "old" in settings:
        del inputs["old_per_token_logps"]
    return inputs, sizes


def logps(model: Any, ids: Any, mask: Any, keep: int, **_: Any) -> Any:
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -keep - 1 : -1]
    return selective_log_softmax(logits, ids[:, -keep:]), torch.zeros(len(ids), keep), None


def grpo(model: Any, settings: dict[str, Any]) -> dict[str, Any]:
    inputs, _ = sampled(settings)
    low, high = settings["clip"]
    kinds = {"token": "dapo", "answer": "grpo", "constant": "dr_grpo"}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=logps, aux_loss_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, importance_sampling_level="token", beta=settings["kl"],
        loss_type=kinds[settings.get("aggregate", "token")], max_completion_length=settings.get("most"),
        epsilon_low=low, epsilon_high=high, use_vllm=False, model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=settings.get("dual"), use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=accelerator, _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1, _metrics=metrics(), _step=0,
    )  # fmt: skip
    return gradient(model, GRPOTrainer._compute_loss(trainer, model, inputs))


def rloo(model: Any) -> dict[str, Any]:
    inputs, sizes = sampled({})
    # Of a whole answer the ratio would be far from 1 with the old log-probabilities of `cases`.
    with torch.no_grad():
        ids, mask = (torch.cat([inputs[f"{x}_{y}"] for x in ("prompt", "completion")], 1) for y in ("ids", "mask"))
        own, _, _ = logps(model, ids, mask, max(sizes))
    shifts = torch.tensor(cases.rloo_shifts(len(sizes)))
    inputs["old_logps"] = (own * inputs["completion_mask"]).sum(1) - shifts
    low, high = cases.RLOO_CLIP
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=logps, aux_loss_enabled=False, epsilon_low=low, epsilon_high=high,
        model=SimpleNamespace(training=True), accelerator=accelerator, _metrics=metrics(),
    )  # fmt: skip
    return gradient(model, RLOOTrainer._compute_loss(trainer, model, inputs))


def advantages(trainer: Any, begin: str, **settings: Any) -> list[float]:
    """What the lines of the trainer's own method that find advantages make of the rewards of `cases`."""
    lines = inspect.getsource(trainer._generate_and_score_completions).splitlines()
    first = next(place for place, line in enumerate(lines) if line.strip().startswith(begin))
    last = next(place for place, line in enumerate(lines) if place > first and line.strip().startswith("is_std_zero"))
    known = {
        "torch": torch, "nanstd": nanstd, "num_generations": len(cases.REWARDS[0]),
        "rewards": torch.tensor(cases.REWARDS).flatten(), "self": SimpleNamespace(**settings),
    }  # fmt: skip
    exec(textwrap.dedent("\n".join(lines[first:last])), known)
    return known["advantages"].tolist()


def main() -> None:
    folder = sys.argv[1]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    rows = cases.answers(6, 3)
    ids, mask = padded([p + a for p, a in rows], cases.PAD), padded([[1] * len(p + a) for p, a in rows], 0)
    targets = padded([[-100] * len(p) + a for p, a in rows], -100)
    found = {
        "made by": f"benchmarks/peers/trl_reference.py with TRL {trl.__version__}, torch {torch.__version__}",
        "labels": {name: labels(tokenizer, template) for name, template in cases.TEMPLATES.items()},
        "sft": gradient(model, model(input_ids=ids, attention_mask=mask, labels=targets).loss),
        "dpo": {name: dpo(model, name, settings) for name, settings in cases.DPO.items()},
        "reward": reward(folder),
        "grpo": {name: grpo(model, settings) for name, settings in cases.GRPO.items()},
        "rloo": rloo(model),
        "advantages": {
            f"grpo, {scale}": advantages(GRPOTrainer, "mean_grouped_rewards", scale_rewards=scale)
            for scale in ("group", "batch", "none")
        }
        | {
            f"rloo, {scale}": advantages(RLOOTrainer, "grouped_rewards", normalize_advantages=scale == "batch")
            for scale in ("none", "batch")
        },
    }
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found)[:600])


if __name__ == "__main__":
    main()
