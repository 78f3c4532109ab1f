"""bench_penjing_grpo.py JOB: `penjing train` on the steps that JOB describes, as bench_trl_grpo.py does; prints one
JSON line."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from penjing.core.config import dump_toml
from penjing.core.info import versions
from penjing.train.run import train


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(job["threads"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Which answers are rewarded does not matter: half of them, about.
        lines = [json.dumps({"prompt": prompt, "answer": "[aeiou]$"}) for prompt in job["prompts"]]
        (folder / "prompts.jsonl").write_text("\n".join(lines))
        values = {
            "initial": job["checkpoint"],
            "output": str(folder / "trained"),
            "steps": job["steps"],
            "seed": 1,
            "prompts": {"sources": [str(folder / "prompts.jsonl")], "held_out": 0.0},
            "data": {"kind": "rollouts", "batch_size": job["batch"], "samples": job["samples"],
                     "max_tokens": job["max_tokens"]},
            "algorithm": {"kind": "grpo"},
            "reward": {"kind": "verifier", "check": "regex", "unended": "scored"},
            "learning_rate": {"kind": "constant", "peak": 1e-6},
            "precision": {"mode": job["precision"]},
            "evaluation": {"every": 0},
            "checkpoint": {"every": 10_000},
            "monitor": {"every": 1},
        }  # fmt: skip
        path = folder / "grpo.toml"
        path.write_text(dump_toml(values))
        train(path)
        lines = (folder / "trained-run/metrics.jsonl").read_text().splitlines()
    records = [record for line in lines if "length" in (record := json.loads(line))]
    found = {
        "name": f"penjing {versions()['penjing']} {job['precision']}",
        "seconds": [record["step_s"] for record in records[1:]],
        "length": sum(record["length"] for record in records) / len(records),
        "rollout_share": sum(record["rollout_share"] for record in records[1:]) / max(len(records) - 1, 1),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
