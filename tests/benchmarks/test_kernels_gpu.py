"""The GPU benchmark where there is no GPU: every row says why it is not measured, in the shape of all rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import run_kernels_gpu
import torch
from rows import Row


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_rows_without_a_gpu_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["run_kernels_gpu.py", "--out", str(out)])
    run_kernels_gpu.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == len(list(run_kernels_gpu.metrics()))
    for row in rows:
        assert Row.model_validate_json(json.dumps(row)).reason == "not measured: no CUDA device"
