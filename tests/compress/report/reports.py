"""A report of a run that never was."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np

from penjing.compress.measure.evaluate import EvaluateSettings, accuracy


def made_up_report(model: str = "build/dense", right: tuple[int, ...] = (190, 178, 188)) -> dict[str, Any]:
    """Three stages of a classifier on 200 images: the model, pruned, distilled; `right` answers of each."""
    kinds = ("model", "prune", "distill")
    stages = []
    for number, (kind, correct) in enumerate(zip(kinds, right, strict=True)):
        smaller = number > 0
        stages.append(
            {
                "name": f"{number:02d}-{kind}",
                "kind": kind,
                "record": {"groups": [{"name": "a", "removed": 3}]} if kind == "prune" else {},
                "quality": asdict(accuracy(np.arange(200) < correct, EvaluateSettings())),
                "size": {
                    "parameters": 50_000 if smaller else 70_000,
                    "bytes": 200_000 if smaller else 280_000,
                    "macs": 5_000_000 if smaller else 8_000_000,
                },
                "latency": [
                    {
                        "runtime": runtime,
                        "case": f"batch {batch}",
                        "unit": "images",
                        "seconds": batch * (0.0010 if smaller else 0.0014),
                        "low": batch * 0.0009,
                        "high": batch * 0.0015,
                        "throughput": 1000.0 if smaller else 714.0,
                        "speedup": 1.4 if smaller else 1.0,
                        "speedup_low": 1.3 if smaller else 1.0,
                        "speedup_high": 1.5 if smaller else 1.0,
                        "runs": 5,
                    }
                    for batch in (1, 64)
                    for runtime in ("torch", "onnxruntime")
                ],
                "widths": {"stem.conv": 16, "blocks.0.layers.0.conv": 11 if smaller else 16, "fc": 10},
                "seconds": 12.5 * number,
                "peak_memory_bytes": 10**8 * number,
            }
        )
    decision = {
        "steps": ["01-prune", "02-distill"],
        "attempt": 1,
        "metric": "accuracy",
        "reference": 0.95,
        "value": 0.92,
        "loss": 3.0,
        "loss_low": 1.0,
        "loss_high": 5.0,
        "budget": 1.0,
        "unit": "accuracy points lost",
        "outcome": "repeated milder",
        "prunes": {"01-prune": {"ratio": 0.6}},
        "prunes_next": {"01-prune": {"ratio": 0.3}},
    }
    kept = decision | {"attempt": 2, "loss": 0.9, "outcome": "kept", "prunes_next": None}
    report = {
        "schema_version": 1,
        "recipe": {"model": model, "steps": [{"kind": "prune", "ratio": 0.6}, {"kind": "distill"}]},
        "command": "penjing compress recipes/pruned.toml",
        "versions": {"python": "3.11", "torch": "2.13.0"},
        "device": {"name": "a processor", "cores": 2, "memory_bytes": 8 * 10**9},
        "stages": stages,
        "decisions": [decision, kept],
    }
    return json.loads(json.dumps(report))
