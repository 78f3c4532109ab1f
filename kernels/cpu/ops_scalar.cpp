// Plain C++ for any processor.
#include <cmath>
#include <cstdint>

#include "ops.h"
#include "simd_scalar.h"

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

constexpr int FLOAT_ROWS = 1, FLOAT_COLUMNS = 4;
constexpr int ATTENTION_ROWS = 4, ATTENTION_VECTORS = 4;

}  // namespace

#include "ops_impl.h"

namespace penjing {
const Ops& scalar_ops() {
    static constexpr Ops table = make_table("scalar");
    return table;
}
}  // namespace penjing
