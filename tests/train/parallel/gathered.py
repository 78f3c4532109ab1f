"""One process of a ZeRO 3 world that makes and exports a model, as `train.run` does, and measures its memory.

Started by `worlds.py` as a script: RANK, WORLD_SIZE and a folder; rank 0 leaves results.json and `out` there.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penjing.core.checkpoint.decoder import save_checkpoint
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.models.tensor_names import tensor_shapes
from penjing.core.progress import Silent
from penjing.train.parallel.config import ParallelConfig
from penjing.train.parallelize import form_mesh, gather, parallelize
from penjing.train.processes.world import World
from penjing.train.state.initial import decoder_weights, fill_weights, materialize, without_data

CONFIG = DecoderConfig(
    vocab_size=4096, hidden_size=384, intermediate_size=1024, num_hidden_layers=5, num_attention_heads=6,
    num_key_value_heads=6, head_dim=64, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


class Held(TorchDispatchMode):
    """`most` bytes that tensors made inside held at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what is done to its part comes here again
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._made.values()))
        return output


WEIGHTS = decoder_weights(0.02, CONFIG.num_hidden_layers, seed=1)


def alone() -> Decoder:
    """What one process begins with."""
    model = Decoder(CONFIG)
    fill_weights(model, WEIGHTS)
    return model


def main(folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    world = form_mesh(World(rank, size), ParallelConfig(zero=3), Silent())
    with Held() as held:
        with without_data():
            model: torch.nn.Module = Decoder(CONFIG)
        model = parallelize(model, world).model
        materialize(model, world.device)
        fill_weights(model, WEIGHTS)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: see proc(5)
    before = memory("VmRSS")
    whole = gather(model, world, (lambda: Decoder(CONFIG)) if rank == 0 else None)  # type: ignore[arg-type]
    if rank == 0:
        (folder / "out").mkdir()
        parameters = dict(whole.named_parameters())
        save_checkpoint(folder / "out", CONFIG, ((name, parameters[name].detach()) for name in tensor_shapes(CONFIG)))
    grown: list[int] = [0] * size
    dist.all_gather_object(grown, memory("VmHWM") - before)
    most: list[int] = [0] * size
    dist.all_gather_object(most, held.most)
    if rank == 0:
        sizes = [parameter.nbytes for parameter in whole.parameters()]
        results = {"grown": grown, "most": most, "model": sum(sizes), "largest": max(sizes)}
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
