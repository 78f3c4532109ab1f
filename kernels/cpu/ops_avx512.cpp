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

#include "int4_block.h"
#include "stepped_avx512.h"

namespace {

// rows × NR·16 sums of u8 × s8 products over some k-groups, `more`: added to what is there; a micro-tile stays in
// registers. Each k-group fetches LINES cache lines from `ahead` on.
template <int MR, int NR, int LINES>
inline void int8_tile(const uint8_t* x, int64_t ldx, const int8_t* w, const int8_t* ahead, int64_t groups,
                      int64_t width, bool more, int32_t* acc) {
    // Every loop over the tile is unrolled by force: one that is not puts the sums on the stack.
    VI sum[MR][NR];
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n)
            sum[m][n] = more ? _mm512_loadu_si512(acc + m * penjing::PANEL + 16 * n) : _mm512_setzero_si512();
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
constexpr int int4_rows(int nr) { return int8_rows(nr); }

// A single block reads its panel from memory itself: so many bytes ahead, the hardware's prefetcher stops at each 4 KiB
// page. 8 KiB and more were slower.
constexpr int64_t int8_near(int64_t) { return 2048; }
constexpr int64_t int8_step(const penjing::Ahead& ahead) { return 64 * ahead.lines; }

template <int MR, int NR>
inline void int8_lines(const uint8_t* x, int64_t ldx, const int8_t* w, penjing::Ahead ahead, int64_t groups,
                       int64_t width, bool more, int32_t* acc) {
    switch (ahead.lines) {
        case 0: return int8_tile<MR, NR, 0>(x, ldx, w, ahead.at, groups, width, more, acc);
        case 1: return int8_tile<MR, NR, 1>(x, ldx, w, ahead.at, groups, width, more, acc);
        case 2: return int8_tile<MR, NR, 2>(x, ldx, w, ahead.at, groups, width, more, acc);
        default: return int8_tile<MR, NR, NR>(x, ldx, w, ahead.at, groups, width, more, acc);
    }
}

template <int NR>
inline void int8_rows_of(int rows, const uint8_t* x, int64_t ldx, const int8_t* w, penjing::Ahead ahead, int64_t groups,
                         int64_t width, bool more, int32_t* acc) {
    switch (rows) {
        case 1: return int8_lines<1, NR>(x, ldx, w, ahead, groups, width, more, acc);
        case 2: return int8_lines<2, NR>(x, ldx, w, ahead, groups, width, more, acc);
        case 3: return int8_lines<3, NR>(x, ldx, w, ahead, groups, width, more, acc);
        case 4: return int8_lines<4, NR>(x, ldx, w, ahead, groups, width, more, acc);
        case 5: return int8_lines<5, NR>(x, ldx, w, ahead, groups, width, more, acc);
        case 6: return int8_lines<6, NR>(x, ldx, w, ahead, groups, width, more, acc);
        case 7: return int8_lines<7, NR <= 3 ? NR : 3>(x, ldx, w, ahead, groups, width, more, acc);
        default: return int8_lines<8, NR <= 3 ? NR : 3>(x, ldx, w, ahead, groups, width, more, acc);
    }
}

inline void int8_block(int rows, int columns, const uint8_t* x, int64_t ldx, const int8_t* w, penjing::Ahead ahead,
                       int64_t groups, bool more, int32_t* acc) {
    switch (columns / 16) {
        case 1: return int8_rows_of<1>(rows, x, ldx, w, ahead, groups, columns, more, acc);
        case 2: return int8_rows_of<2>(rows, x, ldx, w, ahead, groups, columns, more, acc);
        case 3: return int8_rows_of<3>(rows, x, ldx, w, ahead, groups, columns, more, acc);
        default: return int8_rows_of<4>(rows, x, ldx, w, ahead, groups, columns, more, acc);
    }
}

// int8_tile over some groups of weights in steps from `w` on, which are expanded in registers and, KEEP, left in `code` for
// other rows. Each pair of k-groups fetches `lines` cache lines from `ahead` on.
template <int MR, int NR, bool KEEP>
inline void stepped_tile(const char* w, int64_t groups, int64_t pairs, const uint8_t* x, int64_t ldx, const char* ahead,
                         int lines, bool more, int8_t* code, int32_t* acc) {
    const VI low_half = _mm512_set1_epi8(15);
    constexpr int64_t width = 16 * NR;
    VI sum[MR][NR];
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n)
            sum[m][n] = more ? _mm512_loadu_si512(acc + m * penjing::PANEL + 16 * n) : _mm512_setzero_si512();
    for (int64_t g = 0; g < groups; ++g) {
        alignas(64) int32_t head[2 * NR * 16];  // registers are short
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) {
            const Steps steps = steps_of(w, n);
            _mm512_store_si512(head + 32 * n, steps.step);
            _mm512_store_si512(head + 32 * n + 16, steps.offset);
        }
        w += 2 * width;
        for (int64_t pair = 0; pair < pairs; ++pair, w += 4 * width, x += 8) {
            for (int line = 0; line < lines; ++line, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                VI weight[NR];
#pragma GCC unroll 4
                for (int n = 0; n < NR; ++n) {
                    const VI both = _mm512_loadu_si512(w + 64 * n);
                    const VI numbers = _mm512_and_si512(half ? _mm512_srli_epi16(both, 4) : both, low_half);
                    weight[n] = stepped(numbers, _mm512_load_si512(head + 32 * n), _mm512_load_si512(head + 32 * n + 16));
                    if (KEEP) _mm512_store_si512(code + 64 * n, weight[n]);
                }
                if (KEEP) code += 4 * width;
#pragma GCC unroll 8
                for (int m = 0; m < MR; ++m) {
                    int32_t four;
                    __builtin_memcpy(&four, x + m * ldx + 4 * half, 4);
                    const VI broadcast = _mm512_set1_epi32(four);
#pragma GCC unroll 4
                    for (int n = 0; n < NR; ++n) sum[m][n] = _mm512_dpbusd_epi32(sum[m][n], broadcast, weight[n]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) _mm512_storeu_si512(acc + m * penjing::PANEL + 16 * n, sum[m][n]);
}

template <int NR, bool KEEP>
inline void stepped_rows(const char* w, int64_t groups, int64_t pairs, int rows, const uint8_t* x, int64_t ldx,
                         const char* ahead, int lines, bool more, int8_t* code, int32_t* acc) {
    switch (rows) {
        case 1: return stepped_tile<1, NR, KEEP>(w, groups, pairs, x, ldx, ahead, lines, more, code, acc);
        case 2: return stepped_tile<2, NR, KEEP>(w, groups, pairs, x, ldx, ahead, lines, more, code, acc);
        case 3: return stepped_tile<3, NR, KEEP>(w, groups, pairs, x, ldx, ahead, lines, more, code, acc);
        case 4: return stepped_tile<4, NR, KEEP>(w, groups, pairs, x, ldx, ahead, lines, more, code, acc);
        case 5: return stepped_tile<5, NR, KEEP>(w, groups, pairs, x, ldx, ahead, lines, more, code, acc);
        case 6: return stepped_tile<6, NR, KEEP>(w, groups, pairs, x, ldx, ahead, lines, more, code, acc);
        case 7: return stepped_tile<7, NR <= 3 ? NR : 3, KEEP>(w, groups, pairs, x, ldx, ahead, lines, more, code, acc);
        default: return stepped_tile<8, NR <= 3 ? NR : 3, KEEP>(w, groups, pairs, x, ldx, ahead, lines, more, code, acc);
    }
}

template <bool KEEP>
inline void stepped_columns(const char* w, int64_t groups, int64_t pairs, int rows, int columns, const uint8_t* x, int64_t ldx,
                            const char* ahead, int lines, bool more, int8_t* code, int32_t* acc) {
    switch (columns / 16) {
        case 1: return stepped_rows<1, KEEP>(w, groups, pairs, rows, x, ldx, ahead, lines, more, code, acc);
        case 2: return stepped_rows<2, KEEP>(w, groups, pairs, rows, x, ldx, ahead, lines, more, code, acc);
        case 3: return stepped_rows<3, KEEP>(w, groups, pairs, rows, x, ldx, ahead, lines, more, code, acc);
        default: return stepped_rows<4, KEEP>(w, groups, pairs, rows, x, ldx, ahead, lines, more, code, acc);
    }
}

// The first block of rows, see ops_stepped.h.
inline void stepped_block(const char* w, int64_t groups, int64_t pairs, int rows, int columns, const uint8_t* x, int64_t ldx,
                          penjing::Ahead ahead, bool more, bool alone, int8_t* code, int32_t* acc) {
    if (alone)  // reads its panel from memory itself
        return stepped_columns<false>(w, groups, pairs, rows, columns, x, ldx, w + int8_near(0), columns / 16, more, code, acc);
    stepped_columns<true>(w, groups, pairs, rows, columns, x, ldx, reinterpret_cast<const char*>(ahead.at), 2 * ahead.lines,
                          more, code, acc);
}

// One group of an INT4 layer: exact sums of unsigned halves of bytes times activations, then what `group_term` makes of each,
// added to `total`. `scales`: of the group's columns and, OFFSETS, their offsets behind them. `group_sum` and `group_scale`,
// OFFSETS: of the rows' activations. A function of its own: inlined into the loop over groups, GCC 12 keeps copies of the sums on the stack.
template <int MR, int NR, int LINES, bool OFFSETS>
__attribute__((noinline)) void int4_group(const int8_t* x, int64_t ldx, const int32_t* start, const float* group_sum,
                                          const float* group_scale, int64_t lds, const float* scales, const char* w,
                                          const char* ahead, int64_t pairs, int64_t step, float* total) {
    const VI low_half = _mm512_set1_epi8(15);
    VI sum[MR][NR];
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) sum[m][n] = OFFSETS ? _mm512_setzero_si512() : _mm512_set1_epi32(start[m * lds]);
    for (int64_t pair = 0; pair < pairs; ++pair) {
#pragma GCC unroll 4
        for (int n = 0; n < LINES; ++n) _mm_prefetch(ahead + 64 * n, _MM_HINT_T1);
        ahead += 64 * LINES;
        // The second half loads them again: the first-level cache has them, and registers are short.
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            VI weight[NR];
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) {
                const VI both = _mm512_loadu_si512(w + 64 * n);
                weight[n] = _mm512_and_si512(half ? _mm512_srli_epi16(both, 4) : both, low_half);
            }
#pragma GCC unroll 8
            for (int m = 0; m < MR; ++m) {
                int32_t four;
                __builtin_memcpy(&four, x + m * ldx + 4 * half, 4);
                const VI broadcast = _mm512_set1_epi32(four);
#pragma GCC unroll 4
                for (int n = 0; n < NR; ++n) sum[m][n] = _mm512_dpbusd_epi32(sum[m][n], weight[n], broadcast);
            }
        }
        w += step;
        x += 8;
    }
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) {
        const Group group{v_load(scales + 16 * n), OFFSETS ? v_load(scales + penjing::PANEL + 16 * n) : v_zero()};
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
            float* to = total + m * penjing::PANEL + 16 * n;
            const float own = OFFSETS ? group_sum[m * lds] : 0.0f, by = OFFSETS ? group_scale[m * lds] : 0.0f;
            v_store(to, v_add(v_load(to), group_term<OFFSETS>(group, sum[m][n], own, by)));
        }
    }
}

