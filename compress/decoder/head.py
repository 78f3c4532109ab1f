"""The two tables of a decoder, embedding and LM head: rotate, smooth, quantize, a block of rows at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.compress.decoder.layer import ERROR_ROWS, Rotations, int8_rule, quantized_tensors
from penjing.compress.decoder.rotate import rotate_input
from penjing.compress.decoder.settings import Int8Settings
from penjing.compress.decoder.smooth import channel_magnitude, input_magnitude, smoothing_scale
from penjing.compress.decoder.stream import EMBEDDING, FINAL_NORM, HEAD, HEAD_BIAS, LayerStream, Weights
from penjing.compress.decoder.weights import (
    ROWS_AT_ONCE,
    ErrorMeter,
    LinearError,
    QuantizedWeight,
    quantize_per_channel,
)
from penjing.core.checkpoint.dtypes import DTYPES
from penjing.core.errors import InputError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.tensor_names import POSITIONS, TOKEN_INPUTS
from penjing.core.runtime.embedding import CHANNEL
from penjing.core.runtime.schemes import EMBEDDING_MODULE
from penjing.kernels.hadamard import hadamard

# Of the smoothing between the last norm and a table that is the embedding too. Of 0, 0.25, 0.5 and 0.7 the one with
# which SmolLM2 loses least on five texts: 0.6 % of perplexity in all, 1.25 % without smoothing. That was with channels
# measured as `magnitudes` does; by their root mean square SmolLM2 loses as much on five other texts, and Gemma 3 0.85 %
# on four in place of 1.13, in the mean (docs/log/2026-11-29-trained-with-finer-scales.md).
TABLE_ALPHA = 0.5


@dataclass(frozen=True)
class CompressedHead:
    """Last norm and LM head of the artifact; no head where it stays tied to the embedding."""

    tensors: Weights
    error: LinearError | None  # None: the head was kept


def unties(settings: Int8Settings) -> bool:
    """Whether the artifact's LM head differs from its embedding even where the model's are one tensor."""
    return settings.transform.rotate or (settings.lm_head == "int8" and settings.embedding_dtype != "int8")


def one_table(settings: Int8Settings, config: DecoderConfig) -> bool:
    """Whether embedding and LM head are the same integers."""
    return config.tie_word_embeddings and settings.embedding_dtype == "int8" and not unties(settings)


def compress_embedding(stream: LayerStream, settings: Int8Settings, rotations: Rotations | None) -> Weights:
    """The embedding table (V, E) in `embedding_dtype`; nothing where it comes with the head.

    Raises:
        InputError: a value does not fit the dtype.
    """
    table_VE, block = stream.stored(EMBEDDING), settings.transform.hadamard_table
    if settings.embedding_dtype == "int8":
        if one_table(settings, stream.config):
            return {}
        blocks = [quantize_per_channel(_turned(rows_RE, rotations, block)) for rows_RE in table_VE.split(ROWS_AT_ONCE)]
        return quantized_tensors(EMBEDDING_MODULE, _joined(blocks))
    return {EMBEDDING: _rotated(EMBEDDING, table_VE, settings.embedding_dtype, rotations, block)}


def compress_positions(stream: LayerStream, settings: Int8Settings, rotations: Rotations | None) -> Weights:
    """The table of learned positions, if there is one, in floating point.

    Raises:
        InputError: a value does not fit the dtype.
    """
    return _kept_floating(stream, settings, POSITIONS, rotations) if stream.config.learned_positions else {}


def copy_token_inputs(stream: LayerStream, settings: Int8Settings, rotations: Rotations | None) -> Weights:
    """The table of what layers take of tokens, if there is one, in floating point.

    Raises:
        InputError: a value does not fit the dtype.
    """
    return _kept_floating(stream, settings, TOKEN_INPUTS, None) if stream.config.token_inputs else {}


def _kept_floating(stream: LayerStream, settings: Int8Settings, name: str, rotations: Rotations | None) -> Weights:
    dtype = "float16" if settings.embedding_dtype == "int8" else settings.embedding_dtype
    return {name: _rotated(name, stream.stored(name), dtype, rotations)}


def _turned(rows_RE: Tensor, rotations: Rotations | None, block: int) -> Tensor:
    """Rows of a table in the basis of the artifact's."""
    rows_RE = rows_RE if rotations is None else rotate_input(rows_RE, rotations.residual_EE)
    return hadamard(rows_RE, block) if block else rows_RE


def _rotated(name: str, table_VE: Tensor, dtype: str, rotations: Rotations | None, block: int = 0) -> Tensor:
    stored_VE = torch.empty(table_VE.shape, dtype=DTYPES[dtype])
    for rows_RE, stored_RE in zip(table_VE.split(ROWS_AT_ONCE), stored_VE.split(ROWS_AT_ONCE), strict=True):
        stored_RE.copy_(_turned(rows_RE, rotations, block))
    if not torch.isfinite(stored_VE).all():
        raise InputError(f"{name} has values beyond {dtype}; use --set steps.N.embedding_dtype=bfloat16 or float32")
    return stored_VE


