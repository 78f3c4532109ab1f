"""The MLP of a decoder layer."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from penjing.core.models.norm import RMSNorm
from penjing.kernels.activation import XIELU_LINEAR, Activation, activate, xielu
from penjing.kernels.geglu import geglu
from penjing.kernels.hadamard import hadamard
from penjing.kernels.swiglu import clamped_swiglu, swiglu

Gate = Activation | Literal["clamped_swiglu"]


def _squared(gate: Tensor, up: Tensor) -> Tensor:
    return activate(gate, "relu2") * up


GATED = {"silu": swiglu, "gelu_tanh": geglu, "relu2": _squared, "clamped_swiglu": clamped_swiglu}


class XIELU(nn.Module):
    """An activation whose curvature on both sides of 0 is learned (https://arxiv.org/abs/2411.13010): `alpha_p` and
    `alpha_n`, (1,), become positive by softplus."""

    def __init__(self) -> None:
        super().__init__()
        begin = torch.tensor([0.8, 0.8 - XIELU_LINEAR]).expm1().log()  # as the paper begins
        self.alpha_p, self.alpha_n = nn.Parameter(begin[:1].clone()), nn.Parameter(begin[1:].clone())

    def forward(self, x: Tensor) -> Tensor:
        """Shape and dtype of `x`."""
        if torch.is_grad_enabled() or x.is_meta or isinstance(x, FakeTensor):  # those have no numbers to look at
            return xielu(x, F.softplus(self.alpha_p), XIELU_LINEAR + F.softplus(self.alpha_n)).to(x.dtype)
        return activate(x, "xielu", self.curve)

    @property
    def curve(self) -> tuple[float, float]:
        """The factors of `kernels.activation.xielu`."""
        return float(F.softplus(self.alpha_p)), XIELU_LINEAR + float(F.softplus(self.alpha_n))


class MLP(nn.Module):
    """down(act(gate(x)) × up(x)), without `gated` down(act(gate(x))), with a norm before `down` if there is one:
    (…, hidden) → (…, hidden).

    Args:
        hadamard: block of the transform of what `down` reads, which its weight undoes (`kernels.hadamard`); 0: none.
        activation: of the gate; with `gated` one of GATED.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        bias: bool = False,
        hadamard: int = 0,
        activation: Gate = "silu",
        gated: bool = True,
        inner_norm: RMSNorm | None = None,
    ):
        super().__init__()
        self.hadamard, self.gated = hadamard, gated
        self.activation: Gate = activation
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        if gated:
            self.up_proj = nn.Linear(hidden, inner, bias=bias)
        if activation == "xielu":
            self.act_fn = XIELU()
        self.ffn_sub_norm = inner_norm
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            inner = GATED[self.activation](self.gate_proj(x), self.up_proj(x))
        elif self.activation == "xielu":
            inner = self.act_fn(self.gate_proj(x))
        else:
            assert self.activation != "clamped_swiglu", "it is of a gate"
            inner = activate(self.gate_proj(x), self.activation)
        if self.ffn_sub_norm is not None:
            inner = self.ffn_sub_norm(inner)
        return self.down_proj(hadamard(inner, self.hadamard).to(inner.dtype) if self.hadamard else inner)


class TokenInput(nn.Module):
    """norm(out(gelu(gate(x)) × p)) of a layer's hidden state x (…, E) and of what it takes of a token, p (…, P)."""

    def __init__(self, hidden: int, width: int, eps: float):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.out_proj = nn.Linear(width, hidden, bias=False)
        self.norm = RMSNorm(hidden, eps)

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        return self.norm(self.out_proj(geglu(self.gate_proj(x), p.to(x.dtype))))
