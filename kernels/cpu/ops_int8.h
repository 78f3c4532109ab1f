// Per-token quantization and the INT8 linear layer, over one instruction set's lanes.
#pragma once

namespace {

inline void quantize_row(const float* x, int64_t k, uint8_t* q, float* scale, uint8_t flip) {
    VI peak = vi_zero();
    int64_t i = 0;
    for (; i + W <= k; i += W) peak = vi_abs_max(peak, v_load(x + i));
    if (i < k) peak = vi_abs_max(peak, v_load_n(x + i, static_cast<int>(k - i)));
    const uint32_t bits = vi_largest(peak);
    float largest;
    __builtin_memcpy(&largest, &bits, 4);
    const float divisor = largest / 127.0f == 0.0f ? 1.0f : largest / 127.0f;
    *scale = divisor;
    const V by = v_set(divisor), high = v_set(127.0f), low = v_set(-127.0f);
    for (i = 0; i < k; i += W) {
        const int n = k - i < W ? static_cast<int>(k - i) : W;
        const V value = v_round(v_div(n == W ? v_load(x + i) : v_load_n(x + i, n), by));
        v_store_bytes(q + i, v_max(low, v_min(high, value)), flip, n);
    }
}

inline void quantize_row_above(const float* x, int64_t k, uint8_t* q, float* scale, int32_t* zero) {
    VI peak = vi_zero();
    V high = v_zero(), low = v_zero();  // 0 is always in the range
    for (int64_t i = 0; i < k; i += W) {
        const V value = k - i < W ? v_load_n(x + i, static_cast<int>(k - i)) : v_load(x + i);
        peak = vi_abs_max(peak, value);
        high = v_max(value, high);
        low = v_max(v_sub(v_zero(), value), low);
    }
    const uint32_t bits = vi_largest(peak);
    float largest;
    __builtin_memcpy(&largest, &bits, 4);
    const float below = v_largest(low), range = v_largest(high) + below;
    // An infinity or NaN shows in the scale; comparisons alone would lose a NaN.
    const float step = bits < 0x7f800000u ? range / 255.0f : largest;
    const float divisor = step == 0.0f ? 1.0f : step;
    const float level = v_largest(v_round(v_set(below / divisor)));
    const float begin = bits < 0x7f800000u ? level : 128.0f;
    *scale = divisor;
    *zero = static_cast<int32_t>(begin);
    const V by = v_set(divisor), shift = v_set(begin - 128.0f), most = v_set(127.0f), least = v_set(-128.0f);
    for (int64_t i = 0; i < k; i += W) {
        const int n = k - i < W ? static_cast<int>(k - i) : W;
        const V value = v_add(v_round(v_div(n == W ? v_load(x + i) : v_load_n(x + i, n), by)), shift);
        v_store_bytes(q + i, v_max(least, v_min(most, value)), 0x80, n);
    }
}

// A layer with zero points, whose inputs are multiplied block by block.
inline void above_block(PjLinear linear, int64_t first, int columns, penjing::Int8Rows rows, int begin, int end,
                        const int8_t* weight, penjing::Ahead ahead) {
    const int64_t blocks = penjing::above_blocks(linear.k), groups = penjing::padded_k(linear.k) / 4;
    constexpr int64_t most = penjing::ABOVE_INPUTS / 4;
    const int32_t* sums = linear.comp + first * blocks;
    alignas(64) int32_t acc[8 * penjing::PANEL];
    alignas(64) float total[8 * penjing::PANEL];
    for (int64_t block = 0; block < blocks; ++block, sums += columns) {
        const int64_t done = block * most, some = groups - done < most ? groups - done : most;
        const uint8_t* x = rows.x + begin * rows.ldx + 4 * done;
        int8_block(end - begin, columns, x, rows.ldx, weight + 4 * columns * done, ahead, some, false, acc);
        ahead.at += int8_step(ahead) * some;
        for (int row = begin; row < end; ++row) {
            const int64_t at = row * blocks + block;
            const int64_t own = (row - begin) * penjing::PANEL;
            add_above(acc + own, sums, columns, rows.row_scale[at], rows.zero[at], block > 0, total + own);
        }
    }
    finish_blocks(linear, first, columns, rows, begin, end, total);
}

inline void int8_panel(const PjLinear& linear, int64_t panel, const penjing::Int8Rows& rows) {
    const int64_t groups = penjing::padded_k(linear.k) / 4, first = panel * linear.width;
    const int64_t left = penjing::padded_columns(linear) - first;
    const int columns = left < linear.width ? static_cast<int>(left) : linear.width;
    const int8_t* weight = static_cast<const int8_t*>(linear.weight) + first * groups * 4;
    alignas(64) int32_t acc[8 * penjing::PANEL];

    const int most = int8_rows(columns / 16), lines = columns / 16;
    const int blocks = (rows.rows + most - 1) / most;
    for (int block = 0; block < blocks; ++block) {
        // Blocks of nearly equal height: 16 rows run as 6 + 5 + 5, not 6 + 6 + 4.
        const int begin = static_cast<int>(static_cast<int64_t>(rows.rows) * block / blocks);
        const int end = static_cast<int>(static_cast<int64_t>(rows.rows) * (block + 1) / blocks);
        // Blocks fetch equal parts of the next panel, which lies behind this one: with all of it in one block, memory was
        // idle during the others (8 rows on cold weights ran at 13 GB/s instead of 21).
        penjing::Ahead ahead{weight + int8_near(columns * groups * 4), lines, 64 * groups};
        if (blocks > 1) {
            const int parts = blocks < lines ? blocks : lines;
            ahead.at = weight + (columns * groups * 4) + lines * groups * block / parts * 64;
            ahead.lines = block < parts ? (lines + parts - 1) / parts : 0;
        }
        if (rows.zero) {
            above_block(linear, first, columns, rows, begin, end, weight, ahead);
            continue;
        }
        int8_block(end - begin, columns, rows.x + begin * rows.ldx, rows.ldx, weight, ahead, groups, false, acc);
        finish_int8(linear, first, columns, rows, begin, end, acc);
    }
}

}  // namespace
