"""A decoder's step whose LM head has a copy in 4 bits gives the tokens that it gave before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penjing.core.checkpoint.load import load_model
from penjing.core.models.decoder import Decoder
from penjing.core.runtime import screen
from penjing.core.runtime.fused import fuse_decoder
from penjing.kernels.decoder_step import DecoderStep
from tests.core.artifact.int8_artifact import write_int8_artifact
from tests.kernels.cpu import needs_extension

pytestmark = needs_extension
MakeCheckpoint = Callable[..., Path]
PAGE, TOKENS = 16, 48
CONVOLUTIONS = {"model_type": "penjing", "layer_types": ("short_conv", "full_attention"), "conv_taps": 3}
TURNED = {"model_type": "penjing", "table_hadamard": 64}


@pytest.fixture(params=[{}, CONVOLUTIONS, TURNED], ids=["attention", "convolutions", "turned table"])
def model(request: pytest.FixtureRequest, make_tiny_checkpoint: MakeCheckpoint, tmp_path: Path) -> Decoder:
    checkpoint = make_tiny_checkpoint(hidden_size=128, head_dim=16, **request.param)
    return load_model(write_int8_artifact(checkpoint, tmp_path / "int8", quantize_head=True)).model


def fuse(model: Decoder) -> DecoderStep:
    step = fuse_decoder(model)
    assert step is not None
    return step


def answer(step: DecoderStep, model: Decoder) -> list[tuple[int, float]]:
    """The largest logits of a sequence that goes on with them."""
    config, found = model.config, [(5, 0.0)]
    pages, attending = TOKENS // PAGE, len(config.attention_layers)
    pool = torch.zeros(attending, 2, pages, config.num_key_value_heads, PAGE, config.head_dim)
    rows = torch.zeros(config.num_hidden_layers - attending, pages, PAGE, config.hidden_size)
    table = torch.arange(pages, dtype=torch.int32)[None]
    for at in range(TOKENS):
        one = torch.tensor([at], dtype=torch.int32)
        bounds, last = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        ids = torch.tensor([found[-1][0]], dtype=torch.int32)
        values, ids = step.step_top(
            1, ids, one, one.long(), bounds, one + 1, table, last, pool, row_pool=rows if len(rows) else None
        )
        found.append((int(ids), float(values)))
    return found


def test_tokens_are_the_same(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "LEAST_BYTES", 0)
    plain, screened = fuse(model), fuse(model)
    screened.keep_hidden()
    kept = screened.hidden_RE
    assert screen.screen_head(screened, model) is None
    assert screened.hidden_RE is kept
    assert answer(screened, model) == answer(plain, model)


def test_a_small_head_is_read_as_it_is(model: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "penjing"):
        assert screen.screen_head(fuse(model), model) == "the LM head is small"
    assert "all logits are computed" in caplog.text


def test_a_head_in_floating_point_is_read_as_it_is(make_tiny_checkpoint: MakeCheckpoint) -> None:
    floating = load_model(make_tiny_checkpoint()).model
    assert "not stored in 8 bits" in (screen.screen_head(fuse(floating), floating) or "")
