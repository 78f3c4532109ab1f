"""The compiled kernels as functions on torch tensors; every argument is checked before its address is passed on."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from penjing.kernels.cpu.checks import (
    add_key_blocks,
    check,
    check_sequences,
    check_slots,
    float_linear,
    pages_of,
    raise_for,
    rows,
)
from penjing.kernels.cpu.key_blocks import TILE_KEYS, LayerBlocks
from penjing.kernels.cpu.library import Linear, Pages, Selection
from penjing.kernels.cpu.packing import (
    Int4Part,
    Int8Part,
    Panels,
    SteppedPart,
    pack_int4,
    pack_int8,
    pack_stepped,
    packed_int4_bytes,
    packed_stepped_bytes,
)
from penjing.kernels.cpu.pages import empty_pages
from penjing.kernels.cpu.threads import default_threads

ISAS = ("amx", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx2", "scalar")


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
            ValueError: an unknown name, or one that this processor or its system cannot run.
        """
        result = self.library.pj_select_isa(name.encode())
        if result == -1:
            raise ValueError(f"instruction set {name!r} is unknown; choose auto, {', '.join(ISAS)}")
        if result == -2:
            raise ValueError(f"this processor or its system does not run {name!r}; choose auto")

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

    def packed_bytes(self, out_features: int, in_features: int, swiglu: bool = False, zero_points: bool = False) -> int:
        """Bytes that `prepack_int8` needs for a layer."""
        return self.library.pj_packed_bytes(out_features, in_features, swiglu, zero_points)

    def prepack_int8(
        self,
        weight_NK: Tensor,
        scale_N: Tensor,
        bias_N: Tensor | None = None,
        *,
        swiglu: bool = False,
        memory: Tensor | None = None,
        zero_points: bool = False,
    ) -> Panels:
        """Lay out an INT8 weight for `int8_linear`; the panels divide evenly among the present number of threads.

        Args:
            weight_NK: (N, K) int8, contiguous. With `swiglu` its upper half is the gate, its lower half the up
                projection, and the layer gives silu(gate) × up, N / 2 features.
            scale_N: (N,) float32.
            bias_N: (N,) float32 or None.
            memory: (packed_bytes,) uint8 to fill, 64-byte aligned; allocated if None.
            zero_points: of activations, see `kernels.quantize.quantize_above`.

        Raises:
            ValueError: a wrong shape, dtype or layout.
        """
        parts = [(weight_NK, scale_N, bias_N)]
        return self.prepack_parts(parts, swiglu=swiglu, memory=memory, zero_points=zero_points)

    def prepack_parts(
        self,
        parts: Sequence[Int8Part],
        *,
        swiglu: bool = False,
        memory: Tensor | None = None,
        zero_points: bool = False,
    ) -> Panels:
        """`prepack_int8` of several (weight_NK, scale_N, bias_N) as if they were one, the first one's outputs first."""
        return pack_int8(self.library, parts, swiglu, memory, zero_points)

    def prepack_stepped(
        self,
        parts: Sequence[SteppedPart],
        group: int,
        *,
        swiglu: bool = False,
        memory: Tensor | None = None,
        zero_points: bool = False,
    ) -> Panels:
        """`prepack_parts` of INT8 weights that are stored in 4 bits, `kernels.stepped`.

        Args:
            parts: (packed_NK8, scale_N, step_NG2, bias_N) of each.
            group: inputs that share a step, a multiple of 32 up to 256 that divides K; zero points: that divides 256.
            memory: (packed_stepped_bytes,) uint8 to fill, 64-byte aligned; allocated if None.

        Raises:
            ValueError: a wrong shape, dtype or layout.
        """
        return pack_stepped(self.library, parts, group, swiglu, memory, zero_points)

    def packed_stepped_bytes(
        self, out_features: int, in_features: int, group: int, swiglu: bool = False, zero_points: bool = False
    ) -> int:
        """Bytes that `prepack_stepped` needs for a layer."""
        return packed_stepped_bytes(self.library, out_features, in_features, group, swiglu, zero_points)

    def prepack_int4(
        self,
        parts: Sequence[Int4Part],
        group: int,
        *,
        swiglu: bool = False,
        memory: Tensor | None = None,
        half_inputs: bool = False,
    ) -> Panels:
        """Lay out INT4 weights of one input for `int4_linear`, as `prepack_parts` does INT8 ones.

        Args:
            parts: (packed_NK8, scale_NG, offset_NG, bias_N) of each; see `kernels.int4_linear`.
            group: inputs that share a scale, a multiple of 32 that divides K.
            memory: (packed_int4_bytes,) uint8 to fill, 64-byte aligned; allocated if None.
            half_inputs: activations are rounded to bfloat16, not to 8 bits.

        Raises:
            ValueError: a wrong shape, dtype or layout.
        """
        return pack_int4(self.library, parts, group, swiglu, memory, half_inputs)

    def packed_int4_bytes(
        self,
        out_features: int,
        in_features: int,
        group: int,
        scale_dtype: torch.dtype,
        swiglu: bool = False,
        offsets: bool = False,
    ) -> int:
        """Bytes that `prepack_int4` needs for a layer."""
        return packed_int4_bytes(self.library, out_features, in_features, group, scale_dtype, swiglu, offsets)

    def int8_linear(self, x_MK: Tensor, panels: Panels) -> Tensor:
        """(M, N) float32 = x_MK, quantized per token, times the packed weight; see `kernels.int8_linear`."""
        x_MK = rows("x_MK", x_MK, panels.in_features)
        y_MN = torch.empty(x_MK.shape[0], panels.out_features)
        self._run_linear(panels.linear, x_MK, y_MN)
        return y_MN

    def int4_linear(self, x_MK: Tensor, panels: Panels) -> Tensor:
        """(M, N) float32 = x_MK, rounded as the layer wants it, times the packed weight; see `kernels.int4_linear`."""
        return self.int8_linear(x_MK, panels)

    def linear(self, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """(M, N) float32 = x_MK · weight_NKᵀ + bias_N on the weight in place (float32, bfloat16 or float16).

        A row's result does not depend on M.
        """
        linear = float_linear(weight_NK, bias_N)
        x_MK = rows("x_MK", x_MK, weight_NK.shape[1])
        y_MN = torch.empty(x_MK.shape[0], weight_NK.shape[0])
        self._run_linear(linear, x_MK, y_MN)
        return y_MN

    def _run_linear(self, linear: Linear, x_MK: Tensor, y_MN: Tensor) -> None:
        if self.library.pj_linear(ctypes.byref(linear), x_MK.data_ptr(), x_MK.shape[0], y_MN.data_ptr()):
            raise MemoryError(f"no memory to quantize {tuple(x_MK.shape)} activations")

    def quantize_per_token(self, x_MK: Tensor) -> tuple[Tensor, Tensor]:
        """q_MK int8 and scale_M float32; see `kernels.quantize`."""
        x_MK = rows("x_MK", x_MK, None)
        q_MK, scale_M = torch.empty(x_MK.shape, dtype=torch.int8), torch.empty(x_MK.shape[0])
        self.library.pj_quantize(x_MK.data_ptr(), *x_MK.shape, q_MK.data_ptr(), scale_M.data_ptr())
        return q_MK, scale_M

    def rms_norm_quantize(self, x_MK: Tensor, weight_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`rms_norm`, then `quantize_per_token`, without the normalized rows' way through memory; bits are the same."""
        check("weight_K", weight_K, torch.float32, (None,))
        x_MK = rows("x_MK", x_MK, weight_K.shape[0])
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
        gate_MK = rows("gate_MK", gate_MK, None)
        up_MK = rows("up_MK", up_MK, gate_MK.shape[1])
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
        check("weight_K", weight_K, torch.float32, (None,))
        x_MK = rows("x_MK", x_MK, weight_K.shape[0])
        out_MK = torch.empty_like(x_MK)
        self.library.pj_rms_norm(x_MK.data_ptr(), weight_K.data_ptr(), *x_MK.shape, eps, out_MK.data_ptr())
        return out_MK

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) × up, element by element, float32."""
        check("gate", gate, torch.float32, tuple(up.shape))
        check("up", up, torch.float32, tuple(gate.shape))
        out = torch.empty_like(gate)
        self.library.pj_swiglu(gate.data_ptr(), up.data_ptr(), gate.numel(), out.data_ptr())
        return out

    def activate(self, x: Tensor, kind: int, curve: tuple[float, float]) -> Tensor:
        """The activation of this number (`kernels.activation`), element by element, float32."""
        check("x", x, torch.float32, tuple(x.shape))
        out = torch.empty_like(x)
        self.library.pj_activate(x.data_ptr(), x.numel(), kind, *curve, out.data_ptr())
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap × tanh(x / cap), element by element, float32."""
        out = x.clone(memory_format=torch.contiguous_format)
        check("x", out, torch.float32, tuple(x.shape))
        self.library.pj_soft_cap(out.data_ptr(), out.numel(), cap)
        return out

    def geglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """gelu(gate) × up with the tanh formula, element by element, float32."""
        check("gate", gate, torch.float32, tuple(up.shape))
        check("up", up, torch.float32, tuple(gate.shape))
        out = torch.empty_like(gate)
        self.library.pj_geglu(gate.data_ptr(), up.data_ptr(), gate.numel(), out.data_ptr())
        return out

    def hadamard(self, x_MK: Tensor, block: int) -> Tensor:
        """Each block of `block` columns times a Hadamard matrix, float32; see `kernels.hadamard`."""
        check("x_MK", x_MK, torch.float32, (None, None))
        out_MK = torch.empty_like(x_MK)
        self.library.pj_hadamard(x_MK.data_ptr(), *x_MK.shape, block, out_MK.data_ptr())
        return out_MK

    def rotate(self, x_THD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
        """Rotary embedding of (T, heads, head_dim) by (T, head_dim / 2) cos and sin, float32."""
        check("x_THD", x_THD, torch.float32, (None, None, None))
        num_tokens, num_heads, head_dim = x_THD.shape
        for name, table in (("cos_TF", cos_TF), ("sin_TF", sin_TF)):
            check(name, table, torch.float32, (num_tokens, head_dim // 2))
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
        turned: bool = False,
    ) -> None:
        """Store keys and values in their pages; see `kernels.kv_cache`, and `Pages` for `turned`."""
        pages = pages_of(k_cache, v_cache, k_scale, v_scale, turned)
        check("slot_T", slot_T, torch.int64, (None,))
        shape = (slot_T.shape[0], k_cache.shape[1], k_cache.shape[3])
        check("k_TKD", k_TKD, torch.float32, shape)
        check("v_TKD", v_TKD, torch.float32, shape)
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
        chooses: LayerBlocks | None = None,
        cap: float | None = None,
        sinks_H: Tensor | None = None,
        turned: bool = False,
    ) -> Tensor:
        """(T, num_heads, head_dim) float32; see `kernels.paged_attention`, `kernels.key_blocks` for `chooses`, and
        `Pages` for `turned`."""
        pages = pages_of(k_cache, v_cache, k_scale, v_scale, turned)
        num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
        check("q_THD", q_THD, torch.float32, (None, None, head_dim))
        if q_THD.shape[1] == 0 or q_THD.shape[1] % num_kv_heads:
            raise ValueError(f"q_THD has {q_THD.shape[1]} heads; a multiple of {num_kv_heads} is needed")
        sequences = check_sequences(cu_query_S1, context_len_S, block_table_SB, q_THD.shape[0], k_cache.shape[2])
        if window is not None and window < 1:
            raise ValueError(f"window={window}: at least 1 key is needed")
        if sinks_H is not None:
            check("sinks_H", sinks_H, torch.float32, (q_THD.shape[1],))
        out_THD = torch.empty_like(q_THD)
        if q_THD.shape[0]:
            result = self.library.pj_attention(
                q_THD.data_ptr(),
                out_THD.data_ptr(),
                ctypes.byref(pages),
                ctypes.byref(sequences),
                q_THD.shape[1],
                scale,
                cap or 0.0,
                None if sinks_H is None else sinks_H.data_ptr(),
                window or 0,
                *self._chosen(pages, chooses, (q_THD.shape[0], num_kv_heads, int(context_len_S.max()))),
            )
            raise_for(result, k_cache.shape[0])
        return out_THD

    @staticmethod
    def _chosen(
        pages: Pages, chooses: LayerBlocks | None, shape: tuple[int, int, int]
    ) -> tuple[Selection | None, int | None, int | None]:
        if chooses is None:
            return None, None, None
        selection = add_key_blocks(pages, chooses.blocks, chooses.summary, chooses.summary_scale)
        slots, masks = chooses.slots, chooses.masks
        if slots is not None:
            check("slot_T", slots, torch.int64, (shape[0],))
            check_slots(slots, pages.num_blocks * pages.block_size)
        if masks is not None:
            check("masks", masks, torch.uint8, (*shape[:2], -(-shape[2] // TILE_KEYS)))
        return selection, None if slots is None else slots.data_ptr(), None if masks is None else masks.data_ptr()
