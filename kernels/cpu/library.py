"""Find and open the compiled library and declare its functions; the structures mirror abi.h field by field."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

ABI_VERSION = 36
STEP_PROBLEMS = {
    -1: "there is no memory for the working buffers",
    -2: "the block table holds an id outside the cache",
    -3: "a token id lies outside the vocabulary and the rows of images",
    -4: "a position is negative or lies beyond the longest context",
    -5: "a slot lies outside the cache",
    -6: "a logit row lies outside the step's rows",
    -8: "an adapter's slot is free or there is none",
    -9: "rows that choose blocks of keys have no window besides, and each has summaries",
    -7: "cu_query_S1 must rise from 0 to T, with 1 ≤ queries ≤ context_len ≤ the keys that the block table holds",
}
"""What a refused step of the decoder returns."""
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}
TURNED_KEYS = 16  # of turned pages, see `Pages`


class MissingLibrary(Exception):  # noqa: N818  a state that is handled, not a failure
    """The library is not built, cannot be opened, or was built from other sources."""


class Linear(ctypes.Structure):
    """PjLinear."""

    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("comp", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("dtype", c_int32),
        ("width", c_int32),
        ("swiglu", c_int32),
        ("group", c_int32),
        ("scale_dtype", c_int32),
        ("offsets", c_int32),
        ("zero_points", c_int32),
        ("half_inputs", c_int32),
    )


class Experts(ctypes.Structure):
    """PjExperts."""

    _fields_ = (
        ("router", Linear),
        ("gate_up", POINTER(Linear)),
        ("down", POINTER(Linear)),
        *((name, c_void_p) for name in ("bias", "sum_norm", "shared_norm")),
        ("num_experts", c_int64),
        ("per_row", c_int64),
        ("factor", c_float),
        ("margin", c_float),
        ("normed", c_int32),
        ("logistic", c_int32),
        ("bias_of_logits", c_int32),
        ("shared", c_int32),
    )


class Layer(ctypes.Structure):
    """PjLayer."""

    _fields_ = (
        ("qkv", Linear * 4),
        ("out", Linear),
        ("gate_up", Linear * 2),
        ("down", Linear),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("out_norm", c_void_p),
        ("down_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("v_norm", c_void_p),
        ("token_gate", Linear),
        ("token_out", Linear),
        ("token_norm", c_void_p),
        ("attended_norm", c_void_p),
        ("inner_norm", c_void_p),
        ("sinks", c_void_p),
        ("taps", c_void_p),
        ("tap_bias", c_void_p),
        ("experts", POINTER(Experts)),
        ("window", c_int64),
        ("hadamard", c_int64),
        ("num_taps", c_int64),
        ("place", c_int64),
        ("borrows", c_int64),
        ("curve", c_float * 2),
        ("gates", c_int64),
        ("num_qkv", c_int32),
        ("num_gate_up", c_int32),
        ("activation", c_int32),
        ("whole_norm", c_int32),
        ("rotary", c_int32),
        ("gated", c_int32),
        ("parallel", c_int32),
        ("norm_rotated", c_int32),
        ("gate_function", c_int32),
        ("scale", c_float),
    )


class Screen(ctypes.Structure):
    """PjScreen."""

    _fields_ = (
        ("rough", Linear),
        ("directions", c_void_p),
        ("factors", c_void_p),
        ("lost", c_void_p),
        ("count", c_int64),
        ("beside", c_float),
        ("unused", c_int32),
    )


class Model(ctypes.Structure):
    """PjModel."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("embedding", c_void_p),
        ("embedding_scale", c_void_p),
        ("positions", c_void_p),
        ("token_table", c_void_p),
        ("final_norm", c_void_p),
        ("head", Linear),
        ("screen", POINTER(Screen)),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("num_layers", c_int64),
        ("vocab", c_int64),
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("num_positions", c_int64),
        ("token_inputs", c_int64),
        ("eps", c_float),
        ("attention_scale", c_float),
        ("attention_cap", c_float),
        ("logit_cap", c_float),
        ("embedding_dtype", c_int32),
        ("token_dtype", c_int32),
        ("unused", c_int32),
        ("table_hadamard", c_int32),
    )


