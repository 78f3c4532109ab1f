"""The MLP of a decoder layer."""

from __future__ import annotations

from torch import Tensor, nn

from penjing.kernels.activation import Activation, activate
from penjing.kernels.geglu import geglu
from penjing.kernels.hadamard import hadamard
from penjing.kernels.swiglu import swiglu


class MLP(nn.Module):
    """down(act(gate(x)) × up(x)), without `gated` down(act(gate(x))): (…, hidden) → (…, hidden).

    Args:
        hadamard: block of the transform of what `down` reads, which its weight undoes (`kernels.hadamard`); 0: none.
        activation: of the gate; with `gated` "silu" or "gelu_tanh".
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        bias: bool = False,
        hadamard: int = 0,
        activation: Activation = "silu",
        gated: bool = True,
    ):
        super().__init__()
        self.hadamard, self.gated = hadamard, gated
        self.activation: Activation = activation
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        if gated:
            self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            inner = (geglu if self.activation == "gelu_tanh" else swiglu)(self.gate_proj(x), self.up_proj(x))
        else:
            inner = activate(self.gate_proj(x), self.activation)
        return self.down_proj(hadamard(inner, self.hadamard).to(inner.dtype) if self.hadamard else inner)
