"""The GPU benchmark where there is no GPU: every row says why it is not measured, in the shape of all rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import run_kernels
import run_kernels_gpu
import torch
from lib.engine_gpu import METRICS, SMOLLM2, decode_rate, random_model
from lib.rows import Row


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_rows_without_a_gpu_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "kernels_gpu.jsonl"
    monkeypatch.setattr(sys, "argv", ["run_kernels.py", "--device", "cuda", "--results", str(tmp_path)])
    assert run_kernels.main() == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    names = [row["metric"] for row in rows]
    assert len({*names}) == len(names)
    assert {metric.name for metric in run_kernels_gpu.metrics()} | {*METRICS, "rms_norm", "int8_matmul_8192"} < {*names}
    for row in rows:
        assert "no CUDA device" in str(Row.model_validate_json(json.dumps(row)).reason)


def test_parts_out_of_time_say_so() -> None:
    rows = list(run_kernels_gpu.attention_rows(-1.0, None))
    assert len(rows) == len(list(run_kernels_gpu.metrics()))
    assert all("budget" in row["reason"] for row in rows)


def test_the_engine_answers_random_prompts_on_a_random_model() -> None:
    tiny = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    loaded = random_model(SMOLLM2 | tiny | {"num_attention_heads": 4, "num_key_value_heads": 2})
    assert decode_rate(loaded, 1, streams=3, prompt=5, new=58, device="cpu", num_blocks=100, max_model_len=64) > 0
