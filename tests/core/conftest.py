"""The core: where its tests compress what they imported, their reports have no pictures."""

from __future__ import annotations

from tests.figures import figures_without_ink  # noqa: F401
