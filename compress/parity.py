"""The same inputs through the fake-quantized model (floats that imitate INT8) and through the INT8 runtime."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.compress.quantize import ROWS_AT_ONCE, QuantizedWeight, fake_quantize_activation
from penjing.compress.stream import HEAD, LayerStream, Weights
from penjing.core.artifact import FAKE_QUANTIZED, INT8_RUNTIME, Parity, ParityDifference, ParityInput, ParityOutput
from penjing.core.artifact import logprob_difference as compare_logprobs
from penjing.core.checkpoint import Checkpoint
from penjing.core.load import LoadedModel
from penjing.core.progress import Progress, Silent

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea, there lived",
)
CONTINUATION = 12  # greedy tokens a prompt


@torch.no_grad()
def measure_parity(checkpoint: Checkpoint, loaded: LoadedModel, progress: Progress | None = None) -> Parity:
    """Continue each prompt with the INT8 runtime, then read the same tokens with the fake-quantized model.

    Args:
        checkpoint: the artifact, opened for its tensors.
        loaded: the artifact, loaded in the INT8 runtime.
    """
    progress = progress or Silent()
    inputs = [ParityInput(text=text, token_ids=tuple(loaded.tokenizer.encode(text))) for text in PROMPTS]
    sequences, runtime_logits = [], []
    for prompt in inputs:
        ids = _continue_greedily(loaded.model, list(prompt.token_ids))
        sequences.append(ids)
        runtime_logits.append(loaded.model(torch.tensor([ids]))[0])
        progress.advance()
    # Right padding: attention is causal, so what follows a sequence does not reach it.
    padded_WT = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True)
    fake_WTV = fake_quantized_logits(checkpoint, padded_WT)
    fake_logits = [fake_TV[: len(ids)] for fake_TV, ids in zip(fake_WTV, sequences, strict=True)]

    lengths = [len(prompt.token_ids) for prompt in inputs]
    outputs = {
        name: tuple(_output(*row) for row in zip(logits, sequences, lengths, strict=True))
        for name, logits in ((FAKE_QUANTIZED, fake_logits), (INT8_RUNTIME, runtime_logits))
    }
    gaps = torch.cat([(one - other).abs().flatten() for one, other in zip(fake_logits, runtime_logits, strict=True)])
    logprobs = compare_logprobs((FAKE_QUANTIZED, INT8_RUNTIME), outputs[FAKE_QUANTIZED], outputs[INT8_RUNTIME])
    logits = ParityDifference(
        between=(FAKE_QUANTIZED, INT8_RUNTIME),
        quantity="logits",
        num_values=gaps.numel(),
        largest=float(gaps.max()),
        mean=float(gaps.mean()),
        same_tokens=logprobs.same_tokens,
    )
    return Parity(inputs=tuple(inputs), outputs=outputs, differences=(logits, logprobs))


@torch.no_grad()
def fake_quantized_logits(checkpoint: Checkpoint, windows_WT: Tensor) -> Tensor:
    """(W, T) token ids → (W, T, V) float32 logits, with weights and activations rounded to INT8 and widened again.

    One layer is in memory at a time; an artifact in which nothing is quantized runs as it is.
    """
    stream = LayerStream(checkpoint)
    stored = set(checkpoint.tensor_names)
    hidden_WTE = stream.embed(windows_WT)
    for layer in range(stream.config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        weights = _dequantize(stream.weights(layer), checkpoint, prefix)

        def rounded(name: str, x: Tensor, prefix: str = prefix) -> Tensor | None:
            return fake_quantize_activation(x) if f"{prefix}{name}.weight_scale" in stored else None

        stream.run(layer, weights, hidden_WTE, rounded)
    x_WTE = stream.final_norm(hidden_WTE)
    head_VE = stream.head_weight()
    if f"{HEAD}_scale" not in stored:
        return F.linear(x_WTE, head_VE.to(torch.float32))
    scale_V1 = checkpoint.get(f"{HEAD}_scale")
    x_WTE = fake_quantize_activation(x_WTE)
    blocks = zip(head_VE.split(ROWS_AT_ONCE), scale_V1.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([F.linear(x_WTE, QuantizedWeight(*block).dequantize()) for block in blocks], dim=-1)


def _dequantize(weights: Weights, checkpoint: Checkpoint, prefix: str) -> Weights:
    stored = set(checkpoint.tensor_names)
    return {
        name: tensor * checkpoint.get(f"{prefix}{name}_scale") if f"{prefix}{name}_scale" in stored else tensor
        for name, tensor in weights.items()
    }


def _continue_greedily(model: nn.Module, ids: list[int]) -> list[int]:
    for _ in range(CONTINUATION):
        logits_RV = model(torch.tensor([ids]), logit_rows=torch.tensor([len(ids) - 1]))
        ids = [*ids, int(logits_RV[0].argmax())]
    return ids


def _output(logits_TV: Tensor, ids: list[int], prompt_length: int) -> ParityOutput:
    """The greedy choice at each position of the continuation `ids[prompt_length:]`, given the tokens before it."""
    logprobs_RV = logits_TV[prompt_length - 1 : len(ids) - 1].log_softmax(dim=-1)
    best = logprobs_RV.max(dim=-1)
    return ParityOutput(token_ids=tuple(best.indices.tolist()), logprobs=tuple(best.values.tolist()))
