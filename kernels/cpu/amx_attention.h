// Attention of many rows to keys and values in bfloat16 by tiles. Included by ops_amx.cpp alone.
//
// A product of tiles takes 32 inputs: one chain of multiply-adds over the first of each pair, one over the second, and their
// sum is added to what was there (Intel's manual, TDPBF16PS; checked on a processor). Inputs i and i + 16 are a pair here, so
// that these are the chains of ops_attention.h, and every bit is the one that vectors compute.
#pragma once

namespace {

using penjing::AttentionTile;
using penjing::CHOICE_KEYS;
using penjing::KeyRows;
using penjing::TILE_KEYS;
using penjing::TileKeys;
using penjing::TileValues;

constexpr int BLOCK = 32;  // inputs of a product of tiles
constexpr int KEY_GROUPS = TILE_KEYS / CHOICE_KEYS;
constexpr int64_t PAIRS = 16 * BLOCK;  // numbers of a block for 16 columns: a word of two inputs for each, 16 times

// With fewer rows, what tiles save is less than what it takes to write keys and values as they read them.
constexpr int64_t LEAST_QUERIES = 7;

bool by_tiles(int32_t dtype, int64_t head_dim, int64_t rows) {
    return dtype == PJ_BF16 && head_dim % BLOCK == 0 && rows >= LEAST_QUERIES;
}

// Upper halves of words of equal places in one word: numbers in bfloat16, written out as floats.
inline VI side_by_side(V a, V b) {
    const VI upper = vi_set(static_cast<int32_t>(0xffff0000u));
    // x | (y & z)
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(_mm512_castps_si512(a), 16), _mm512_castps_si512(b), upper, 0xf8);
}

// Numbers of two rows in turns.
inline VI interleaved(const void* first, const void* second) {
    alignas(64) static constexpr int16_t turns[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m256i low = _mm256_loadu_si256(static_cast<const __m256i*>(first));
    const VI both = _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_loadu_si256(static_cast<const __m256i*>(second)), 1);
    return _mm512_permutexvar_epi16(vi_load(turns), both);
}

void take_heads(const float* x, float factor, int64_t heads, int64_t head_dim, int32_t dtype, bool tiles, void* out) {
    if (!tiles) return penjing::avx512_ops().take_heads(x, factor, heads, head_dim, dtype, false, out);
    const V by = v_set(factor);
    uint16_t* to = static_cast<uint16_t*>(out);
    for (int64_t at = 0; at < heads * head_dim; at += BLOCK) {
        const V first = v_brain(v_mul(v_load(x + at), by)), second = v_brain(v_mul(v_load(x + at + 16), by));
        _mm512_storeu_si512(to + at, side_by_side(first, second));
    }
}

TileKeys turn_keys(const KeyRows& from) {
    if (!from.tiles) return penjing::avx512_ops().turn_keys(from);
    const int64_t head_dim = from.words, size = head_dim * CHOICE_KEYS;
    TileKeys keys{};
    const void* const* ahead = from.ahead;
    for (int group = 0; group < KEY_GROUPS; ++group) {
        uint16_t* to = reinterpret_cast<uint16_t*>(from.room) + group * size;
        keys.group[group] = to;
        if (group * CHOICE_KEYS >= from.keys || !(from.chosen >> group & 1)) continue;
        const void* const* rows = from.k + group * CHOICE_KEYS;
        if (from.turned) {
            const uint16_t* key = static_cast<const uint16_t*>(rows[0]);
            const uint16_t* next = static_cast<const uint16_t*>(ahead[0]);
            for (int64_t block = 0; block < size; block += PAIRS) {
                for (int64_t i = block; i < block + PAIRS / 2; i += CHOICE_KEYS) {
                    const int64_t at = block + 2 * (i - block);
                    __builtin_prefetch(next + at, 0, 2);
                    _mm512_storeu_si512(to + at, interleaved(key + i, key + i + PAIRS / 2));
                }
            }
        } else {
            for (int lane = 0; lane < CHOICE_KEYS; ++lane) {
                fetch_row(ahead[lane], static_cast<int>(2 * head_dim));
                // Past the last key the first stands in; its scores are masked.
                const bool there = group * CHOICE_KEYS + lane < from.keys;
                const uint16_t* row = static_cast<const uint16_t*>(there ? rows[lane] : from.k[0]);
                for (int64_t d = 0; d < head_dim; ++d) {
                    const int64_t block = d / BLOCK, in_block = d % BLOCK;
                    to[block * PAIRS + in_block % 16 * BLOCK + 2 * lane + in_block / 16] = row[d];
                }
            }
        }
        ahead += CHOICE_KEYS;
    }
    return keys;
}

