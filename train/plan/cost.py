"""Seconds of a training step of a distributed run, from numbers alone: arithmetic, communication, bubble.

Arithmetic runs at the GPU's efficiency, less for narrow models and for attention. Communication moves the
bytes of ring collectives over the link that an axis crosses: tensor and context parallelism wait for theirs, data
parallelism hides its own behind the backward pass as far as that reaches, and pipeline sends pass beside the work.
The bubble comes from the papers' formulas for the heaviest stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from penjing.train.pipeline.shape import LayerShape, ModelShape
from penjing.train.plan.hardware import Hardware
from penjing.train.plan.memory import Run, layers_of

# Products of width h take h² and what lies between them h: at this width the one costs as much time as the other.
_NARROW = 1500
_ATTENTION = 0.5  # speed of attention against wide products (FlashAttention-2, https://arxiv.org/abs/2307.08691)
_LATENCY = 15e-6  # seconds of a collective's step
_HIDDEN = 0.8  # of the arithmetic it runs beside, the share that data-parallel communication can hide behind
_AGAIN = {"none": 0.0, "selective": 0.05, "full": 1.0}  # forward passes repeated in the backward pass


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of the slowest rank, by part, and what follows."""

    compute: float
    tensor: float
    context: float
    expert: float
    bubble: float
    data: float
    optimizer: float
    tokens: float  # of the step, over all ranks
    gpus: int
    model_flops: float  # of the step
    peak: float  # FLOP/s of a GPU

    @property
    def total(self) -> float:
        """The step."""
        return sum((self.compute, self.tensor, self.context, self.expert, self.bubble, self.data, self.optimizer))

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens a second and GPU."""
        return self.tokens / self.total / self.gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: recomputation is not counted, causal attention as a whole square."""
        return self.model_flops / (self.total * self.gpus * self.peak)


def step_time(
    shape: ModelShape, run: Run, gpu: Hardware, gpus_per_node: int = 8, *, linear_gain: float = 1.0
) -> StepTime:
    """How long a step takes.

    Args:
        linear_gain: how much faster matrix products with weights are than in bfloat16 (float8).
    """
    parallel = run.parallel
    tp, cp, pp, ep, dp = parallel.tp, parallel.cp, parallel.pp, parallel.ep, run.dp
    stages = layers_of(shape, pp, parallel.schedule, run.length)
    rate = reached(shape, gpu)
    forward = [layer_forward(shape.layers[index], run, rate, linear_gain) for layers in stages for index in layers]
    head = 2 * shape.table * run.tokens / tp / rate
    sums = _stage_sums(forward, [len(layers) for layers in stages])
    chunk = max([*sums[:-1], sums[-1] + head])  # the heaviest stage paces the pipeline
    chunks = len(stages) // pp
    compute = chunk * chunks * passes(run)

    layers = ceil(len(shape.layers) / pp)
    routing = ceil(sum(layer.routed > 0 for layer in shape.layers) / pp)  # layers with experts
    near = _link(gpu, 1, tp, gpus_per_node)
    hidden_bytes = 2 * run.tokens * shape.hidden
    # all-gather and reduce-scatter around attention and around the MLP, again in each further pass
    repeats = 2 + (1 if run.recompute == "full" else 0)
    tensor = 4 * repeats * layers * ring(hidden_bytes, tp, near)
    kept = max(layer.key_values for layer in shape.layers)
    context = 2 * repeats * layers * ring(2 * run.tokens * cp * kept / tp, cp, _link(gpu, tp, cp, gpus_per_node))
    routed = max(layer.routed for layer in shape.layers)
    inner = tp * cp * pp
    # there and back, each token to each of its experts
    expert = 2 * repeats * routing * ring(hidden_bytes * routed, ep, _link(gpu, inner, ep, gpus_per_node))
    one = compute + tensor + context + expert
    micro = run.micro_batches

    data = _data(shape, run, gpu, gpus_per_node, stages, one * micro)
    dense, experts = _held(shape, run, stages)
    updated = (dense + shape.table / tp) / run.shards + experts / (run.shards / ep if parallel.zero else 1)
    optimizer = update_seconds(updated, gpu)
    return StepTime(
        compute=compute * micro,
        tensor=tensor * micro,
        context=context * micro,
        expert=expert * micro,
        bubble=_bubble(run, one, chunks),
        data=data,
        optimizer=optimizer,
        tokens=float(dp * micro * run.micro_batch * run.length),
        gpus=dp * tp * pp * cp,
        model_flops=shape.model_flops(run.length) * dp * micro * run.micro_batch * run.length,
        peak=gpu.flops,
    )


def reached(shape: ModelShape, gpu: Hardware) -> float:
    """FLOP/s of wide products and of what lies between them, in a model of this width."""
    return gpu.flops * gpu.efficiency * shape.hidden / (shape.hidden + _NARROW)


