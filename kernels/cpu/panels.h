// How columns of a packed layer are chosen and how wide its panels are; INT8 and INT4 layers alike.
#pragma once

#include <initializer_list>

#include "ops.h"

namespace penjing {

// Row of `weight` behind a packed column, or −1 in the padding.
inline int64_t source_row(int64_t column, int64_t n, bool swiglu) {
    if (!swiglu) return column < n ? column : -1;
    const int64_t group = column / 16, at = group / 2 * 16 + column % 16;
    if (at >= n) return -1;
    return group % 2 == 0 ? at : n + at;
}

// Four values in the halves of two bytes → in the low halves of four bytes.
inline uint32_t spread_halves(uint32_t x) {
    x = (x | (x << 8)) & 0x00ff00ffu;
    return (x | (x << 4)) & 0x0f0f0f0fu;
}

// What stands behind the panels of an INT8 layer: the sums of a column's weights (PjLinear::comp), its scale and bias.
struct Int8Columns {
    int32_t* comp;
    float* scales;
    float* biases;
};

// Tells `linear` where its panels and its columns' numbers are: `memory`, and behind `bytes` of panels.
inline Int8Columns place_int8(PjLinear* linear, void* memory, int64_t bytes) {
    const int64_t columns = padded_columns(*linear);
    int32_t* comp = reinterpret_cast<int32_t*>(static_cast<char*>(memory) + bytes);
    float* scales = reinterpret_cast<float*>(comp + columns * row_scales(*linear));
    const Int8Columns found{comp, scales, scales + columns};
    linear->weight = memory;
    linear->comp = found.comp;
    linear->scale = found.scales;
    linear->bias = found.biases;
    return found;
}

// The width that leaves the busiest of `threads` the fewest columns.
inline int best_width(int64_t columns, std::initializer_list<int> widths, bool swiglu, int threads) {
    int best = PANEL;
    int64_t least = INT64_MAX;
    for (int width : widths) {
        if (swiglu && width % 32 != 0) continue;
        const int64_t panels = (columns + width - 1) / width;
        const int64_t columns_of_one = (panels + threads - 1) / threads * width;
        if (columns_of_one < least) {
            least = columns_of_one;
            best = width;
        }
    }
    return best;
}

}  // namespace penjing
