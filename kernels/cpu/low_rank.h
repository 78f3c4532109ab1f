// Low-rank adapters (LoRA) beside the linear layers of a decoder: y += scale × (x · Aᵀ) · Bᵀ for the rows that have one.
//
// In two halves with a barrier between them: first each member computes its share of the ranks of every row, then its
// share of the outputs. A row's numbers depend on the row and its adapter alone.
#pragma once

#include "abi.h"
#include "ops.h"
#include "pool.h"

namespace penjing {

enum Projection { PROJ_Q, PROJ_K, PROJ_V, PROJ_HEAD_GATE, PROJ_OUT, PROJ_GATE, PROJ_UP, PROJ_DOWN, NUM_PROJECTIONS };

constexpr int MOST_TOGETHER = 4;  // projections of one input

// Where a projection's outputs lie: of a row, each 16 of them `spread` floats behind the 16 before.
struct LowRankOut {
    Projection which;
    float* out;
    int64_t ldo;
    int64_t spread;
};

// Some rows of one input on their way through the adapters of one layer.
struct LowRankCall {
    const Ops& ops;
    const PjLowRank* const* adapters;  // (adapters) of (layers × NUM_PROJECTIONS)
    const int32_t* who;                // (count) adapter of each row, −1: none
    int64_t layer;
    int64_t count;
    const float* x;  // (count, ldx)
    int64_t ldx;
    float* low;  // (MOST_TOGETHER, count, rank)
    int64_t rank;  // the largest
    const LowRankOut* outs;
    int num_outs;
};

// The largest rank among the adapters that `who` names; 0: no row has one.
int64_t largest_rank(const PjLowRank* const* adapters, int64_t num_layers, const int32_t* who, int64_t count);

// Both halves, on each member. The team has computed or is computing the outputs; ends without a barrier.
void low_rank(const LowRankCall& call, const Team& team);

// What `gated` (swiglu_row or geglu_row of `Ops`) gives for a row (2 × n) where 16 of gate and up come in turn, as such a
// pair is packed.
void open_gated_row(void (*gated)(const float*, const float*, int64_t, float*), const float* x, int64_t n, float* out);

}  // namespace penjing
