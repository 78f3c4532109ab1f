"""Writes tests/train/reference/peft.json: loss, gradients and merged logits that PEFT finds for the adapter of the
cases.py beside it.

    PYTHONPATH=build/src:. build/peers/trl/venv/bin/python benchmarks/peers/peft_reference.py MODEL_FOLDER [ADAPTER]

MODEL_FOLDER is the tiny checkpoint of the tests. ADAPTER, a folder that `penjing train` wrote for it, is loaded too, to
see that PEFT takes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import peft  # pyright: ignore[reportMissingImports]
import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.trl_reference import padded
from tests.train.reference import cases

OUT = Path(__file__).parents[2] / "tests/train/reference/peft.json"
PREFIX = "base_model.model."


def main() -> None:
    base = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="eager").eval()
    targets = ["q_proj", "down_proj"]
    model = peft.get_peft_model(base, peft.LoraConfig(r=cases.RANK, lora_alpha=cases.ALPHA, target_modules=targets))
    names = [name for name, _ in model.named_parameters() if "lora" in name]
    ours = {name: name.removeprefix(PREFIX).replace(".default", "") for name in names}
    parameters = dict(model.named_parameters())
    values = cases.adapter({ours[name]: tuple(parameters[name].shape) for name in ours})
    with torch.no_grad():
        for name, mine in ours.items():
            parameters[name].copy_(torch.from_numpy(values[mine]))
    rows = cases.answers(6, 3)
    ids, mask = padded([p + a for p, a in rows], cases.PAD), padded([[1] * len(p + a) for p, a in rows], 0)
    loss = model(input_ids=ids, attention_mask=mask, labels=padded([[-100] * len(p) + a for p, a in rows], -100)).loss
    loss.backward()
    norms = {mine: float(parameters[name].grad.norm()) for name, mine in ours.items()}
    merged = model.merge_and_unload()
    with torch.no_grad():
        logits = merged(torch.tensor([[5, 9, 200, 31]])).logits[0, -1, :8].tolist()
    found = {
        "made by": f"benchmarks/peers/peft_reference.py with PEFT {peft.__version__}, torch {torch.__version__}",
        "loss": float(loss), "norms": norms, "merged": logits, "names": [f"{PREFIX}{name}" for name in sorted(norms)],
    }  # fmt: skip
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    if len(sys.argv) > 2:
        fresh = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
        taken = peft.PeftModel.from_pretrained(fresh, sys.argv[2]).merge_and_unload()
        checkpoint = AutoModelForCausalLM.from_pretrained(Path(sys.argv[2]).parent, dtype=torch.float32)
        differences = [(a - b).abs().max() for a, b in zip(taken.parameters(), checkpoint.parameters(), strict=True)]
        print(f"PEFT merges {sys.argv[2]} to the checkpoint beside it within {float(max(differences)):.1e}")


if __name__ == "__main__":
    main()
