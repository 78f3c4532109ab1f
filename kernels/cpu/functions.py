"""The compiled kernels as functions on torch tensors; every argument is checked before its address is passed on."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penjing.kernels.cpu.kv_layout import check_cache
from penjing.kernels.cpu.library import DTYPES, Linear, Pages, Part, Sequences
from penjing.kernels.cpu.pages import empty_pages
from penjing.kernels.cpu.threads import default_threads

ISAS = ("avx512_vnni", "avx2", "scalar")


@dataclass(frozen=True, eq=False)
class Int8Panels:
    """A packed INT8 layer; `memory` holds what `linear` points to."""

    linear: Linear
    memory: Tensor
    in_features: int
    out_features: int


class CpuExtension:
    """The library, set to this machine's instruction set (or PENJING_CPU_ISA) and number of threads."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library
        self.set_num_threads(default_threads())
        wanted = os.environ.get("PENJING_CPU_ISA")
        if wanted:
            self.select_isa(wanted)

    @property
    def isa(self) -> str:
        """The instruction set in use, one of ISAS."""
        return self.library.pj_isa().decode()

    def select_isa(self, name: str) -> None:
        """Use the kernels of one instruction set from ISAS, or "auto".

        Raises:
            ValueError: an unknown name, or one that this processor cannot run.
        """
        result = self.library.pj_select_isa(name.encode())
        if result == -1:
            raise ValueError(f"instruction set {name!r} is unknown; choose auto, {', '.join(ISAS)}")
        if result == -2:
            raise ValueError(f"this processor does not run {name!r}; choose auto")

    @property
    def num_threads(self) -> int:
        """Threads of the team, the caller's included."""
        return self.library.pj_num_threads()

    def set_num_threads(self, count: int) -> None:
        """Resize the team; waits for a running call."""
        if not 1 <= count <= 1024:
            raise ValueError(f"num_threads={count}: 1 to 1024 is possible")
        self.library.pj_set_num_threads(count)

    def empty_pages(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A zeroed tensor on huge pages where the system grants them, for weights and key-value pools."""
        return empty_pages(self.library, shape, dtype)

    def read(self, memory: Tensor) -> int:
        """Sum, modulo 2³², of a contiguous tensor's 32-bit words, read by all threads: measures memory bandwidth."""
        if not memory.is_contiguous() or memory.device.type != "cpu":
            raise ValueError("memory is not a contiguous CPU tensor")
        return self.library.pj_read(memory.data_ptr(), memory.numel() * memory.element_size() // 4)

    def packed_bytes(self, out_features: int, in_features: int, swiglu: bool = False) -> int:
        """Bytes that `prepack_int8` needs for a layer."""
        return self.library.pj_packed_bytes(out_features, in_features, swiglu)

    def prepack_int8(
        self,
        weight_NK: Tensor,
        scale_N: Tensor,
        bias_N: Tensor | None = None,
        *,
        swiglu: bool = False,
        memory: Tensor | None = None,
    ) -> Int8Panels:
        """Lay out an INT8 weight for `int8_linear`; the panels divide evenly among the present number of threads.

        Args:
            weight_NK: (N, K) int8, contiguous. With `swiglu` its upper half is the gate, its lower half the up
                projection, and the layer gives silu(gate) × up, N / 2 features.
            scale_N: (N,) float32.
            bias_N: (N,) float32 or None.
            memory: (packed_bytes,) uint8 to fill, 64-byte aligned; allocated if None.

        Raises:
            ValueError: a wrong shape, dtype or layout.
        """
        return self.prepack_parts([(weight_NK, scale_N, bias_N)], swiglu=swiglu, memory=memory)

    def prepack_parts(
        self,
        parts: Sequence[tuple[Tensor, Tensor, Tensor | None]],
        *,
        swiglu: bool = False,
        memory: Tensor | None = None,
    ) -> Int8Panels:
        """`prepack_int8` of several (weight_NK, scale_N, bias_N) as if they were one, the first one's outputs first.

        Raises:
            ValueError: a wrong shape, dtype or layout.
        """
        in_features = parts[0][0].shape[-1]
        for weight_NK, scale_N, bias_N in parts:
            _check("weight_NK", weight_NK, torch.int8, (None, in_features))
            if 0 in weight_NK.shape:
                raise ValueError(f"weight_NK has shape {tuple(weight_NK.shape)}; non-empty (N, K) is needed")
            _check("scale_N", scale_N, torch.float32, (weight_NK.shape[0],))
            if bias_N is not None:
                _check("bias_N", bias_N, torch.float32, (weight_NK.shape[0],))
        num_rows = sum(weight_NK.shape[0] for weight_NK, _, _ in parts)
        if swiglu and num_rows % 2:
            raise ValueError(f"weight_NK has {num_rows} rows; gate and up have as many each")
        out_features = num_rows // 2 if swiglu else num_rows
        needed = self.packed_bytes(out_features, in_features, swiglu)
        if memory is None:
            memory = self.empty_pages((needed,), torch.uint8)
        _check("memory", memory, torch.uint8, (needed,))
        if memory.data_ptr() % 64:
            raise ValueError("memory is not aligned to 64 bytes")
        c_parts = (Part * len(parts))()
        for c_part, (weight_NK, scale_N, bias_N) in zip(c_parts, parts, strict=True):
            c_part.weight, c_part.scale, c_part.rows = weight_NK.data_ptr(), scale_N.data_ptr(), weight_NK.shape[0]
            c_part.bias = None if bias_N is None else bias_N.data_ptr()
        linear = Linear()
        self.library.pj_pack_int8(
            c_parts, len(parts), out_features, in_features, swiglu, memory.data_ptr(), ctypes.byref(linear)
        )
        return Int8Panels(linear, memory, in_features, out_features)

    def int8_linear(self, x_MK: Tensor, panels: Int8Panels) -> Tensor:
        """(M, N) float32 = x_MK, quantized per token, times the packed weight; see `kernels.int8_linear`."""
        x_MK = _rows("x_MK", x_MK, panels.in_features)
        y_MN = torch.empty(x_MK.shape[0], panels.out_features)
        self._run_linear(panels.linear, x_MK, y_MN)
        return y_MN

    def linear(self, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """(M, N) float32 = x_MK · weight_NKᵀ + bias_N on the weight in place (float32, bfloat16 or float16).

        A row's result does not depend on M.
        """
        linear = float_linear(weight_NK, bias_N)
        x_MK = _rows("x_MK", x_MK, weight_NK.shape[1])
        y_MN = torch.empty(x_MK.shape[0], weight_NK.shape[0])
        self._run_linear(linear, x_MK, y_MN)
        return y_MN

    def _run_linear(self, linear: Linear, x_MK: Tensor, y_MN: Tensor) -> None:
        if self.library.pj_linear(ctypes.byref(linear), x_MK.data_ptr(), x_MK.shape[0], y_MN.data_ptr()):
            raise MemoryError(f"no memory to quantize {tuple(x_MK.shape)} activations")

    def quantize_per_token(self, x_MK: Tensor) -> tuple[Tensor, Tensor]:
        """q_MK int8 and scale_M float32; see `kernels.quantize`."""
        x_MK = _rows("x_MK", x_MK, None)
        q_MK, scale_M = torch.empty(x_MK.shape, dtype=torch.int8), torch.empty(x_MK.shape[0])
        self.library.pj_quantize(x_MK.data_ptr(), *x_MK.shape, q_MK.data_ptr(), scale_M.data_ptr())
        return q_MK, scale_M

    def rms_norm_quantize(self, x_MK: Tensor, weight_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`rms_norm`, then `quantize_per_token`, without the normalized rows' way through memory; bits are the same."""
        _check("weight_K", weight_K, torch.float32, (None,))
        x_MK = _rows("x_MK", x_MK, weight_K.shape[0])
        q_MK, scale_M = torch.empty(x_MK.shape, dtype=torch.int8), torch.empty(x_MK.shape[0])
        scratch = torch.empty(self.num_threads, x_MK.shape[1])
        self.library.pj_rms_norm_quantize(
            x_MK.data_ptr(),
            weight_K.data_ptr(),
            *x_MK.shape,
            eps,
            scratch.data_ptr(),
            scratch.shape[0],
            q_MK.data_ptr(),
            scale_M.data_ptr(),
        )
        return q_MK, scale_M

    def swiglu_quantize(self, gate_MK: Tensor, up_MK: Tensor) -> tuple[Tensor, Tensor]:
        """`swiglu`, then `quantize_per_token`, without the products' way through memory; bits are the same."""
        gate_MK = _rows("gate_MK", gate_MK, None)
        up_MK = _rows("up_MK", up_MK, gate_MK.shape[1])
        if up_MK.shape != gate_MK.shape:
            raise ValueError(f"up_MK has shape {tuple(up_MK.shape)}; gate_MK's {tuple(gate_MK.shape)} is needed")
        q_MK, scale_M = torch.empty(gate_MK.shape, dtype=torch.int8), torch.empty(gate_MK.shape[0])
        scratch = torch.empty(self.num_threads, gate_MK.shape[1])
        self.library.pj_swiglu_quantize(
            gate_MK.data_ptr(),
            up_MK.data_ptr(),
            *gate_MK.shape,
            scratch.data_ptr(),
            scratch.shape[0],
            q_MK.data_ptr(),
            scale_M.data_ptr(),
        )
        return q_MK, scale_M

    def rms_norm(self, x_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) × weight for each row, float32."""
        _check("weight_K", weight_K, torch.float32, (None,))
        x_MK = _rows("x_MK", x_MK, weight_K.shape[0])
        out_MK = torch.empty_like(x_MK)
        self.library.pj_rms_norm(x_MK.data_ptr(), weight_K.data_ptr(), *x_MK.shape, eps, out_MK.data_ptr())
        return out_MK

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) × up, element by element, float32."""
        _check("gate", gate, torch.float32, tuple(up.shape))
        _check("up", up, torch.float32, tuple(gate.shape))
        out = torch.empty_like(gate)
        self.library.pj_swiglu(gate.data_ptr(), up.data_ptr(), gate.numel(), out.data_ptr())
        return out

    def hadamard(self, x_MK: Tensor, block: int) -> Tensor:
        """Each block of `block` columns times a Hadamard matrix, float32; see `kernels.hadamard`."""
        _check("x_MK", x_MK, torch.float32, (None, None))
        out_MK = torch.empty_like(x_MK)
        self.library.pj_hadamard(x_MK.data_ptr(), *x_MK.shape, block, out_MK.data_ptr())
        return out_MK

    def rotate(self, x_THD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
        """Rotary embedding of (T, heads, head_dim) by (T, head_dim / 2) cos and sin, float32."""
        _check("x_THD", x_THD, torch.float32, (None, None, None))
        num_tokens, num_heads, head_dim = x_THD.shape
        for name, table in (("cos_TF", cos_TF), ("sin_TF", sin_TF)):
            _check(name, table, torch.float32, (num_tokens, head_dim // 2))
        out = x_THD.clone()
        self.library.pj_rotate(out.data_ptr(), cos_TF.data_ptr(), sin_TF.data_ptr(), num_tokens, num_heads, head_dim)
        return out

    def write_kv(
        self,
        k_TKD: Tensor,
        v_TKD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_T: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Store keys and values in their pages; see `kernels.kv_cache`."""
        pages = _pages(k_cache, v_cache, k_scale, v_scale)
        _check("slot_T", slot_T, torch.int64, (None,))
        shape = (slot_T.shape[0], k_cache.shape[1], k_cache.shape[3])
        _check("k_TKD", k_TKD, torch.float32, shape)
        _check("v_TKD", v_TKD, torch.float32, shape)
        check_slots(slot_T, k_cache.shape[0] * k_cache.shape[2])
        self.library.pj_write_kv(
            k_TKD.data_ptr(), v_TKD.data_ptr(), slot_T.data_ptr(), slot_T.shape[0], ctypes.byref(pages)
        )

    def paged_attention(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cu_query_S1: Tensor,
        context_len_S: Tensor,
        block_table_SB: Tensor,
        scale: float,
        window: int | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        """(T, num_heads, head_dim) float32; see `kernels.paged_attention`."""
        pages = _pages(k_cache, v_cache, k_scale, v_scale)
        num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
        _check("q_THD", q_THD, torch.float32, (None, None, head_dim))
        if q_THD.shape[1] == 0 or q_THD.shape[1] % num_kv_heads:
            raise ValueError(f"q_THD has {q_THD.shape[1]} heads; a multiple of {num_kv_heads} is needed")
        sequences = check_sequences(cu_query_S1, context_len_S, block_table_SB, q_THD.shape[0], k_cache.shape[2])
        if window is not None and window < 1:
            raise ValueError(f"window={window}: at least 1 key is needed")
        out_THD = torch.empty_like(q_THD)
        if q_THD.shape[0]:
            result = self.library.pj_attention(
                q_THD.data_ptr(),
                out_THD.data_ptr(),
                ctypes.byref(pages),
                ctypes.byref(sequences),
                q_THD.shape[1],
                scale,
                window or 0,
            )
            raise_for(result, k_cache.shape[0])
        return out_THD


def float_linear(weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
    """Describe a float layer whose weight is read in place; the tensors must outlive the description."""
    name = str(weight_NK.dtype).removeprefix("torch.")
    if name not in DTYPES or weight_NK.dtype == torch.int8:
        raise ValueError(f"weight_NK is {weight_NK.dtype}; float32, bfloat16 or float16 is needed")
    _check("weight_NK", weight_NK, weight_NK.dtype, (None, None))
    if 0 in weight_NK.shape:
        raise ValueError(f"weight_NK has shape {tuple(weight_NK.shape)}; non-empty (N, K) is needed")
    if bias_N is not None:
        _check("bias_N", bias_N, torch.float32, (weight_NK.shape[0],))
    return Linear(
        weight=weight_NK.data_ptr(),
        bias=None if bias_N is None else bias_N.data_ptr(),
        n=weight_NK.shape[0],
        k=weight_NK.shape[1],
        dtype=DTYPES[name],
    )


def check_slots(slot_T: Tensor, num_slots: int) -> None:
    """Raise ValueError unless every slot is −1 or inside the cache."""
    if slot_T.numel():
        low, high = (int(value) for value in torch.aminmax(slot_T))
        if low < -1 or high >= num_slots:
            raise ValueError(f"slots {low} … {high} are outside the cache of {num_slots}")


def check_sequences(
    cu_query_S1: Tensor, context_len_S: Tensor, block_table_SB: Tensor, num_rows: int, block_size: int
) -> Sequences:
    """Describe the sequences of a call; raises ValueError for lengths that do not fit together."""
    _check("context_len_S", context_len_S, torch.int32, (None,))
    num_sequences = context_len_S.shape[0]
    _check("cu_query_S1", cu_query_S1, torch.int32, (num_sequences + 1,))
    _check("block_table_SB", block_table_SB, torch.int32, (num_sequences, None))
    cu_query, context_len = cu_query_S1.tolist(), context_len_S.tolist()
    if cu_query[0] != 0 or cu_query[-1] != num_rows:
        raise ValueError(f"cu_query_S1 goes from {cu_query[0]} to {cu_query[-1]}; 0 to {num_rows} is needed")
    room = block_table_SB.shape[1] * block_size
    for sequence, length in enumerate(context_len):
        queries = cu_query[sequence + 1] - cu_query[sequence]
        if not 0 <= queries <= length or length > room or length == 0:
            raise ValueError(
                f"sequence {sequence} has {queries} queries and {length} keys; its blocks hold {room}, "
                "and queries ≤ keys with at least 1 key is needed"
            )
    return Sequences(
        cu_query_S1.data_ptr(),
        context_len_S.data_ptr(),
        block_table_SB.data_ptr(),
        block_table_SB.shape[1],
        num_sequences,
    )


def raise_for(result: int, num_blocks: int) -> None:
    """Turn the library's negative results into exceptions."""
    if result == -1:
        raise MemoryError("no memory for the working buffers of the step")
    if result == -2:
        raise ValueError(f"the block table holds an id outside the cache of {num_blocks} blocks")


def _pages(k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> Pages:
    check_cache(k_cache, v_cache, k_scale, v_scale)
    dtype = torch.int8 if k_scale is not None else torch.float32
    _check("k_cache", k_cache, dtype, (None, None, None, None))
    _check("v_cache", v_cache, dtype, tuple(k_cache.shape))
    if 0 in k_cache.shape:
        raise ValueError(f"k_cache has shape {tuple(k_cache.shape)}; no dimension may be 0")
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    scales = [None if scale is None else scale.data_ptr() for scale in (k_scale, v_scale)]
    return Pages(k_cache.data_ptr(), v_cache.data_ptr(), *scales, num_blocks, block_size, num_kv_heads, head_dim)


def _rows(name: str, x_MK: Tensor, columns: int | None) -> Tensor:
    """`x_MK` as contiguous float32."""
    if x_MK.dim() != 2 or x_MK.shape[1] == 0 or columns not in (None, x_MK.shape[1]) or not x_MK.is_floating_point():
        wanted = "K ≥ 1" if columns is None else str(columns)
        raise ValueError(f"{name} has shape {tuple(x_MK.shape)} and {x_MK.dtype}; floating (M, {wanted}) is needed")
    if x_MK.device.type != "cpu":
        raise ValueError(f"{name} is on {x_MK.device}; a CPU tensor is needed")
    return x_MK.detach().to(torch.float32).contiguous()


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    fits = tensor.dim() == len(shape) and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()} on {tensor.device}; "
            f"contiguous {dtype} ({wanted}) on the CPU is needed"
        )
