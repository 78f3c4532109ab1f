// The INT4 linear layer over one instruction set's lanes: exact sums of each group, then floats group by group in their
// order, so that every instruction set gives the bits of the torch reference.
#pragma once

namespace {

// start[g] = factor × the sum of group g. With −8 it is what a group's sum begins with, because weights are stored as
// w + 8.
inline void group_starts(const int8_t* q, int64_t k, int64_t group, int32_t factor, int32_t* start) {
    for (int64_t at = 0; at < k; at += group) {
        int32_t sum = 0;
        for (int64_t i = 0; i < group; ++i) sum += q[at + i];
        *start++ = factor * sum;
    }
}

inline void int4_panel(const PjLinear& linear, int64_t panel, const penjing::Int4Rows& rows) {
    const int64_t first = panel * linear.width, left = penjing::padded_columns(linear) - first;
    const int columns = left < linear.width ? static_cast<int>(left) : linear.width;
    const int64_t groups = linear.k / linear.group, pairs = linear.k / 8;
    const char* weight = static_cast<const char*>(linear.weight) + first * penjing::column_bytes(linear);
    const int64_t bytes = columns * penjing::column_bytes(linear);
    alignas(64) float total[8 * penjing::PANEL];

    const int most = int4_rows(columns / 16), lines = columns / 16;
    const int blocks = (rows.rows + most - 1) / most;
    for (int block = 0; block < blocks; ++block) {
        const int begin = static_cast<int>(static_cast<int64_t>(rows.rows) * block / blocks);
        const int end = static_cast<int>(static_cast<int64_t>(rows.rows) * (block + 1) / blocks);
        // As for INT8 (ops_int8.h): one block reads ahead of itself, several fetch parts of the next panel.
        Int4Block task{weight, columns, groups, linear.group, linear.scale_dtype, rows.ldx, rows.lds, nullptr, nullptr, {}, 0};
        if (linear.offsets) {
            task.group_sum = rows.group_sum + begin * rows.lds;
            task.group_scale = rows.group_scale + begin * rows.lds;
        }
        const int8_t* at = reinterpret_cast<const int8_t*>(weight);
        if (blocks == 1) {
            task.ahead = {at + int8_near(bytes), lines};
            task.skip = columns * penjing::group_bytes(linear);
        } else {
            const int parts = blocks < lines ? blocks : lines;
            task.ahead = {at + bytes + lines * pairs * block / parts * 64, block < parts ? (lines + parts - 1) / parts : 0};
        }
        int4_block(end - begin, task, rows.x + begin * rows.ldx, rows.start + begin * rows.lds, total);
        for (int row = begin; row < end; ++row) {
            const float* sums = total + (row - begin) * penjing::PANEL;
            const V row_scale = v_set(linear.offsets ? 1.0f : rows.row_scale[row]);
            finish_row(linear, first, columns, rows.out + row * rows.ldo, rows.add, [&](int column) {
                return finish(linear, sums + column, first + column, row_scale);
            });
        }
    }
}

inline void int4_panels(const PjLinear& linear, int64_t begin, int64_t end, const penjing::Int4Rows& rows) {
    for (int64_t panel = begin; panel < end; ++panel) int4_panel(linear, panel, rows);
}

}  // namespace
