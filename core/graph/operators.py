"""The operators that a stored graph may hold. Nothing else is called when a graph that someone hands us is read."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from penjing.core.errors import InputError

_ATEN = """
conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d linear addmm mm bmm matmul baddbmm
einsum outer dot mv embedding embedding_bag
batch_norm layer_norm group_norm instance_norm rms_norm native_layer_norm native_group_norm
_native_batch_norm_legit_no_training
scaled_dot_product_attention lstm gru rnn_tanh rnn_relu
relu relu6 leaky_relu prelu elu celu selu gelu silu mish sigmoid log_sigmoid tanh hardtanh hardswish hardsigmoid
hardshrink softshrink tanhshrink softplus softsign threshold glu softmax _softmax log_softmax _log_softmax softmin
dropout feature_dropout alpha_dropout rrelu
add sub rsub mul div true_divide floor_divide remainder fmod pow square sqrt rsqrt reciprocal exp exp2 expm1 log log2
log10 log1p abs neg sign sgn floor ceil round trunc frac sin cos tan asin acos atan atan2
sinh cosh tanh asinh acosh atanh erf erfc erfinv maximum minimum fmax fmin clamp clamp_min clamp_max
lerp addcmul addcdiv logaddexp hypot nan_to_num
__and__ __or__ __xor__
eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor
bitwise_left_shift bitwise_right_shift isnan isinf isfinite where masked_fill
sum mean amax amin max min prod std var var_mean std_mean norm linalg_vector_norm logsumexp argmax argmin any all
diff cumsum cumprod cummax cummin sort argsort topk median
max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d upsample_linear1d
upsample_trilinear3d _upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler
grid_sampler_2d affine_grid_generator pixel_shuffle pixel_unshuffle channel_shuffle im2col col2im unfold
view reshape _unsafe_view view_as reshape_as flatten unflatten squeeze unsqueeze transpose permute t mT movedim
swapaxes numpy_T expand expand_as repeat repeat_interleave tile broadcast_to cat concat stack hstack vstack chunk
split split_with_sizes tensor_split unbind select slice narrow index index_select gather take_along_dim
index_put scatter scatter_add scatter_reduce index_add index_fill index_copy slice_scatter select_scatter copy
masked_select nonzero roll flip rot90 tril triu diagonal diag diag_embed meshgrid pad constant_pad_nd
reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
arange fill zero full full_like zeros zeros_like ones ones_like empty empty_like new_zeros new_ones new_full new_empty
scalar_tensor linspace eye one_hot tensor
to _to_copy type_as float clone contiguous alias detach lift_fresh_copy lift_fresh resolve_conj resolve_neg
sym_size sym_numel sym_stride item _local_scalar_dense numel
cosine_similarity normalize cdist pairwise_distance bucketize searchsorted histc fft_rfft fft_irfft view_as_real
view_as_complex complex real imag stft
isin unique_consecutive cross kron trace logit sinc special_expit expit rsub xlogy heaviside
"""
ATEN = frozenset(_ATEN.split())
"""ATen operators by name: none writes into its arguments, a file or a device, and none runs code."""

FUNCTIONS: dict[str, Any] = {
    f"operator.{name}": getattr(operator, name)
    for name in (
        "getitem",
        "add",
        "sub",
        "mul",
        "floordiv",
        "truediv",
        "mod",
        "neg",
        "pow",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    )
} | {
    "torch.sym_max": torch.sym_max,
    "torch.sym_min": torch.sym_min,
    "torch.sym_int": torch.sym_int,
    "torch.sym_float": torch.sym_float,
    "torch.sym_ite": torch.sym_ite,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "math.trunc": math.trunc,
}
"""What else a node may call: elements of tuples, and arithmetic of sizes."""
_NAMES = {function: name for name, function in FUNCTIONS.items()}


def described(target: Any) -> str:
    """What a node calls, as messages and stored graphs name it: "aten.conv2d.default", "operator.getitem"."""
    return _NAMES.get(target) or str(target)


def name_of_target(target: Any) -> str:
    """How what a node calls is stored.

    Raises:
        InputError: it is not an operator that penjing knows; it is named.
    """
    known = target in _NAMES
    if isinstance(target, torch._ops.OpOverload):
        known = target.namespace == "aten" and target._schema.name.removeprefix("aten::") in ATEN
    if not known:
        raise InputError(
            f"the network uses {target}, an operator that penjing does not know; write that part of the network with "
            "other operators, or add it to core/graph/operators.py"
        )
    return described(target)


def target_of_name(name: Any) -> Any:
    """What a stored name calls.

    Raises:
        InputError: it is not an operator that penjing knows.
    """
    if isinstance(name, str) and name in FUNCTIONS:
        return FUNCTIONS[name]
    parts = name.split(".") if isinstance(name, str) else []
    if len(parts) == 3 and parts[0] == "aten" and parts[1] in ATEN:
        packet = getattr(torch.ops.aten, parts[1], None)
        if packet is not None and parts[2] in packet.overloads():
            target = getattr(packet, parts[2])
            if not target._schema.is_mutable:
                return target
    raise InputError(f"the graph calls {name!r}, which is not an operator that penjing knows; import the network again")
