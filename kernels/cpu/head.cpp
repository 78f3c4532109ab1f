#include "head.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace penjing {
namespace {

constexpr int64_t TILE = 256;  // columns at a time: a whole number of panels, and 16 rows of it stay in first-level cache

// Also true for a NaN.
bool exceeds(const float* x, int64_t count, float bound) {
    int found = 0;
    for (int64_t i = 0; i < count; ++i) found |= !(x[i] <= bound);
    return found != 0;
}

}  // namespace

void TopList::clear() {
    std::fill_n(value, k, -std::numeric_limits<float>::infinity());
    std::fill_n(id, k, -1);
}

void TopList::add(float v, int32_t column) {
    if (std::isnan(v)) nan = true;
    const auto precedes = [&](int at) { return v > value[at] || (v == value[at] && column < id[at]); };
    if (!precedes(k - 1)) return;
    int at = k - 1;
    for (; at > 0 && precedes(at - 1); --at) {
        value[at] = value[at - 1];
        id[at] = id[at - 1];
    }
    value[at] = v;
    id[at] = column;
}

TopBuffer carve_top(Carver& carver, int64_t rows, int k) {
    const size_t r = static_cast<size_t>(rows), entries = r * static_cast<size_t>(k);
    return {carver.take<float>(r * TILE), carver.take<float>(entries), carver.take<int32_t>(entries),
            carver.take<uint8_t>(r)};
}

TopBuffer row_of(const TopBuffer& buffer, int64_t row, int k) {
    return {buffer.tile + row * TILE, buffer.value + row * k, buffer.id + row * k, buffer.nan + row};
}

void top_of_share(const Ops& ops, const PjLinear& linear, const Rows& rows, int64_t count, int member, int members, int k,
                  float cap, const TopBuffer& buffer) {
    // Shares begin at panels, as those of `apply_linear` do; a float layer is cut into cache lines of output.
    const int64_t unit = in_panels(linear) ? linear.width : 16, units = (linear.n + unit - 1) / unit;
    const int64_t first = share(units, member, members) * unit;
    const int64_t last = std::min(share(units, member + 1, members) * unit, linear.n);
    clear_top(buffer, count, k);
    top_of_columns(ops, linear, rows, count, first, last, k, cap, buffer);
}

void clear_top(const TopBuffer& buffer, int64_t rows, int k) {
    for (int64_t row = 0; row < rows; ++row) {
        TopList{buffer.value + row * k, buffer.id + row * k, k}.clear();
        buffer.nan[row] = 0;
    }
}

void top_of_columns(const Ops& ops, const PjLinear& linear, const Rows& rows, int64_t count, int64_t first, int64_t last,
                    int k, float cap, const TopBuffer& buffer) {
    const int64_t unit = in_panels(linear) ? linear.width : 16;
    const int64_t step = std::max(TILE / unit, int64_t{1}) * unit;
    for (int64_t begin = first; begin < last; begin += step) {
        const int64_t end = std::min(begin + step, last), width = end - begin;
        apply_linear(ops, part_of_linear(linear, begin, end), rows, count, 0, 1, buffer.tile, TILE, false);
        for (int64_t row = 0; row < count; ++row) {
            float* x = buffer.tile + row * TILE;
            if (cap > 0) ops.soft_cap_row(x, cap, width);
            TopList list{buffer.value + row * k, buffer.id + row * k, k};
            if (!exceeds(x, width, list.value[k - 1])) continue;
            for (int64_t i = 0; i < width; ++i) list.add(x[i], static_cast<int32_t>(begin + i));
            buffer.nan[row] |= list.nan;
        }
    }
}

void merge_top(const TopBuffer* buffers, int members, int64_t row, int k, float* value, int32_t* id) {
    TopList merged{value, id, k};
    merged.clear();
    for (int member = 0; member < members; ++member) {
        const TopBuffer& from = buffers[member];
        for (int64_t i = row * k; i < (row + 1) * k && from.id[i] >= 0; ++i) merged.add(from.value[i], from.id[i]);
        merged.nan |= from.nan[row] != 0;
    }
    if (merged.nan) value[0] = std::numeric_limits<float>::quiet_NaN();
}

}  // namespace penjing
