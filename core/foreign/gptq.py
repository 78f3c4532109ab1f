"""GPTQ folders, as AutoGPTQ and GPTQModel write them.

    X.qweight  (K × bits / 32, N) int32: codes of one output, inputs in their order from the lowest bits
    X.qzeros   (G, N × bits / 32) int32: zeros of one group, outputs in their order
    X.scales   (G, N) floating
    X.g_idx    (K,) int32: the group of each input. With `desc_act` inputs are grouped in the order of how active they
               are, so that groups do not lie together.

In the first version of the format ("gptq") each word of zeros is less by 1 in each of its numbers, as a 32-bit
subtraction; "gptq_v2" has them as they are. GPTQModel reads them so:
https://github.com/ModelCloud/GPTQModel/blob/main/gptqmodel/utils/model.py (convert_gptq_v1_to_v2_format).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penjing.core.errors import InputError
from penjing.core.foreign.layer import (
    BITS,
    FLOATING,
    WORD,
    Folder,
    Grouped,
    Shape,
    finite,
    group_size,
    need,
    num_groups,
    number,
    unpacked,
)

FORMATS = ("gptq", "gptq_v2")
_ONES = {4: 0x11111111, 8: 0x01010101}


class Gptq:
    """See `Packing`; `values` is the folder's quantization_config."""

    name = "GPTQ"
    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, values: dict[str, Any], source: str) -> None:
        """Raises:
        InputError: bits, groups or a variant of the layout that penjing does not read.
        """
        self.bits = number(values, "bits", lambda bits: bits in BITS, "4 and 8", source)
        self.size = group_size(values, source)
        self.ordered = values.get("desc_act", False)
        if not isinstance(self.ordered, bool):
            raise InputError(f"{source}: desc_act is {self.ordered!r}; true or false is needed")
        layout = values.get("checkpoint_format") or values.get("format") or "gptq"
        if layout not in FORMATS:
            raise InputError(f"{source}: checkpoint_format is {layout!r}; penjing reads {' and '.join(FORMATS)}")
        if values.get("dynamic"):
            raise InputError(f"{source}: dynamic gives layers other bits or groups; penjing reads one kind for all")
        if values.get("pack_dtype", "int32") != "int32":
            raise InputError(f"{source}: pack_dtype is {values['pack_dtype']!r}; penjing reads int32")
        self.first_version = layout == "gptq"

    def modules(self, names: Sequence[str]) -> list[str]:
        """See `Packing`."""
        return [name.removesuffix(".qweight") for name in names if name.endswith(".qweight")]

    def check(self, module: str, folder: Folder) -> Shape:
        """See `Packing`."""
        a_word = WORD // self.bits
        words, outputs = need(folder, f"{module}.qweight", ("I32",), (None, None))
        inputs = words * a_word
        groups = num_groups(inputs, self.size)
        need(folder, f"{module}.qzeros", ("I32",), (groups, -(-outputs // a_word)))
        need(folder, f"{module}.scales", FLOATING, (groups, outputs))
        if self.ordered:
            need(folder, f"{module}.g_idx", ("I32",), (inputs,))
        return outputs, inputs

    def read(self, module: str, folder: Folder) -> Grouped:
        """See `Packing`."""
        code_NK = unpacked(folder.stored(f"{module}.qweight").t(), self.bits).flatten(1)
        words = folder.stored(f"{module}.qzeros")
        if self.first_version:  # int64, and cut again: int32 would overflow
            words = ((words.to(torch.int64) + _ONES[self.bits]) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
        scale_NG = finite(folder.stored(f"{module}.scales"), f"{module}.scales").t().contiguous()
        zero_NG = unpacked(words, self.bits).flatten(1)[:, : len(scale_NG)].t().contiguous()
        size = self.size or code_NK.shape[1]
        group_K = self._order(module, folder, code_NK.shape[1], size) if self.ordered else None
        return Grouped(self.bits, code_NK, zero_NG, scale_NG, group_K, size)

    def _order(self, module: str, folder: Folder, inputs: int, size: int) -> Tensor | None:
        group_K = folder.stored(f"{module}.g_idx").to(torch.int64)
        groups = num_groups(inputs, size)
        if int(group_K.min()) < 0 or int(group_K.max()) >= groups:
            raise InputError(
                f"{module}.g_idx holds groups from {int(group_K.min())} to {int(group_K.max())}; {inputs} inputs have "
                f"{groups} groups, from 0"
            )
        return None if torch.equal(group_K, torch.arange(inputs) // size) else group_K
