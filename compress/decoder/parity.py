"""The same inputs through the fake-quantized model (floats that imitate INT8) and through the INT8 runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.compress.decoder.stream import HEAD, Beside, LayerStream
from penjing.compress.decoder.weights import ROWS_AT_ONCE, QuantizedWeight, fake_quantize_activation
from penjing.core.artifact.decoder import (
    INT8_RUNTIME,
    LAYER_OUTPUTS,
    LOGITS,
    Answer,
    Prompt,
    answers_to_record,
    logprob_difference,
    open_decoder_artifact,
    prompts_to_record,
)
from penjing.core.artifact.parity import FAKE_QUANTIZED, Bound, Difference, Parity, gate, measured
from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.models.decoder import Decoder, capped_logits, table_basis
from penjing.core.progress import Progress, Silent
from penjing.core.runtime.fused import fuse_layer
from penjing.core.runtime.quantized import dequantized

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea, there lived",
)
CONTINUATION = 12  # greedy tokens a prompt
BETWEEN = (FAKE_QUANTIZED, INT8_RUNTIME)
# Dynamic quantization is chaotic end to end, so the gate is on what each layer does with the same input.
BOUND = Bound(between=BETWEEN, quantity=LAYER_OUTPUTS, statistic="mean", value=0.05)
HINT = "see 'penjing info' for the kernels that run here"
LEAST_ADDED = 1e-3  # of a hidden state's size: of what adds less, float32 leaves few digits in the sum


@torch.no_grad()
def measure(folder: Path, progress: Progress | None = None, bound: Bound = BOUND) -> Parity:
    """Continue each prompt with the INT8 runtime, then read the same tokens with the fake-quantized model.

    Args:
        folder: the artifact, so far without its parity record.
        bound: of what each layer does with the same input.

    Raises:
        InputError: the bound is exceeded (an artifact that does so is refused), or there is NaN.
    """
    progress = progress or Silent()
    loaded = load_model(folder)
    prompts = [Prompt(text=text, token_ids=tuple(loaded.tokenizer.encode(text))) for text in PROMPTS]
    sequences = _continue_greedily(loaded.model, [list(prompt.token_ids) for prompt in prompts], progress)
    # Right padding: attention is causal, so what follows a sequence does not reach it.
    padded_WT = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True)
    runtime_WTV = loaded.model(padded_WT)
    runtime_logits = [runtime_TV[: len(ids)] for runtime_TV, ids in zip(runtime_WTV, sequences, strict=True)]
    del loaded  # the second half streams: both together would be the peak of a whole run
    checkpoint = open_checkpoint(folder)
    layers = _LayerGaps(LayerStream(checkpoint))
    fake_WTV = fake_quantized_logits(checkpoint, padded_WT, layers.compare)
    fake_logits = [fake_TV[: len(ids)] for fake_TV, ids in zip(fake_WTV, sequences, strict=True)]

    lengths = [len(prompt.token_ids) for prompt in prompts]
    answers = {
        name: tuple(
            greedy_answer(logits_TV[length - 1 : len(ids) - 1])
            for logits_TV, ids, length in zip(logits, sequences, lengths, strict=True)
        )
        for name, logits in ((FAKE_QUANTIZED, fake_logits), (INT8_RUNTIME, runtime_logits))
    }
    gaps = torch.cat([(one - other).abs().flatten() for one, other in zip(fake_logits, runtime_logits, strict=True)])
    differences = (
        judge_layers(layers.gaps, bound, HINT),
        tensor_difference(BETWEEN, LOGITS, gaps),
        logprob_difference(BETWEEN, answers[FAKE_QUANTIZED], answers[INT8_RUNTIME]),
    )
    return Parity(
        family="decoder",
        inputs=prompts_to_record(prompts),
        outputs={name: answers_to_record(given) for name, given in answers.items()},
        differences=differences,
        bound=bound,
    )


def rerun(folder: Path, progress: Progress) -> tuple[Difference, ...]:
    """Run the prompts through both implementations again, here and now; every hash is checked.

    Raises:
        InputError: damaged, or the INT8 runtime on this machine is further from the fake-quantized model than the
            record's bound.
    """
    bound = open_decoder_artifact(folder).parity.bound
    progress.start("parity", CONTINUATION)
    return measure(folder, progress, bound).differences


def tensor_difference(between: tuple[str, str], quantity: str, gaps: Tensor) -> Difference:
    """A difference of `gaps`, any shape, absolute.

    Raises:
        InputError: NaN or infinity.
    """
    return measured(between, quantity, gaps.numel(), float(gaps.max()), float(gaps.mean()))


def relative_gaps(before: Tensor, after: Tensor, found: Tensor) -> Tensor:
    """How far a layer's output `found` is from `after`, relative to what the layer adds to its input, `before`; each
    (…, T, E) float32."""
    size, added = (x.square().mean(dim=-1, keepdim=True).sqrt() for x in (after, after - before))
    return (found - after).abs() / torch.maximum(added, LEAST_ADDED * size)


def judge_layers(gaps: Sequence[Tensor], bound: Bound, hint: str) -> Difference:
    """The difference of all layers' outputs, whose `gaps` are given for each layer.

    Each layer is held to the bound by itself: in the mean of thirty one that is wrong would not show.

    Raises:
        InputError: a layer is beyond the bound, or there is NaN.
    """
    for number, each in enumerate(gaps):
        gate([tensor_difference(bound.between, LAYER_OUTPUTS, each)], bound, f"in layer {number}; {hint}")
    return tensor_difference(bound.between, LAYER_OUTPUTS, torch.cat(list(gaps)))


def greedy_answer(logits_RV: Tensor) -> Answer:
    """The greedy choice at each of R positions of (R, V) float32 logits."""
    best = logits_RV.log_softmax(dim=-1).max(dim=-1)
    return Answer(token_ids=tuple(best.indices.tolist()), logprobs=tuple(best.values.tolist()))


class _LayerGaps:
    """Sends what a fake-quantized layer got through the INT8 runtime's layer too: fused, where the engine fuses it."""

    def __init__(self, stream: LayerStream) -> None:
        self._stream = stream
        self.gaps: list[Tensor] = []

    def compare(self, layer: int, before_WTE: Tensor, after_WTE: Tensor, beside: Beside) -> None:
        stored, runtime_WTE = self._stream.stored_layer(layer), before_WTE.clone()
        fused = fuse_layer(self._stream.config, layer, stored)
        if fused is not None:
            runtime_WTE = fused(before_WTE)
        else:
            self._stream.run(stored, runtime_WTE, beside=Beside(beside.tokens_WT, dict(beside.kept)))
        self.gaps.append(relative_gaps(before_WTE, after_WTE, runtime_WTE).flatten())


