"""The parity gate of a decoder's exports: what another loader computes, layer by layer, against fake quantization.

Dynamic quantization is chaotic end to end (`penjing.core.artifact.decoder`), so each layer is judged by its own: what
the loader fed to it goes through the fake-quantized layer too, and both outputs are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from penjing.compress.decoder.parity import (
    PROMPTS,
    Computed,
    greedy_answer,
    judge_layers,
    run_dequantized,
    run_fake_quantized,
    tensor_difference,
)
from penjing.compress.decoder.stream import LayerStream
from penjing.core.artifact.decoder import (
    INT8_RUNTIME,
    LAYER_OUTPUTS,
    DecoderArtifact,
    logprob_difference,
    recorded_answers,
    recorded_prompts,
)
from penjing.core.artifact.parity import Bound, Difference, gate
from penjing.core.checkpoint.decoder import Checkpoint
from penjing.core.text.tokenizer import Tokenizer

HINT = "nothing was exported. Is the artifact damaged? 'penjing compress verify' says how far the INT8 runtime is"
DEQUANTIZED = "dequantized"
# The same weights and floating activations on both sides: what is left is the order of sums in float32.
WEIGHTS_BOUND = Bound(between=(DEQUANTIZED, ""), quantity=LAYER_OUTPUTS, statistic="mean", value=1e-4)

ENDS = 1e-3  # of embedding and logits: a table that is in INT8 here is in float16 there, half of a 2048th away


def prompt_ids(checkpoint: Checkpoint) -> list[tuple[list[int], int]]:
    """(token ids, their number) of each prompt, of an artifact that has no record of them."""
    tokenizer = Tokenizer.from_folder(checkpoint.folder)
    encoded = [tokenizer.encode(text) for text in PROMPTS]
    return [(list(ids), len(ids)) for ids in encoded]


def sequences(artifact: DecoderArtifact) -> list[tuple[list[int], int]]:
    """(token ids, length of the prompt) of each input of the artifact's record with what the INT8 runtime answered."""
    record = artifact.parity
    pairs = zip(recorded_prompts(record), recorded_answers(record, INT8_RUNTIME), strict=True)
    return [([*prompt.token_ids, *answer.token_ids], len(prompt.token_ids)) for prompt, answer in pairs]


@torch.no_grad()
def measure_weights(checkpoint: Checkpoint, loader: str, readings: list[Computed]) -> Difference:
    """How far the layers of `loader` are from layers with the stored weights and floating activations.

    Args:
        readings: of `prompt_ids(checkpoint)`, in order.

    Raises:
        InputError: the mean difference of a layer is beyond `WEIGHTS_BOUND`, that of the embedding or of the logits
            beyond `ENDS`, or there is NaN.
    """
    stream, bound = LayerStream(checkpoint), WEIGHTS_BOUND.of(loader)
    head = stream.floating_head()
    for reading, (ids, _) in zip(readings, prompt_ids(checkpoint), strict=True):
        ends = {
            "embedding": (reading.hidden[0], stream.embed(torch.tensor([ids]))[0]),
            "logits": (reading.logits_TV, head(stream.final_norm(reading.hidden[-1]))),
        }
        for name, (found, wanted) in ends.items():
            difference = tensor_difference(bound.between, LAYER_OUTPUTS, _relative(found, wanted))
            gate([difference], bound.model_copy(update={"value": ENDS}), f"in the {name}; {HINT}")
    return judge_layers(_gaps(stream, readings, run_dequantized), bound, HINT)


def _gaps(
    stream: LayerStream, readings: list[Computed], run: Callable[[LayerStream, int, Iterable[Tensor]], None]
) -> list[Tensor]:
    """For each layer the distances of its outputs from what `run` makes of the same inputs, relative to the size of a
    token: other loaders round by scales of their own, which is 0.03 of what a layer of SmolLM2 adds."""
    gaps: list[Tensor] = []
    for layer in range(stream.config.num_hidden_layers):
        expected = [reading.hidden[layer][None].clone() for reading in readings]
        run(stream, layer, expected)
        found: list[Tensor] = []
        for reading, wanted_1TE in zip(readings, expected, strict=True):
            found.append(_relative(reading.hidden[layer + 1], wanted_1TE[0]))
        gaps.append(torch.cat(found))
    return gaps


def _relative(found: Tensor, wanted: Tensor) -> Tensor:
    """Distances of two (T, …), relative to the size of a token's row, in one row."""
    return ((found - wanted).abs() / wanted.square().mean(dim=-1, keepdim=True).sqrt()).flatten()


@torch.no_grad()
def measure(artifact: DecoderArtifact, loader: str, readings: list[Computed]) -> tuple[Difference, ...]:
    """How far `loader` is from the fake-quantized layers, and its greedy tokens from those of the INT8 runtime.

    Args:
        readings: of `sequences(artifact)`, in order.

    Raises:
        InputError: a layer's mean difference is beyond the bound of the artifact's record, or there is NaN.
    """
    gaps = _gaps(LayerStream(artifact.checkpoint), readings, run_fake_quantized)
    layers = judge_layers(gaps, artifact.parity.bound.of(loader), HINT)
    answers = tuple(
        greedy_answer(reading.logits_TV[begin - 1 : len(ids) - 1])
        for reading, (ids, begin) in zip(readings, sequences(artifact), strict=True)
    )
    runtime = recorded_answers(artifact.parity, INT8_RUNTIME)
    return (layers, logprob_difference((INT8_RUNTIME, loader), runtime, answers))
