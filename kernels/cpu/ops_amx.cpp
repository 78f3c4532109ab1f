// AMX (Sapphire Rapids and later): linear layers of several rows and attention to bfloat16 by tiles, everything else as on
// AVX-512.
#include "ops.h"

#if defined(PJ_HAS_AMX)
#include <immintrin.h>

#include <cmath>
#include <cstdint>

// Standard headers come first: what they define inline may run on any processor.
#if defined(__clang__)
#pragma clang attribute push(                                                                                     \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,amx-tile,amx-int8,amx-bf16"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,amx-tile,amx-int8,amx-bf16")
#endif

#include "simd_avx512.h"

#include "ops_math.h"

#include "ops_epilogue.h"

#include "int4_block.h"

#include "amx_tiles.h"

#include "stepped_avx512.h"

#include "amx_stepped.h"

#include "ops_meet.h"

#include "amx_attention.h"

namespace {

// A single block reads its panel from memory itself, so many bytes ahead.
constexpr int64_t NEAR = 8192;

// One row's sums over a block of inputs: of a layer with zero points added to `total`, and its outputs behind the last.
// Copies, as for `finish_int8`.
void finish_block(PjLinear linear, int64_t first, int columns, Int8Rows rows, int row, int64_t block,
                  const int32_t* acc, float* total) {
    float* out = rows.out + row * rows.ldo;
    if (!rows.zero) {
        const V row_scale = v_set(rows.row_scale[row]);
        return finish_row(linear, first, columns, out, rows.add,
                          [&](int column) { return dequantize(linear, acc + column, first + column, row_scale); });
    }
    const int64_t blocks = penjing::above_blocks(linear.k), at = row * blocks + block;
    const int32_t* sums = linear.comp + first * blocks + block * columns;
    add_above(acc, sums, columns, rows.row_scale[at], rows.zero[at], block > 0, total);
    if (block + 1 < blocks) return;
    finish_row(linear, first, columns, out, rows.add,
               [&](int column) { return finish_above(linear, total + column, first + column); });
}

void int8_panel(const PjLinear& linear, int64_t panel, const Int8Rows& rows, const RowTiles& tiles) {
    const int64_t groups = penjing::padded_k(linear.k) / 4, first = panel * linear.width;
    const int64_t left = penjing::padded_columns(linear) - first, count = penjing::row_scales(linear);
    const int64_t most = count > 1 ? penjing::ABOVE_INPUTS / 4 : groups;
    const int columns = left < linear.width ? static_cast<int>(left) : linear.width;
    const int8_t* weight = static_cast<const int8_t*>(linear.weight) + first * groups * 4;
    alignas(64) int32_t acc[2 * TILE_ROWS * PANEL];
    alignas(64) float total[2 * TILE_ROWS * PANEL];

    // The blocks fetch equal parts of the next panel; one alone fetches a little ahead of itself.
    const int64_t blocks = tiles.count / 2 * ((columns + 31) / 32) + tiles.count % 2;
    const int lines = tiles.count == 1 ? TILE_GROUPS : static_cast<int>((columns + blocks - 1) / blocks);
    const int8_t* ahead = weight + (tiles.count == 1 ? NEAR : columns * groups * 4);
    for (int tile = 0; tile < tiles.count; tile += 2) {
        const int begin = tiles.first(tile), second = tile + 1 < tiles.count ? tiles.first(tile + 1) : -1;
        for (int64_t block = 0; block < count; ++block) {
            const int64_t before = block * most, some = groups - before < most ? groups - before : most;
            const int64_t steps = some / TILE_GROUPS, rest = some - steps * TILE_GROUPS, done = before + steps * TILE_GROUPS;
            const uint8_t* x = rows.x + begin * rows.ldx + 4 * before;
            const int8_t* own = weight + 4 * columns * before;
            if (second < 0) {  // with an odd number of tiles the last is alone
                switch (columns / 16) {
                    case 1: sum_1<1>(x, rows.ldx, own, columns, steps, ahead, lines, false, acc); break;
                    case 2: sum_1<2>(x, rows.ldx, own, columns, steps, ahead, lines, false, acc); break;
                    case 3: sum_1<3>(x, rows.ldx, own, columns, steps, ahead, lines, false, acc); break;
                    default: sum_1<4>(x, rows.ldx, own, columns, steps, ahead, lines, false, acc); break;
                }
                ahead += 64 * lines * steps * (columns / 16);
            } else {
                const uint8_t* below = rows.x + second * rows.ldx + 4 * before;
                for (int column = 0; column < columns; column += 32, ahead += 64 * lines * steps) {
                    const int8_t* w = own + 4 * column;
                    if (column + 16 < columns) sum_2<2>(x, below, rows.ldx, w, columns, steps, ahead, lines, false, acc + column);
                    else sum_2<1>(x, below, rows.ldx, w, columns, steps, ahead, lines, false, acc + column);
                }
            }
            for (int half = 0; half < (second < 0 ? 1 : 2); ++half) {
                const int from = half ? second : begin, until = from + tiles.height;
                int32_t* sums = acc + half * TILE_ROWS * PANEL;
                const int8_t* w = weight + 4 * columns * done;
                if (rest) sum_rest(tiles.height, columns, rows.x + from * rows.ldx + 4 * done, rows.ldx, w, columns, rest, sums);
                for (int row = (tile + half) * tiles.height; row < until; ++row) {
                    const int32_t* of_row = sums + (row - from) * PANEL;
                    float* of_blocks = total + half * TILE_ROWS * PANEL + (row - from) * PANEL;
                    finish_block(linear, first, columns, rows, row, block, of_row, of_blocks);
                }
            }
        }
    }
}

void int8_panels(const PjLinear& linear, int64_t begin, int64_t end, const Int8Rows& rows) {
    if (rows.rows < LEAST_ROWS || linear.k < 4 * TILE_GROUPS || begin == end)
        return penjing::avx512_ops().int8_panels(linear, begin, end, rows);
    if (penjing::in_steps(linear)) return stepped_panels(linear, begin, end, rows);
    const RowTiles tiles(rows.rows);
    shape_tiles(tiles.height, TILE_GROUPS);
    for (int64_t panel = begin; panel < end; ++panel) int8_panel(linear, panel, rows, tiles);
    _tile_release();
}

}  // namespace

#include "amx_int4.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace penjing {

const Ops& amx_ops() {
    static const Ops table = [] {
        Ops ops = __builtin_cpu_supports("avx512bf16") ? bf16_ops() : avx512_ops();
        ops.name = "amx";
        ops.int8_panels = ::int8_panels;
        ops.int4_panels = ::int4_panels;
        ops.by_tiles = ::by_tiles;
        ops.take_heads = ::take_heads;
        ops.turn_keys = ::turn_keys;
        ops.attend_tile = ::attend_tile;
        ops.end_attention = ::end_attention;
        return ops;
    }();
    return table;
}

}  // namespace penjing
#endif
