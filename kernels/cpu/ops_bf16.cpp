// AVX-512 with BF16 (Cooper Lake, Sapphire Rapids, Zen 4 and later): products of 4-bit weights and bfloat16 activations,
// everything else as on AVX-512 with VNNI.
#include "ops.h"

#if defined(PJ_HAS_BF16)
#include <immintrin.h>

#include <cmath>
#include <cstdint>

// Standard headers come first: what they define inline may run on any processor.
#if defined(__clang__)
#pragma clang attribute push(                                                                                       \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")
#endif

#include "simd_avx512.h"

#include "ops_math.h"

#include "ops_epilogue.h"

#include "int4_block.h"

namespace {

constexpr int HALF_INT4_ROWS = 6, HALF_INT4_VECTORS = 4;
constexpr int64_t int8_near(int64_t) { return 2048; }

using WeightPair = __m512bh;
using InputPair = __m512bh;

// See half_pairs.h. A table of 32 values, each 16 of them the same, takes the bit above the four as it is.
template <int SHIFT>
inline WeightPair weight_pair(const void* words) {
    alignas(64) static constexpr uint16_t values[32] = {
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
        0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
        0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    const VI word = vi_load(words);
    return (WeightPair)_mm512_permutexvar_epi16(SHIFT ? _mm512_srli_epi32(word, 4 * SHIFT) : word, vi_load(values));
}
inline InputPair input_pair(const uint16_t* x) {
    int32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return (InputPair)_mm512_set1_epi32(pair);
}
inline V add_pair(V sum, InputPair x, WeightPair w) { return _mm512_dpbf16_ps(sum, x, w); }

}  // namespace

#include "ops_half_int4.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace penjing {

const Ops& bf16_ops() {
    static const Ops table = [] {
        Ops ops = avx512_ops();
        ops.name = "avx512_bf16";
        ops.half_int4_panels = ::half_int4_panels;
        return ops;
    }();
    return table;
}

}  // namespace penjing
#endif
