"""Float32 layers whose result for a row, or an image, does not depend on the batch, for serving."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.core.vision.graph_eyes import GraphEyes
from penjing.kernels.linear import linear


class BatchInvariantLinear(nn.Linear):
    """`nn.Linear` in float32 whose result for a row is bit-equal whatever rows come with it (`kernels.linear`)."""

    def forward(self, input: Tensor) -> Tensor:
        y_MN = linear(input.reshape(-1, self.in_features), self.weight, self.bias)
        return y_MN.view(*input.shape[:-1], self.out_features)


def apply_batch_invariance(model: nn.Module) -> None:
    """Turn every plain `nn.Linear` of `model` into a `BatchInvariantLinear` with the same parameters, in place."""
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear:
            invariant = BatchInvariantLinear(
                layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta"
            )
            invariant.weight, invariant.bias = layer.weight, layer.bias
            model.set_submodule(name, invariant)


class ImageLinear(nn.Linear):
    """`nn.Linear` on (N, rows, in_features): each of the N is a product of its own.

    A BLAS picks its loop order by the number of rows. Images have equally many, so that the bits of one are those that
    it has alone, on as many threads; `kernels.linear`, which needs no such rule, takes 1.3 times as long.
    """

    def forward(self, input: Tensor) -> Tensor:
        return torch.stack([F.linear(each, self.weight, self.bias) for each in input])


class ImageConv2d(nn.Conv2d):
    """`nn.Conv2d` that computes images one by one."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(ImageConv2d, self).forward(each) for each in input.split(1)])


class ImageGraphEyes(GraphEyes):
    """`GraphEyes` that computes images one by one."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([super(ImageGraphEyes, self).forward(each) for each in images.split(1)])


def apply_image_invariance(model: nn.Module) -> None:
    """Turn every plain `nn.Linear`, `nn.Conv2d` and graph of a network of images into one that computes each image by
    itself, with the same parameters, in place."""
    kinds: dict[type, type] = {nn.Linear: ImageLinear, nn.Conv2d: ImageConv2d, GraphEyes: ImageGraphEyes}
    for layer in model.modules():
        layer.__class__ = kinds.get(type(layer), type(layer))
