"""Tests of one group run in one process, so that what they share is made once."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("kept")
def test_groups_reach_the_scheduler(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("loadgroup", False):
        pytest.skip("not run by pytest -n 2 --dist loadgroup, as make test does")
    assert request.node.nodeid.endswith("@kept"), "pytest-xdist no longer groups tests with this version of pytest"
