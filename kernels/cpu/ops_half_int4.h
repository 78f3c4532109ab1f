// The INT4 linear layer of bfloat16 activations, over one instruction set's lanes. A group's products are added pair by
// pair (half_pairs.h), then the groups in their order: every instruction set gives the same bits, and no row depends on its
// neighbours.
#pragma once

namespace {

// A panel's columns for some rows.
struct HalfInt4Block {
    const char* weight;  // of the panel
    int64_t columns;
    int64_t groups;
    int64_t group;
    int64_t head;  // bytes of a group's scales and offsets
    int32_t scale_dtype;
    const uint16_t* x;  // of the first row
    int64_t ldx;
    const float* group_sum;  // null: no offsets
    int64_t lds;
};

// Memory to ask for: so many lines for each 8 inputs, then a step, and one more for each group.
struct HalfInt4Ahead {
    const char* at;
    int lines;
    int64_t step;
    int64_t skip;
};

// Eight inputs, of which pair SHIFT and those behind it are still to be added.
template <int MR, int NR, int SHIFT>
__attribute__((always_inline)) inline void add_pairs(const uint16_t* x, int64_t ldx, const char* w, V (&sum)[MR][NR]) {
    if constexpr (SHIFT < 4) {
        WeightPair weight[NR];
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) weight[n] = weight_pair<SHIFT>(w + 4 * W * n);
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
            const InputPair pair = input_pair(x + m * ldx + 2 * SHIFT);
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) sum[m][n] = add_pair(sum[m][n], pair, weight[n]);
        }
        add_pairs<MR, NR, SHIFT + 1>(x, ldx, w, sum);
    }
}

// Adds one group to the totals. A function of its own, so that sums stay in registers.
template <int MR, int NR>
__attribute__((noinline)) void half_int4_group(const HalfInt4Block& b, int64_t g, const char* scales, int64_t column,
                                                const HalfInt4Ahead& ahead, const char* fetch, float* total) {
    V sum[MR][NR];
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) sum[m][n] = v_zero();
    const char* w = scales + b.head + 4 * column;
    const uint16_t* x = b.x + g * b.group;
    for (int64_t input = 0; input < b.group; input += 8, x += 8, w += 4 * b.columns, fetch += ahead.step) {
        for (int line = 0; line < ahead.lines; ++line) __builtin_prefetch(fetch + 64 * line, 0, 2);
        add_pairs<MR, NR, 0>(x, b.ldx, w, sum);
    }
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) {
        const int64_t first = column + W * n;
        const V scale = v_load_scales(scales, first, b.scale_dtype);
        V middle = v_zero();
        if (b.group_sum) {
            const V offset = v_load_scales(scales + b.head / 2, first, b.scale_dtype);
            middle = v_fused(v_set(8.0f), scale, offset);
        }
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
            float* at = total + m * penjing::PANEL + first;
            V value = v_fused(sum[m][n], scale, v_load(at));
            if (b.group_sum) value = v_fused(v_set(b.group_sum[m * b.lds + g]), middle, value);
            v_store(at, value);
        }
    }
}

template <int MR, int NR>
inline void half_int4_tile(const HalfInt4Block& b, int64_t column, const HalfInt4Ahead& ahead, float* total) {
    const char *scales = b.weight, *fetch = ahead.at;
    for (int64_t g = 0; g < b.groups; ++g) {
        fetch += ahead.skip;
        half_int4_group<MR, NR>(b, g, scales, column, ahead, fetch, total);
        fetch += ahead.step * (b.group / 8);
        scales += b.head + b.columns * b.group / 2;
    }
}

template <int NR>
inline void half_int4_rows(int rows, const HalfInt4Block& b, int64_t column, const HalfInt4Ahead& ahead, float* total) {
    constexpr int MOST = HALF_INT4_ROWS;
    switch (rows) {
        case 1: return half_int4_tile<1, NR>(b, column, ahead, total);
        case 2: return half_int4_tile<MOST < 2 ? 1 : 2, NR>(b, column, ahead, total);
        case 3: return half_int4_tile<MOST < 3 ? 1 : 3, NR>(b, column, ahead, total);
        case 4: return half_int4_tile<MOST < 4 ? 1 : 4, NR>(b, column, ahead, total);
        case 5: return half_int4_tile<MOST < 5 ? 1 : 5, NR>(b, column, ahead, total);
        default: return half_int4_tile<MOST < 6 ? 1 : 6, NR>(b, column, ahead, total);
    }
}

inline void half_int4_panel(const PjLinear& linear, int64_t panel, const penjing::Int4Rows& rows) {
    const int64_t first = panel * linear.width, left = penjing::padded_columns(linear) - first;
    const int64_t columns = left < linear.width ? left : linear.width;
    const char* weight = static_cast<const char*>(linear.weight) + first * penjing::column_bytes(linear);
    const int64_t head = columns * penjing::group_bytes(linear), bytes = columns * penjing::column_bytes(linear);
    alignas(64) float total[HALF_INT4_ROWS * penjing::PANEL];

    const int blocks = (rows.rows + HALF_INT4_ROWS - 1) / HALF_INT4_ROWS;
    for (int block = 0; block < blocks; ++block) {
        const int begin = static_cast<int>(static_cast<int64_t>(rows.rows) * block / blocks);
        const int end = static_cast<int>(static_cast<int64_t>(rows.rows) * (block + 1) / blocks);
        const HalfInt4Block b{weight, columns, linear.k / linear.group, linear.group, head, linear.scale_dtype,
                               rows.half + begin * rows.ldx, rows.ldx,
                               linear.offsets ? rows.group_sum + begin * rows.lds : nullptr, rows.lds};
        for (int i = 0; i < (end - begin) * penjing::PANEL; i += W) v_store(total + i, v_zero());
        for (int64_t column = 0; column < columns;) {
            const int64_t vectors = (columns - column) / W;
            const int together = static_cast<int>(vectors < HALF_INT4_VECTORS ? vectors : HALF_INT4_VECTORS);
            // One block reads ahead of itself; of several, the first fetches the next panel, which lies behind.
            HalfInt4Ahead ahead{weight + int8_near(bytes) + 4 * column, 4 * W * together / 64, 4 * columns, head};
            if (blocks > 1) ahead.at += bytes - int8_near(bytes);
            if (block > 0) ahead.lines = 0;
            switch (together) {
                case 1: half_int4_rows<1>(end - begin, b, column, ahead, total); break;
                case 2: half_int4_rows<HALF_INT4_VECTORS < 2 ? 1 : 2>(end - begin, b, column, ahead, total); break;
                case 3: half_int4_rows<HALF_INT4_VECTORS < 3 ? 1 : 3>(end - begin, b, column, ahead, total); break;
                default: half_int4_rows<HALF_INT4_VECTORS>(end - begin, b, column, ahead, total); break;
            }
            column += W * together;
        }
        for (int row = begin; row < end; ++row) {
            const float* sums = total + (row - begin) * penjing::PANEL;
            finish_row(linear, first, static_cast<int>(columns), rows.out + row * rows.ldo, rows.add, [&](int column) {
                return v_add(v_load(sums + column), v_load(linear.bias + first + column));
            });
        }
    }
}

inline void half_int4_panels(const PjLinear& linear, int64_t begin, int64_t end, const penjing::Int4Rows& rows) {
    for (int64_t panel = begin; panel < end; ++panel) half_int4_panel(linear, panel, rows);
}

}  // namespace
