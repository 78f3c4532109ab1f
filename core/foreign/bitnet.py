"""BitNet folders: linear layers of weights −1, 0 and 1 with one scale a layer, trained with activations of 8 bits and a
scale for each token (https://arxiv.org/abs/2402.17764), as transformers reads them (`integrations/bitnet.py` there).

    X.weight        (N / 4, K) uint8: each byte has a weight + 1 of four outputs, N / 4 apart, in two bits each; or
                    (N, K) floating, "online": what training keeps, which becomes three values when it is read
    X.weight_scale  (1) floating, of what is packed: weights are multiplied with it, those of "bitlinear" divided by it

Floating weights become round(w / mean |w|), within −1 and 1, times mean |w|.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penjing.core.errors import InputError
from penjing.core.foreign.layer import FLOATING, TERNARY, TERNARY_ZERO, Folder, Grouped, Shape, finite, need

OUTPUTS_A_BYTE = 4
LEAST_MEAN = 1e-5  # of |w|, as the paper's training has it
HEAD = "lm_head"  # stays floating in all of them


class BitNet:
    """See `Packing`; `values` is the folder's quantization_config."""

    name = "BitNet"
    suffixes = ("weight_scale",)

    def __init__(self, values: dict[str, Any], source: str) -> None:
        """Raises:
        InputError: a variant that penjing does not read.
        """
        known = {"linear_class": ("bitlinear", "autobitlinear"), "quantization_mode": ("offline", "online")}
        usual = {"linear_class": "bitlinear", "quantization_mode": "offline"}
        found = {name: values.get(name, usual[name]) for name in known}
        for name, allowed in known.items():
            if found[name] not in allowed:
                raise InputError(f"{source}: {name} is {found[name]!r}; penjing reads {' and '.join(allowed)}")
        if values.get("use_rms_norm"):
            raise InputError(
                f"{source}: use_rms_norm puts a norm before each linear layer, which penjing does not have"
            )
        self.divides = found["linear_class"] == "bitlinear"
        self.floating = found["quantization_mode"] == "online"
        if self.divides and self.floating:
            raise InputError(f"{source}: quantization_mode 'online' is of linear_class 'autobitlinear' alone")
        kept = values.get("modules_to_not_convert") or [HEAD]
        if kept != [HEAD]:
            raise InputError(f"{source}: modules_to_not_convert is {kept!r}; penjing reads [{HEAD!r}]")

    def modules(self, names: Sequence[str]) -> list[str]:
        """See `Packing`."""
        ending = "_proj.weight" if self.floating else ".weight_scale"
        cut = ".weight" if self.floating else ending
        return [name.removesuffix(cut) for name in names if name.endswith(ending)]

    def check(self, module: str, folder: Folder) -> Shape:
        """See `Packing`."""
        if self.floating:
            return need(folder, f"{module}.weight", FLOATING, (None, None))
        rows, inputs = need(folder, f"{module}.weight", ("U8",), (None, None))
        need(folder, f"{module}.weight_scale", FLOATING, (1,))
        return OUTPUTS_A_BYTE * rows, inputs

    def read(self, module: str, folder: Folder) -> Grouped:
        """See `Packing`."""
        weight = folder.stored(f"{module}.weight")
        if self.floating:
            wide_NK = finite(weight, f"{module}.weight").to(torch.float32)
            scale = wide_NK.abs().mean().clamp(min=LEAST_MEAN)
            code_NK = (wide_NK * (1.0 / scale)).round_().clamp_(-1, 1).add_(TERNARY_ZERO).to(torch.uint8)
            return _layer(code_NK, scale)
        parts = [weight >> 2 * place & 3 for place in range(OUTPUTS_A_BYTE)]
        code_NK = torch.cat(parts) + (TERNARY_ZERO - 1)
        if (code_NK > TERNARY_ZERO + 1).any():
            raise InputError(f"{module}.weight holds bits that stand for none of -1, 0 and 1")
        stored = finite(folder.stored(f"{module}.weight_scale"), f"{module}.weight_scale").to(torch.float32)[0]
        scale = 1.0 / stored if self.divides else stored
        if not 0 < scale < torch.inf:
            raise InputError(f"{module}.weight_scale is {float(stored):g}, which gives no scale of weights")
        return _layer(code_NK, scale)


def _layer(code_NK: Tensor, scale: Tensor) -> Grouped:
    outputs, inputs = code_NK.shape
    zero_N1 = torch.full((outputs, 1), TERNARY_ZERO, dtype=torch.uint8)
    return Grouped(TERNARY, code_NK, zero_N1, scale.expand(outputs, 1).contiguous(), None, inputs)
