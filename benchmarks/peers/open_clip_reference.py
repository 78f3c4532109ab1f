"""Prints what open_clip's losses and their gradients are for vectors that a test has too.

    bash benchmarks/peers/open_clip.sh
    build/peers/open_clip/venv/bin/python benchmarks/peers/open_clip_reference.py > open_clip.json

which lies in tests/train/objective/reference. Six images and their texts as vectors of length 1, in 64 bits.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.metadata import distribution
from typing import Any

import torch
import torch.nn.functional as F

PAIRS, WIDTH = 6, 4
SCALE, BIAS = 7.5, -2.5


def main() -> None:
    torch.manual_seed(5)
    losses, found = losses_of_open_clip(), dict[str, Any]()
    images, texts = (F.normalize(torch.randn(PAIRS, WIDTH, dtype=torch.float64), dim=1) for _ in range(2))
    for kind, loss, extra in (
        ("clip", losses.ClipLoss(), {}),
        ("siglip", losses.SigLipLoss(), {"logit_bias": torch.tensor(BIAS, dtype=torch.float64)}),
    ):
        given = {"image_features": images.clone(), "text_features": texts.clone()}
        given |= {"logit_scale": torch.tensor(SCALE, dtype=torch.float64)} | extra
        for tensor in given.values():
            tensor.requires_grad_()
        value = loss(**given)
        gradients = dict(zip(given, torch.autograd.grad(value, list(given.values())), strict=True))
        gradients = {name: gradient.tolist() for name, gradient in gradients.items()}
        found[kind] = {"loss": value.item(), "gradients": gradients}
    version = distribution("open_clip_torch").version
    json.dump({"open_clip": version, "images": images.tolist(), "texts": texts.tolist(), **found}, sys.stdout, indent=1)
    print()


def losses_of_open_clip() -> Any:
    """The module alone: the package imports torchvision."""
    path = distribution("open_clip_torch").locate_file("open_clip/loss.py")
    spec = importlib.util.spec_from_file_location("open_clip_loss", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
