"""A decoder's step on a device as a row of fused launches: nine a layer for INT8 weights, none of which waits.
Weights of 4 bits take a launch more for each gate, and for codes in groups.

Residuals are added and gates applied where the products are made, INT8 codes where the norms are; rotation and the
write to the cache are one launch. Nothing depends on the values, so a step can be captured in a CUDA graph. Every
kernel treats rows alike whatever the batch (see the files of `kernels`), so a row's bits are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penjing.core.models.attention import Attention
from penjing.core.models.decoder import Decoder, DecoderLayer
from penjing.core.models.mlp import MLP
from penjing.core.models.norm import RMSNorm
from penjing.core.models.rope import yarn_magnitudes
from penjing.core.runtime.batch_invariant import BatchInvariantLinear
from penjing.core.runtime.embedding import Int8Embedding
from penjing.core.runtime.quantized import Int4Linear, Int8Linear, moved
from penjing.kernels.gpu.registry import MAX_HEAD_DIM
from penjing.kernels.hadamard import hadamard
from penjing.kernels.int4_linear import FLOATING, PackedInt4, prepack_int4, quantize_for_int4, scaled_int4_matmul
from penjing.kernels.int8_linear import PackedInt8, prepack_int8, scaled_above, scaled_int8_matmul
from penjing.kernels.linear import linear
from penjing.kernels.paged_attention import paged_attention
from penjing.kernels.quantize import quantize_per_token
from penjing.kernels.rms_norm import rms_norm, rms_norm_quantize
from penjing.kernels.rotary import rotary_cos_sin, rotary_write_kv
from penjing.kernels.swiglu import swiglu

_PROJECTIONS = (nn.Linear, BatchInvariantLinear, Int8Linear, Int4Linear)


def unsupported(model: Decoder) -> str | None:
    """Why `DeviceStep` cannot take `model`, or None if it can."""
    if model.config.head_dim > MAX_HEAD_DIM:  # torch's way would wait for the device
        return f"head_dim={model.config.head_dim} is above {MAX_HEAD_DIM}"
    if departures := model.config.departures():
        return ", ".join(departures)
    for index, layer in enumerate(model.model.layers):
        assert isinstance(layer, DecoderLayer)
        for part, wanted in ((layer.self_attn, Attention), (layer.mlp, MLP)):
            if type(part) is not wanted:
                return f"layer {index} has a {type(part).__name__}"
    for name, module in model.named_modules():
        projection = name.endswith("_proj") or name == "lm_head"
        if projection and type(module) not in _PROJECTIONS:
            return f"{name} is a {type(module).__name__}"
    return None


@dataclass(frozen=True)
class _Int8:
    """One INT8 layer, or several of one input whose outputs follow each other."""

    packed: PackedInt8
    dtype: torch.dtype
    swiglu: bool = False

    def __call__(self, x_MK: Tensor, residual_MN: Tensor | None = None) -> Tensor:
        if self.packed.zero_points:
            return self._above(x_MK, residual_MN)
        return self._product(*quantize_per_token(x_MK), residual_MN)

    def of_norm(self, x_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        if self.packed.zero_points:
            return self._above(rms_norm(x_MK, weight_K, eps), None)
        codes_MK, scale_M, _ = rms_norm_quantize(x_MK, weight_K, eps)
        return self._product(codes_MK, scale_M, None)

    def _above(self, x_MK: Tensor, residual_MN: Tensor | None) -> Tensor:
        y_MN = scaled_above(x_MK, self.packed, residual_MN, self.dtype)
        return swiglu(*y_MN.chunk(2, dim=1)) if self.swiglu else y_MN

    def _product(self, codes_MK: Tensor, scale_M: Tensor, residual_MN: Tensor | None) -> Tensor:
        return scaled_int8_matmul(
            codes_MK, scale_M, self.packed, residual_MN=residual_MN, swiglu=self.swiglu, dtype=self.dtype
        )


@dataclass(frozen=True)
class _Int4:
    """The same of 4-bit weights."""

    packed: PackedInt4
    dtype: torch.dtype
    swiglu: bool = False

    def __call__(self, x_MK: Tensor, residual_MN: Tensor | None = None) -> Tensor:
        return self._product(*quantize_for_int4(x_MK, self.packed), residual_MN)

    def of_norm(self, x_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        if self.packed.offset_NG is not None:  # a scale for each group, which the fused norm has not
            return self(rms_norm(x_MK, weight_K, eps))
        codes_MK, scale_M, _ = rms_norm_quantize(x_MK, weight_K, eps)
        return self._product(codes_MK, scale_M[:, None], None)

    def _product(self, codes_MK: Tensor, scale_MG: Tensor, residual_MN: Tensor | None) -> Tensor:
        y_MN = scaled_int4_matmul(codes_MK, scale_MG, self.packed, residual_MN=residual_MN, dtype=self.dtype)
        return swiglu(*y_MN.chunk(2, dim=1)) if self.swiglu else y_MN


@dataclass(frozen=True)
class _Float:
    """The same in a float type."""

    weight_NK: Tensor  # noqa: N815
    bias_N: Tensor | None  # noqa: N815
    dtype: torch.dtype
    swiglu: bool = False

    def __call__(self, x_MK: Tensor, residual_MN: Tensor | None = None) -> Tensor:
        y_MN = linear(x_MK, self.weight_NK, self.bias_N, residual_MN=residual_MN, dtype=self.dtype)
        return swiglu(*y_MN.chunk(2, dim=1)) if self.swiglu else y_MN

    def of_norm(self, x_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        return self(rms_norm(x_MK, weight_K, eps))


_One = _Int8 | _Int4 | _Float


@dataclass(frozen=True)
class _Mixed:
    """Layers of one input that are not all of one kind."""

    parts: list[_One]
    swiglu: bool = False

    def of_norm(self, x_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        y_MN = torch.cat([part.of_norm(x_MK, weight_K, eps) for part in self.parts], dim=1)
        return swiglu(*y_MN.chunk(2, dim=1)) if self.swiglu else y_MN


@dataclass(frozen=True)
class _Layer:
    qkv: _One | _Mixed
    out: _One
    gate_up: _One | _Mixed
    down: _One
    hadamard: int
    input_norm: Tensor
    post_norm: Tensor
    head_norms: tuple[Tensor, Tensor] | None
    window: int | None


class DeviceStep:
    """A dense decoder's weights on `device`, laid out for `__call__`; activations and float weights are in `dtype`."""

    def __init__(self, model: Decoder, device: str, dtype: torch.dtype) -> None:
        """Copy the weights.

        Raises:
            ValueError: the model is not one that this takes, see `unsupported`.
        """
        reason = unsupported(model)
        if reason is not None:
            raise ValueError(reason)
        self.config, self.device, self.dtype = model.config, torch.device(device), dtype
        self._move: Callable[[Tensor], Tensor] = lambda x: x.detach().to(self.device)
        backbone = model.model
        head, table = model.lm_head, backbone.embed_tokens
        eight = isinstance(table, Int8Embedding)
        every = torch.arange(model.config.vocab_size)
        self._embedding = self._move(table(every) if eight else table.weight).to(dtype)
        if isinstance(head, nn.Linear) and not eight and head.weight is table.weight:
            self._head: _One = _Float(self._embedding, None, torch.float32)
        else:
            self._head = self._projection(head, torch.float32)
        self._norm = self._norm_before(self._head, backbone.norm)
        self._frequency = self._move(backbone.inverse_frequency).to(torch.float32)
        self._rotary_scale, _ = yarn_magnitudes(model.config.rope_scaling)
        self._layers = [self._layer(model, index) for index in range(model.config.num_hidden_layers)]

    @torch.inference_mode()
    def __call__(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        cu_query_S1: Tensor,
        context_len_S: Tensor,
        block_table_SB: Tensor,
        logit_rows_R: Tensor | None,
        kv_pool: Tensor,
        kv_scale: Tensor | None,
    ) -> Tensor:
        """Compute T tokens into the cache; see `StepTensors` in `serve.step_inputs` for the lengths.

        Args:
            token_ids_T, positions_T: int32.
            slots_T: int64; −1 writes nothing.
            cu_query_S1, context_len_S, block_table_SB: int32, see `kernels.paged_attention`.
            logit_rows_R: int32 rows whose logits are wanted; None: all.
            kv_pool: (layers, 2, blocks, kv_heads, block_size, head_dim), `dtype` or int8.
            kv_scale: its scales, float32, without the last dimension; None unless int8.

        Returns:
            (R, V) float32 logits.
        """
        config, eps = self.config, self.config.rms_norm_eps
        sizes = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        x = torch.nn.functional.embedding(token_ids_T, self._embedding)
        angles = rotary_cos_sin(self._frequency, positions_T, self._rotary_scale)
        for index, layer in enumerate(self._layers):
            heads = layer.qkv.of_norm(x, layer.input_norm, eps).unflatten(1, (-1, config.head_dim))
            q, k, v = heads.split(sizes, dim=1)
            if layer.head_norms is not None:
                q, k = (rms_norm(y, weight, eps) for y, weight in zip((q, k), layer.head_norms, strict=True))
            scales = (None, None) if kv_scale is None else (kv_scale[index, 0], kv_scale[index, 1])
            cache = kv_pool[index, 0], kv_pool[index, 1]
            q = rotary_write_kv(q, k, v, *angles, *cache, slots_T, *scales)
            lengths = cu_query_S1, context_len_S, block_table_SB
            seen = paged_attention(q, *cache, *lengths, config.head_dim**-0.5, layer.window, *scales)
            x = layer.out(seen.flatten(1), x)
            inner = layer.gate_up.of_norm(x, layer.post_norm, eps)
            x = layer.down(hadamard(inner, layer.hadamard).to(inner.dtype) if layer.hadamard else inner, x)
        if logit_rows_R is not None:
            x = x.index_select(0, logit_rows_R)
        return self._head.of_norm(x, self._norm, eps)

    def _layer(self, model: Decoder, index: int) -> _Layer:
        layer = model.model.layers[index]
        assert isinstance(layer, DecoderLayer)
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(attention, Attention)
        assert isinstance(mlp, MLP)
        norms = (attention.q_norm, attention.k_norm) if attention.qk_norm else ()
        head_norms = [self._move(norm.weight).to(self.dtype) for norm in norms]
        qkv = self._group((attention.q_proj, attention.k_proj, attention.v_proj))
        gate_up = self._group((mlp.gate_proj, mlp.up_proj), swiglu=True)
        return _Layer(
            qkv=qkv,
            out=self._projection(attention.o_proj),
            gate_up=gate_up,
            down=self._projection(mlp.down_proj),
            hadamard=mlp.hadamard,
            input_norm=self._norm_before(qkv, layer.input_layernorm),
            post_norm=self._norm_before(gate_up, layer.post_attention_layernorm),
            head_norms=(head_norms[0], head_norms[1]) if head_norms else None,
            window=model.config.layer_window(index),
        )

    def _norm_before(self, reader: _One | _Mixed, norm: RMSNorm | None) -> Tensor:
        """The weight in float32 before codes, else in `dtype`, which it would promote the result to."""
        assert norm is not None  # unsupported() has looked
        return self._move(norm.weight).to(torch.float32 if isinstance(reader, (_Int8, _Int4)) else self.dtype)

    def _projection(self, module: nn.Module, dtype: torch.dtype | None = None) -> _One:
        if isinstance(module, Int4Linear) and module.packed.activation_bits == FLOATING:  # no kernel: widened once
            packed = module.packed
            bias = None if packed.bias_N is None else self._move(packed.bias_N).to(self.dtype)
            return _Float(self._move(packed.dequantize()).to(self.dtype), bias, dtype or self.dtype)
        if isinstance(module, Int4Linear):
            return _Int4(moved(module.packed, self._move), dtype or self.dtype)
        if isinstance(module, Int8Linear):
            return _Int8(moved(module.packed, self._move), dtype or self.dtype)
        assert isinstance(module, nn.Linear)
        bias = None if module.bias is None else self._move(module.bias).to(self.dtype)
        return _Float(self._move(module.weight).to(self.dtype).contiguous(), bias, dtype or self.dtype)

    def _group(self, modules: Sequence[nn.Module], swiglu: bool = False) -> _One | _Mixed:
        """Layers of one input as one product, their outputs one behind the other."""
        parts = [self._projection(module) for module in modules]
        int8 = [part for part in parts if isinstance(part, _Int8)]
        int4 = [part for part in parts if isinstance(part, _Int4)]
        floats = [part for part in parts if isinstance(part, _Float)]
        if len(int4) == len(parts) and len({_form(part.packed) for part in int4}) == 1:
            return _Int4(_joined_int4([part.packed for part in int4]), self.dtype, swiglu)
        if len(int8) == len(parts) and not any(part.packed.zero_points for part in int8):
            packed = [part.packed for part in int8]
            weight = torch.cat([one.weight_NK for one in packed])
            bias = _joined([one.bias_N for one in packed], [one.out_features for one in packed])
            return _Int8(prepack_int8(weight, torch.cat([one.scale_N for one in packed]), bias), self.dtype, swiglu)
        if len(floats) == len(parts):
            bias = _joined([part.bias_N for part in floats], [len(part.weight_NK) for part in floats])
            return _Float(torch.cat([part.weight_NK for part in floats]), bias, self.dtype, swiglu)
        return _Mixed(parts, swiglu)


def _joined(vectors: Sequence[Tensor | None], lengths: Sequence[int]) -> Tensor | None:
    """The biases one behind the other, zeros where a layer has none; None if none has."""
    some = next((vector for vector in vectors if vector is not None), None)
    if some is None:
        return None
    pairs = zip(vectors, lengths, strict=True)
    return torch.cat([some.new_zeros(length) if vector is None else vector for vector, length in pairs])


def _form(packed: PackedInt4) -> tuple[int, torch.dtype, bool]:
    """What layers have in common that are one product."""
    return packed.group, packed.scale_NG.dtype, packed.offset_NG is not None


def _joined_int4(packed: Sequence[PackedInt4]) -> PackedInt4:
    offsets = [one.offset_NG for one in packed if one.offset_NG is not None]
    return prepack_int4(
        torch.cat([one.packed_NK8 for one in packed]),
        torch.cat([one.scale_NG for one in packed]),
        _joined([one.bias_N for one in packed], [one.out_features for one in packed]),
        torch.cat(offsets) if offsets else None,
    )
