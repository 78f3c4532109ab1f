"""Decoders whose MLPs have widths of their own, as pruning over all layers leaves them, from checkpoint to tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import decoder_config_to_hf
from penjing.core.runtime.fused import fuse_decoder
from penjing.kernels.dispatch import cpu_extension
from penjing.serve.engine.request import Request
from penjing.serve.generate import generate_stream
from penjing.serve.sampling.params import SamplingParams
from tests.serve.tiny import ids_of, run_all, tiny_engine, tiny_model

# The widest layer last, first and in the middle: buffers must fit it wherever it stands.
WIDTHS = [(24, 56, 8), (56, 8, 24), (8, 24, 56)]
PRUNED: dict[str, Any] = {"model_type": "penjing", "num_hidden_layers": 3, "intermediate_size": 56}


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("widths", WIDTHS)
def test_greedy_answers_are_the_argmax_of_the_torch_model(widths: tuple[int, ...], int8: bool) -> None:
    loaded = tiny_model(seed=2, int8=int8, intermediate_sizes=widths, **PRUNED)
    assert (fuse_decoder(loaded.model) is None) == (cpu_extension() is None)
    engine = tiny_engine(loaded, max_num_batched_tokens=32, kv_dtype="float32")
    random = Random(1)
    for length in (1, 40, 90):
        ids = [random.randrange(256) for _ in range(length)]
        request = Request("r", list(ids), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        (outputs,) = run_all(engine, [request]).values()
        made = ids_of(outputs)
        assert len(made) == 8
        with torch.inference_mode():
            logits = loaded.model(torch.tensor(ids + made))[length - 1 : -1]
        # Equal but for rounding: INT8 rows may round a value to either side, so ties within 1e-3 count.
        chosen = logits.gather(1, torch.tensor(made)[:, None])[:, 0]
        assert (chosen >= logits.amax(1) - 1e-3 * logits.abs().amax()).all()


def test_from_a_checkpoint(make_tiny_checkpoint: Callable[..., Path]) -> None:
    folder = make_tiny_checkpoint(**PRUNED | {"intermediate_sizes": WIDTHS[0]})
    loaded = load_model(folder)
    assert loaded.config.intermediate_sizes == WIDTHS[0]
    outputs = list(generate_stream(folder, "in the other", SamplingParams(temperature=0, max_tokens=12)))
    ids = loaded.tokenizer.encode("in the other")
    with torch.inference_mode():
        for token in ids_of(outputs):
            assert int(loaded.model(torch.tensor(ids))[-1].argmax()) == token
            ids.append(token)


@pytest.mark.parametrize("widths", [(24, 56), (24, 56, 0), (24, 48, 8)])
def test_widths_that_do_not_fit(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"the largest of them intermediate_size=56"):
        tiny_model(intermediate_sizes=widths, **PRUNED)


def test_a_plain_type_has_one_width(make_tiny_checkpoint: Callable[..., Path]) -> None:
    folder = make_tiny_checkpoint(**PRUNED | {"intermediate_sizes": WIDTHS[0]})
    config = open_checkpoint(folder).config
    with pytest.raises(InputError, match=r"intermediate_sizes.*penjing"):
        decoder_config_to_hf(DecoderConfig.model_validate(config.model_dump() | {"model_type": "llama"}))
