"""AWQ folders in the layout "gemm", as AutoAWQ writes them.

    X.qweight  (K, N / 8) int32: codes of one input; a word holds the outputs 0, 2, 4, 6, 1, 3, 5, 7 of its eight
    X.qzeros   (G, N / 8) int32: zeros of one group in the same order
    X.scales   (G, N) floating

https://github.com/casper-hansen/AutoAWQ/blob/main/awq/utils/packing_utils.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penjing.core.errors import InputError
from penjing.core.foreign.layer import (
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

BITS = 4
A_WORD = WORD // BITS
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each half byte of a word belongs to, from the lowest


class Awq:
    """See `Packing`; `values` is the folder's quantization_config."""

    name = "AWQ"
    suffixes = ("qweight", "qzeros", "scales")

    def __init__(self, values: dict[str, Any], source: str) -> None:
        """Raises:
        InputError: bits, groups or a variant of the layout that penjing does not read.
        """
        key = "bits" if "bits" in values else "w_bit"  # older files have other names
        number(values, key, lambda bits: bits == BITS, "4", source)
        sizes = values if "group_size" in values else {"group_size": values.get("q_group_size")}
        self.size = group_size(sizes, source)
        layout = values.get("version") or values.get("format") or "gemm"
        if not isinstance(layout, str) or layout.lower() != "gemm":
            raise InputError(f"{source}: version is {layout!r}; penjing reads AWQ's layout 'gemm'")
        if values.get("zero_point", True) is not True:
            raise InputError(f"{source}: zero_point is {values['zero_point']!r}; AWQ's layout 'gemm' has zero points")

    def modules(self, names: Sequence[str]) -> list[str]:
        """See `Packing`."""
        return [name.removesuffix(".qweight") for name in names if name.endswith(".qweight")]

    def check(self, module: str, folder: Folder) -> Shape:
        """See `Packing`."""
        inputs, words = need(folder, f"{module}.qweight", ("I32",), (None, None))
        groups = num_groups(inputs, self.size)
        need(folder, f"{module}.qzeros", ("I32",), (groups, words))
        need(folder, f"{module}.scales", FLOATING, (groups, words * A_WORD))
        return words * A_WORD, inputs

    def read(self, module: str, folder: Folder) -> Grouped:
        """See `Packing`."""
        code_NK = _outputs(folder.stored(f"{module}.qweight")).t().contiguous()
        zero_NG = _outputs(folder.stored(f"{module}.qzeros")).t().contiguous()
        scale_NG = finite(folder.stored(f"{module}.scales"), f"{module}.scales").t().contiguous()
        return Grouped(BITS, code_NK, zero_NG, scale_NG, None, self.size or code_NK.shape[1])


def _outputs(words: Tensor) -> Tensor:
    """(R, N / 8) int32 → (R, N) uint8, outputs in their order."""
    halves = unpacked(words, BITS)
    ordered = torch.empty_like(halves)
    ordered[..., list(ORDER)] = halves
    return ordered.flatten(1)
