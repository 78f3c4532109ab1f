"""Reports in their forms."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def figures_without_ink() -> None:
    """In place of the one of all tests of compression: pages are looked at whole here, with their figures."""
