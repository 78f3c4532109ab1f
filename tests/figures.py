"""Figures of reports in tests: a conftest that imports the fixture has it for all tests beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def figures_without_ink() -> Iterator[None]:
    """Axes are filled as ever, and then no picture is made of them, which takes matplotlib a tenth of a second, much of
    a small run whose report has figures."""
    from matplotlib.figure import Figure

    def nothing(self: Figure, out: IO[str], **_: Any) -> None:
        out.write("<svg></svg>")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", nothing)
        yield
