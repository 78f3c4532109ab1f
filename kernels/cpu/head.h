// The k largest outputs of a linear layer, for an LM head whose other logits nobody looks at.
#pragma once

#include "linear.h"
#include "memory.h"

namespace penjing {

// The largest entries of a row so far, in descending order, equals by ascending id; the unused rest is (−inf, −1).
struct TopList {
    float* value;
    int32_t* id;
    int k;
    bool nan = false;  // one was seen: the row is worth nothing

    void clear();
    void add(float value, int32_t id);
};

// Working memory of a member for `rows` rows.
struct TopBuffer {
    float* tile;
    float* value;
    int32_t* id;
    uint8_t* nan;
};
TopBuffer carve_top(Carver& carver, int64_t rows, int k);

TopBuffer row_of(const TopBuffer& buffer, int64_t row, int k);

void clear_top(const TopBuffer& buffer, int64_t rows, int k);

// Outputs [first, last) for `count` rows: computed a tile at a time, kept where they are among the largest since
// `clear_top`. `first` begins a panel, and does not precede a `last` before it.
// With a cap above 0 they become cap × tanh(output / cap) before, since rounding then makes equals of neighbours.
void top_of_columns(const Ops& ops, const PjLinear& linear, const Rows& rows, int64_t count, int64_t first, int64_t last,
                    int k, float cap, const TopBuffer& buffer);
// The largest of the member's share.
void top_of_share(const Ops& ops, const PjLinear& linear, const Rows& rows, int64_t count, int member, int members, int k,
                  float cap, const TopBuffer& buffer);

// Merges the members' lists of one row; a NaN anywhere becomes the row's largest value.
void merge_top(const TopBuffer* buffers, int members, int64_t row, int k, float* value, int32_t* id);

}  // namespace penjing
