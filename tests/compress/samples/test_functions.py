"""Samples that a function yields, through a compression."""

from __future__ import annotations

from pathlib import Path

import torch

from penjing.compress.run import run_recipe
from tests.compress.graphs import graph_folder

FUNCTION = """
from pathlib import Path
import torch

def other():
    with Path(__file__).with_suffix(".calls").open("a+") as calls:
        calls.write("x")
        drawn = torch.Generator().manual_seed(calls.tell())
        for _ in range(4 * calls.tell()):
            yield torch.randn(8, 2, generator=drawn), torch.randint(3, (8,), generator=drawn)
"""


def test_steps_are_judged_on_the_same_samples_of_a_function_that_yields_others(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    network = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    values = {
        "model": str(graph_folder(tmp_path / "dense", network, torch.randn(2, 2))),
        "output": str(tmp_path / "int8"),
        "data": {"source": f"{tmp_path}/mine.py:other", "held_out": 0.3, "batch_images": 4},
        "guard": {"accuracy_points": 100.0},
        "steps": [{"kind": "quantize", "target": "onnxruntime-cpu"}],
    }
    assert (run_recipe(values) / "model.onnx").exists()
