// INT8 layers whose weights are stored in steps (pack_stepped.cpp) by tiles: some inputs of a panel are expanded to bytes
// once for up to 96 rows, in the layout that tiles read. Included by ops_amx.cpp alone.
#pragma once

namespace {

using penjing::Int8Rows;

constexpr int64_t STEPPED_INPUTS = 256;  // expanded at a time, 16 KiB of a panel; no group is larger
constexpr int STEPPED_ROWS = 96;         // that share what was expanded

// Calls `of(row, place)` for the rows of all tiles, each once, with the place of its sums.
template <class Of>
inline void each_row(const RowTiles& tiles, Of of) {
    for (int tile = 0; tile < tiles.count; ++tile) {
        const int from = tiles.first(tile);
        for (int row = tile * tiles.height; row < from + tiles.height; ++row)
            of(row, (tile * TILE_ROWS + row - from) * PANEL);
    }
}

// Sums of one tile of rows, of two where `below` is one, over `inputs` inputs from `code` on.
inline void stepped_tiles(const uint8_t* x, const uint8_t* below, int64_t ldx, const int8_t* code, int columns, int64_t inputs,
                          const int8_t*& ahead, int lines, bool more, int32_t* acc) {
    const int64_t steps = inputs / (4 * TILE_GROUPS);
    if (!below) {
        switch (columns / 16) {
            case 1: sum_1<1>(x, ldx, code, columns, steps, ahead, lines, more, acc); break;
            case 2: sum_1<2>(x, ldx, code, columns, steps, ahead, lines, more, acc); break;
            case 3: sum_1<3>(x, ldx, code, columns, steps, ahead, lines, more, acc); break;
            default: sum_1<4>(x, ldx, code, columns, steps, ahead, lines, more, acc); break;
        }
        ahead += 64 * lines * steps * (columns / 16);
        return;
    }
    for (int column = 0; column < columns; column += 32, ahead += 64 * lines * steps) {
        const int8_t* w = code + 4 * column;
        if (column + 16 < columns) sum_2<2>(x, below, ldx, w, columns, steps, ahead, lines, more, acc + column);
        else sum_2<1>(x, below, ldx, w, columns, steps, ahead, lines, more, acc + column);
    }
}

// Sums of some rows of a panel from row `begin` on, those of tile t from acc + t × TILE_ROWS × PANEL on. Of a layer with zero
// points the sums of all blocks of inputs are in `total` in the same places.
inline void stepped_sums(const PjLinear& linear, int64_t panel, const char* weight, int columns, const Int8Rows& rows,
                         int begin, const RowTiles& tiles, int32_t* acc, float* total) {
    static_assert(STEPPED_INPUTS == penjing::ABOVE_INPUTS);
    const uint8_t* x = rows.x + begin * rows.ldx;
    const int64_t ldx = rows.ldx, scales = penjing::row_scales(linear);
    const int32_t* level = linear.comp + panel * linear.width * scales;  // with zero points
    const bool fetches = begin == 0;
    alignas(64) int8_t code[STEPPED_INPUTS * PANEL];
    const int64_t groups = linear.k / linear.group, most = STEPPED_INPUTS / linear.group;
    const int64_t group_bytes = (2 + linear.group / 2) * columns;
    for (int64_t g = 0; g < groups; g += most) {
        const int64_t some = groups - g < most ? groups - g : most, inputs = some * linear.group;
        const char* from = weight + g * group_bytes;
        for (int64_t i = 0; i < some; ++i)
            expand_group(from + i * group_bytes, linear.group / 8, columns, code + i * linear.group * columns);
        written();
        // The tiles fetch equal parts of what the next panel has in this place.
        const int64_t pairs = tiles.count / 2 * ((columns + 31) / 32) + tiles.count % 2 * (columns / 16);
        const int64_t calls = inputs / (4 * TILE_GROUPS) * pairs, whole = (some * group_bytes + 63) / 64;
        const int lines = fetches && calls ? static_cast<int>((whole + calls - 1) / calls) : 0;
        const int8_t* ahead = reinterpret_cast<const int8_t*>(from + groups * group_bytes);
        const int64_t done = inputs / (4 * TILE_GROUPS) * 4 * TILE_GROUPS, rest = (inputs - done) / 4;
        for (int tile = 0; tile < tiles.count; tile += 2) {
            const bool two = tile + 1 < tiles.count;
            const uint8_t* part = x + g * linear.group;
            const uint8_t *above = part + tiles.first(tile) * ldx, *below = two ? part + tiles.first(tile + 1) * ldx : nullptr;
            int32_t* sums = acc + tile * TILE_ROWS * PANEL;
            stepped_tiles(above, below, ldx, code, columns, inputs, ahead, lines, g != 0 && !rows.zero, sums);
            if (!rest) continue;
            const int8_t* w = code + columns * done;
            sum_rest(tiles.height, columns, above + done, ldx, w, columns, rest, sums);
            if (two) sum_rest(tiles.height, columns, below + done, ldx, w, columns, rest, sums + TILE_ROWS * PANEL);
        }
        written();
        if (!rows.zero) continue;
        each_row(tiles, [&](int row, int64_t place) {
            const int64_t at = (begin + row) * scales + g / most;
            add_above(acc + place, level, columns, rows.row_scale[at], rows.zero[at], g != 0, total + place);
        });
        level += columns;
    }
}

inline void stepped_panel(const PjLinear& linear, int64_t panel, const Int8Rows& rows, int begin, const RowTiles& tiles) {
    const int64_t first = panel * linear.width, left = penjing::padded_columns(linear) - first;
    const int columns = left < linear.width ? static_cast<int>(left) : linear.width;
    const char* weight = static_cast<const char*>(linear.weight) + first * penjing::column_bytes(linear);
    alignas(64) int32_t acc[STEPPED_ROWS * PANEL];
    alignas(64) float total[STEPPED_ROWS * PANEL];
    stepped_sums(linear, panel, weight, columns, rows, begin, tiles, acc, total);
    each_row(tiles, [&](int row, int64_t place) {
        if (rows.zero) finish_blocks(linear, first, columns, rows, begin + row, begin + row + 1, total + place);
        else finish_int8(linear, first, columns, rows, begin + row, begin + row + 1, acc + place);
    });
}

inline void stepped_panels(const PjLinear& linear, int64_t begin, int64_t end, const Int8Rows& rows) {
    const int parts = (rows.rows + STEPPED_ROWS - 1) / STEPPED_ROWS;
    for (int part = 0; part < parts; ++part) {  // of equal height, none of which is left with few rows
        const int from = static_cast<int>(static_cast<int64_t>(rows.rows) * part / parts);
        const RowTiles tiles(static_cast<int>(static_cast<int64_t>(rows.rows) * (part + 1) / parts) - from);
        shape_tiles(tiles.height, TILE_GROUPS);
        for (int64_t panel = begin; panel < end; ++panel) stepped_panel(linear, panel, rows, from, tiles);
        _tile_release();
    }
}

}  // namespace
