"""Float32 layers whose result for a row, or an image, does not depend on the batch, for serving."""

from __future__ import annotations

import torch
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


class ImageConv2d(nn.Conv2d):
    """`nn.Conv2d` that computes images one by one."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(ImageConv2d, self).forward(each) for each in input.split(1)])


class ImageGraphEyes(GraphEyes):
    """`GraphEyes` that computes images one by one."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([super(ImageGraphEyes, self).forward(each) for each in images.split(1)])


def apply_image_invariance(model: nn.Module) -> None:
    """Make the bits of each image's result those that it has alone, with the same parameters, in place. Where no part
    of the network is a graph, they do not depend on the number of torch's threads either: a BLAS may add up in another
    order on two threads, `kernels.linear`, which takes 1.3 times as long on one, does not."""
    kinds: dict[type, type] = {nn.Linear: BatchInvariantLinear, nn.Conv2d: ImageConv2d, GraphEyes: ImageGraphEyes}
    for layer in model.modules():
        layer.__class__ = kinds.get(type(layer), type(layer))
