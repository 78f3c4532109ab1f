// INT8 and INT4 weights in panels, and linear layers shared out among a team.
#pragma once

#include <cstddef>

#include "memory.h"
#include "ops.h"
#include "pool.h"

namespace penjing {

// Rows of activations in the form that linear layers read.
struct Rows {
    float* x;         // (rows, k) float32
    uint8_t* q;       // (rows, k rounded up to 4) quantized + 128 or + zero, for INT8 layers
    float* row_scale; // (rows), and of INT8 layers with zero points (rows, above_blocks(k))
    int32_t* zero;    // (rows, above_blocks(k)) what stands for 0 in q, for these
    int8_t* q4;       // (rows, k) quantized, and (rows, k / group) where sums of groups start, for INT4 layers
    uint16_t* half;   // (rows, k) bfloat16, for INT4 layers with half_inputs, see halve_row
    int32_t* start;
    float* group_sum;    // (rows, k / group), for INT4 layers with offsets in place of `start`
    float* group_scale;  // (rows, k / group) of activations, likewise
};

constexpr int64_t LEAST_GROUP = 32;

// Rows without x, of up to k inputs.
Rows carve_rows(Carver& carver, int64_t rows, int64_t k);

// The `count` rows from `row` on.
Rows rows_from(const Rows& rows, const PjLinear& linear, int64_t row);

// Quantizes x as row `row` of the input of `linear`; nothing for a float layer.
void quantize_row_for(const Ops& ops, const PjLinear& linear, const float* x, const Rows& rows, int64_t row);

// Bytes of a packed INT8 layer: panels, then column sums (PjLinear::comp), scales and biases.
size_t packed_bytes(int64_t n, int64_t k, bool swiglu, bool zero_points);

// Lays out a weight (n, k) (SwiGLU: (2n, k), gate above up), given as parts one above the other, at `memory` and describes
// it in `linear`. Column c of a panel
// keeps k-groups of 4 bytes at [group][c]: what one VNNI instruction multiplies. The panel's width is the one that
// divides most evenly among `threads`.
void pack_int8(const PjPart* parts, int num_parts, int64_t n, int64_t k, bool swiglu, bool zero_points, int threads,
               void* memory, PjLinear* linear);

// The same for INT8 weights that are stored in steps, see pack_stepped.cpp; with zero points a group divides ABOVE_INPUTS.
size_t packed_stepped_bytes(int64_t n, int64_t k, bool swiglu, int32_t group, bool zero_points);
void pack_stepped(const PjPart* parts, int num_parts, int64_t n, int64_t k, bool swiglu, int32_t group, bool zero_points,
                  int threads, void* memory, PjLinear* linear);

// The same for an INT4 weight, see pack_int4.cpp.
size_t packed_int4_bytes(int64_t n, int64_t k, bool swiglu, int32_t group, int32_t scale_dtype, bool offsets);
void pack_int4(const PjPart* parts, int num_parts, int64_t n, int64_t k, bool swiglu, int32_t group,
               int32_t scale_dtype, int threads, void* memory, PjLinear* linear);

// The member's share of the outputs of `linear` for the first `count` rows; a float layer reads rows.x with stride k.
void apply_linear(const Ops& ops, const PjLinear& linear, const Rows& rows, int64_t count, int member, int members,
                  float* out, int64_t ldo, bool add);

// Outputs [begin, end) of a layer as a layer; INT8 and INT4: `begin` is the first of a panel.
PjLinear part_of_linear(const PjLinear& linear, int64_t begin, int64_t end);

// Row `row` of the weight of a packed INT8 layer without SwiGLU, times its scale: (k).
void dequantize_row(const PjLinear& linear, int64_t row, float* out);

// The beginning of what the member reads of a packed layer in `apply_linear`.
Soon first_panels(const PjLinear& linear, int member, int members);

// A whole layer on float input (rows, k), with a team of its own. False when there is no memory.
bool run_linear(const PjLinear& linear, const float* x, int64_t rows, float* out);

// Rows that a member takes at a time when `rows` are shared out: so many that they and a panel stay in a 1 MiB
// second-level cache, and that all members get equally many pieces. At most `most_chunk_rows(k)`.
int64_t row_chunk(int64_t rows, int64_t k, int members);
int64_t most_chunk_rows(int64_t k);

}  // namespace penjing
