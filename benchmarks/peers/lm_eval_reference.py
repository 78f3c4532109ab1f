"""Writes tests/compress/measure/reference/lm_eval.json: what lm-eval finds for the questions beside it.

    PYTHONPATH=build/src:. build/peers/lm_eval/venv/bin/python benchmarks/peers/lm_eval_reference.py MODEL_FOLDER

MODEL_FOLDER is the tiny checkpoint of the tests (`tests.conftest.write_tiny_checkpoint`). ARC and HellaSwag are
lm-eval's own tasks with another source of data; the plain form is a task of the few lines below.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval  # pyright: ignore[reportMissingImports]
from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
from lm_eval.tasks._yaml_loader import load_yaml  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parents[2] / "tests/compress/measure/reference"
PLAIN = {
    "task": "plain",
    "output_type": "multiple_choice",
    "doc_to_text": "{{query}}",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}
THEIRS = {"arc": "arc/arc_easy.yaml", "hellaswag": "hellaswag/hellaswag.yaml"}


def main() -> None:
    folder = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = HFLM(pretrained=AutoModelForCausalLM.from_pretrained(folder), tokenizer=tokenizer, batch_size=1)
    found: dict[str, Any] = {"versions": {name: version(name) for name in ("lm-eval", "transformers")}}
    tasks = Path(str(lm_eval.__file__)).with_name("tasks")
    for name in ("arc", "hellaswag", "plain"):
        task = load_yaml(tasks / THEIRS[name], resolve_func=True) if name in THEIRS else PLAIN
        file = str(FOLDER / f"{name}.jsonl")
        source = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": {"test": file}}}
        splits = {"training_split": None, "validation_split": None, "test_split": "test"}
        result = simple_evaluate(model, tasks=[{**task, **source, **splits}], bootstrap_iters=0)
        samples = sorted(result["samples"][task["task"]], key=lambda sample: sample["doc_id"])
        found[name] = {
            "likelihoods": [[float(answer[0]) for answer in sample["filtered_resps"]] for sample in samples],
            "acc": [float(sample["acc"]) for sample in samples],
            "acc_norm": [float(sample["acc_norm"]) for sample in samples],
        }
    (FOLDER / "lm_eval.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