def passes(run: Run) -> float:
    """Forward passes that a micro-batch's work is worth: one, two of the backward pass, and what is repeated."""
    return 3 + _AGAIN[run.recompute]


def hidden_rest(traffic: float, work: float) -> float:
    """Seconds of data-parallel traffic that arithmetic does not hide; the first gather and the last reduction are
    alone."""
    return max(traffic - _HIDDEN * work, 0.05 * traffic)


def update_seconds(parameters: float, gpu: Hardware) -> float:
    """Of AdamW: 16 bytes read and 12 written a parameter."""
    return 28 * parameters / gpu.memory_bandwidth


def layer_forward(layer: LayerShape, run: Run, rate: float, linear_gain: float = 1.0) -> float:
    """Seconds of a layer's forward pass over a micro-batch, at `rate` FLOP/s."""
    linear = 2 * (layer.dense + layer.active)
    attention = layer.forward_flops(run.length, causal=True) - linear
    return (linear / linear_gain + attention / _ATTENTION) * run.tokens / run.parallel.tp / rate


def _stage_sums(values: list[float], lengths: list[int]) -> list[float]:
    sums, start = [], 0
    for length in lengths:
        sums.append(sum(values[start : start + length]))
        start += length
    return sums


def _link(gpu: Hardware, inner: int, size: int, gpus_per_node: int) -> float:
    """Bytes/s of each rank along an axis of `size` ranks that lie `inner` apart: ranks of a node share its way out."""
    if size == 1 or inner * size <= gpus_per_node:
        return gpu.node_link * gpu.link_share
    together = max(1, gpus_per_node // inner)
    return min(gpu.node_link, gpu.network * together) * gpu.link_share


def ring(size: float, ranks: int, link: float) -> float:
    """Seconds of an all-gather, reduce-scatter or all-to-all after which each rank has seen `size` bytes."""
    return size * (ranks - 1) / ranks / link + _LATENCY * log2(ranks) if ranks > 1 else 0.0


def _bubble(run: Run, one: float, chunks: int) -> float:
    """Idle seconds; `one`: a rank's work on one micro-batch, a third of it a forward pass."""
    third = one / 3 / chunks
    idle = {
        "gpipe": 3 * third,
        "1f1b": 3 * third,
        "interleaved": 3 * third,
        "zb": third,
        "zbv": third,  # the ranks begin in turn
        "dualpipev": third,
    }[run.parallel.schedule]
    return (run.parallel.pp - 1) * idle


def _data(
    shape: ModelShape, run: Run, gpu: Hardware, gpus_per_node: int, stages: tuple[tuple[int, ...], ...], work: float
) -> float:
    """Seconds of gradient and parameter traffic that the arithmetic does not hide."""
    parallel, ranks = run.parallel, run.dp * run.parallel.cp
    if ranks == 1:
        return 0.0
    dense, experts = _held(shape, run, stages)
    dense += shape.table * (1 if parallel.pp > 1 or shape.tied else 2) / parallel.tp
    link = _link(gpu, parallel.tp * (1 if parallel.cp > 1 else parallel.pp), ranks, gpus_per_node)
    reduces = run.micro_batches if parallel.zero >= 2 else 1
    # Without ZeRO the other half of an all-reduce in float32; with it parameters, in bfloat16
    gathers = {0: 1, 1: 0.5, 2: 0.5, 3: run.micro_batches}[parallel.zero]
    if parallel.shards is None:
        exchanged = ring(4 * dense, ranks, link)
        if experts:  # fewer ranks have each
            exchanged += ring(4 * experts, ranks // parallel.ep, link)
        traffic = (reduces + gathers) * exchanged
    else:  # between the copies a rank's shard of the gradient alone, once a step
        inner = parallel.tp * (1 if parallel.cp > 1 else parallel.pp)
        near, held = _link(gpu, inner, run.shards, gpus_per_node), dense + experts
        traffic = (reduces + gathers) * ring(4 * held, run.shards, near)
        between = _link(gpu, inner * run.shards, ranks // run.shards, gpus_per_node)
        traffic += 2 * ring(4 * held / run.shards, ranks // run.shards, between)
    return hidden_rest(traffic, work)


def _held(shape: ModelShape, run: Run, stages: tuple[tuple[int, ...], ...]) -> tuple[float, float]:
    """Parameters of the layers of a rank before ZeRO: of the stage with most, (all but experts, experts)."""
    parallel = run.parallel
    chunks = len(stages) // parallel.pp
    layers = max(([shape.layers[i] for i in stage] for stage in stages), key=lambda s: sum(x.parameters for x in s))
    dense, experts = sum(layer.dense for layer in layers), sum(layer.experts for layer in layers)
    return chunks * dense / parallel.tp, chunks * experts / parallel.tp / parallel.ep