template <int MR, int NR, int LINES, bool OFFSETS>
inline void int4_tile(const Int4Block& b, const int8_t* x, const int32_t* start, float* total) {
    const int64_t step = 4 * b.columns, pairs = b.group / 8, scale_bytes = bytes_of_group(b);
    const char* w = b.weight;
    const char* ahead = reinterpret_cast<const char*>(b.ahead.at);
    alignas(64) float scales[2 * penjing::PANEL];
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NR; ++n) v_store(total + m * penjing::PANEL + 16 * n, v_zero());
    for (int64_t g = 0; g < b.groups; ++g) {
        ahead += b.skip;
        for (int n = 0; n < NR; ++n) {
            const Group group = v_load_group(b, w, 16 * n);
            v_store(scales + 16 * n, group.scale);
            if (OFFSETS) v_store(scales + penjing::PANEL + 16 * n, group.offset);
        }
        int4_group<MR, NR, LINES, OFFSETS>(x, b.ldx, OFFSETS ? nullptr : start + g, OFFSETS ? b.group_sum + g : nullptr,
                                           OFFSETS ? b.group_scale + g : nullptr, b.lds, scales, w + scale_bytes, ahead, pairs,
                                           step, total);
        x += b.group;
        w += scale_bytes + step * pairs;
        ahead += 64 * LINES * pairs;
    }
}

