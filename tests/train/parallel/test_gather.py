"""The whole model of a sharded run is in the main process's memory once, at the end, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.parallel import gathered
from tests.train.parallel.worlds import run_world

SLACK = 4 * 2**20  # the allocator's, and sockets'


def test_a_start_holds_parts_and_an_export_the_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**18))  # what is freed is given back, and seen to be
    script = Path(__file__).with_name("gathered.py")
    result = run_world(tmp_path, 2, {}, script=script, new=True)  # malloc reads it at the start
    for most in result["most"]:
        assert result["model"] / 2 < most < result["model"] / 2 + result["largest"] + 2**16  # buffers
    main, other = result["grown"]
    assert result["model"] > 36e6
    assert main < result["model"] + 2 * result["largest"] + SLACK
    assert other < 2 * result["largest"] + SLACK
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in gathered.alone().named_parameters())
