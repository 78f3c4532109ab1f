"""The parity gate of a decoder's exports: what another loader computes, layer by layer, against fake quantization.

Dynamic quantization is chaotic end to end (`core.artifact.ParityDifference`), so each layer is judged by its own: what
the loader fed to it goes through the fake-quantized layer too, and both outputs are compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penjing.compress.decoder.parity import run_fake_quantized
from penjing.compress.decoder.stream import LayerStream
from penjing.compress.verify import LAYER_BOUND
from penjing.core.artifact.decoder import (
    FAKE_QUANTIZED,
    INT8_RUNTIME,
    Artifact,
    ParityDifference,
    ParityOutput,
    logprob_difference,
)
from penjing.core.errors import InputError


@dataclass(frozen=True)
class Reading:
    """What a loader computed of one sequence of T tokens.

    Attributes:
        hidden: layers + 1 hidden states (T, E) float32, the first before all layers, each next one after its layer.
        logits_TV: (T, V) float32.
    """

    hidden: list[Tensor]
    logits_TV: Tensor  # noqa: N815


def sequences(artifact: Artifact) -> list[tuple[list[int], int]]:
    """(token ids, length of the prompt) of each input of the artifact's record with what the INT8 runtime answered."""
    record = artifact.parity
    pairs = zip(record.inputs, record.outputs[INT8_RUNTIME], strict=True)
    return [([*prompt.token_ids, *answer.token_ids], len(prompt.token_ids)) for prompt, answer in pairs]


@torch.no_grad()
def measure(artifact: Artifact, loader: str, readings: list[Reading]) -> tuple[ParityDifference, ...]:
    """How far `loader` is from the fake-quantized layers, and its greedy tokens from those of the INT8 runtime.

    Args:
        readings: of `sequences(artifact)`, in order.

    Raises:
        InputError: the layers' mean difference is beyond `LAYER_BOUND`, or there is NaN.
    """
    stream = LayerStream(artifact.checkpoint)
    gaps: list[Tensor] = []
    for layer in range(stream.config.num_hidden_layers):
        expected = [reading.hidden[layer][None].clone() for reading in readings]
        run_fake_quantized(stream, layer, expected)
        for reading, wanted_1TE in zip(readings, expected, strict=True):
            size_T1 = wanted_1TE[0].square().mean(dim=-1, keepdim=True).sqrt()
            gaps.append(((reading.hidden[layer + 1] - wanted_1TE[0]).abs() / size_T1).flatten())
    every = torch.cat(gaps)
    mean = float(every.mean())
    if not mean <= LAYER_BOUND:  # NaN fails too
        raise InputError(
            f"parity: {loader}'s layers differ from the fake-quantized ones by {mean:.3g} of the hidden state's "
            f"size on average, the bound is {LAYER_BOUND}; nothing was exported. Is the artifact damaged? "
            "'penjing compress verify' says how far the INT8 runtime is"
        )
    layers = ParityDifference(
        between=(FAKE_QUANTIZED, loader),
        quantity="layer_outputs",
        num_values=every.numel(),
        largest=float(every.max()),
        mean=mean,
    )
    answers = tuple(
        _greedy(reading.logits_TV[begin - 1 : len(ids) - 1])
        for reading, (ids, begin) in zip(readings, sequences(artifact), strict=True)
    )
    runtime = artifact.parity.outputs[INT8_RUNTIME]
    return (layers, logprob_difference((INT8_RUNTIME, loader), runtime, answers))


def _greedy(logits_RV: Tensor) -> ParityOutput:
    best = logits_RV.log_softmax(dim=-1).max(dim=-1)
    return ParityOutput(token_ids=tuple(best.indices.tolist()), logprobs=tuple(best.values.tolist()))
