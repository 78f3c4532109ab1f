"""Logits that no sound model gives: whatever they are, the choice is a token or NOT_FINITE, and kernels and reference
agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penjing.serve.sampling import choice as module
from penjing.serve.sampling.choice import NOT_FINITE, Chooser, StepScores, Wanted, choose_rows
from penjing.serve.sampling.params import SamplingParams
from tests.kernels.cpu import needs_extension
from tests.serve.sampling.masks import Mask

pytestmark = needs_extension
LARGEST = float(np.finfo(np.float32).max)
VALUES = [-np.inf, np.inf, np.nan, LARGEST, -LARGEST, 0.0, -0.0, 1e-45, 1.0, -1.0, 88.0]


@settings(max_examples=200)
@given(st.data(), st.integers(1, 80), st.booleans())
def test_any_logits(data: st.DataObject, vocab: int, masked: bool) -> None:
    common = VALUES if data.draw(st.integers(0, 3)) == 0 else [x for x in VALUES if x == x and x < np.inf]
    logits = np.array([data.draw(st.lists(st.sampled_from(common), min_size=vocab, max_size=vocab))], np.float32)
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.0, 1e-4, 1.0, 1e300])),
        top_k=data.draw(st.sampled_from([-1, 0, 1, vocab, vocab + 1, 2**40])),
        top_p=data.draw(st.sampled_from([1e-300, 0.5, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        repetition_penalty=data.draw(st.sampled_from([1e-300, 1.0, 1e300])),
        frequency_penalty=data.draw(st.sampled_from([-2.0, 0.0, 2.0])),
        logit_bias={vocab - 1: data.draw(st.sampled_from([-100.0, 100.0]))},
        logprobs=data.draw(st.sampled_from([None, 0, 20])),
    )
    words = st.integers(1, 2**32 - 1)
    mask: Any = Mask(np.array([data.draw(words) | 1 for _ in range(-(-vocab // 32))], np.uint32)) if masked else None
    wanted = [Wanted(Chooser(params, 3, 0, [0, vocab - 1], [], mask))]
    (found,) = choose_rows(wanted, StepScores(logits))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "cpu_extension", lambda: None)
        (expected,) = choose_rows(wanted, StepScores(logits))
    assert found.token == expected.token
    assert (found.token == NOT_FINITE) == (not np.isfinite(logits.max()))
    assert found.token == NOT_FINITE or 0 <= found.token < vocab
    if mask is not None and found.token >= 0 and np.isfinite(logits[0][found.token]):
        assert mask.mask[found.token // 32] >> (found.token % 32) & 1
    assert [(token, rank) for token, _, rank in found.scores or []] == [(t, r) for t, _, r in expected.scores or []]