// Values by groups of 16 dimensions, of keys i and i + 16 of a block in one word. Those that nobody sees become 0: their
// weight is that, and nothing is known of them.
void turn_values(const AttentionTile& tile) {
    alignas(64) static constexpr uint16_t nothing[16] = {};
    const TileValues& values = *tile.values;
    const void* const* ahead = tile.ahead;
    const auto row = [&](int key) {
        const bool seen = key >= values.begin && key < values.end && (values.chosen >> key / CHOICE_KEYS & 1);
        return seen ? static_cast<const uint16_t*>(tile.v[key]) : nullptr;
    };
    for (int block = 0; block < TILE_KEYS; block += BLOCK) {
        if (block >= values.end || block + BLOCK <= values.begin) continue;
        for (int i = block; i < block + 16; ++i) {
            const uint16_t *first = row(i), *second = row(i + 16);
            if (ahead) {
                fetch_row(ahead[i], 2 * tile.head_dim);
                fetch_row(ahead[i + 16], 2 * tile.head_dim);
            }
            uint16_t* to = reinterpret_cast<uint16_t*>(values.room) + block * 16 + (i - block) * BLOCK;
            for (int d = 0; d < tile.head_dim; d += 16, to += TILE_KEYS * 16)
                _mm512_storeu_si512(to, interleaved(first ? first + d : nothing, second ? second + d : nothing));
        }
    }
}

// Sums over `blocks` blocks for a tile of rows and NR groups of 16 columns, which lie `apart` numbers from each other.
// Registers of tiles are named in the source, hence no loops over them.
template <int NR>
inline void sum_blocks(const uint16_t* a, int64_t lda, const uint16_t* b, int64_t apart, int64_t blocks, float* c) {
    constexpr int64_t LDB = 2 * BLOCK, LDC = 4 * TILE_KEYS;
    _tile_zero(0);
    if (NR > 1) _tile_zero(1);
    if (NR > 2) _tile_zero(2);
    if (NR > 3) _tile_zero(3);
    for (int64_t block = 0; block < blocks; ++block, a += BLOCK, b += PAIRS) {
        _tile_loadd(4, a, 2 * lda);
        _tile_loadd(6, b, LDB);
        _tile_dpbf16ps(0, 4, 6);
        if (NR > 1) _tile_loadd(7, b + apart, LDB);
        if (NR > 1) _tile_dpbf16ps(1, 4, 7);
        if (NR > 2) _tile_loadd(6, b + 2 * apart, LDB);
        if (NR > 2) _tile_dpbf16ps(2, 4, 6);
        if (NR > 3) _tile_loadd(7, b + 3 * apart, LDB);
        if (NR > 3) _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, c, LDC);
    if (NR > 1) _tile_stored(1, c + 16, LDC);
    if (NR > 2) _tile_stored(2, c + 32, LDC);
    if (NR > 3) _tile_stored(3, c + 48, LDC);
}

inline void sum_groups(int groups, const uint16_t* a, int64_t lda, const uint16_t* b, int64_t apart, int64_t blocks, float* c) {
    written();
    switch (groups) {
        case 1: sum_blocks<1>(a, lda, b, apart, blocks, c); break;
        case 2: sum_blocks<2>(a, lda, b, apart, blocks, c); break;
        case 3: sum_blocks<3>(a, lda, b, apart, blocks, c); break;
        default: sum_blocks<4>(a, lda, b, apart, blocks, c); break;
    }
    written();
}

// A tile of rows on its way: `height` rows from `row` on, of which those from `fresh` on have not been attended to yet.
struct RowBlock {
    int row, fresh, height;
    int first, last;  // keys that any of them sees
    alignas(64) float score[TILE_ROWS * TILE_KEYS];
    alignas(64) uint16_t weight[TILE_ROWS * TILE_KEYS];
};

void score_rows(const AttentionTile& tile, RowBlock& rows) {
    rows.first = TILE_KEYS;
    rows.last = 0;
    for (int m = rows.fresh; m < rows.row + rows.height; ++m) {
        rows.first = tile.low[m] < rows.first ? tile.low[m] : rows.first;
        rows.last = tile.high[m] > rows.last ? tile.high[m] : rows.last;
    }
    const int64_t head_dim = tile.head_dim;
    const int begin = rows.first / CHOICE_KEYS, end = (rows.last + CHOICE_KEYS - 1) / CHOICE_KEYS;
    const uint16_t* keys = static_cast<const uint16_t*>(tile.keys->group[begin]);
    sum_groups(end - begin, static_cast<const uint16_t*>(tile.q) + rows.row * head_dim, head_dim, keys, head_dim * CHOICE_KEYS,
               head_dim / BLOCK, rows.score + begin * CHOICE_KEYS);
}

