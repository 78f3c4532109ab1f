"""Gates of attention against float64, in each instruction set."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from penjing.kernels.attention_gate import GATE_FUNCTIONS, GateFunction, open_gate

pytestmark = pytest.mark.usefixtures("implementation")
WIDE = {"sigmoid": torch.sigmoid, "softplus": lambda x: F.softplus(x, threshold=800)}


@pytest.mark.parametrize("function", GATE_FUNCTIONS)
def test_each_function(function: GateFunction) -> None:
    x = torch.cat((torch.linspace(-60, 60, 4003), torch.tensor([0.0, -200.0, 200.0, torch.inf, -torch.inf, torch.nan])))
    found, expected = open_gate(x, function), WIDE[function](x.double())
    assert found[-1].isnan()
    torch.testing.assert_close(found[:-1].double(), expected[:-1], rtol=5e-6, atol=1e-37)  # of a small gate, too
    near = x.abs() < 15
    torch.testing.assert_close(found[near].double(), WIDE[function](x[near].double()), rtol=1.5e-6, atol=0)
    assert torch.equal(open_gate(x[1000:1007], function), found[1000:1007])  # wherever an element lies
    assert open_gate(x.bfloat16(), function).dtype == torch.bfloat16


@pytest.mark.parametrize("function", GATE_FUNCTIONS)
def test_gradients(function: GateFunction) -> None:
    x = torch.linspace(-3, 3, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: open_gate(x, function), (x,))
