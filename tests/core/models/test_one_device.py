"""Model files pass their tests where torch.distributed cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BLOCK = "tests.core.models.without_distributed"


@pytest.mark.parametrize(
    "selection",
    [
        ("tests/core/models/test_decoder.py", "tests/core/models/test_resnet.py", "-k", "llama3 or resnet"),
        pytest.param(
            tuple(f"tests/core/test_{name}.py" for name in ("decoder", "decoder_variants", "encoder", "resnet")),
            marks=pytest.mark.full,
        ),
    ],
    ids=["some", "all"],
)
def test_models_pass_their_tests_without_torch_distributed(selection: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", BLOCK, *selection]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_it_really_is_blocked() -> None:
    command = [sys.executable, "-c", f"import {BLOCK}, penjing.train.processes.world"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "ImportError: torch.distributed is blocked, and penjing.train.processes.world imports it" in done.stderr
