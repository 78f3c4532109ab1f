// AVX2 with byte products that add to 32 bits (AVX-VNNI: Alder Lake, Sierra Forest and later, which lack AVX-512).
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "ops.h"

#if defined(PJ_HAS_AVX_VNNI)

#if defined(__clang__) && defined(PJ_EMULATE_AVX_VNNI)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#elif defined(PJ_EMULATE_AVX_VNNI)
#pragma GCC target("avx2,fma,f16c")
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif

#include "simd_avx2.h"

#include "int4_block.h"
#include "tiles_avx2.h"

namespace {

// sum + the four products of a lane's bytes, u8 × s8. The emulation lets any processor test all but this instruction.
inline VI add_dot(VI sum, VI u, VI s) {
#if defined(PJ_EMULATE_AVX_VNNI)
    const VI even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
    const VI odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
#else
    return _mm256_dpbusd_avx_epi32(sum, u, s);
#endif
}

// rows × NR·8 sums of products over some k-groups, `more`: added to what is there. Sums stay in registers.
template <int MR, int NR>
inline void int8_tile(const uint8_t* x, int64_t ldx, const int8_t* w, Fetch fetch, int64_t groups, int64_t width, bool more,
                      int32_t* acc) {
    VI sum[MR * NR];
#pragma GCC unroll 16
    for (int i = 0; i < MR * NR; ++i) sum[i] = more ? vi_load(acc + i / NR * penjing::PANEL + i % NR * 8) : vi_zero();
    const int8_t* row = reinterpret_cast<const int8_t*>(x);
    for (int64_t g = 0; g < groups; ++g, row += 4, w += 4 * width, fetch.at += fetch.step) {
        fetch.template ask<NR / 2>();
        VI weight[NR];
#pragma GCC unroll 8
        for (int n = 0; n < NR; ++n) weight[n] = vi_load(w + 32 * n);
#pragma GCC unroll 6
        for (int m = 0; m < MR; ++m) {
            const VI four = every_word(row + m * ldx);
#pragma GCC unroll 8
            for (int n = 0; n < NR; ++n) sum[m * NR + n] = add_dot(sum[m * NR + n], four, weight[n]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR * NR; ++i)
        _mm256_storeu_si256(reinterpret_cast<VI*>(acc + i / NR * penjing::PANEL + i % NR * 8), sum[i]);
}

constexpr int int8_rows(int) { return 6; }  // twelve sums, two weights and a broadcast fill 16 registers

// Tiles of NR × 8 columns from `column` on; where those end. A tile asks for a line of `ahead` for each 16 of its columns.
template <int MR, int NR>
inline int int8_columns(const uint8_t* x, int64_t ldx, int column, int columns, const int8_t* w,
                        const penjing::Ahead& ahead, int64_t groups, bool more, int32_t* acc) {
    for (; column + 8 * NR <= columns; column += 8 * NR) {
        const int line = column / 16;
        const Fetch fetch{ahead.at + line * ahead.far, 64, ahead.far, 0, ahead.lines - line};
        int8_tile<MR, NR>(x, ldx, w + 4 * column, fetch, groups, columns, more, acc + column);
    }
    return column;
}

inline void int8_block(int rows, int columns, const uint8_t* x, int64_t ldx, const int8_t* w, penjing::Ahead ahead,
                       int64_t groups, bool more, int32_t* acc) {
    const auto run = [&](auto columns_of, int column) {
        return columns_of(x, ldx, column, columns, w, ahead, groups, more, acc);
    };
    switch (rows) {
        case 1: run(int8_columns<1, 2>, run(int8_columns<1, 8>, 0)); break;
        case 2: run(int8_columns<2, 2>, run(int8_columns<2, 4>, 0)); break;
        case 3: run(int8_columns<3, 2>, 0); break;
        case 4: run(int8_columns<4, 2>, 0); break;
        case 5: run(int8_columns<5, 2>, 0); break;
        default: run(int8_columns<6, 2>, 0); break;
    }
}

template <int MR, int NR>
inline void int4_sums(const char* w, int64_t step, const int8_t* x, int64_t ldx, int64_t inputs, Fetch& fetch, VI* sum) {
    constexpr bool BY_COLUMN = MR <= 2;  // either two rows' inputs stay in registers, or two columns' weights
    const VI low_half = _mm256_set1_epi8(15);
    VI part[MR * NR];
#pragma GCC unroll 8
    for (int i = 0; i < MR * NR; ++i) part[i] = sum[i];
    for (int64_t first = 0; first < inputs; first += 8, x += 8, w += step, fetch.at += fetch.step) {
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
            VI& to = part[m * NR + n];
            to = add_dot(add_dot(to, low[n], every_word(x + m * ldx)), high[n], every_word(x + m * ldx + 4));
            asm("" : "+x"(to));  // GCC 12 keeps a second copy of all sums in memory otherwise
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR * NR; ++i) sum[i] = part[i];
}

}  // namespace

#include "ops_impl.h"

namespace penjing {
const Ops& avx_vnni_ops() {
    static constexpr Ops table = make_table("avx_vnni");
    return table;
}
}  // namespace penjing

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
#endif
