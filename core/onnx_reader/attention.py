"""Attention and RotaryEmbedding of version 23."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.core.onnx_reader.values import Call


def _attention(call: Call) -> Tensor:
    odd = [name for index, name in ((4, "past_key"), (5, "past_value"), (6, "nonpad_kv_seqlen")) if call.has(index)]
    odd += [name for name in ("softcap", "qk_matmul_output_mode") if call.attribute(name)]
    odd += [f"output {index}" for index in (1, 2, 3) if call.uses(index)]
    if odd:
        raise call.refused(f"has {odd[0]}, which penjing does not compute")
    query, key, value = (call.tensor(index) for index in range(3))
    flat = query.ndim == 3
    heads, shared = call.attribute("q_num_heads"), call.attribute("kv_num_heads")
    if flat:
        query, key, value = _apart(query, heads), _apart(key, shared), _apart(value, shared)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = bool(call.attribute("is_causal", 0))
    mask = call.optional(3)
    if causal and mask is not None:
        raise call.refused("is causal and has a mask, which penjing does not compute")
    mixed = F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=call.attribute("scale"))
    return mixed.transpose(1, 2).flatten(2) if flat else mixed


def _apart(x: Tensor, heads: int) -> Tensor:
    return x.reshape(x.shape[0], -1, heads, x.shape[2] // heads).transpose(1, 2)


def _rotary(call: Call) -> Tensor:
    x, cos, sin = call.tensor(0), call.tensor(1), call.tensor(2)
    flat = x.ndim == 3
    x = x.reshape(x.shape[0], x.shape[1], call.attribute("num_heads"), -1) if flat else x.transpose(1, 2)
    if call.has(3):
        cos, sin = F.embedding(call.tensor(3), cos), F.embedding(call.tensor(3), sin)
    width = call.attribute("rotary_embedding_dim", 0) or x.shape[3]
    turned, rest = x[..., :width], x[..., width:]
    cos, sin = cos.unsqueeze(2)[..., : width // 2], sin.unsqueeze(2)[..., : width // 2]
    if call.attribute("interleaved", 0):
        one, other = turned[..., 0::2], turned[..., 1::2]
        y = torch.stack([one * cos - other * sin, one * sin + other * cos], -1).flatten(-2)
    else:
        one, other = turned[..., : width // 2], turned[..., width // 2 :]
        y = torch.cat([one * cos - other * sin, one * sin + other * cos], -1)
    y = torch.cat([y, rest], -1) if width < x.shape[3] else y
    return y.flatten(2) if flat else y.transpose(1, 2)


OPERATORS: dict[str, Callable[[Call], Any]] = {"Attention": _attention, "RotaryEmbedding": _rotary}
