// What the INT4 micro-tiles of all instruction sets share. Included after simd_*.h.
#pragma once

namespace {

// A panel's columns for some rows.
struct Int4Block {
    const char* weight;  // of the panel
    int64_t columns;
    int64_t groups;
    int64_t group;        // k of one, a multiple of 32
    int32_t scale_dtype;  // PjDtype
    int64_t ldx;          // of the rows' bytes
    int64_t lds;          // of their starts and group scales
    const float* group_sum;    // of the rows, with offsets
    const float* group_scale;  // the same; null: no offsets
    penjing::Ahead ahead;  // lines for each pair of k-groups
    int64_t skip;          // bytes of `ahead` that a group's scales and offsets take
};

// W scales of a group, from column `column` on.
inline V v_load_scales(const char* scales, int64_t column, int32_t dtype) {
    if (dtype == PJ_F32) return v_load(reinterpret_cast<const float*>(scales) + column);
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(scales) + column;
    return dtype == PJ_BF16 ? v_load_bf16_n(halves, W) : v_load_f16_n(halves, W);
}
inline int64_t bytes_of_scale(int32_t dtype) { return dtype == PJ_F32 ? 4 : 2; }
// Of the scales, and where there are any the offsets, of a group.
inline int64_t bytes_of_group(const Int4Block& b) {
    return b.columns * bytes_of_scale(b.scale_dtype) * (b.group_scale ? 2 : 1);
}

// Of W columns of a group, from column `column` on.
struct Group {
    V scale;
    V offset;  // where the layer has any
};
inline Group v_load_group(const Int4Block& b, const char* scales, int64_t column) {
    const V scale = v_load_scales(scales, column, b.scale_dtype);
    if (!b.group_scale) return {scale, v_zero()};
    return {scale, v_load_scales(scales + b.columns * bytes_of_scale(b.scale_dtype), column, b.scale_dtype)};
}

// W columns of a row's sum over one group, ready to be added: sum × scale, and with offsets (sum × scale + sum of the
// activations × offset) × the group's scale of activations.
template <bool OFFSETS>
inline V group_term(const Group& group, VI sum, float group_sum, float group_scale) {
    const V product = v_mul(v_from_int(sum), group.scale);
    if (!OFFSETS) return product;
    return v_mul(v_add(product, v_mul(v_set(group_sum), group.offset)), v_set(group_scale));
}
inline V group_term(const Int4Block& b, const Group& group, VI sum, int64_t at) {
    if (!b.group_scale) return group_term<false>(group, sum, 0.0f, 0.0f);
    return group_term<true>(group, sum, b.group_sum[at], b.group_scale[at]);
}

}  // namespace
