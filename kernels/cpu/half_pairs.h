// Products of two inputs at a time, in float32: what AVX-512's BF16 instruction computes, on processors without it. Of a
// pair of activations, two bfloat16 in a word, the upper one's product is added first; each addition is rounded once.
#pragma once

namespace {

// Weights of two inputs for W columns.
struct WeightPair {
    V low, high;
};
struct InputPair {
    V low, high;
};

// Those of inputs SHIFT and SHIFT + 4, counted as they stand in a word of eight.
template <int SHIFT>
inline WeightPair weight_pair(const void* words) {
    return {v_four_bits<4 * SHIFT>(words), v_four_bits<4 * SHIFT + 16>(words)};
}

inline InputPair input_pair(const uint16_t* x) {
    const uint32_t low = static_cast<uint32_t>(x[0]) << 16, high = static_cast<uint32_t>(x[1]) << 16;
    float first, second;
    __builtin_memcpy(&first, &low, 4);
    __builtin_memcpy(&second, &high, 4);
    return {v_set(first), v_set(second)};
}

inline V add_pair(V sum, const InputPair& x, const WeightPair& w) {
    return v_fused(x.low, w.low, v_fused(x.high, w.high, sum));
}

}  // namespace
