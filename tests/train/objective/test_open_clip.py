"""The contrastive losses and their gradients are open_clip's, of a whole step and of one that is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penjing.core.vision.towers import Seen
from penjing.train.objective.contrastive import Contrastive, Kind

# Written by benchmarks/peers/open_clip_reference.py.
REFERENCE: dict[str, Any] = json.loads((Path(__file__).parent / "reference" / "open_clip.json").read_text())
SCALE, BIAS = 7.5, -2.5


class Vectors(nn.Module):
    """The reference's vectors by their numbers, as a model that learns them."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.images, self.texts = (
            nn.Parameter(torch.tensor(REFERENCE[name], dtype=torch.float64)) for name in ("images", "texts")
        )
        bias = BIAS if kind == "siglip" else 0.0
        self.scale, self.bias = (nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (SCALE, bias))

    def forward(self, images: Tensor, tokens: Tensor, mask: Tensor) -> Seen:
        return Seen(self.images[images], self.texts[tokens], self.scale, self.bias)


@pytest.mark.parametrize("sizes", [[6], [2, 3, 1]])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_losses_and_gradients_are_those_of_open_clip(kind: Kind, sizes: list[int]) -> None:
    model, objective, expected = Vectors(kind), Contrastive(kind), REFERENCE[kind]
    batches = [
        {"images": ids, "tokens": ids, "mask": ids, "group": ids, "real": torch.ones(len(ids), dtype=torch.bool)}
        for ids in torch.arange(6).split(sizes)
    ]
    objective.begin(model, batches)
    total = 0.0
    for batch in batches:
        loss = objective(model, batch).total / 6
        loss.backward()
        total += float(loss.detach())
    assert total == pytest.approx(expected["loss"], abs=1e-9)
    named = {"images": "image_features", "texts": "text_features", "scale": "logit_scale", "bias": "logit_bias"}
    for ours, theirs in named.items():
        if theirs in expected["gradients"]:
            gradient = torch.tensor(expected["gradients"][theirs], dtype=torch.float64)
            torch.testing.assert_close(model.get_parameter(ours).grad, gradient, atol=1e-9, rtol=1e-9)
