// INT4 panels by tiles: 16 columns at a time are unpacked to bytes once for up to 128 rows, each group's exact sums are a
// tile, and they are scaled and added group by group as on every other level. Included by ops_amx.cpp alone.
#pragma once

namespace {

using penjing::Int4Rows;

constexpr int MOST_TILES = 8;         // of rows that share what was unpacked
constexpr int64_t MOST_INPUTS = 2048;  // unpacked at a time: 32 KiB, which stays in the first-level cache
constexpr int64_t MOST_GROUPS = MOST_INPUTS / 32;
constexpr int MOST_ROWS = MOST_TILES * TILE_ROWS;

// 16 columns of some groups, unpacked.
struct Strip {
    alignas(64) int8_t weight[MOST_INPUTS * 16];
    alignas(64) float scale[MOST_GROUPS * 16];
    alignas(64) float offset[MOST_GROUPS * 16];
};

// Some groups of one panel of a layer.
struct Groups {
    const char* from;  // the first one's scales
    int64_t columns;
    int64_t count;
    int64_t size;         // inputs of one
    int64_t head;         // bytes of the scales and offsets of one
    int64_t bytes;        // of a whole one
    int32_t scale_dtype;  // PjDtype
    bool offsets;
};

inline void unpack(const Groups& groups, int64_t column, Strip& strip) {
    const VI low_half = _mm512_set1_epi8(15), zero_point = _mm512_set1_epi8(groups.offsets ? 0 : 8);
    const char* from = groups.from;
    int8_t* to = strip.weight;
    for (int64_t g = 0; g < groups.count; ++g, from += groups.bytes) {
        v_store(strip.scale + 16 * g, v_load_scales(from, column, groups.scale_dtype));
        if (groups.offsets) v_store(strip.offset + 16 * g, v_load_scales(from + groups.head / 2, column, groups.scale_dtype));
        const char* pair = from + groups.head + 4 * column;
        for (int64_t p = 0; p < groups.size / 8; ++p, pair += 4 * groups.columns, to += 128) {
            const VI both = vi_load(pair), high = _mm512_srli_epi16(both, 4);
            _mm512_store_si512(to, _mm512_sub_epi8(_mm512_and_si512(both, low_half), zero_point));
            _mm512_store_si512(to + 64, _mm512_sub_epi8(_mm512_and_si512(high, low_half), zero_point));
        }
    }
    written();
}

// The exact sums of one group in tile `set` % 4, and their way to memory. Both may be on their way while vectors work.
#define PJ_SUM_GROUP(SUM, X, W)                  \
    _tile_zero(SUM);                             \
    for (int64_t i = 0; i < inputs; i += step) { \
        _tile_loadd(X, x + i, ldx);              \
        _tile_loadd(W, w + 16 * i, 64);          \
        _tile_dpbssd(SUM, X, W);                 \
    }
inline void sum_group(int64_t set, const int8_t* x, int64_t ldx, const int8_t* w, int64_t inputs, int64_t step) {
    switch (set % 4) {
        case 0: PJ_SUM_GROUP(0, 4, 6) break;
        case 1: PJ_SUM_GROUP(1, 5, 7) break;
        case 2: PJ_SUM_GROUP(2, 4, 6) break;
        default: PJ_SUM_GROUP(3, 5, 7) break;
    }
}
#undef PJ_SUM_GROUP
inline void store_group(int64_t set, int32_t* acc) {
    switch (set % 4) {
        case 0: _tile_stored(0, acc, 64); break;
        case 1: _tile_stored(1, acc + 256, 64); break;
        case 2: _tile_stored(2, acc + 512, 64); break;
        default: _tile_stored(3, acc + 768, 64); break;
    }
}

// Adds some groups to the totals of one tile of rows, of which MR are computed, and fetches a strip of the next panel.
template <int MR, bool OFFSETS>
void add_groups(const Groups& groups, const Strip& strip, const int8_t* x, int64_t ldx, int64_t step, const float* sums,
                const float* scales, int64_t lds, const char* ahead, float* total) {
    alignas(64) int32_t acc[4 * TILE_ROWS * 16];
    V sum[MR];
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) sum[m] = v_load(total + m * PANEL);
    const int64_t size = groups.size, count = groups.count;
    const auto multiply = [&](int64_t g) {
        if (g < count) sum_group(g, x + g * size, ldx, strip.weight + g * size * 16, size, step);
    };
    for (int64_t g = 0; g < 3; ++g) multiply(g);
    store_group(0, acc);
    for (int64_t g = 0; g < count; ++g) {
        multiply(g + 3);
        store_group(g + 1, acc);
        if (ahead) {
            _mm_prefetch(ahead, _MM_HINT_T1);
            for (int64_t p = 0; p < size / 8; ++p)
                _mm_prefetch(ahead + groups.head + 4 * groups.columns * p, _MM_HINT_T1);
            ahead += groups.bytes;
        }
        const int32_t* own = acc + g % 4 * TILE_ROWS * 16;
        const V scale = v_load(strip.scale + 16 * g), offset = OFFSETS ? v_load(strip.offset + 16 * g) : v_zero();
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
            V term = v_mul(v_from_int(vi_load(own + 16 * m)), scale);
            if (OFFSETS) {
                term = v_add(term, v_mul(v_set(sums[m * lds + g]), offset));
                term = v_mul(term, v_set(scales[m * lds + g]));
            }
            sum[m] = v_add(sum[m], term);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) v_store(total + m * PANEL, sum[m]);
}

