"""The gated MLP of a decoder layer."""

from __future__ import annotations

from torch import Tensor, nn

from penjing.kernels.swiglu import swiglu


class MLP(nn.Module):
    """down(silu(gate(x)) × up(x)): (…, hidden) → (…, hidden)."""

    def __init__(self, hidden: int, inner: int, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
