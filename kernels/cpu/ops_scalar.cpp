// Plain C++ for any processor.
#include <cmath>
#include <cstdint>

#include "ops.h"
#include "simd_scalar.h"

#include "int4_block.h"

namespace {

constexpr int int8_rows(int) { return 1; }
constexpr int int4_rows(int) { return 1; }
constexpr int64_t int8_near(int64_t) { return 0; }
constexpr int64_t int8_step(const penjing::Ahead&) { return 0; }

inline void int8_block(int, int columns, const uint8_t* x, int64_t, const int8_t* w, penjing::Ahead,
                       int64_t groups, bool more, int32_t* acc) {
    uint32_t sum[penjing::PANEL] = {};
    for (int column = 0; more && column < columns; ++column) sum[column] = static_cast<uint32_t>(acc[column]);
    for (int64_t g = 0; g < groups; ++g, w += 4 * columns) {
        for (int column = 0; column < columns; ++column) {
            for (int i = 0; i < 4; ++i) {
                sum[column] += static_cast<uint32_t>(x[4 * g + i] * static_cast<int32_t>(w[4 * column + i]));
            }
        }
    }
    for (int column = 0; column < columns; ++column) acc[column] = static_cast<int32_t>(sum[column]);
}

// Weights that are stored in steps (pack_stepped.cpp).
inline void expand_group(const char* from, int64_t pairs, int64_t columns, int8_t* to) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(from);
    for (int64_t at = 0; at < pairs * 4 * columns; ++at) {
        const int64_t pair = at / (4 * columns), place = at % (4 * columns), column = place / 4;
        const int step = bytes[2 * column], offset = static_cast<int8_t>(bytes[2 * column + 1]);
        const int both = bytes[2 * columns + at];
        int8_t* out = to + pair * 8 * columns + place;
        out[0] = static_cast<int8_t>(offset + step * (both & 15));
        out[4 * columns] = static_cast<int8_t>(offset + step * (both >> 4));
    }
}
// The first block of rows, see ops_stepped.h.
inline void stepped_block(const char* w, int64_t groups, int64_t pairs, int rows, int columns, const uint8_t* x, int64_t ldx,
                          penjing::Ahead ahead, bool more, bool, int8_t* code, int32_t* acc) {
    for (int64_t g = 0; g < groups; ++g)
        expand_group(w + g * (2 + 4 * pairs) * columns, pairs, columns, code + g * pairs * 8 * columns);
    int8_block(rows, columns, x, ldx, code, ahead, groups * pairs * 2, more, acc);
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
            const V term = group_term(b, v_load_group(b, scales, column), vi_load(sum + column), g);
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
