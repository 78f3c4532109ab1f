// AVX2 with FMA and F16C (Haswell, Zen 1 and later).
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "ops.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "simd_avx2.h"

#include "int4_block.h"
#include "tiles_avx2.h"

namespace {

// Four 16-bit numbers all over a vector. From memory it is one instruction; from a general register it would be three.
inline VI every_four(const int16_t* at) {
    return _mm256_castpd_si256(_mm256_broadcast_sd(reinterpret_cast<const double*>(at)));
}

constexpr int INT8_ROWS = 6, INT8_INPUTS = 256;  // of a piece: its weights, 16 KiB of a panel, stay in the first-level cache

// Without VNNI the byte multiply-add saturates at 16 bits: both sides are widened to 16 bits and pairs summed into 32. The
// rows `x` have been widened before, INT8_INPUTS apart. Of NR × 8 columns, so that few rows read whole cache lines. A line
// at `ahead` is fetched for each group, and one `far` behind it where NR is 4.
template <int MR, int NR>
inline void int8_tile(const int16_t* x, const int8_t* w, const int8_t* ahead, int64_t step, int64_t far, int64_t groups,
                      int64_t width, bool more, int32_t* acc) {
    VI low[MR * NR], high[MR * NR];  // columns 0–3 and 4–7 of eight, two partial sums each
#pragma GCC unroll 8
    for (int i = 0; i < MR * NR; ++i) low[i] = high[i] = _mm256_setzero_si256();
    for (int64_t g = 0; g < groups; ++g, x += 4, w += width * 4, ahead += step) {
        _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
        if (NR == 4) _mm_prefetch(reinterpret_cast<const char*>(ahead + far), _MM_HINT_T1);
        VI w_low, w_high;
#pragma GCC unroll 8
        for (int i = 0; i < MR * NR; ++i) {
            const __m128i* at = reinterpret_cast<const __m128i*>(w + i / MR * 32);
            if (i % MR == 0) {
                w_low = _mm256_cvtepi8_epi16(_mm_loadu_si128(at));
                w_high = _mm256_cvtepi8_epi16(_mm_loadu_si128(at + 1));
            }
            const VI four = every_four(x + i % MR * INT8_INPUTS);
            low[i] = _mm256_add_epi32(low[i], _mm256_madd_epi16(four, w_low));
            high[i] = _mm256_add_epi32(high[i], _mm256_madd_epi16(four, w_high));
            asm("" : "+x"(low[i]), "+x"(high[i]));  // GCC 12 keeps a second copy of all sums in memory otherwise
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR * NR; ++i) {
        const VI sum = _mm256_permute4x64_epi64(_mm256_hadd_epi32(low[i], high[i]), 0xd8);
        int32_t* to = acc + i % MR * penjing::PANEL + i / MR * 8;
        _mm256_storeu_si256(reinterpret_cast<VI*>(to), more ? _mm256_add_epi32(sum, vi_load(to)) : sum);
    }
}

// Four inputs of each group.
inline void widen_bytes(const uint8_t* x, int64_t groups, int16_t* to) {
    int64_t g = 0;
    for (; g + 4 <= groups; g += 4, x += 16, to += 16)
        _mm256_storeu_si256(reinterpret_cast<VI*>(to), _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
    for (; g < groups; ++g)
        for (int i = 0; i < 4; ++i) *to++ = *x++;
}

constexpr int int8_rows(int) { return INT8_ROWS; }

// Columns of a piece of the inputs from `column` on, NR × 8 at a time; where those end that it can take. For each group the
// first tiles of a panel ask for a line of the next one, those of 32 columns for two.
template <int MR, int NR>
inline int int8_columns(const int16_t* x, int column, int columns, const int8_t* w, const penjing::Ahead& ahead,
                        int64_t first, int64_t some, bool more, int32_t* acc) {
    constexpr int LINES = NR == 4 ? 2 : 1;
    for (; column + 8 * NR <= columns; column += 8 * NR) {
        const int line = column / (8 * NR) * LINES;
        const int64_t step = line < ahead.lines ? 64 : 0, far = line + 1 < ahead.lines ? ahead.far : 0;
        const int8_t* at = ahead.at + (step ? line * ahead.far + first * 64 : 0);
        int8_tile<MR, NR>(x, w + 4 * (first * columns + column), at, step, far, some, columns, more, acc + column);
    }
    return column;
}

inline void int8_block(int rows, int columns, const uint8_t* x, int64_t ldx, const int8_t* w, penjing::Ahead ahead,
                       int64_t groups, bool more, int32_t* acc) {
    constexpr int64_t PIECE = INT8_INPUTS / 4;
    alignas(32) int16_t wide[INT8_ROWS * INT8_INPUTS];
    for (int64_t first = 0; first < groups; first += PIECE, more = true) {
        const int64_t some = groups - first < PIECE ? groups - first : PIECE;
        for (int m = 0; m < rows; ++m) widen_bytes(x + m * ldx + 4 * first, some, wide + m * INT8_INPUTS);
        const auto run = [&](auto columns_of, int column) {
            return columns_of(wide, column, columns, w, ahead, first, some, more, acc);
        };
        switch (rows) {
            case 1: run(int8_columns<1, 2>, run(int8_columns<1, 4>, 0)); break;
            case 2: run(int8_columns<2, 2>, 0); break;
            case 3: run(int8_columns<3, 2>, 0); break;
            case 4: run(int8_columns<4, 1>, 0); break;
            case 5: run(int8_columns<5, 1>, 0); break;
            default: run(int8_columns<6, 1>, 0); break;
        }
    }
}

// Sums of one group. Products are of bytes in [0, 15] and [−127, 127]: those of 32 inputs stay inside 16 bits, two in a lane,
// so that nothing is widened before. Of NR × 8 columns, so that few rows read whole cache lines.
template <int MR, int NR>
inline void int4_sums(const char* w, int64_t step, const int8_t* x, int64_t ldx, int64_t inputs, Fetch& fetch, VI* sum) {
    constexpr bool BY_COLUMN = MR <= 2;  // either two rows' inputs stay in registers, or two columns' weights
    const VI low_half = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const int8_t* upper = x + 2 * ldx;  // of rows 2 and 3
    asm("" : "+r"(upper));              // else GCC keeps an address for each row and each pair, on the stack
    for (int64_t first = 0; first < inputs; first += 32, x += 32, upper += 32) {
        VI part[MR * NR];
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair, w += step, fetch.at += fetch.step) {
            fetch.template ask<NR / 2>();
            VI low[NR], high[NR];
#pragma GCC unroll 8
            for (int i = 0; i < MR * NR; ++i) {
                const int m = BY_COLUMN ? i % MR : i / NR, n = BY_COLUMN ? i / MR : i % NR;
                if (m == 0) {
                    const VI both = vi_load(w + 32 * n);
                    low[n] = _mm256_and_si256(both, low_half);
                    high[n] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half);
                }
                const int8_t* row = (m < 2 ? x : upper) + m % 2 * ldx + 8 * pair;
                const VI product = _mm256_maddubs_epi16(low[n], every_word(row));
                VI& to = part[m * NR + n];
                to = _mm256_add_epi16(pair ? _mm256_add_epi16(to, product) : product,
                                      _mm256_maddubs_epi16(high[n], every_word(row + 4)));
                asm("" : "+x"(to));  // as in int8_tile
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < MR * NR; ++i) sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(part[i], ones));
    }
}

}  // namespace

#include "ops_impl.h"

namespace penjing {
const Ops& avx2_ops() {
    static constexpr Ops table = make_table("avx2");
    return table;
}
}  // namespace penjing

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
