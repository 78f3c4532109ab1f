"""What each process of a spawned world runs: a list of cases, each a mesh compared with one process.

Started by `worlds.py` as a script: RANK, WORLD_SIZE and a folder with cases.json; rank 0 leaves results.json there.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._dynamo.utils import counters

from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.train.data.order import Order
from penjing.train.data.prefetch import Prefetched
from penjing.train.data.stream import OrderedStream, TokenSamples
from penjing.train.loop import Evaluation, Trainer
from penjing.train.numerics.compiled import compile_model
from penjing.train.numerics.precision import Precision, PrecisionConfig
from penjing.train.numerics.recompute import apply_recompute
from penjing.train.objective.balancing import Balanced, BalancingConfig
from penjing.train.objective.objective import IGNORED, Batch, CrossEntropy
from penjing.train.optim.clip import ClipConfig, GradientNorms
from penjing.train.optim.optimizer import OptimizerConfig, build_optimizer
from penjing.train.optim.schedule import LearningRate
from penjing.train.parallel.config import ParallelConfig
from penjing.train.parallel.mesh import MeshWorld
from penjing.train.parallel.shard import gather_in
from penjing.train.parallelize import form_mesh, parallelize
from penjing.train.processes.stop import InterruptedRunError
from penjing.train.processes.world import World
from penjing.train.shares import Shares
from penjing.train.state.checkpoint import Checkpoints, ShardedCheckpoints
from penjing.train.state.initial import decoder_weights, fill_weights, materialize, without_data
from penjing.train.state.state import local_part, named_parameters

ROWS, LENGTH, VOCAB = 12, 8, 64
LOADS = ("language_loss", "balance_loss", "expert_load_max", "expert_load_min")


class Silent:
    def note(self, message: str) -> None: ...


def batch(step: int, ragged: bool) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    if ragged:
        for row in range(ROWS):
            targets[row, 1 + (row * 5 + step) % LENGTH :] = IGNORED
    return {"tokens": tokens[:, :-1].contiguous(), "targets": targets}


class Rows:
    """Endless micro-batches: this share's rows of each step."""

    def __init__(self, share: int, shares: int, accumulation: int, ragged: bool) -> None:
        self.share, self.shares, self.accumulation, self.ragged = share, shares, accumulation, ragged
        self.taken = 0

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> Batch:
        step, index = divmod(self.taken, self.accumulation)
        self.taken += 1
        whole = batch(step, self.ragged)
        cut = self.shares * self.accumulation
        return {name: tensor.chunk(cut)[index * self.shares + self.share] for name, tensor in whole.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class Numbered(TokenSamples):
    """The same rows as samples."""

    def __init__(self, ragged: bool) -> None:
        self.ragged = ragged

    def __len__(self) -> int:
        return 3 * ROWS

    def read(self, samples: Sequence[int] | NDArray[np.int64]) -> Batch:
        steps = [batch(int(sample) // ROWS, self.ragged) for sample in samples]
        return {
            name: torch.stack([step[name][int(sample) % ROWS] for step, sample in zip(steps, samples, strict=True)])
            for name in steps[0]
        }


Part = tuple[torch.Tensor, tuple[slice, ...]]


def part(tensor: torch.Tensor) -> Part:
    """What this process holds of `tensor`, and where that lies in the whole."""
    local, region = local_part(tensor.detach())
    return local.clone().contiguous(), region


def furthest(parts: dict[str, Part], whole: dict[str, Part]) -> float:
    """The largest difference of `parts` from the same of `whole`."""
    distances = [(mine - whole[name][0][region]).abs() for name, (mine, region) in parts.items()]
    return max(distance.max().item() if distance.numel() else 0.0 for distance in distances)


def model_of(case: dict[str, Any]) -> Decoder:
    """Without data, as `train.run` builds it."""
    values = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32,
        "qk_norm": True, "model_type": "qwen3", "tie_word_embeddings": True,
    }  # fmt: skip
    with without_data():
        model = Decoder(DecoderConfig(**values | case.get("model", {})))
    return model.double() if case.get("double") else model


def train(
    case: dict[str, Any], world: World, checkpoints: Checkpoints | None = None, stop: bool = False, resume: bool = False
) -> dict[str, Any]:
    """Losses, gradient norms, gradients and weights of a few steps, and the evaluation, in this process.

    With `checkpoints`, `stop` after the second step, or `resume` from there.
    """
    model = model_of(case)
    torch._dynamo.reset()
    counters.clear()
    if isinstance(world, MeshWorld) and "compile" in case:
        compile_model(model, is_shared=True, backend=case["compile"])
    apply_recompute(model, case.get("recompute", "none"))
    spread = parallelize(model, world)
    materialize(spread.model, world.device)
    fill_weights(spread.model, decoder_weights(0.2, 4, seed=5))
    initial = {n: part(p) for n, p in named_parameters(spread.model)}
    name = case.get("optimizer", "sgd")
    optimizer = build_optimizer(spread.model, OptimizerConfig(name=name), 0.05)
    accumulation, ragged = case.get("accumulation", 1), case.get("ragged", False)
    data = world.data
    objective: CrossEntropy | Balanced = CrossEntropy(label_smoothing=case.get("smoothing", 0.0))
    after_update: tuple[Callable[[int], None], ...] = ()
    if "balancing" in case:
        objective = Balanced(CrossEntropy(), BalancingConfig(**case["balancing"]))
        objective.world = world
        if "bias_rate" in case["balancing"]:
            after_update = (objective.bias_update(spread.model, world),)
    gradients: list[dict[str, Part]] = []
    records: list[dict[str, float]] = []
    update = optimizer.step

    def step(*args: Any) -> None:
        gradients.append({n: part(p.grad) for n, p in named_parameters(spread.model) if p.grad is not None})
        update()

    optimizer.step = step  # type: ignore[method-assign]
    read: dict[str, set[str]] = {}  # module → the formats that its weight was seen in, while training

    def look(name: str, module: Any, *rest: Any) -> None:
        if torch.is_grad_enabled():  # what is evaluated is all in float32
            read.setdefault(name, set()).add(str(module.weight.dtype))

    widths: set[int] = set()  # of the logits that the objective was given
    if (head := next((m for n, m in spread.model.named_modules() if n.endswith("lm_head")), None)) is not None:
        head.register_forward_hook(lambda module, inputs, output: widths.add(local_part(output)[0].shape[-1]))
    if "precision" in case and "compile" not in case:  # such hooks would make a graph of each block
        for name, module in spread.model.named_modules():
            if isinstance(getattr(module, "weight", None), torch.Tensor):
                module.register_forward_pre_hook(functools.partial(look, name))
    trainer = Trainer(
        spread.model, objective, Rows(data.rank, data.size, accumulation, ragged), optimizer, 3,
        rate=LearningRate(peak=0.05 if name == "sgd" else 1e-3), accumulation=accumulation, world=world,
        pipeline=spread.pipeline,
        precision=Precision(
            spread.model, PrecisionConfig(**case.get("precision", {})), world.device, gather_in
        ),
        norms=GradientNorms(ClipConfig(norm=case.get("clip"))), after_backward=spread.after_backward,
        after_update=after_update,
        evaluation=Evaluation(
            lambda: [{k: v.chunk(data.size)[data.rank] for k, v in batch(99, ragged).items()}], CrossEntropy(), 3
        ),
    )  # fmt: skip
    trainer.monitor.on_step = lambda step, steps, values, *rest: records.append(values)  # type: ignore[method-assign]
    trainer.checkpoints = checkpoints
    if resume:
        assert checkpoints is not None
        found = checkpoints.load_newest()
        assert found is not None
        assert found[0] == 2
        trainer.load_state_dict(found[1])
    if stop:
        trainer.stop_requested = lambda: trainer.step == 1
        try:
            trainer.fit()
        except InterruptedRunError:
            world.barrier()
            return {}
    if "shares" in case and world.size > 1:
        order = Order(3 * ROWS, ROWS, 2, world.rank, world.size, seed=0, shuffle=False)
        trainer.stream = stream = Prefetched(OrderedStream(Numbered(ragged), order), depth=2)
        trainer.shares = Shares(world, stream, ROWS, 2, print, gain=1.0)  # so much is never promised: it stays
        trainer.shares.load_state_dict({"counts": case["shares"], "seen": [], "factors": [3.0] * world.size})
    evaluation = trainer.fit()
    return {
        "sizes": sorted({record["micro_batch"] for record in records if "micro_batch" in record}),
        "initial": initial,
        "widths": sorted(widths),
        "graphs": counters["stats"]["unique_graphs"],
        "read": {name: sorted(formats) for name, formats in read.items()},
        "losses": [record["loss"] for record in records],
        "norms": [record["gradient_norm"] for record in records],
        "experts": [record[name] for record in records for name in LOADS if name in record],
        "gradients": gradients,
        "weights": {n: part(p) for n, p in named_parameters(spread.model)},
        "evaluation": evaluation["loss"],
    }


def compare(case: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    # The load of experts is judged in each micro-batch; all else depends on the whole step.
    accumulation = case["accumulation"] if "balancing" in case else 1
    if "precision" in case:  # what is rounded must be the same micro-batches
        accumulation = case["accumulation"] * ParallelConfig(**case["parallel"]).data_size(size)
    alone = train({**case, "accumulation": accumulation, "recompute": "none"}, World())
    world = form_mesh(World(rank, size), ParallelConfig(**case["parallel"]), Silent())  # type: ignore[arg-type]
    if "saved_by" in case:
        saving = form_mesh(World(rank, size), ParallelConfig(**case["saved_by"]), Silent())  # type: ignore[arg-type]
        folder = Path(os.environ["FOLDER"]) / f"{case['folder']}-{'float64' if case.get('double') else 'float32'}"
        train(case, saving, ShardedCheckpoints(folder, 3, saving), stop=True)
        here = train(case, world, ShardedCheckpoints(folder, 3, world), resume=True)
        for key in ("losses", "norms", "gradients"):
            alone[key] = alone[key][2:]
    else:
        here = train(case, world)
    bits = {
        (name, tuple((one.start, one.stop) for one in region)): hashlib.sha256(mine.numpy().tobytes()).hexdigest()
        for name, (mine, region) in here["weights"].items() if mine.numel()
    }  # fmt: skip
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, bits)
    held = {key: {other[key] for other in everyone if key in other} for other in everyone for key in other}
    found = dict.fromkeys(alone["weights"], 0)
    for name, region in held:
        found[name] += math.prod(stop - start for start, stop in region)
    differences = {
        key: max((abs(a - b) for a, b in zip(here[key], alone[key], strict=True)), default=0.0)
        for key in ("losses", "norms", "experts")
    }
    differences["initial"] = furthest(here["initial"], alone["initial"])
    differences["evaluation"] = abs(here["evaluation"] - alone["evaluation"])
    differences["gradients"] = max(
        furthest(mine, reference) for mine, reference in zip(here["gradients"], alone["gradients"], strict=True)
    )
    differences["weights"] = furthest(here["weights"], alone["weights"])
    worst = torch.tensor([float("nan") if d != d else d for d in differences.values()], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    scale = max(gradient.abs().max().item() for gradient, _ in alone["gradients"][0].values())
    return {
        **dict(zip(differences, worst.tolist(), strict=True)),
        "missing": sorted(name for name, (whole, _) in alone["weights"].items() if found[name] != whole.numel()),
        "apart": sorted({name for (name, _), copies in held.items() if len(copies) > 1}),
        "sizes": here["sizes"],
        "read": here["read"],
        "widths": here["widths"],
        "graphs": here["graphs"],
        "scale": scale,
    }


def main(folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    results = {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        try:
            results[name] = compare(case, rank, size)
        except Exception:
            print(f"case {name} on rank {rank}", flush=True)
            traceback.print_exc()
            os._exit(1)  # the others wait in a collective: whoever started them ends them
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