def embed_for_calibration(
    stream: LayerStream, rotations: Rotations | None, windows_WT: Tensor, rows_RE: Tensor | None = None
) -> Tensor:
    """(W, T) token ids → (W, T, E) float32 hidden states in the rotated basis.

    Args:
        rows_RE: what tokens beyond the vocabulary point into: rows of images, float32.
    """
    if rows_RE is None:
        hidden_WTE = stream.embed(windows_WT)
    else:
        beyond_WT = windows_WT >= stream.config.vocab_size
        hidden_WTE = stream.embed(windows_WT.masked_fill(beyond_WT, 0))
        hidden_WTE[beyond_WT] = rows_RE[windows_WT[beyond_WT] - stream.config.vocab_size]
    return hidden_WTE if rotations is None else rotate_input(hidden_WTE, rotations.residual_EE)


@torch.no_grad()
def compress_head(
    stream: LayerStream, settings: Int8Settings, rotations: Rotations | None, sample_ME: Tensor
) -> CompressedHead:
    """Last norm and LM head.

    Args:
        sample_ME: some of the calibration text's (rotated) hidden states after the last layer.
    """
    stored_VE = stream.head_weight()
    norm_E = stream.stored(FINAL_NORM).to(torch.float32)
    folded_E = torch.ones_like(norm_E) if rotations is None else norm_E  # moves into the head, before the rotation
    new_norm_E = norm_E.clone() if rotations is None else torch.ones_like(norm_E)

    def rows(start: int) -> Tensor:
        rows_RE = stored_VE[start : start + ROWS_AT_ONCE].to(torch.float32) * folded_E
        return rows_RE if rotations is None else rotate_input(rows_RE, rotations.residual_EE)

    starts = range(0, stored_VE.shape[0], ROWS_AT_ONCE)
    x_ME = F.rms_norm(sample_ME, new_norm_E.shape, new_norm_E, stream.config.rms_norm_eps)
    scale_E = torch.ones_like(norm_E)
    tied, block = one_table(settings, stream.config), settings.transform.hadamard_table
    if tied:
        alpha = 0.0 if block else TABLE_ALPHA  # a transform spreads outliers better
    else:
        alpha = 0.0 if settings.keeps("lm_head") else settings.transform.smooth_norm
    if alpha > 0:
        if tied:
            square_E = torch.stack([rows(start).square().sum(dim=0) for start in starts]).sum(dim=0)
            scale_E = smoothing_scale(x_ME.square().mean(dim=0).sqrt(), (square_E / len(stored_VE)).sqrt(), alpha)
        else:
            magnitude_E = torch.stack([input_magnitude(rows(start)) for start in starts]).amax(dim=0)
            scale_E = smoothing_scale(channel_magnitude(x_ME), magnitude_E, alpha)
    tensors: Weights = {FINAL_NORM: new_norm_E / scale_E}
    if (bias_V := stream.head_bias()) is not None:
        tensors[HEAD_BIAS] = bias_V
    if not tied and not unties(settings) and stream.config.tie_word_embeddings:
        return CompressedHead(tensors, None)
    if settings.keeps("lm_head"):
        kept_VE = torch.empty(stored_VE.shape, dtype=DTYPES[settings.embedding_dtype])
        for start in starts:
            kept_VE[start : start + ROWS_AT_ONCE] = _turned(rows(start) * scale_E, None, block)
        return CompressedHead(tensors | {HEAD: kept_VE}, None)
    # Compensation would make the head better and the embedding, which is looked up row by row, worse.
    x_ME = _turned(x_ME / scale_E, None, block)
    rule = quantize_per_channel if tied else int8_rule(settings, x_ME)
    meter, blocks = ErrorMeter(), list[QuantizedWeight]()
    few_ME = x_ME[:: max(1, len(x_ME) // ERROR_ROWS)]
    for start in starts:
        rows_RE = _turned(rows(start) * scale_E, None, block)
        blocks.append(rule(rows_RE))
        meter.add(rows_RE, blocks[-1], few_ME)
    if tied:
        tensors[CHANNEL] = scale_E.reciprocal()
    module = EMBEDDING_MODULE if tied else "lm_head"
    return CompressedHead(tensors | quantized_tensors(module, _joined(blocks)), meter.result())


def _joined(blocks: list[QuantizedWeight]) -> QuantizedWeight:
    return QuantizedWeight(
        torch.cat([block.weight_NK for block in blocks]), torch.cat([block.scale_N1 for block in blocks])
    )
