// INT8 weights in panels, and linear layers shared out among a team.
#pragma once

#include <cstddef>

#include "ops.h"
#include "pool.h"

namespace penjing {

// Rows of activations in the form that linear layers read.
struct Rows {
    float* x;         // (rows, k) float32
    uint8_t* q;       // (rows, k rounded up to 4) quantized + 128
    float* row_scale; // (rows)
};

// Bytes of a packed INT8 layer: panels, then 128 × column sums, scales and biases.
size_t packed_bytes(int64_t n, int64_t k, bool swiglu);

// Lays out a weight (n, k) (SwiGLU: (2n, k), gate above up), given as parts one above the other, at `memory` and describes
// it in `linear`. Column c of a panel
// keeps k-groups of 4 bytes at [group][c]: what one VNNI instruction multiplies. The panel's width is the one that
// divides most evenly among `threads`.
void pack_int8(const PjPart* parts, int num_parts, int64_t n, int64_t k, bool swiglu, int threads, void* memory,
               PjLinear* linear);

// Quantizes rows [begin, end) of x (row stride ldx) into `rows`, whose row 0 is x's row 0.
void quantize_rows(const Ops& ops, const float* x, int64_t ldx, int64_t k, int64_t begin, int64_t end, Rows rows);

// The member's share of the outputs of `linear` for the first `count` rows; a float layer reads rows.x with stride k.
void apply_linear(const Ops& ops, const PjLinear& linear, const Rows& rows, int64_t count, int member, int members,
                  float* out, int64_t ldo, bool add);

// The beginning of what the member reads of an INT8 layer in `apply_linear`.
Soon first_panels(const PjLinear& linear, int member, int members);

// A whole layer on float input (rows, k), with a team of its own. False when there is no memory.
bool run_linear(const PjLinear& linear, const float* x, int64_t rows, float* out);

// Rows that a member takes at a time when `rows` are shared out: so many that they and a panel stay in a 1 MiB
// second-level cache, and that all members get equally many pieces. At most `most_chunk_rows(k)`.
int64_t row_chunk(int64_t rows, int64_t k, int members);
int64_t most_chunk_rows(int64_t k);

}  // namespace penjing
