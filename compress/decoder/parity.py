"""The same inputs through the fake-quantized model (floats that imitate INT8) and through the INT8 runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.compress.decoder.stream import HEAD, LayerStream
from penjing.compress.decoder.weights import ROWS_AT_ONCE, QuantizedWeight, fake_quantize_activation
from penjing.core.artifact.decoder import (
    FAKE_QUANTIZED,
    INT8_RUNTIME,
    Parity,
    ParityDifference,
    ParityInput,
    ParityOutput,
)
from penjing.core.artifact.decoder import logprob_difference as compare_logprobs
from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.models.decoder import Decoder
from penjing.core.progress import Progress, Silent

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea, there lived",
)
LAYER_BOUND = 0.05  # mean difference of a layer's output, of the hidden state's root mean square
CONTINUATION = 12  # greedy tokens a prompt


@torch.no_grad()
def measure_parity(folder: Path, progress: Progress | None = None) -> Parity:
    """Continue each prompt with the INT8 runtime, then read the same tokens with the fake-quantized model.

    Args:
        folder: the artifact, so far without its parity record.
    """
    progress = progress or Silent()
    loaded = load_model(folder)
    inputs = [ParityInput(text=text, token_ids=tuple(loaded.tokenizer.encode(text))) for text in PROMPTS]
    sequences, runtime_logits = [], []
    for prompt in inputs:
        ids = _continue_greedily(loaded.model, list(prompt.token_ids))
        sequences.append(ids)
        runtime_logits.append(loaded.model(torch.tensor([ids]))[0])
        progress.advance()
    # Right padding: attention is causal, so what follows a sequence does not reach it.
    padded_WT = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True)
    del loaded  # the second half streams: both together would be the peak of a whole run
    checkpoint = open_checkpoint(folder)
    layers = _LayerGaps(LayerStream(checkpoint))
    fake_WTV = fake_quantized_logits(checkpoint, padded_WT, layers.compare)
    fake_logits = [fake_TV[: len(ids)] for fake_TV, ids in zip(fake_WTV, sequences, strict=True)]

    lengths = [len(prompt.token_ids) for prompt in inputs]
    outputs = {
        name: tuple(_output(*row) for row in zip(logits, sequences, lengths, strict=True))
        for name, logits in ((FAKE_QUANTIZED, fake_logits), (INT8_RUNTIME, runtime_logits))
    }
    gaps = torch.cat([(one - other).abs().flatten() for one, other in zip(fake_logits, runtime_logits, strict=True)])
    logprobs = compare_logprobs((FAKE_QUANTIZED, INT8_RUNTIME), outputs[FAKE_QUANTIZED], outputs[INT8_RUNTIME])
    differences = (_difference("layer_outputs", torch.cat(layers.gaps)), _difference("logits", gaps), logprobs)
    return Parity(inputs=tuple(inputs), outputs=outputs, differences=differences)


class _LayerGaps:
    """Sends what a fake-quantized layer got through the INT8 runtime's layer too."""

    def __init__(self, stream: LayerStream) -> None:
        self._stream = stream
        self.gaps: list[Tensor] = []

    def compare(self, layer: int, before_WTE: Tensor, after_WTE: Tensor) -> None:
        runtime_WTE = before_WTE.clone()
        self._stream.run(self._stream.stored_layer(layer), runtime_WTE)
        size_WT1 = after_WTE.square().mean(dim=-1, keepdim=True).sqrt()
        self.gaps.append(((runtime_WTE - after_WTE).abs() / size_WT1).flatten())


def _difference(quantity: Literal["layer_outputs", "logits"], gaps: Tensor) -> ParityDifference:
    return ParityDifference(
        between=(FAKE_QUANTIZED, INT8_RUNTIME),
        quantity=quantity,
        num_values=gaps.numel(),
        largest=float(gaps.max()),
        mean=float(gaps.mean()),
    )


@torch.no_grad()
def fake_quantized_logits(
    checkpoint: Checkpoint, windows_WT: Tensor, each_layer: Callable[[int, Tensor, Tensor], None] | None = None
) -> Tensor:
    """(W, T) token ids → (W, T, V) float32 logits, with weights and activations rounded to INT8 and widened again.

    One layer is in memory at a time; a model in which nothing is quantized runs as it is.

    Args:
        each_layer: called with the layer's number and its input and output, (W, T, E) float32.
    """
    stream = LayerStream(checkpoint)
    hidden_WTE = stream.embed(windows_WT)
    for layer in range(stream.config.num_hidden_layers):
        before_WTE = hidden_WTE.clone()
        run_fake_quantized(stream, layer, (hidden_WTE,))
        if each_layer is not None:
            each_layer(layer, before_WTE, hidden_WTE)
    x_WTE = stream.final_norm(hidden_WTE)
    head_VE = stream.head_weight()
    if not stream.is_int8("lm_head"):
        return F.linear(x_WTE, head_VE.to(torch.float32))
    scale_V1 = stream.stored(f"{HEAD}_scale")
    x_WTE = fake_quantize_activation(x_WTE)
    blocks = zip(head_VE.split(ROWS_AT_ONCE), scale_V1.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([F.linear(x_WTE, QuantizedWeight(*block).dequantize()) for block in blocks], dim=-1)


def run_fake_quantized(stream: LayerStream, layer: int, hidden: Iterable[Tensor]) -> None:
    """Send each of `hidden`, (W, T, E) float32, through a layer whose weights and activations are rounded, in place."""

    def rounded(name: str, x: Tensor) -> Tensor | None:
        return fake_quantize_activation(x) if stream.is_int8(f"model.layers.{layer}.{name}") else None

    module = stream.float_layer(layer, stream.weights(layer))
    for hidden_WTE in hidden:
        stream.run(module, hidden_WTE, rounded)


def check_parity(parity: Parity) -> None:
    """The gate of a decoder's artifact: what each layer does with the same input.

    Raises:
        InputError: the INT8 runtime differs from the fake-quantized model by more than LAYER_BOUND.
    """
    layers = next(each for each in parity.differences if each.quantity == "layer_outputs")
    if not layers.mean <= LAYER_BOUND:  # NaN fails too
        raise InputError(
            f"parity: the INT8 runtime's layers differ from the fake-quantized ones by {layers.mean:.3g} of their "
            f"inputs' size on average, the bound is {LAYER_BOUND}; see 'penjing info' for the kernels that run here"
        )


def _continue_greedily(model: Decoder, ids: list[int]) -> list[int]:
    for _ in range(CONTINUATION):
        logits_RV = model(torch.tensor([ids]), logit_rows=torch.tensor([len(ids) - 1]))
        ids = [*ids, int(logits_RV[0].argmax())]
    return ids


def _output(logits_TV: Tensor, ids: list[int], prompt_length: int) -> ParityOutput:
    """The greedy choice at each position of the continuation `ids[prompt_length:]`, given the tokens before it."""
    logprobs_RV = logits_TV[prompt_length - 1 : len(ids) - 1].log_softmax(dim=-1)
    best = logprobs_RV.max(dim=-1)
    return ParityOutput(token_ids=tuple(best.indices.tolist()), logprobs=tuple(best.values.tolist()))
