"""Every configuration compiles for sm_90 without a GPU, and the hot ones spill nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest

from penjing.kernels.gpu.registry import OPERATIONS, variants

MAX_SHARED_BYTES = 227 * 1024  # of one block on sm_90 (CUDA programming guide, table of compute capabilities)


@cache
def build(*options: str) -> dict[str, list[dict]]:
    """Compile all operations in a process of its own: here the kernels are those of the interpreter."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "penjing.kernels.gpu.build", *options]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    usages = [json.loads(line) for line in ran.stdout.splitlines()]
    return {name: [usage for usage in usages if usage["operation"] == name] for name in OPERATIONS}


def check(usages: list[dict]) -> None:
    assert usages
    for usage in usages:
        assert usage["shared_bytes"] <= MAX_SHARED_BYTES, usage
        assert usage["spill_bytes"] == 0 or not usage["hot"], usage


@pytest.mark.xdist_group("sm_90")  # one process compiles for all
@pytest.mark.timeout(900)  # the first waits for it
@pytest.mark.parametrize("operation", OPERATIONS)
def test_configurations_compile_for_sm_90(operation: str) -> None:
    check(build()[operation])


@pytest.mark.full
@pytest.mark.xdist_group("sm_90")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_rare_configurations_compile_for_sm_90(operation: str) -> None:
    check(build("--full")[operation])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_labels_are_distinct(operation: str) -> None:
    labels = [variant.label for variant in variants(operation)]
    assert len(set(labels)) == len(labels)


def test_an_unknown_operation_is_named() -> None:
    with pytest.raises(ValueError, match="'nothing' is unknown"):
        variants("nothing")
