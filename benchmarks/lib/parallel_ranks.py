"""What one process of a small world does for run_parallel.py: counts bytes, or runs layers that sleep.

Sleeping layers leave the processors free, so four stages run side by side on any machine, as on four GPUs. Started as
a script, once a process: RANK WORLD_SIZE FOLDER JOB; the first process leaves FOLDER/result.json.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.progress import Silent
from penjing.train.data.order import Order
from penjing.train.data.prefetch import Prefetched
from penjing.train.data.stream import OrderedStream, TokenSamples
from penjing.train.loop import Trainer
from penjing.train.numerics.precision import Precision, PrecisionConfig
from penjing.train.objective.objective import Batch, CrossEntropy
from penjing.train.optim.optimizer import OptimizerConfig, build_optimizer
from penjing.train.parallel.config import ParallelConfig
from penjing.train.parallel.shard import gather_in
from penjing.train.parallelize import form_mesh, parallelize
from penjing.train.processes.world import World
from penjing.train.shares import Shares

_SMALL = 4096  # bytes: the loop's own sums
_TINY = {
    "vocab_size": 4096, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


class Tokens:
    """The same random micro-batch for ever: (rows, length) tokens."""

    def __init__(self, rows: int, length: int, vocabulary: int) -> None:
        tokens = torch.randint(0, vocabulary, (rows, length + 1), generator=torch.Generator().manual_seed(0))
        self.batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    def __iter__(self) -> Tokens:
        return self

    def __next__(self) -> Batch:
        return self.batch

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


def trainer_of(
    model: Decoder,
    parallel: dict[str, Any],
    rows: int,
    length: int,
    accumulation: int = 1,
    *,
    mode: str = "fp32",
    accuracy: bool = False,
) -> Trainer:
    """A loop over the whole process group, computing in the precision `mode`."""
    here = World(dist.get_rank(), dist.get_world_size())
    world = form_mesh(here, ParallelConfig.model_validate(parallel), Silent())
    spread = parallelize(model, world)
    return Trainer(
        spread.model, CrossEntropy(accuracy=accuracy), Tokens(rows, length, model.config.vocab_size),
        build_optimizer(spread.model, OptimizerConfig(), 1e-3), 10**6, accumulation=accumulation, world=world,
        pipeline=spread.pipeline, after_backward=spread.after_backward,
        precision=Precision(spread.model, PrecisionConfig.model_validate({"mode": mode}), world.device, gather_in),
    )  # fmt: skip


class WireBytes(TorchDispatchMode):
    """Bytes that this process sends by ring algorithms in the collectives called inside, small sums left out.

    All-reduces are counted where they are called, since PowerSGD's come from other threads, which no mode sees.
    """

    def __init__(self, processes: int) -> None:
        super().__init__()
        self.processes, self.sent = processes, 0.0
        self._all_reduce = dist.all_reduce

    def __enter__(self) -> WireBytes:
        """Begin to count."""
        dist.all_reduce = self._counted
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Count no more."""
        dist.all_reduce = self._all_reduce
        super().__exit__(*error)

    def _counted(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._add(2 * (self.processes - 1) / self.processes, [tensor])
        return self._all_reduce(tensor, *args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, then do."""
        share = (self.processes - 1) / self.processes
        # Not here: _allgather_base_, ZeRO's parameters, and broadcast_, of DDP's order of buckets.
        factors = {"_reduce_scatter_base_": share, "alltoall_base_": share, "allgather_": self.processes - 1}
        if func.namespace == "c10d" and func._opname in factors:
            self._add(factors[func._opname], args[1] if isinstance(args[1], list | tuple) else [args[1]])
        return func(*args, **(kwargs or {}))

    def _add(self, factor: float, tensors: Any) -> None:
        size = sum(one.numel() * one.element_size() for one in tensors)
        self.sent += factor * size if size > _SMALL else 0.0


def traffic(parallel: dict[str, Any]) -> dict[str, float]:
    """Bytes of gradients that a process sends in one step of decoder-tiny; PowerSGD's after its first ten."""
    trainer = trainer_of(Decoder(DecoderConfig.model_validate(_TINY)), parallel, 1, 16)
    trainer.steps = 12
    replica = trainer.world.replicate(trainer.model)
    sent = 0.0
    for _ in range(trainer.steps):
        with WireBytes(dist.get_world_size()) as counted:
            trainer._advance(replica)
        sent = counted.sent
    return {"bytes": sent}


def memory(parallel: dict[str, Any]) -> dict[str, float]:
    """Bytes of parameters, gradients and AdamW's state that a process holds when decoder-tiny is updated."""
    trainer = trainer_of(Decoder(DecoderConfig.model_validate(_TINY)), parallel, 1, 16)
    update = trainer.optimizer.step
    held: dict[str, float] = {}

    def step(*args: Any) -> None:
        update()
        parameters = list(trainer.model.parameters())
        state = [one for values in trainer.optimizer.state.values() for one in values.values()]
        held["parameters"] = sum(map(_bytes, parameters))
        held["gradients"] = sum(_bytes(one.grad) for one in parameters if one.grad is not None)
        held["optimizer"] = sum(_bytes(one) for one in state if isinstance(one, torch.Tensor))

    trainer.optimizer.step = step  # type: ignore[method-assign]
    trainer.steps = 1
    trainer.fit()
    return held


class _Gathered(TorchDispatchMode):
    """Bytes of parameters that ZeRO collects inside, as they arrive."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, then do."""
        if func.namespace == "c10d" and func._opname == "_allgather_base_":
            self.bytes += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def gathers(parallel: dict[str, Any], mode: str) -> dict[str, float]:
    """Bytes of the parameters that a process collects in one step of decoder-tiny in the precision `mode`."""
    trainer = trainer_of(Decoder(DecoderConfig.model_validate(_TINY)), parallel, 1, 16, mode=mode)
    trainer.steps = 2
    replica = trainer.world.replicate(trainer.model)
    trainer._advance(replica)
    with _Gathered() as gathered:
        trainer._advance(replica)
    return {"bytes": gathered.bytes}


class _Held(TorchDispatchMode):
    """The most bytes that tensors made inside held at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do, then count."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what is done to its part comes here again
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if type(tensor) is torch.Tensor:
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._made.values()))
        return output


def logits(parallel: dict[str, Any], whole: bool) -> dict[str, float]:
    """The most bytes of activations and gradients that a process holds in a step of decoder-tiny with 8 × 128 tokens;
    `whole`: the objective also wants to know how many it got right, for which it takes all logits."""
    trainer = trainer_of(Decoder(DecoderConfig.model_validate(_TINY)), parallel, 8, 128, accuracy=whole)
    trainer.steps = 2
    replica = trainer.world.replicate(trainer.model)
    trainer._advance(replica)
    with _Held() as held:
        trainer._advance(replica)
    return {"bytes": held.most}


def _bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


def pipeline(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds, bubble and micro-batch of each step of a pipeline: layer i takes rates[i] × (fixed + samples) seconds
    forward and twice that backward."""
    rates, fixed = job["rates"], job["fixed"]
    values = _TINY | {"hidden_size": 16, "intermediate_size": 16, "head_dim": 4, "vocab_size": 64}
    model = Decoder(DecoderConfig.model_validate(values | {"num_hidden_layers": len(rates), "num_attention_heads": 2}))
    for layer, rate in zip(model.model.layers, rates, strict=True):
        _put_to_sleep(layer, fixed, rate)
    trainer = trainer_of(model, job["parallel"], job["micro_batch"], 4, job["micro_batches"])
    assert trainer.pipeline is not None
    seconds, records = [], []
    run = trainer.pipeline.backward

    def timed(*args: Any) -> Any:
        dist.barrier()
        began = time.perf_counter()
        result = run(*args)
        taken = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        seconds.append(float(taken))
        return result

    trainer.pipeline.backward = timed  # type: ignore[method-assign]
    trainer.monitor.on_step = lambda step, steps, values, *rest: records.append(values)  # type: ignore[method-assign]
    trainer.steps = job["steps"]
    trainer.fit()
    return {"seconds": seconds, **{name: [one[name] for one in records] for name in ("bubble", "micro_batch")}}


def _put_to_sleep(layer: nn.Module, fixed: float, rate: float) -> None:
    inner = layer.forward
    layer.forward = lambda x, *rest: _Sleep.apply(inner(x, *rest), rate * (fixed + len(x)))  # type: ignore[method-assign]


class _Numbered(TokenSamples):
    """Samples of four tokens that are their numbers."""

    def __len__(self) -> int:
        return 1000

    def read(self, samples: Sequence[int] | NDArray[np.int64]) -> Batch:
        """See `TokenSamples`."""
        tokens = torch.tensor(samples)[:, None].expand(-1, 4) % 64
        return {"tokens": tokens, "targets": tokens.clone()}


def shares(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each step of data parallelism, of which process i takes rates[i] seconds a sample forward and twice
    that backward; `unlike`: shares follow the speed."""
    world, batch, micro_batch = World(dist.get_rank(), dist.get_world_size()), job["batch"], job["micro_batch"]
    values = _TINY | {"hidden_size": 16, "intermediate_size": 16, "head_dim": 4, "vocab_size": 64}
    model = Decoder(DecoderConfig.model_validate(values | {"num_hidden_layers": 1, "num_attention_heads": 2}))
    _put_to_sleep(model.model.layers[0], 0.0, job["rates"][world.rank])
    order = Order(1000, batch, micro_batch, world.rank, world.size, seed=0)
    stream = Prefetched(OrderedStream(_Numbered(), order))
    trainer = Trainer(
        model, CrossEntropy(), stream, build_optimizer(model, OptimizerConfig(), 1e-3), job["steps"],
        accumulation=order.turns.own, world=world,
        shares=Shares(world, stream, batch, micro_batch, print) if job["unlike"] else None,
    )  # fmt: skip
    ends = [time.perf_counter()]
    trainer.monitor.on_step = lambda *rest: ends.append(time.perf_counter())  # type: ignore[method-assign]
    trainer.fit()
    stream.close()
    return {"seconds": [after - before for before, after in pairwise(ends)]}


def run_ranks(size: int, job: dict[str, Any]) -> dict[str, Any]:
    """The result of `job`, whose "kind" is one of these functions, in `size` processes of one thread.

    Raises:
        subprocess.CalledProcessError: a process failed; what it said went to the terminal.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve())]
        started = [
            subprocess.Popen([*command, str(rank), str(size), folder, json.dumps(job)], start_new_session=True)
            for rank in range(size)
        ]
        try:
            running = True
            while running:
                running = any(one.poll() is None for one in started)
                if failed := next((one for one in started if one.poll() not in (None, 0)), None):
                    raise subprocess.CalledProcessError(failed.returncode, command)
                time.sleep(0.05)
        finally:
            for one in started:
                one.kill()
                one.wait()
        return json.loads((Path(folder) / "result.json").read_text())


def settled(values: list[float]) -> float:
    """The median of the last three steps."""
    return statistics.median(values[-3:])


def _main(rank: int, size: int, folder: str, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    kind = job["kind"]
    counted = {"traffic": traffic, "memory": memory, "gathers": gathers, "logits": logits}
    if asleep := {"pipeline": pipeline, "shares": shares}.get(kind):
        result = asleep(job)
    else:
        result = counted[kind](**{k: v for k, v in job.items() if k != "kind"})
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
