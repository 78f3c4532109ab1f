from __future__ import annotations

import pytest

from penjing.train.recipe.recipe import parse_size


def test_sizes_are_read_with_their_units() -> None:
    assert [parse_size(text) for text in ("6GiB", "1.5 KiB", "200", "3 MB")] == [6 * 2**30, 1536, 200, 3_000_000]
    with pytest.raises(ValueError, match="is no size; write for example 6GiB"):
        parse_size("6 gigs")
