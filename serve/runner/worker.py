"""One of the processes of a model that several compute together: `python -m penjing.serve.runner.worker`.

It loads its part, follows the steps of the first process, and ends with it.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from penjing.serve.engine.config import EngineConfig
from penjing.serve.runner.ranks import Channel, GlooGather, Store, c10d, decode_step

if TYPE_CHECKING:
    from penjing.core.models.decoder import Decoder
    from penjing.core.runtime.tensor_parallel import Split


def follow(channel: Channel, model: Decoder, split: Split, rank: int, store: Store) -> None:
    """Say that `model` is loaded, then compute the steps that come until the other end goes.

    Raises:
        RuntimeError: another process went during a step, or stalled.
    """
    from penjing.core.runtime.tensor_parallel import apply_tensor_parallel
    from penjing.kernels.dispatch import cpu_extension
    from penjing.serve.runner.kv_pool import allocate_cache
    from penjing.serve.runner.model_step import ModelStep

    channel.send(b"loaded")
    settings = channel.receive()
    if settings is None:
        return
    config = EngineConfig.model_validate_json(settings)
    assert config.num_blocks is not None
    extension = cpu_extension()
    assert extension is not None  # the first process has looked
    apply_tensor_parallel(model, split, rank, GlooGather(store, rank, split.ranks), extension)
    cache = allocate_cache(split.share(rank), config.num_blocks, config.block_size, config.kv_dtype)
    step = ModelStep(model)
    while (message := channel.receive()) is not None:
        step(decode_step(message), cache)


def _main(folder: str, rank: str, ranks: str, descriptor: str, context: str, store_path: str) -> None:
    import socket

    from penjing.core.checkpoint.load import load_model
    from penjing.core.runtime.tensor_parallel import Split

    channel = Channel(socket.socket(fileno=int(descriptor)))
    loaded = load_model(Path(folder), share=(int(rank), int(ranks)), context=int(context) if context else None)
    split = Split(loaded.config, int(ranks))
    follow(channel, loaded.model, split, int(rank), c10d.FileStore(store_path, int(ranks)))


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    except Exception:
        print(f"process {sys.argv[2]} of {sys.argv[3]} of the model cannot go on:", file=sys.stderr)
        traceback.print_exc(limit=-3)  # where it was; frames of torch's modules are many and say nothing
        sys.exit(1)
