"""bench_penjing_align.py JOB: `penjing train` on the steps that JOB describes, as bench_trl_align.py does; prints one
JSON line."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from penjing.core.config import dump_toml
from penjing.core.info import versions
from penjing.train import loop
from penjing.train.monitor import monitor
from penjing.train.run import train


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(job["threads"])
    if job["clock"] == "processor":
        clock: Any = SimpleNamespace(perf_counter=time.process_time)
        loop.time = monitor.time = clock
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows(job)))
        values = {
            "initial": job["checkpoint"],
            "output": str(folder / "trained"),
            "steps": job["steps"],
            "seed": 1,
            "learning_rate": {"kind": "constant", "peak": 1e-6},
            "precision": {"mode": job["precision"]},
            "evaluation": {"every": 0},
            "checkpoint": {"every": 10_000},
            "monitor": {"every": 1},
        }  # fmt: skip
        path = folder / "run.toml"
        path.write_text(dump_toml(values | settings(job, str(folder / "rows.jsonl"))))
        train(path)
        lines = (folder / "trained-run/metrics.jsonl").read_text().splitlines()
    records = [record for line in lines if "step_s" in (record := json.loads(line))]
    found = {
        "name": f"penjing {versions()['penjing']} {job['precision']}",
        "seconds": [record["step_s"] for record in records[1:]],
    }
    if job["kind"] == "grpo":
        found["length"] = sum(record["length"] for record in records) / len(records)
        found["rollout_share"] = sum(record["rollout_share"] for record in records[1:]) / max(len(records) - 1, 1)
    print(json.dumps(found), flush=True)


def rows(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Of grpo which answers are rewarded does not matter: half of them, about."""
    if job["kind"] == "sft":
        return job["texts"]
    return [{"prompt": prompt, "answer": "[aeiou]$"} for prompt in job["prompts"]]


def settings(job: dict[str, Any], path: str) -> dict[str, Any]:
    if job["kind"] == "sft":
        data = {"kind": "chat", "sources": [path], "sequence_length": job["length"], "batch_size": job["batch"],
                "held_out": 0.0, "micro_batch": job["batch"]}  # fmt: skip
        return {"data": data}
    data = {"kind": "rollouts", "batch_size": job["batch"], "samples": job["samples"], "max_tokens": job["max_tokens"]}
    return {
        "prompts": {"sources": [path], "held_out": 0.0},
        "data": data,
        "algorithm": {"kind": "grpo"},
        "reward": {"kind": "verifier", "check": "regex", "unended": "scored"},
    }


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
