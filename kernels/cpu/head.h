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
    void add(float value, int32_t id);  // ids of equal values must come in ascending order
};

// Working memory of a member for `rows` rows.
struct TopBuffer {
    float* tile;
    float* value;
    int32_t* id;
    uint8_t* nan;
};
TopBuffer carve_top(Carver& carver, int64_t rows, int k);

// The member's share of the outputs for `count` rows: computed a tile at a time, kept where among the largest. With a
// cap above 0 they become cap × tanh(output / cap) before, since rounding then makes equals of neighbours.
void top_of_columns(const Ops& ops, const PjLinear& linear, const Rows& rows, int64_t count, int member, int members,
                    int k, float cap, const TopBuffer& buffer);

// Merges the members' lists of one row, in their order; a NaN anywhere becomes the row's largest value.
void merge_top(const TopBuffer* buffers, int members, int64_t row, int k, float* value, int32_t* id);

}  // namespace penjing
