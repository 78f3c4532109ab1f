"""Float32 linear layers whose rows do not depend on the batch, for serving (`kernels.linear`)."""

from __future__ import annotations

from torch import Tensor, nn

from penjing.kernels.linear import linear


class BatchInvariantLinear(nn.Linear):
    """`nn.Linear` in float32 whose result for a row is bit-equal whatever rows come with it."""

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
