// Plain C++ for any processor.
#include <cmath>
#include <cstdint>

#include "ops.h"
#include "simd_scalar.h"

#include "int4_block.h"

namespace {

constexpr int int8_rows(int) { return 1; }
constexpr int64_t int8_near(int64_t) { return 0; }

inline void int8_block(int, int columns, const uint8_t* x, int64_t, const int8_t* w, penjing::Ahead,
                       int64_t groups, int32_t* acc) {
    uint32_t sum[penjing::PANEL] = {};
    for (int64_t g = 0; g < groups; ++g, w += 4 * columns) {
        for (int column = 0; column < columns; ++column) {
            for (int i = 0; i < 4; ++i) {
                sum[column] += static_cast<uint32_t>(x[4 * g + i] * static_cast<int32_t>(w[4 * column + i]));
            }
        }
    }
    for (int column = 0; column < columns; ++column) acc[column] = static_cast<int32_t>(sum[column]);
}

inline void int4_block(int, const Int4Block& b, const int8_t* x, const int32_t* start, float* total) {
    for (int64_t column = 0; column < b.columns; ++column) total[column] = 0.0f;
    const char* w = b.weight;
    for (int64_t g = 0; g < b.groups; ++g) {
        const char* scales = w;
        w += bytes_of_group(b);
        int32_t sum[penjing::PANEL];
        for (int64_t column = 0; column < b.columns; ++column) sum[column] = b.group_scale ? 0 : start[g];
        for (int64_t pair = 0; pair < b.group / 8; ++pair, w += 4 * b.columns, x += 8) {
            for (int64_t column = 0; column < b.columns; ++column) {
                for (int i = 0; i < 4; ++i) {
                    const int both = static_cast<uint8_t>(w[4 * column + i]);
                    sum[column] += (both & 15) * x[i] + (both >> 4) * x[4 + i];
                }
            }
        }
        for (int64_t column = 0; column < b.columns; column += W) {
            const V scale = v_load_scales(scales, column, b.scale_dtype);
            const V term = group_term(b, scales, column, vi_load(sum + column), scale, g);
            v_store(total + column, v_add(v_load(total + column), term));
        }
    }
}

constexpr int FLOAT_ROWS = 1, FLOAT_COLUMNS = 4;
constexpr int HALF_INT4_ROWS = 1, HALF_INT4_VECTORS = 1;
constexpr int ATTENTION_ROWS = 4, ATTENTION_VECTORS = 4;

}  // namespace

#include "ops_impl.h"

namespace penjing {
const Ops& scalar_ops() {
    static constexpr Ops table = make_table("scalar");
    return table;
}
}  // namespace penjing
