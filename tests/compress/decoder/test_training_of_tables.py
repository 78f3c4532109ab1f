"""Training beside tables that are rounded: one that is embedding and LM head, a head that was the embedding, a head
that is smoothed. Step 0 answers as the calibrated artifact does, and what does not learn is written as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penjing.compress.decoder.qat import FixedLinear, rounded_layers
from penjing.compress.decoder.stream import HEAD_BIAS
from penjing.compress.quantizers.decoder import RoundedTask
from penjing.compress.run import run_recipe
from penjing.compress.verify import verify_artifact
from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.progress import Silent
from penjing.core.runtime.embedding import CHANNEL

TABLE, HEAD, LEARNT = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight_scale"
UNTURNED = ["steps.0.transform.rotate=false", "guard.perplexity_ratio=9"]
ONE = [*UNTURNED, "steps.0.embedding_dtype=int8"]
FOUR = ["steps.0.weights_bits=4", "steps.0.group=32", "steps.0.offsets=true", "steps.0.transform.search_steps=0"]
IDS = torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def train(
    write: Callable[..., Path], make_tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Trains a tiny decoder as overrides say; gives the artifact that was trained, the calibrated one's tensors, and
    the network that training began with."""

    def run(*overrides: str, **config: Any) -> tuple[Checkpoint, dict[str, Tensor], Any]:
        begun: list[Any] = []
        calibrated: dict[str, Tensor] = {}
        initialize = RoundedTask.initialize

        def watched(self: RoundedTask, model: Any) -> None:
            initialize(self, model)
            folder = open_checkpoint(self._decoder.calibrated)
            calibrated.update({name: folder.get(name) for name in folder.tensor_names})
            begun.append(model)
            with torch.no_grad():
                apart = (model(IDS) - load_model(folder.folder).model(IDS)).abs()
            assert apart.median() < 1e-4

        monkeypatch.setattr(RoundedTask, "initialize", watched)
        model = make_tiny_checkpoint(**{"tie_word_embeddings": True} | config)
        out = run_recipe(write("out", 8), [f"model={model}", *overrides])
        verify_artifact(out, Silent())
        return open_checkpoint(out), calibrated, begun[0]

    return run


@pytest.mark.parametrize(
    "more",
    [
        [],
        pytest.param(FOUR, marks=pytest.mark.full),  # "turned" has four bits too
        ["steps.0.transform.smooth_norm=0.5"],
        [*FOUR, "steps.0.transform.hadamard_table=32"],
    ],
    ids=["8 bits", "4 bits", "smoothed", "turned"],
)
def test_a_table_that_is_the_head_too_stays_as_it_was_calibrated(more: list[str], train: Any) -> None:
    found, calibrated, begun = train(*ONE, *more)
    assert found.config.tie_word_embeddings
    assert set(found.tensor_names) == set(calibrated)
    for name in (TABLE, f"{TABLE}_scale", CHANNEL):
        assert torch.equal(found.get(name), calibrated[name])
    assert not torch.equal(found.get(LEARNT), calibrated[LEARNT])  # other layers did learn
    head = begun.lm_head
    assert isinstance(head, FixedLinear)
    assert not head.weight.requires_grad
    assert HEAD.removesuffix(".weight") not in rounded_layers(begun)
    rows = head.weight * calibrated[CHANNEL]
    torch.testing.assert_close(begun.model.embed_tokens.weight, rows)


def test_a_head_that_was_the_embedding_learns_apart_from_it(train: Any) -> None:
    found, calibrated, begun = train(*UNTURNED, "steps.0.transform.smooth_norm=0.5", "steps.0.embedding_dtype=float32")
    assert not found.config.tie_word_embeddings
    assert found.dtype(TABLE) == "F32"
    assert found.dtype(HEAD) == "I8"
    assert not torch.equal(found.get(TABLE), calibrated[TABLE])
    assert not torch.equal(found.get(f"{HEAD}_scale"), calibrated[f"{HEAD}_scale"])
    norm = begun.model.norm.weight.detach()
    assert (norm - 1).abs().max() > 0.05  # it took the smoothing that the head's columns are multiplied with


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_smoothed_begins_beside_its_norm(tied: bool, train: Any) -> None:
    smooth = ["steps.0.transform.smooth_norm=0.5", "steps.0.embedding_dtype=float32", "steps.0.rounding=nearest"]
    found, _, begun = train(*smooth, tie_word_embeddings=tied)
    assert found.dtype(HEAD) == "I8"
    apart = begun.lm_head.weight / begun.lm_head.unit
    assert ((apart - apart.round()).abs() < 0.485).float().mean() > 0.9  # else floats of another norm were cut to fit


def test_the_bias_of_a_fixed_head_is_kept(train: Any) -> None:
    found, calibrated, begun = train(*ONE, *FOUR, model_type="penjing", head_bias=True, tie_word_embeddings=False)
    assert torch.equal(found.get(HEAD_BIAS), calibrated[HEAD_BIAS])
    assert not begun.lm_head.bias.requires_grad
