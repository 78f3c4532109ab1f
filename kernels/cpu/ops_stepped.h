// INT8 layers whose weights are stored in 4 bits, offset + step × u (pack_stepped.cpp), over one instruction set's lanes.
// Some inputs of a panel are expanded to bytes by the first block of rows, and the INT8 micro-tiles of the others read those:
// they lie in the first-level cache. Sums are exact integers, so a row's bits are those of the same weights in INT8.
#pragma once

namespace {

constexpr int64_t STEPPED_INPUTS = 256;  // expanded at a time, 16 KiB of a panel; no group is larger
constexpr int STEPPED_ROWS = 96;         // that share what was expanded

// Sums of up to STEPPED_ROWS rows, of which the first is `row`; `fetches`: the next panel is asked for meanwhile. Of a layer
// with zero points, whose blocks of inputs are as long as what is expanded at a time, the sums of all blocks are in `total`.
//
// An instruction set's `stepped_block` computes those of the first block of rows and leaves the bytes in `code`, unless that
// block is alone and it has no need of them.
inline void stepped_sums(const PjLinear& linear, int64_t panel, const char* weight, int columns, const penjing::Int8Rows& rows,
                         int row, int count, bool fetches, int32_t* acc, float* total) {
    static_assert(STEPPED_INPUTS == penjing::ABOVE_INPUTS);
    alignas(64) int8_t code[STEPPED_INPUTS * penjing::PANEL];
    const int64_t groups = linear.k / linear.group, most_groups = STEPPED_INPUTS / linear.group;
    const int64_t group_bytes = (2 + linear.group / 2) * columns;
    const int most = int8_rows(columns / 16), blocks = (count + most - 1) / most;
    const int64_t scales = penjing::row_scales(linear);
    const int32_t* level = linear.comp + panel * linear.width * scales;  // with zero points
    for (int64_t g = 0; g < groups; g += most_groups) {
        const int64_t some = groups - g < most_groups ? groups - g : most_groups, fours = some * linear.group / 4;
        const char* from = weight + g * group_bytes;
        // The blocks of rows fetch equal parts of what the next panel has in this place.
        const int64_t lines = (some * group_bytes + 63) / 64, each = (lines + fours * blocks - 1) / (fours * blocks);
        const int8_t* next = reinterpret_cast<const int8_t*>(from + groups * group_bytes);
        const uint8_t* x = rows.x + row * rows.ldx + g * linear.group;
        for (int block = 0; block < blocks; ++block) {
            const int begin = static_cast<int>(static_cast<int64_t>(count) * block / blocks);
            const int end = static_cast<int>(static_cast<int64_t>(count) * (block + 1) / blocks);
            const bool has = fetches && block * each * fours < lines;
            const penjing::Ahead ahead{has ? next + block * each * fours * 64 : next, has ? static_cast<int>(each) : 0, 64 * fours};
            const uint8_t* own = x + begin * rows.ldx;
            int32_t* sums = acc + begin * penjing::PANEL;
            const bool more = g != 0 && !rows.zero;
            if (block) int8_block(end - begin, columns, own, rows.ldx, code, ahead, fours, more, sums);
            else stepped_block(from, some, linear.group / 8, end, columns, own, rows.ldx, ahead, more, blocks == 1, code, sums);
        }
        if (!rows.zero) continue;
        for (int i = 0; i < count; ++i) {
            const int64_t at = (row + i) * scales + g / most_groups;
            add_above(acc + i * penjing::PANEL, level, columns, rows.row_scale[at], rows.zero[at], g != 0,
                      total + i * penjing::PANEL);
        }
        level += columns;
    }
}

inline void stepped_panel(const PjLinear& linear, int64_t panel, const penjing::Int8Rows& rows) {
    const int64_t first = panel * linear.width, left = penjing::padded_columns(linear) - first;
    const int columns = left < linear.width ? static_cast<int>(left) : linear.width;
    const char* weight = static_cast<const char*>(linear.weight) + first * penjing::column_bytes(linear);
    alignas(64) int32_t acc[STEPPED_ROWS * penjing::PANEL];
    alignas(64) float total[STEPPED_ROWS * penjing::PANEL];
    for (int begin = 0; begin < rows.rows; begin += STEPPED_ROWS) {
        const int count = rows.rows - begin < STEPPED_ROWS ? rows.rows - begin : STEPPED_ROWS;
        stepped_sums(linear, panel, weight, columns, rows, begin, count, begin == 0, acc, total);
        if (rows.zero) finish_blocks(linear, first, columns, rows, begin, begin + count, total);
        else finish_int8(linear, first, columns, rows, begin, begin + count, acc);
    }
}

inline void int8_panels(const PjLinear& linear, int64_t begin, int64_t end, const penjing::Int8Rows& rows) {
    const auto one = penjing::in_steps(linear) ? stepped_panel : int8_panel;
    for (int64_t panel = begin; panel < end; ++panel) one(linear, panel, rows);
}

}  // namespace
