from __future__ import annotations

import pytest
import torch
from torch import nn

from penjing.core.errors import ConfigError
from penjing.core.models.decoder import Decoder
from penjing.train.numerics.precision import Precision, PrecisionConfig
from penjing.train.numerics.recompute import apply_recompute
from penjing.train.objective.objective import CrossEntropy
from penjing.train.plan.estimate import MemoryEstimate, check_memory, estimate_memory
from tests.allocated import peak_bytes
from tests.conftest import tiny_config
from tests.train.conftest import token_batch

CPU = torch.device("cpu")


def build(recompute: str, mode: str) -> nn.Module:
    model = Decoder(tiny_config(num_hidden_layers=4))
    apply_recompute(model, recompute)  # type: ignore[arg-type]
    Precision(model, PrecisionConfig(mode=mode), CPU)  # type: ignore[arg-type]
    return model


def estimate(recompute: str, mode: str, rows: int) -> MemoryEstimate:
    batch = token_batch(rows, 64, 0)
    return estimate_memory(
        lambda: build(recompute, mode), CrossEntropy(), batch, optimizer="adamw", averaged=True, replicated=False
    )


def measured_peak(recompute: str, mode: str, rows: int) -> int:
    """Largest number of bytes allocated at once above what was there before, in one forward and backward pass."""
    model, batch, objective = build(recompute, mode), token_batch(rows, 64, 0), CrossEntropy()
    objective(model, batch).total.backward()  # the gradients exist
    return peak_bytes(lambda: objective(model, batch).total.backward())


# Each amount of recomputation and each format stands here once; the other pairs are long variants.
@pytest.mark.parametrize(
    ("recompute", "mode"),
    [
        ("none", "fp32"),
        ("selective", "bf16"),
        ("full", "bf16"),
        *(
            pytest.param(*pair, marks=pytest.mark.full)
            for pair in (("none", "bf16"), ("selective", "fp32"), ("full", "fp32"))
        ),
    ],
)
def test_the_estimate_is_near_what_is_allocated(recompute: str, mode: str) -> None:
    estimated, measured = estimate(recompute, mode, 16).activations, measured_peak(recompute, mode, 16)
    assert 0.75 < estimated / measured < 1.35


def test_activations_grow_with_the_batch_and_shrink_with_recomputation() -> None:
    sizes = {setting: estimate(setting, "fp32", 8) for setting in ("none", "selective", "full")}
    assert sizes["none"].activations > 1.3 * sizes["selective"].activations > 1.69 * sizes["full"].activations
    assert estimate("none", "fp32", 16).activations == pytest.approx(2 * sizes["none"].activations, rel=0.05)
    num_bytes = 4 * sum(parameter.numel() for parameter in build("none", "fp32").parameters())
    one = sizes["none"]
    assert (one.gradients, one.optimizer, one.average, one.reduction) == (num_bytes, 2 * num_bytes, num_bytes, 0)


def test_what_cannot_fit_is_refused_with_advice() -> None:
    size = MemoryEstimate(parameters=100, gradients=100, optimizer=200, average=0, reduction=0, activations=1000)
    check_memory(size, 1400)
    with pytest.raises(ConfigError, match=r"lower data.micro_batch to about 50% of it .* memory.recompute = 'full'"):
        check_memory(size, 900)
    with pytest.raises(ConfigError, match=r"the model alone is too large: lower model.num_hidden_layers"):
        check_memory(size, 300)
