"""Figures of reports in tests: a conftest that imports a fixture has it for all tests beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import IO, Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def figures_without_ink() -> Iterator[Callable[..., None]]:
    """Axes are filled as ever, and then no picture is made of them, which takes matplotlib a tenth of a second, much of
    a run of `penjing compress` on a tiny network. Yields what would make it."""
    from matplotlib.figure import Figure

    def nothing(self: Figure, out: IO[str], **_: Any) -> None:
        out.write("<svg></svg>")

    drawn = Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", nothing)
        yield drawn


@pytest.fixture(scope="module", autouse=True)
def figures_with_ink(figures_without_ink: Callable[..., None]) -> Iterator[None]:
    """Pictures are made; import this one where they are looked at."""
    from matplotlib.figure import Figure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", figures_without_ink)
        yield
