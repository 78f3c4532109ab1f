"""The processor's level in the names of speeds, so that rows of one level do not stand in place of another's."""

from __future__ import annotations

from lib.rows import Row
from penjing.kernels.cpu import extension


def level_prefix() -> str:
    """Nothing with AVX-512, where most rows were measured; else the level, "avx2/" for plain kernels as well."""
    kernels = extension()
    isa = kernels.isa if kernels is not None else "avx2"
    return {"amx": "amx/", "avx_vnni": "avx_vnni/", "avx2": "avx2/", "scalar": "avx2/"}.get(isa, "")


def at_level(rows: list[Row], speeds: tuple[str, ...] = ("",), prefix: str = "") -> list[Row]:
    """The same rows; the level and `prefix` stand before metrics that begin with one of `speeds`, by default all."""
    prefix = level_prefix() + prefix
    return [
        row.model_copy(update={"metric": prefix + row.metric}) if row.metric.startswith(speeds) else row for row in rows
    ]
