"""The memory of the KV cache: how much there may be, and the tensors themselves."""

from __future__ import annotations

import math
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from penjing.core.checkpoint.dtypes import DTYPES
from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig
from penjing.kernels.cpu.kv_layout import check_int8_head_dim
from penjing.serve.engine.config import EngineConfig, KvDtype
from penjing.serve.engine.scheduler import largest_window
from penjing.serve.runner.device import resolve_device
from penjing.serve.runner.key_blocks import bytes_per_page, check_key_blocks

AVAILABLE_SHARE = 0.4  # of the memory that is free when the engine starts
MAX_AUTO_BYTES = 4 << 30
DEVICE_SHARE = 0.9  # of a GPU's memory beside model and workspace: nothing else lives there
SCALE_BYTES = 4  # float32


def resolve(
    config: EngineConfig, model: DecoderConfig, available_bytes: int, is_quantized: bool = False
) -> EngineConfig:
    """`config` with `num_blocks`, `kv_cache_bytes` and `max_model_len` decided for `model`; see also `resolve_device`.

    Raises:
        ConfigError: the settings contradict each other, the model or the memory; says by how much.
    """
    config = resolve_device(config, model, is_quantized)
    check_key_blocks(config, model)
    size, context = config.block_size, model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > context:
        raise ConfigError(f"max_model_len={config.max_model_len} is above the model's context of {context} tokens")
    if config.kv_dtype == "int8":
        try:
            check_int8_head_dim(model.head_dim)
        except ValueError as error:
            raise ConfigError(f"kv_dtype=int8 does not fit this model: {error}") from None
    longest = config.max_model_len or context
    block_bytes = bytes_per_block(model, size, config.kv_dtype) + bytes_per_page(config, model)
    # A null block, and one sequence's last block beyond `longest` tokens of every sequence that may run.
    useful_blocks = 1 + config.max_num_sequences * _peak_blocks(config, model, longest)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif config.kv_cache_bytes is not None:
        num_blocks = config.kv_cache_bytes // block_bytes
    else:
        room = DEVICE_SHARE * available_bytes
        if config.device == "cpu":
            room = min(AVAILABLE_SHARE * available_bytes, MAX_AUTO_BYTES)
        num_blocks = min(int(room) // block_bytes, useful_blocks)
    if num_blocks < 2:
        raise ConfigError(
            f"the KV cache holds {num_blocks} blocks of {block_bytes} bytes and needs at least 2; "
            f"raise kv_cache_bytes, lower block_size={size}, or free memory"
        )
    if num_blocks * block_bytes > available_bytes:
        raise ConfigError(
            f"a KV cache of {num_blocks * block_bytes} bytes does not fit the {available_bytes} available; "
            f"lower num_blocks or kv_cache_bytes"
        )
    if _peak_blocks(config, model, longest) > num_blocks - 1:
        if config.max_model_len is not None:
            raise ConfigError(
                f"max_model_len={longest} needs {_peak_blocks(config, model, longest) + 1} KV blocks of {size} tokens, "
                f"there are {num_blocks}; raise kv_cache_bytes or lower max_model_len"
            )
        longest = (num_blocks - 1) * size
        if longest < 2:
            raise ConfigError(f"a KV cache of {num_blocks} blocks of {size} tokens holds no prompt and answer")
    return config.model_copy(
        update={"num_blocks": num_blocks, "kv_cache_bytes": num_blocks * block_bytes, "max_model_len": longest}
    )


def _peak_blocks(config: EngineConfig, model: DecoderConfig, num_tokens: int) -> int:
    whole, window = -(-num_tokens // config.block_size), largest_window(model)
    if window is None:
        return whole
    return min(whole, -(-(window + config.max_num_batched_tokens) // config.block_size) + 1)


@dataclass(frozen=True)
class PagedCache:
    """What tokens leave to those behind them, in blocks that the scheduler knows by their numbers.

    Attributes:
        pool: (attention layers, 2, num_blocks, num_kv_heads, block_size, head_dim) keys and values.
        scale: float32 of an INT8 pool, without its last dimension.
        rows: (convolutions, num_blocks, block_size, hidden) float32, see `kernels.row_pages`; None: there are none.
            They are not rounded, whatever keys and values are: it is what a layer computes with, not what it compares.
    """

    pool: torch.Tensor
    scale: torch.Tensor | None
    rows: torch.Tensor | None


def pool_shape(model: DecoderConfig, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Of `PagedCache.pool`."""
    return len(model.attention_layers), 2, num_blocks, model.num_key_value_heads, block_size, model.head_dim


def rows_shape(model: DecoderConfig, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Of `PagedCache.rows`, the first number 0 where there are none."""
    convolutions = sum(map(model.is_conv, range(model.num_hidden_layers)))
    return convolutions, num_blocks, block_size, model.hidden_size


def bytes_per_block(model: DecoderConfig, block_size: int, kv_dtype: KvDtype) -> int:
    """Of all layers, scales included."""
    *rows, head_dim = pool_shape(model, 1, block_size)
    of_head = head_dim + SCALE_BYTES if kv_dtype == "int8" else head_dim * DTYPES[kv_dtype].itemsize
    return math.prod(rows) * of_head + math.prod(rows_shape(model, 1, block_size)) * torch.float32.itemsize


def allocate_cache(
    model: DecoderConfig, num_blocks: int, block_size: int, kv_dtype: KvDtype, device: str = "cpu"
) -> PagedCache:
    """Zeros. On the CPU the system hands out their pages when they are first written."""
    shape, rows = (shape_of(model, num_blocks, block_size) for shape_of in (pool_shape, rows_shape))
    eight = kv_dtype == "int8"
    return PagedCache(
        _zeros(shape, torch.int8 if eight else DTYPES[kv_dtype], device),
        _zeros(shape[:-1], torch.float32, device) if eight else None,
        _zeros(rows, torch.float32, device) if rows[0] else None,
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without transparent huge pages refuses; the cache works, its address translation is slower.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def available_memory() -> int:
    """Bytes that can be allocated now, the limit of a container considered."""
    bounds = [_meminfo_available()]
    limit, used = (_read_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        bounds.append(max(0, limit - used))
    return min(bounds)


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None