class Sequences(ctypes.Structure):
    """PjSequences."""

    _fields_ = (
        ("cu_query", c_void_p),
        ("context_len", c_void_p),
        ("block_table", c_void_p),
        ("table_stride", c_int64),
        ("num_sequences", c_int64),
    )


class Pages(ctypes.Structure):
    """PjPages. Of `turned` pages each 16 keys lie by dimension, as scores read them, in the memory of (16, head_dim):
    (head_dim, 16), or in INT8 (head_dim / 4, 16, 4)."""

    _fields_ = (
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("num_blocks", c_int64),
        ("block_size", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("summary", c_void_p),
        ("summary_scale", c_void_p),
        ("dtype", c_int32),
        ("turned", c_int32),
    )


class Selection(ctypes.Structure):
    """PjSelection."""

    _fields_ = (
        ("block", c_int64),
        ("sink", c_int64),
        ("window", c_int64),
        ("budget", c_int64),
    )


class StepInput(ctypes.Structure):
    """StepInput of decoder.h."""

    _fields_ = (
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("logit_rows", c_void_p),
        ("rows", c_int64),
        ("num_logits", c_int64),
        ("sequences", Sequences),
        ("pool", c_void_p),
        ("pool_scale", c_void_p),
        ("num_blocks", c_int64),
        ("block_size", c_int64),
        ("top", c_int64),
        ("logits", c_void_p),
        ("top_ids", c_void_p),
        ("adapters", c_void_p),
        ("adapter", c_void_p),
        ("num_adapters", c_int64),
        ("seen", c_void_p),
        ("num_seen", c_int64),
        ("selection", Selection),
        ("choosing", POINTER(c_int32)),
        ("num_choosing", c_int64),
        ("summary", c_void_p),
        ("summary_scale", c_void_p),
        ("hidden", c_void_p),
        ("gated", c_void_p),
        ("pool_dtype", c_int32),
        ("unused", c_int32),
    )


class Part(ctypes.Structure):
    """PjPart."""

    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("offset", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
    )


class SampleRow(ctypes.Structure):
    """SampleRow of sample.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("seen", c_void_p),
        ("counts", c_void_p),
        ("bias_ids", c_void_p),
        ("bias", c_void_p),
        ("forbidden", c_void_p),
        ("mask", c_void_p),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
        ("top_ranks", c_void_p),
        ("num_seen", c_int64),
        ("num_bias", c_int64),
        ("num_forbidden", c_int64),
        ("number", c_double),
        ("top_p", c_double),
        ("temperature", c_float),
        ("min_p", c_float),
        ("repetition", c_float),
        ("presence", c_float),
        ("frequency", c_float),
        ("top_k", c_int32),
        ("num_logprobs", c_int32),
        ("token", c_int32),
        ("num_top", c_int32),
        ("unused", c_int32),
    )


class LowRank(ctypes.Structure):
    """PjLowRank."""

    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("rank", c_int64),
        ("scale", c_float),
        ("dtype", c_int32),
    )


STRUCTURES = (
    Linear,
    Layer,
    Model,
    Sequences,
    Pages,
    StepInput,
    Part,
    SampleRow,
    LowRank,
    Selection,
    Experts,
    Screen,
)  # in the order of pj_struct_bytes

# name → (result, arguments)
_FUNCTIONS = {
    "pj_abi_version": (c_int32, []),
    "pj_struct_bytes": (c_uint64, [c_int32]),
    "pj_isa": (c_char_p, []),
    "pj_select_isa": (c_int32, [c_char_p]),
    "pj_num_threads": (c_int32, []),
    "pj_set_num_threads": (None, [c_int32]),
    "pj_allocate": (c_void_p, [c_uint64]),
    "pj_free": (None, [c_void_p, c_uint64]),
    "pj_read": (c_uint32, [c_void_p, c_int64]),
    "pj_packed_bytes": (c_uint64, [c_int64, c_int64, c_int32, c_int32]),
    "pj_pack_int8": (
        None,
        [POINTER(Part), c_int32, c_int64, c_int64, c_int32, c_int32, c_void_p, POINTER(Linear)],
    ),
    "pj_packed_stepped_bytes": (c_uint64, [c_int64, c_int64, c_int32, c_int32, c_int32]),
    "pj_pack_stepped": (
        None,
        [POINTER(Part), c_int32, c_int64, c_int64, c_int32, c_int32, c_int32, c_void_p, POINTER(Linear)],
    ),
    "pj_packed_int4_bytes": (c_uint64, [c_int64, c_int64, c_int32, c_int32, c_int32, c_int32]),
    "pj_pack_int4": (
        None,
        [POINTER(Part), c_int32, c_int64, c_int64, c_int32, c_int32, c_int32, c_void_p, POINTER(Linear)],
    ),
    "pj_linear": (c_int32, [POINTER(Linear), c_void_p, c_int64, c_void_p]),
    "pj_quantize": (None, [c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
    "pj_rms_norm_quantize": (
        None,
        [c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p, c_int32, c_void_p, c_void_p],
    ),
    "pj_swiglu_quantize": (None, [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int32, c_void_p, c_void_p]),
    "pj_rms_norm": (None, [c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p]),
    "pj_geglu": (None, [c_void_p, c_void_p, c_int64, c_void_p]),
    "pj_soft_cap": (None, [c_void_p, c_int64, c_float]),
    "pj_activate": (None, [c_void_p, c_int64, c_int32, c_float, c_float, c_void_p]),
    "pj_swiglu": (None, [c_void_p, c_void_p, c_int64, c_void_p]),
    "pj_hadamard": (None, [c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "pj_rotate": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64]),
    "pj_write_kv": (None, [c_void_p, c_void_p, c_void_p, c_int64, POINTER(Pages)]),
    "pj_attention": (
        c_int32,
        [
            *(c_void_p, c_void_p, POINTER(Pages), POINTER(Sequences), c_int64, c_float, c_float, c_void_p, c_int64),
            *(POINTER(Selection), c_void_p, c_void_p),
        ],
    ),
    "pj_make_decoder": (c_void_p, [POINTER(Model)]),
    "pj_free_decoder": (None, [c_void_p]),
    "pj_sample": (c_int32, [POINTER(c_void_p), c_int64, c_int64]),
    "pj_step": (c_int32, [c_void_p, POINTER(StepInput)]),
}


def library_path() -> Path | None:
    """The compiled library beside this file (or PENJING_CPU_LIBRARY, for a build with sanitizers), or None."""
    if other := os.environ.get("PENJING_CPU_LIBRARY"):
        return Path(other)
    folder = Path(__file__).parent
    return next((path for suffix in EXTENSION_SUFFIXES if (path := folder / f"_cpu{suffix}").exists()), None)


def load_library() -> ctypes.CDLL:
    """Open the library and declare its functions.

    Raises:
        MissingLibrary: it is not there, does not open, or has another version than these declarations.
    """
    path = library_path()
    if path is None:
        raise MissingLibrary(
            "the C++ kernels are not built (install a C++17 compiler such as g++ 11, then run pip install -e . again)"
        )
    try:
        library = ctypes.CDLL(str(path))
        version = library.pj_abi_version()
    except (OSError, AttributeError) as error:
        raise MissingLibrary(f"the C++ kernels in {path} do not load ({error})") from None
    if version != ABI_VERSION:
        raise MissingLibrary(f"{path} was built from other sources; run pip install -e . again")
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
