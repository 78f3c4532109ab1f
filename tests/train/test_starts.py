"""What tests count once for equal networks is counted anew for any other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import nn

from penjing.core.models.decoder import Decoder
from penjing.train.numerics.precision import Precision, PrecisionConfig
from penjing.train.numerics.recompute import apply_recompute
from penjing.train.objective.objective import CrossEntropy
from penjing.train.plan.estimate import estimate_memory
from tests.conftest import tiny_config
from tests.starts import once
from tests.train.conftest import token_batch


def plain(**fields: Any) -> nn.Module:
    return Decoder(tiny_config(**fields))


def recomputed(how: Literal["selective", "full"]) -> nn.Module:
    model = plain()
    apply_recompute(model, how)
    return model


def in_16_bits() -> nn.Module:
    model = plain()
    Precision(model, PrecisionConfig(mode="bf16"), torch.device("cpu"))
    return model


def partly_frozen() -> nn.Module:
    model = plain()
    next(model.parameters()).requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("build", "objective", "rows"),
    [
        (lambda: plain(intermediate_size=128), CrossEntropy(), 2),
        (partial(recomputed, "selective"), CrossEntropy(), 2),
        (partial(recomputed, "full"), CrossEntropy(), 2),
        (in_16_bits, CrossEntropy(), 2),
        (partly_frozen, CrossEntropy(), 2),
        (plain, CrossEntropy(accuracy=True), 2),
        (plain, CrossEntropy(), 3),
    ],
    ids=["wider", "half recomputed", "recomputed", "16 bits", "partly frozen", "another objective", "a longer batch"],
)
def test_another_network_is_counted_anew(build: Callable[[], nn.Module], objective: CrossEntropy, rows: int) -> None:
    counted: list[int] = []

    def count(*given: Any, **settings: Any) -> int:
        counted.append(1)
        return len(counted)

    shared = once(count)
    settings = {"optimizer": "adamw", "averaged": False}
    before = torch.random.get_rng_state()
    assert shared(plain, CrossEntropy(), token_batch(2, 16, 0), **settings) == 1
    assert shared(plain, CrossEntropy(), token_batch(2, 16, 1), **settings) == 1
    assert shared(build, objective, token_batch(rows, 16, 0), **settings) == 2
    assert shared(plain, CrossEntropy(), token_batch(2, 16, 0), **settings | {"averaged": True}) == 3
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_is_counted_once_is_what_was_counted() -> None:
    shared, settings = once(estimate_memory), {"optimizer": "adamw", "averaged": False, "replicated": False}
    found = [shared(plain, CrossEntropy(), token_batch(2, 16, seed), **settings) for seed in range(2)]
    assert found == [estimate_memory(plain, CrossEntropy(), token_batch(2, 16, 0), **settings)] * 2
