"""Reports of runs that never were."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np

from penjing.compress.measure.evaluate import EvaluateSettings, accuracy, perplexity, similarity
from penjing.compress.samples.retrieval import Retrieval


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
                    "macs_per": "image",
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
                "quantized": None,
                "answers": [],
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
        "schema_version": 2,
        "family": "classifier",
        "recipe": {"model": model, "steps": [{"kind": "prune", "ratio": 0.6}, {"kind": "distill"}]},
        "command": "penjing compress recipes/pruned.toml",
        "versions": {"python": "3.11", "torch": "2.13.0"},
        "processor": {"name": "a processor", "cores": 2, "memory_bytes": 8 * 10**9},
        "stages": stages,
        "decisions": [decision, kept],
        "seconds": 61.0,
        "peak_memory_bytes": 2 * 10**8,
    }
    return json.loads(json.dumps(report))


def made_up_int8(family: str) -> dict[str, Any]:
    """A network of `family` and its artifact in INT8: a run with two stages."""
    rng = np.random.default_rng(0)
    values = made_up_report(model=f"build/{family}")
    between, quantity, statistic = ["fake_quantized", "onnxruntime"], "logits", "largest"
    if family == "classifier":
        names = ["stem.conv", *(f"blocks.{block}.layers.{layer}.conv" for block in range(9) for layer in (0, 1)), "fc"]
        unit, choice = "image", 0.98
    elif family == "encoder":
        kinds = ("query", "key", "value", "output", "up", "down")
        names = [f"layers.{layer}.{kind}" for layer in range(6) for kind in kinds]
        unit, choice, quantity, statistic = "text", None, "1 - cosine", "mean"
    else:
        kinds = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        names = [f"model.layers.{layer}.{kind}" for layer in range(30) for kind in kinds] + ["lm_head"]
        unit, choice, between, quantity, statistic = (
            "token",
            None,
            ["fake_quantized", "int8_runtime"],
            "layer_outputs",
            "mean",
        )
    errors = rng.uniform(0.01, 0.03, (len(names), 2)) + np.linspace(0, 0.05, len(names))[:, None]
    first, last = (values["stages"][place] | {"widths": dict.fromkeys(names, 64)} for place in (0, 2))
    last |= {"name": "01-quantize", "kind": "quantize"}
    for number, stage in enumerate((first, last)):
        stage["size"] = stage["size"] | {"bytes": 280_000 // (1 + 2 * number), "macs": 8_000_000, "macs_per": unit}
        if family == "decoder":
            losses = np.linspace(2, 3, 24) + 0.01 * number
            found = perplexity({"prose": losses[:16].tolist(), "code": losses[16:].tolist()}, EvaluateSettings())
            stage["quality"] = asdict(found)
        if family == "encoder":
            angles = np.linspace(0.05, 0.15, 64)[:, None] * number
            before, after = (np.concatenate([np.cos(each), np.sin(each)], 1) for each in (0 * angles, angles))
            stage["quality"] = asdict(
                similarity(before, after, EvaluateSettings(), {"": Retrieval(["q"] * 32, ["d"] * 32)})
            )
    row = {"between": between, "quantity": quantity, "num_values": 320, "largest": 0.07, "mean": 0.004, "same": choice}
    last["quantized"] = {
        "target": "onnxruntime-cpu" if family != "decoder" else "compressed-tensors",
        "formats": {"activations": "uint8" if family != "decoder" else "int8", "weights": "int8"},
        "effective_bits": 8.0,
        "kept_for_parity": ["stem.conv"] if family == "classifier" else [],
        "training_steps": 0,
        "agreement": choice,
        "layers": [
            {"name": name, "format": "int8", "weight": float(weight) / 3, "output": float(output)}
            for name, (weight, output) in zip(names, errors, strict=True)
        ],
        "differences": [row],
        "bound": {"between": between, "quantity": quantity, "statistic": statistic, "value": 0.1},
        "unmeasured": {"tensorrt": "needs a GPU"} if family == "classifier" else {},
    }
    values |= {"family": family, "stages": [first, last], "decisions": []}
    return json.loads(json.dumps(values))
