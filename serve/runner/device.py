"""Where an engine runs and in which number types: "auto" becomes a device and a type, once, at the edge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from penjing.core.checkpoint.dtypes import DTYPES
from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig
from penjing.core.runtime.quantized import Int4Linear, Int8Linear
from penjing.kernels.cpu import extension
from penjing.kernels.cpu.kv_layout import narrow_dtype
from penjing.kernels.dispatch import cuda_refusal
from penjing.kernels.gpu.registry import MAX_HEAD_DIM
from penjing.kernels.int4_linear import FLOATING
from penjing.serve.engine.config import Device, EngineConfig, KvDtype

if TYPE_CHECKING:
    from penjing.core.models.decoder import Decoder

SCALE_AND_BIAS_BYTES = 8  # of an INT8 layer's output channel
WORKSPACE_BYTES = 2 << 30  # activations of a step, CUDA graphs, the context itself


def find_device(device: Device) -> Device:
    """`device` with "auto" decided.

    Raises:
        ConfigError: no CUDA device that the kernels run on.
    """
    refusal = None if device == "cpu" else cuda_refusal()
    if device == "cuda" and refusal is not None:
        raise ConfigError(f"device=cuda cannot run here: {refusal}; set device=cpu, or see penjing info")
    return "cpu" if refusal is not None else "cuda" if device == "auto" else device


def resolve_device(config: EngineConfig, model: DecoderConfig, is_quantized: bool = False) -> EngineConfig:
    """`config` with `device`, `dtype` and `kv_dtype` decided for this machine and `model`.

    Keys and values of quantized weights are kept in 16 bits on a CPU: their rounding is far below that of activations.

    Raises:
        ConfigError: no CUDA device that the kernels run on, or types that the device's path does not compute in.
    """
    device = find_device(config.device)
    wide = device == "cpu" or not is_dense(model)
    dtype = ("float32" if wide else "bfloat16") if config.dtype == "auto" else config.dtype
    if wide and dtype != "float32":
        what = "device=cpu" if device == "cpu" else "a model of experts or latent attention"
        raise ConfigError(f"dtype={dtype} with {what}, which runs in float32; leave dtype=auto")
    kv_dtype, kinds = config.kv_dtype, [dtype, *(["float16", "bfloat16"] if device == "cpu" else []), "int8"]
    if kv_dtype == "auto":
        kv_dtype = _sixteen_bits(model) if device == "cpu" and is_quantized else dtype
    if kv_dtype not in kinds:
        raise ConfigError(
            f"kv_dtype={kv_dtype} on device={device} with dtype={dtype}: the cache is kept in {' or '.join(kinds)}; "
            "leave kv_dtype=auto"
        )
    return config.model_copy(update={"device": device, "dtype": dtype, "kv_dtype": kv_dtype})


def _sixteen_bits(model: DecoderConfig) -> KvDtype:
    kernels = extension()
    narrow = narrow_dtype(kernels.isa if kernels is not None else None, model.head_dim)
    return "bfloat16" if narrow == torch.bfloat16 else "float16"


def is_dense(model: DecoderConfig) -> bool:
    """Whether the fused step takes the model's layers; others run one operation after the other."""
    plain = model.moe is None and model.latent_attention is None and not model.departures()
    return plain and model.head_dim <= MAX_HEAD_DIM


def free_device_memory(model: Decoder, config: EngineConfig) -> int:
    """Bytes of the CUDA device that remain for the KV cache when `model` has been moved there."""
    free, _ = torch.cuda.mem_get_info()
    floats = sum(parameter.numel() for parameter in model.parameters()) * DTYPES[config.dtype].itemsize
    integers = sum(_stored_bytes(module, DTYPES[config.dtype].itemsize) for module in model.modules())
    return max(0, free - floats - integers - WORKSPACE_BYTES)


def _stored_bytes(module: nn.Module, float_bytes: int) -> int:
    """Bytes of a layer in integers; its scales of 4 bits lie there twice, in the order of the product too. One whose
    activations are floating lies there in floats."""
    if isinstance(module, Int8Linear):
        return (module.in_features + SCALE_AND_BIAS_BYTES) * module.out_features
    if isinstance(module, Int4Linear):
        packed = module.packed
        if packed.activation_bits == FLOATING:
            return float_bytes * (module.in_features + 1) * module.out_features
        scales = sum(2 * x.nbytes for x in (packed.scale_NG, packed.offset_NG) if x is not None)
        return packed.packed_NK8.nbytes + scales + SCALE_AND_BIAS_BYTES * module.out_features
    return 0