@dataclass(frozen=True)
class Computed:
    """What a loader computed of one sequence of T tokens.

    Attributes:
        hidden: layers + 1 hidden states (T, E) float32, the first before all layers, each next one after its layer.
        logits_TV: (T, V) float32.
    """

    hidden: list[Tensor]
    logits_TV: Tensor  # noqa: N815


@torch.no_grad()
def fake_quantized_logits(
    checkpoint: Checkpoint,
    windows_WT: Tensor,
    each_layer: Callable[[int, Tensor, Tensor, Beside], None] | None = None,
) -> Tensor:
    """(W, T) token ids → (W, T, V) float32 logits, with weights and activations rounded as stored and widened again.

    One layer is in memory at a time; a model in which nothing is quantized runs as it is.

    Args:
        each_layer: called with the layer's number, its input and output, (W, T, E) float32, and what it reads besides.
    """
    stream, beside = LayerStream(checkpoint), Beside(windows_WT)
    hidden_WTE = stream.embed(windows_WT)
    for layer in range(stream.config.num_hidden_layers):
        before_WTE = hidden_WTE.clone()
        run_fake_quantized(stream, layer, (hidden_WTE,), beside)
        if each_layer is not None:
            each_layer(layer, before_WTE, hidden_WTE, beside)
    logits_WTV = _head_logits(stream, table_basis(stream.final_norm(hidden_WTE), stream.config))
    if (bias_V := stream.head_bias()) is not None:
        logits_WTV += bias_V
    return capped_logits(logits_WTV, stream.config)


def _head_logits(stream: LayerStream, x_WTE: Tensor) -> Tensor:
    if not stream.is_quantized("lm_head"):
        return F.linear(x_WTE, stream.head_weight().to(torch.float32))
    scheme = stream.schemes["lm_head"]
    x_WTE = fake_quantize_activation(x_WTE, scheme.activation_group, scheme.zero_points)
    if scheme.bits == 4:
        return F.linear(x_WTE, dequantized("lm_head", scheme, stream.stored))
    head_VE, scale_V1 = stream.head_weight(), stream.stored(f"{HEAD}_scale")
    blocks = zip(head_VE.split(ROWS_AT_ONCE), scale_V1.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([F.linear(x_WTE, QuantizedWeight(*block).dequantize()) for block in blocks], dim=-1)


def run_fake_quantized(stream: LayerStream, layer: int, hidden: Iterable[Tensor], beside: Beside | None = None) -> None:
    """Send each of `hidden`, (W, T, E) float32, through a layer whose weights and activations are rounded, in place;
    `beside`: of the only one."""

    def rounded(name: str, x: Tensor) -> Tensor | None:
        scheme = stream.schemes.get(f"model.layers.{layer}.{name}")
        return None if scheme is None else fake_quantize_activation(x, scheme.activation_group, scheme.zero_points)

    module = stream.float_layer(layer, stream.weights(layer))
    for hidden_WTE in hidden:
        stream.run(module, hidden_WTE, rounded, beside=beside)


def run_dequantized(stream: LayerStream, layer: int, hidden: Iterable[Tensor]) -> None:
    """Send each of `hidden`, (W, T, E) float32, through a layer whose weights alone are rounded, in place."""
    module = stream.float_layer(layer, stream.weights(layer))
    for hidden_WTE in hidden:
        stream.run(module, hidden_WTE)


def _continue_greedily(model: Decoder, sequences: list[list[int]], progress: Progress) -> list[list[int]]:
    for _ in range(CONTINUATION):
        padded_WT = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True)
        last_W = torch.tensor([row * padded_WT.shape[1] + len(ids) - 1 for row, ids in enumerate(sequences)])
        chosen = model(padded_WT, logit_rows=last_W).argmax(dim=-1).tolist()
        sequences = [[*ids, token_id] for ids, token_id in zip(sequences, chosen, strict=True)]
        progress.advance()
    return sequences
