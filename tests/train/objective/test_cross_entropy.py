"""`cross_entropy_sum` against torch's cross-entropy in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from penjing.train.objective import cross_entropy
from penjing.train.objective.cross_entropy import cross_entropy_sum


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    classes=st.integers(2, 70),
    block=st.sampled_from((1, 100, 2**18)),
    smoothing=st.sampled_from((0.0, 0.1)),
    seed=st.integers(0, 1000),
)
def test_value_and_gradient_equal_torchs(rows: int, classes: int, block: int, smoothing: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (10 * torch.randn(rows, classes, generator=generator)).requires_grad_()
    targets = torch.randint(0, classes, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < 0.2] = -100
    reference = logits.detach().double().requires_grad_()
    wanted = F.cross_entropy(reference, targets, ignore_index=-100, reduction="sum", label_smoothing=smoothing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cross_entropy._BLOCK, "cpu", block)
        found = cross_entropy_sum(logits, targets, ignored=-100, label_smoothing=smoothing)
        (found * 0.25).backward()
    (wanted * 0.25).backward()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert logits.grad is not None
    assert reference.grad is not None
    torch.testing.assert_close(logits.grad.double(), reference.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 500).to(dtype).requires_grad_()
    targets = torch.randint(0, 500, (64,))
    cross_entropy_sum(logits, targets, ignored=-100).backward()
    wide = logits.detach().float().requires_grad_()
    F.cross_entropy(wide, targets, reduction="sum").backward()
    assert logits.grad is not None
    assert wide.grad is not None
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad, wide.grad.to(dtype))


def test_nan_stays_visible_and_a_target_out_of_range_is_refused() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = float("nan")
    assert torch.isnan(cross_entropy_sum(logits, torch.tensor([0, 1, 2]), ignored=-100))
    assert torch.isfinite(cross_entropy_sum(logits, torch.tensor([0, -100, 2]), ignored=-100))
    with pytest.raises(RuntimeError):
        cross_entropy_sum(torch.zeros(3, 4), torch.tensor([0, 4, 2]), ignored=-100)


def test_a_target_out_of_range_is_refused_where_classes_are_split(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        logits = distribute_tensor(torch.zeros(3, 4), mesh, [Shard(1)])
        expected = cross_entropy_sum(torch.zeros(3, 4), torch.tensor([0, -100, 2]), ignored=-100)
        assert cross_entropy_sum(logits, torch.tensor([0, -100, 2]), ignored=-100) == expected
        with pytest.raises(RuntimeError, match="target 4 is out of the 4 classes"):
            cross_entropy_sum(logits, torch.tensor([0, 4, 2]), ignored=-100)
    finally:
        dist.destroy_process_group()
