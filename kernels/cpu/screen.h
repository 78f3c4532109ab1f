// The largest output of an INT8 layer from little more than half of its bytes, for an LM head of which only the largest
// logit is looked at. A copy of the weights in 4 bits tells roughly what each output is and how far off that can be; those
// that may be the largest are computed from the weights themselves. So value and place are those of all outputs.
//
// With weights w, their copy h, r = w − h and an input x of whole numbers, an output lacks r · x. Inputs of an LM head lie
// largely along a few directions V: x = Vᵀa + p for any whole numbers a, so r · x = (V r) · a + r · p. The copy has V r, in 4
// bits too, as weights of inputs a behind those of x, which gives the first term; ‖r‖ ‖p‖ bounds the second, and
// ‖V r − its copy‖ ‖a‖ what the first lacks (Cauchy and Schwarz). Nothing is asked of V: it decides how many outputs are
// computed twice, not which is the largest.
#pragma once

#include <vector>

#include "head.h"
#include "linear.h"
#include "memory.h"

namespace penjing {

// So many rows at most: products of eight take longer than reading the weights, and a copy gains nothing.
constexpr int64_t SCREENED_ROWS = 4;

// Working memory of a member.
struct ScreenBuffer {
    float* x;        // (k)
    uint8_t* q;      // (rows, k + directions) the rows, and a of each
    float* reach;    // (rows) how far off an output is at most for each unit of `lost`
    float* rough;    // (rows, SCREEN_TILE)
    float* most;     // (SCREEN_TILE) what outputs of a row may be at most
    float* best;     // (rows) the largest rough output so far
    float* least;    // (rows) an output that a column of this member has
    int32_t* count;  // (rows) of candidates, −1: too many
    int32_t* id;     // (rows, capacity)
    float* limit;    // (rows, capacity) what a candidate may be at most
    int64_t capacity;
};
ScreenBuffer carve_screen(Carver& carver, const PjScreen& screen, int64_t rows, int members);

// Row `row` of the input, which stands quantized in rows.q, as screening reads it.
void enter_screen(const PjScreen& screen, const Rows& rows, int64_t row, const ScreenBuffer& buffer);

// The member's columns that may have the largest output of `count` rows.
void screen_columns(const Ops& ops, const PjScreen& screen, const PjLinear& linear, const Rows& rows, int64_t count,
                    int member, int members, const ScreenBuffer& buffer);

// After all members have done that: the largest output of the member's columns, where it is the largest of all.
void top_of_screened(const Ops& ops, const PjLinear& linear, const Rows& rows, int64_t count, int member, int members,
                     const std::vector<ScreenBuffer>& buffers, const TopBuffer& top);

}  // namespace penjing
