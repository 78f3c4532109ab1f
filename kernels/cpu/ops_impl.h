// The kernels of one instruction set, over the lanes that a simd_*.h header gives. Included once by each ops_*.cpp.
#pragma once

// Order matters: each may use the ones before.
#include "ops_math.h"

#include "ops_meet.h"

#include "ops_keys.h"

#include "ops_scores.h"

#include "ops_attention.h"
#include "ops_epilogue.h"
#include "ops_float.h"
#include "ops_int8.h"
#include "ops_stepped.h"

#include "half_pairs.h"

#include "ops_half_int4.h"

#include "ops_int4.h"
#include "ops_sample.h"
#include "ops_screen.h"
#include "ops_select.h"

namespace {

constexpr penjing::Ops make_table(const char* name) {
    return {name, quantize_row, quantize_row_above, int8_panels, int4_panels, half_int4_panels, group_starts, float_linear, low_rank_blocks,
            rms_norm_row, rotate_head, clamped_row, swiglu_row, geglu_row, relu2_glu_row, activate_row, soft_cap_row, hadamard_row, widen_row, narrow_row, scale_row, sum_words, turn_keys, by_tiles, take_heads, quantize_query, attend_tile, end_attention, merge_tile,
            score_blocks, join_scores, nth_largest, likely_row,
            peak_of_row, weigh_row, sum_weights, split, gather_from, peaks_of_groups, sum_of_powers, count_before};
}

}  // namespace
