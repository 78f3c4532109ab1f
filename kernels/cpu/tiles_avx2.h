// What AVX2 and AVX-VNNI share of their micro-tiles: all but the products of bytes, which int8_block and int4_sums make.
// Included after simd_avx2.h and int4_block.h.
#pragma once

namespace {

// Of one piece of a panel, see ops_int8.h; `more`: added to what is there.
inline void int8_block(int rows, int columns, const uint8_t* x, int64_t ldx, const int8_t* w, penjing::Ahead ahead, int64_t groups,
                bool more, int32_t* acc);

constexpr int64_t int8_near(int64_t panel_bytes) { return panel_bytes; }
constexpr int64_t int8_step(const penjing::Ahead&) { return 64; }

// Weights that are stored in steps (pack_stepped.cpp): 15 × 17 still fits a byte, so that one multiplication of 16 bits
// makes two products.
inline void expand_group(const char* from, int64_t pairs, int64_t columns, int8_t* to) {
    const VI low_half = _mm256_set1_epi8(15);
    const VI steps = _mm256_setr_epi8(0, -1, 0, -1, 4, -1, 4, -1, 8, -1, 8, -1, 12, -1, 12, -1, 0, -1, 0, -1, 4, -1, 4, -1, 8,
                                      -1, 8, -1, 12, -1, 12, -1);
    const VI offsets = _mm256_setr_epi8(1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9, 13, 13, 13, 13, 1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9,
                                        13, 13, 13, 13);
    for (int64_t column = 0; column < columns; column += 8) {
        const __m128i pair_of_bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * column));
        const VI both_of = _mm256_cvtepu16_epi32(pair_of_bytes);
        const VI step = _mm256_shuffle_epi8(both_of, steps), offset = _mm256_shuffle_epi8(both_of, offsets);
        const char* words = from + 2 * columns + 4 * column;
        int8_t* out = to + 4 * column;
        for (int64_t pair = 0; pair < pairs; ++pair, words += 4 * columns, out += 8 * columns) {
            const VI both = vi_load(words), low = _mm256_and_si256(both, low_half);
            const VI high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half);
            const VI first = _mm256_add_epi8(_mm256_mullo_epi16(low, step), offset);
            const VI second = _mm256_add_epi8(_mm256_mullo_epi16(high, step), offset);
            _mm256_storeu_si256(reinterpret_cast<VI*>(out), first);
            _mm256_storeu_si256(reinterpret_cast<VI*>(out + 4 * columns), second);
        }
    }
}

// The first block of rows, see ops_stepped.h.
inline void stepped_block(const char* w, int64_t groups, int64_t pairs, int rows, int columns, const uint8_t* x, int64_t ldx,
                          penjing::Ahead ahead, bool more, bool, int8_t* code, int32_t* acc) {
    for (int64_t g = 0; g < groups; ++g)
        expand_group(w + g * (2 + 4 * pairs) * columns, pairs, columns, code + g * pairs * 8 * columns);
    int8_block(rows, columns, x, ldx, code, ahead, groups * pairs * 2, more, acc);
}

constexpr int int4_rows(int) { return 4; }

// Four bytes all over a vector.
inline VI every_word(const int8_t* at) {
    return _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(at)));
}

// What a tile asks for meanwhile: for each k-group, or pair of them of an INT4 layer, `lines`, which are `far` apart.
struct Fetch {
    const int8_t* at;
    int64_t step, far, skip;
    int lines;

    template <int MOST>
    void ask() const {
#pragma GCC unroll 4
        for (int line = 0; line < MOST; ++line)
            if (line < lines) _mm_prefetch(reinterpret_cast<const char*>(at + line * far), _MM_HINT_T1);
    }
};

// One block of rows reads ahead what it will read of the next panel, several fetch parts of it (ops_int4.h).
inline Fetch fetch_of(const Int4Block& b, int64_t column) {
    const int64_t line = column / 16, left = b.ahead.lines - line, pairs = b.groups * b.group / 8;
    const int lines = left < 0 ? 0 : static_cast<int>(left);
    if (b.skip) return {b.ahead.at + 64 * line, 4 * b.columns, 64, b.skip, lines};
    return {b.ahead.at + 64 * line * pairs, 64, 64 * pairs, 0, lines};
}

// Sums of one group are added to `sum`, of NR × 8 columns. A pair of k-groups is `step` bytes after the one before.
template <int MR, int NR>
inline void int4_sums(const char* w, int64_t step, const int8_t* x, int64_t ldx, int64_t inputs, Fetch& fetch, VI* sum);

template <int MR, int NR>
inline void int4_tile(const Int4Block& b, int64_t column, const int8_t* x, const int32_t* start, float* total) {
    const int64_t step = 4 * b.columns, scale_bytes = bytes_of_group(b);
    const char* w = b.weight;
    Fetch fetch = fetch_of(b, column);
    for (int i = 0; i < MR * NR; ++i) v_store(total + i / NR * penjing::PANEL + i % NR * 8, v_zero());
    for (int64_t g = 0; g < b.groups; ++g) {
        if (fetch.skip) fetch.template ask<NR / 2>();
        fetch.at += fetch.skip;
        VI sum[MR * NR];
        for (int i = 0; i < MR * NR; ++i) sum[i] = vi_set(b.group_scale ? 0 : start[i / NR * b.lds + g]);
        int4_sums<MR, NR>(w + scale_bytes + 4 * column, step, x, b.ldx, b.group, fetch, sum);
        for (int n = 0; n < NR; ++n) {
            const Group group = v_load_group(b, w, column + 8 * n);
            for (int m = 0; m < MR; ++m) {
                float* at = total + m * penjing::PANEL + 8 * n;
                v_store(at, v_add(v_load(at), group_term(b, group, sum[m * NR + n], m * b.lds + g)));
            }
        }
        x += b.group;
        w += scale_bytes + step * b.group / 8;
    }
}

template <int MR, int NR>
inline int64_t int4_columns(const Int4Block& b, int64_t column, const int8_t* x, const int32_t* start, float* total) {
    for (; column + 8 * NR <= b.columns; column += 8 * NR) int4_tile<MR, NR>(b, column, x, start, total + column);
    return column;
}

inline void int4_block(int rows, const Int4Block& b, const int8_t* x, const int32_t* start, float* total) {
    const auto run = [&](auto columns_of, int64_t column) { return columns_of(b, column, x, start, total); };
    switch (rows) {
        case 1: run(int4_columns<1, 2>, run(int4_columns<1, 8>, 0)); break;
        case 2: run(int4_columns<2, 2>, run(int4_columns<2, 4>, 0)); break;
        case 3: run(int4_columns<3, 2>, 0); break;
        default: run(int4_columns<4, 2>, 0); break;
    }
}

// Of what ops_impl.h blocks.
constexpr int FLOAT_ROWS = 3, FLOAT_COLUMNS = 4;
constexpr int HALF_INT4_ROWS = 3, HALF_INT4_VECTORS = 2;
constexpr int ATTENTION_ROWS = 6, ATTENTION_VECTORS = 2;

}  // namespace