// Weights of a row's scores; of groups of keys that none of its neighbours sees 0. Their peak and sum.
inline void weigh(const AttentionTile& tile, int row, int begin, int end, const float* score, uint16_t* weight, float* peak,
                  float* total) {
    const int low = tile.low[row], high = tile.high[row], chosen = tile.chosen ? tile.chosen[row] : ~0;
    V part[KEY_GROUPS], most = v_set(-INFINITY), sum = v_zero();
#pragma GCC unroll 4
    for (int group = 0; group < KEY_GROUPS; ++group) {
        const int first = group * CHOICE_KEYS;
        V x = v_set(-INFINITY);
        if (group >= begin && group < end && (chosen >> group & 1)) {
            x = v_load(score + first);
            if (tile.cap > 0.0f) x = v_soft_cap(x, tile.cap);
            if (first < low || first + CHOICE_KEYS > high) x = v_keep(x, low - first, high - first);
        }
        part[group] = x;
        most = v_max(most, x);
    }
    *peak = v_largest(most);
#pragma GCC unroll 4
    for (V& x : part) {
        x = v_brain(v_exp2(v_sub(x, v_set(*peak))));
        sum = v_add(sum, x);
    }
    *total = v_sum(sum);
#pragma GCC unroll 2
    for (int group = 0; group < KEY_GROUPS; group += 2)
        _mm512_storeu_si512(weight + group * CHOICE_KEYS, side_by_side(part[group], part[group + 1]));
}

void attend_tile(const AttentionTile& tile) {
    if (!tile.tiles) return penjing::avx512_ops().attend_tile(tile);
    const int64_t head_dim = tile.head_dim;
    const int height = tile.rows < TILE_ROWS ? tile.rows : TILE_ROWS;
    keep_shape(height, 16);
    alignas(64) float sum[TILE_ROWS * TILE_KEYS];
    RowBlock room[2];
    const auto begin_rows = [&](int fresh, RowBlock& rows) {
        rows.row = fresh + height <= tile.rows ? fresh : tile.rows - height;
        rows.fresh = fresh;
        rows.height = height;
        score_rows(tile, rows);
    };
    begin_rows(0, room[0]);
    for (int fresh = 0, side = 0; fresh < tile.rows; fresh += height, side ^= 1) {
        RowBlock& rows = room[side];
        const int skip = fresh - rows.row, end = (rows.last + CHOICE_KEYS - 1) / CHOICE_KEYS;
        float peak[TILE_ROWS], total[TILE_ROWS], keep[TILE_ROWS], take[TILE_ROWS];
        for (int m = skip; m < height; ++m)
            weigh(tile, rows.row + m, rows.first / CHOICE_KEYS, end, rows.score + m * TILE_KEYS,
                  rows.weight + m * TILE_KEYS, peak + m, total + m);
        meet<TILE_ROWS>(peak + skip, total + skip, tile.peak + fresh, tile.total + fresh, keep + skip, take + skip, height - skip);
        if (!tile.values->ready) turn_values(tile);
        tile.values->ready = true;
        // Weights are on their way to memory, where tiles read them: meanwhile the next rows.
        if (fresh + height < tile.rows) begin_rows(fresh + height, room[side ^ 1]);
        const int64_t from = rows.first / BLOCK, blocks = (rows.last + BLOCK - 1) / BLOCK - from;
        for (int64_t d = 0; d < head_dim; d += 64) {
            const int64_t groups = head_dim - d < 64 ? (head_dim - d) / 16 : 4;
            const uint16_t* values = reinterpret_cast<const uint16_t*>(tile.values->room) + d * TILE_KEYS + from * PAIRS;
            sum_groups(static_cast<int>(groups), rows.weight + from * BLOCK, TILE_KEYS, values, TILE_KEYS * 16, blocks, sum);
            for (int m = skip; m < height; ++m) {
                float* out = tile.out + (rows.row + m) * head_dim + d;
                const V kept = v_set(keep[m]), taken = v_set(take[m]);
                for (int64_t at = 0; at < groups * 16; at += 16)
                    v_store(out + at, v_fma(v_load(out + at), kept, v_mul(v_load(sum + m * TILE_KEYS + at), taken)));
            }
        }
    }
}

}  // namespace
