// AVX-512 with VNNI (Cascade Lake, Ice Lake, Zen 4 and later).
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "ops.h"

// Standard headers come first: what they define inline may run on any processor.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#endif

#include "simd_avx512.h"

namespace {

// rows × NR·16 sums of u8 × s8 products over all of k; a micro-tile stays in registers. Each k-group fetches LINES
// cache lines from `ahead` on.
template <int MR, int NR, int LINES>
inline void int8_tile(const uint8_t* x, int64_t ldx, const int8_t* w, const int8_t* ahead, int64_t groups,
                      int64_t width, int32_t* acc) {
    // Every loop over the tile is unrolled by force: one that is not puts the sums on the stack.
    VI sum[MR][NR];
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) sum[m][n] = _mm512_setzero_si512();
    const int64_t step = width * 4;
    for (int64_t g = 0; g < groups; ++g) {
        VI weight[NR];
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) weight[n] = _mm512_loadu_si512(w + 64 * n);
#pragma GCC unroll 4
        for (int n = 0; n < LINES; ++n) _mm_prefetch(reinterpret_cast<const char*>(ahead + 64 * n), _MM_HINT_T1);
        ahead += 64 * LINES;
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
            int32_t four;
            __builtin_memcpy(&four, x + m * ldx + 4 * g, 4);
            const VI broadcast = _mm512_set1_epi32(four);
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) sum[m][n] = _mm512_dpbusd_epi32(sum[m][n], broadcast, weight[n]);
        }
        w += step;
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) _mm512_storeu_si512(acc + m * penjing::PANEL + 16 * n, sum[m][n]);
}

// Micro-tiles of 24 accumulators leave room for the weights and a broadcast in 32 registers.
constexpr int int8_rows(int nr) { return nr == 4 ? 6 : 8; }

// A single block reads its panel from memory itself: so many bytes ahead, the hardware's prefetcher stops at each 4 KiB
// page. 8 KiB and more were slower.
constexpr int64_t int8_near(int64_t) { return 2048; }

template <int MR, int NR>
inline void int8_lines(const uint8_t* x, int64_t ldx, const int8_t* w, penjing::Ahead ahead, int64_t groups,
                       int64_t width, int32_t* acc) {
    switch (ahead.lines) {
        case 0: return int8_tile<MR, NR, 0>(x, ldx, w, ahead.at, groups, width, acc);
        case 1: return int8_tile<MR, NR, 1>(x, ldx, w, ahead.at, groups, width, acc);
        case 2: return int8_tile<MR, NR, 2>(x, ldx, w, ahead.at, groups, width, acc);
        default: return int8_tile<MR, NR, NR>(x, ldx, w, ahead.at, groups, width, acc);
    }
}

template <int NR>
inline void int8_rows_of(int rows, const uint8_t* x, int64_t ldx, const int8_t* w, penjing::Ahead ahead, int64_t groups,
                         int64_t width, int32_t* acc) {
    switch (rows) {
        case 1: return int8_lines<1, NR>(x, ldx, w, ahead, groups, width, acc);
        case 2: return int8_lines<2, NR>(x, ldx, w, ahead, groups, width, acc);
        case 3: return int8_lines<3, NR>(x, ldx, w, ahead, groups, width, acc);
        case 4: return int8_lines<4, NR>(x, ldx, w, ahead, groups, width, acc);
        case 5: return int8_lines<5, NR>(x, ldx, w, ahead, groups, width, acc);
        case 6: return int8_lines<6, NR>(x, ldx, w, ahead, groups, width, acc);
        case 7: return int8_lines<7, NR <= 3 ? NR : 3>(x, ldx, w, ahead, groups, width, acc);
        default: return int8_lines<8, NR <= 3 ? NR : 3>(x, ldx, w, ahead, groups, width, acc);
    }
}

inline void int8_block(int rows, int columns, const uint8_t* x, int64_t ldx, const int8_t* w, penjing::Ahead ahead,
                       int64_t groups, int32_t* acc) {
    switch (columns / 16) {
        case 1: return int8_rows_of<1>(rows, x, ldx, w, ahead, groups, columns, acc);
        case 2: return int8_rows_of<2>(rows, x, ldx, w, ahead, groups, columns, acc);
        case 3: return int8_rows_of<3>(rows, x, ldx, w, ahead, groups, columns, acc);
        default: return int8_rows_of<4>(rows, x, ldx, w, ahead, groups, columns, acc);
    }
}

constexpr int FLOAT_ROWS = 6, FLOAT_COLUMNS = 4;  // accumulators of a float micro-tile
constexpr int ATTENTION_ROWS = 6, ATTENTION_VECTORS = 4;

}  // namespace

#include "ops_impl.h"

namespace penjing {
const Ops& avx512_ops() {
    static constexpr Ops table = make_table("avx512_vnni");
    return table;
}
}  // namespace penjing

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
