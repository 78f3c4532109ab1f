"""What a decoder's settings are refused for before a server starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penjing.core.errors import ConfigError
from penjing.serve.engine.config import EngineConfig
from penjing.serve.families.decoder import FAMILY


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_model_len": 1 << 30}, "max_model_len=1073741824 is above the model's context of 512 tokens"),
        (
            {"kv_cache_bytes": 5},
            "the KV cache holds 0 blocks of [0-9]+ bytes and needs at least 2; raise kv_cache_bytes",
        ),
        ({"kv_cache_bytes": 1 << 60}, "does not fit the [0-9]+ available; lower num_blocks or kv_cache_bytes"),
        ({"max_model_len": 512, "num_blocks": 3}, "max_model_len=512 needs 33 KV blocks of 16 tokens, there are 3"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_before_the_server_starts(
    tiny_checkpoint: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        FAMILY.check(tiny_checkpoint, EngineConfig(**settings))


def test_a_cache_that_can_be_is_taken(tiny_checkpoint: Path) -> None:
    assert FAMILY.check(tiny_checkpoint, EngineConfig(max_model_len=64, num_blocks=9)) == tiny_checkpoint