template <bool OFFSETS>
void add_groups_of(int rows, const Groups& groups, const Strip& strip, const int8_t* x, int64_t ldx, int64_t step,
                   const float* sums, const float* scales, int64_t lds, const char* ahead, float* total) {
    if (rows <= 8) add_groups<8, OFFSETS>(groups, strip, x, ldx, step, sums, scales, lds, ahead, total);
    else if (rows <= 12) add_groups<12, OFFSETS>(groups, strip, x, ldx, step, sums, scales, lds, ahead, total);
    else add_groups<16, OFFSETS>(groups, strip, x, ldx, step, sums, scales, lds, ahead, total);
}

void int4_panel(const PjLinear& linear, int64_t panel, const Int4Rows& rows, const RowTiles& tiles, int64_t step) {
    const int64_t first = panel * linear.width, left = penjing::padded_columns(linear) - first;
    const int columns = left < linear.width ? static_cast<int>(left) : linear.width;
    const int64_t all = linear.k / linear.group, most = MOST_INPUTS / linear.group;
    const char* weight = static_cast<const char*>(linear.weight) + first * penjing::column_bytes(linear);
    Groups groups{weight, columns, 0, linear.group, columns * penjing::group_bytes(linear), 0, linear.scale_dtype,
                  linear.offsets != 0};
    groups.bytes = groups.head + columns * linear.group / 2;
    alignas(64) float total[MOST_ROWS * PANEL];
    Strip strip;

    for (int begin = 0; begin < tiles.count; begin += MOST_TILES) {
        const int end = begin + MOST_TILES < tiles.count ? begin + MOST_TILES : tiles.count;
        for (int at = 0; at < (end - begin) * TILE_ROWS * PANEL; at += 16) v_store(total + at, v_zero());
        for (int64_t g = 0; g < all; g += most) {
            groups.from = weight + g * groups.bytes;
            groups.count = all - g < most ? all - g : most;
            for (int column = 0; column < columns; column += 16) {
                unpack(groups, column, strip);
                const char* ahead = begin == 0 ? groups.from + columns * penjing::column_bytes(linear) + 4 * column : nullptr;
                for (int tile = begin; tile < end; ++tile, ahead = nullptr) {
                    const int64_t row = tiles.first(tile), at = row * rows.lds + g;
                    const int8_t* x = rows.x + row * rows.ldx + g * linear.group;
                    const float *sums = rows.group_sum + at, *scales = rows.group_scale + at;
                    float* to = total + (tile - begin) * TILE_ROWS * PANEL + column;
                    if (groups.offsets)
                        add_groups_of<true>(tiles.height, groups, strip, x, rows.ldx, step, sums, scales, rows.lds, ahead, to);
                    else add_groups_of<false>(tiles.height, groups, strip, x, rows.ldx, step, sums, scales, rows.lds, ahead, to);
                }
            }
        }
        for (int tile = begin; tile < end; ++tile) {
            for (int row = tile * tiles.height; row < tiles.first(tile) + tiles.height; ++row) {
                const float* own = total + ((tile - begin) * TILE_ROWS + row - tiles.first(tile)) * PANEL;
                const V row_scale = v_set(groups.offsets ? 1.0f : rows.row_scale[row]);
                finish_row(linear, first, columns, rows.out + row * rows.ldo, rows.add, [&](int column) {
                    return finish(linear, own + column, first + column, row_scale);
                });
            }
        }
    }
}

// A group of more inputs than are unpacked at a time is left to AVX-512, as few rows are.
void int4_panels(const PjLinear& linear, int64_t begin, int64_t end, const Int4Rows& rows) {
    if (rows.rows < LEAST_ROWS || linear.group > MOST_INPUTS || begin == end)
        return penjing::avx512_ops().int4_panels(linear, begin, end, rows);
    const RowTiles tiles(rows.rows);
    const int64_t step = linear.group % 64 ? 32 : 64;
    shape_tiles(tiles.height, static_cast<int>(step / 4));
    for (int64_t panel = begin; panel < end; ++panel) int4_panel(linear, panel, rows, tiles, step);
    _tile_release();
}

}  // namespace