template <int MR, int NR, int LINES>
inline void int4_tile(const Int4Block& b, const int8_t* x, const int32_t* start, float* total) {
    if (b.group_scale) int4_tile<MR, NR, LINES, true>(b, x, start, total);
    else int4_tile<MR, NR, LINES, false>(b, x, start, total);
}

template <int MR, int NR>
inline void int4_lines(const Int4Block& b, const int8_t* x, const int32_t* start, float* total) {
    switch (b.ahead.lines) {
        case 0: return int4_tile<MR, NR, 0>(b, x, start, total);
        case 1: return int4_tile<MR, NR, 1>(b, x, start, total);
        case 2: return int4_tile<MR, NR, 2>(b, x, start, total);
        default: return int4_tile<MR, NR, NR>(b, x, start, total);
    }
}

template <int NR>
inline void int4_rows_of(int rows, const Int4Block& b, const int8_t* x, const int32_t* start, float* total) {
    switch (rows) {
        case 1: return int4_lines<1, NR>(b, x, start, total);
        case 2: return int4_lines<2, NR>(b, x, start, total);
        case 3: return int4_lines<3, NR>(b, x, start, total);
        case 4: return int4_lines<4, NR>(b, x, start, total);
        case 5: return int4_lines<5, NR>(b, x, start, total);
        case 6: return int4_lines<6, NR>(b, x, start, total);
        case 7: return int4_lines<7, NR <= 3 ? NR : 3>(b, x, start, total);
        default: return int4_lines<8, NR <= 3 ? NR : 3>(b, x, start, total);
    }
}

inline void int4_block(int rows, const Int4Block& b, const int8_t* x, const int32_t* start, float* total) {
    switch (b.columns / 16) {
        case 1: return int4_rows_of<1>(rows, b, x, start, total);
        case 2: return int4_rows_of<2>(rows, b, x, start, total);
        case 3: return int4_rows_of<3>(rows, b, x, start, total);
        default: return int4_rows_of<4>(rows, b, x, start, total);
    }
}

constexpr int FLOAT_ROWS = 6, FLOAT_COLUMNS = 4;  // accumulators of a float micro-tile
constexpr int HALF_INT4_ROWS = 4, HALF_INT4_VECTORS = 4;
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
