"""The memory of keys and values, shared out among the decoders of one command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field

from penjing.core.config import Config
from penjing.core.errors import ConfigError
from penjing.core.progress import volume
from penjing.serve.engine.config import EngineConfig

_UNBOUNDED = 1 << 62


class Cache(Config):
    """A decoder's key-value cache."""

    bytes: int = Field(description="Of memory, which it takes as it fills.")
    tokens: int = Field(description="That it holds, of all running answers together.")

    @property
    def described(self) -> str:
        """For the terminal."""
        return f"KV cache of {volume(self.bytes)} for {self.tokens:,} tokens"


def share_memory(
    engines: Mapping[str, EngineConfig], folders: Mapping[str, Path], total: int | None
) -> dict[str, Cache]:
    """The cache of each decoder, by its name. What a setting fixes is kept; the rest of `total` is divided evenly, and
    what a model cannot use goes to the others.

    Args:
        engines: the settings of the decoders, by their names.
        folders: of all models, whose weights need memory too.
        total: bytes of all caches; None: what a single decoder would take, of the memory beside all weights.

    Raises:
        ConfigError: they do not fit, or the memory of a GPU is not divided.
    """
    from penjing.core.checkpoint.decoder import open_checkpoint
    from penjing.serve.runner.kv_pool import AVAILABLE_SHARE, MAX_AUTO_BYTES, available_memory, resolve

    stored = {name: open_checkpoint(folders[name]) for name in engines}

    def resolved(name: str, config: EngineConfig) -> EngineConfig:
        return resolve(config, stored[name].config, _UNBOUNDED, stored[name].quantization is not None)

    most = {name: resolved(name, config) for name, config in engines.items()}
    free = [name for name in engines if engines[name].num_blocks is None and engines[name].kv_cache_bytes is None]
    if total is None:
        if len(engines) > 1 and any(most[name].device == "cuda" for name in free):
            raise ConfigError("several decoders share a GPU: give --kv-cache-bytes, the memory of all their caches")
        room = available_memory() - sum(map(_size, folders.values()))
        total = min(int(AVAILABLE_SHARE * max(0, room)), MAX_AUTO_BYTES)
        if not free:
            total = _UNBOUNDED
    needs = {name: most[name].kv_cache_bytes or 0 for name in engines}
    rest = total - sum(needs[name] for name in engines if name not in free)
    if rest < 0 or (free and not rest):
        raise ConfigError(
            f"the key-value caches that --set fixes take {volume(total - rest)} of {volume(total)}; raise "
            "--kv-cache-bytes or lower them"
        )
    parts = needs | dict(zip(free, divided(rest, [needs[name] for name in free]), strict=True))
    caches = {}
    for name, config in engines.items():
        if name in free:
            config = config.model_copy(update={"kv_cache_bytes": parts[name]})
        try:
            found = resolved(name, config)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        assert found.kv_cache_bytes is not None and found.num_blocks is not None, "resolved"  # noqa: PT018
        caches[name] = Cache(bytes=found.kv_cache_bytes, tokens=(found.num_blocks - 1) * found.block_size)
    return caches


def divided(total: int, needs: Sequence[int]) -> list[int]:
    """`total` in even parts, none above its need; what that leaves over is divided again."""
    parts, left = [0] * len(needs), total
    for position, index in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        parts[index] = min(needs[index], left // (len(needs) - position))
        left -= parts[index]
    return parts


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
