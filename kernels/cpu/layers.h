// What the layers of a decoder do to some rows of a step: norm and projections before attention, with keys and values
// stored in their pages, and output projection and MLP behind it. A team shares the columns of each layer out, or one
// member takes the rows through alone; which rows, and when, is the decoder's to say.
#pragma once

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "decoder.h"
#include "linear.h"
#include "low_rank.h"
#include "memory.h"
#include "ops.h"
#include "pool.h"

namespace penjing {

// Up to this many rows every member quantizes all of them for itself: cheaper than a barrier.
constexpr int64_t OWN_ROWS = 8;

// The step that runs.
struct StepRows {
    const Ops* ops;
    StepInput in;
    int64_t rank;   // the largest of the step's adapters; 0: no row has one
    float* hidden;  // (rows, hidden) the residual
    float* qkv;     // (rows, qkv_size) queries, keys, values and gates, or what a convolution's projection gives
};

constexpr int32_t SQUARED = 3, CLAMPED = 6;  // PjLayer's activation

// Working memory of experts: copies of rows, one for each expert that a row goes to.
struct ExpertRows {
    int32_t* order;  // (places) of the sorted copies, which of the chosen experts each is for: a member's own
    int32_t* place;  // (places) the inverse
    int32_t* begin;  // (num_experts + 1) where each expert's copies begin
    float* normed;   // (rows, hidden) from here on the team's
    float* score;    // (rows, num_experts)
    int32_t* chosen;  // (rows, per_row)
    float* weight;    // (rows, per_row)
    Rows rows;       // of the copies
    float* act;      // (places, 2 × intermediate)
    float* made;     // (places, hidden)
};

// Working memory for some rows on their way through a layer.
struct Buffers {
    Rows rows;   // input of the next linear layer
    float* act;  // (rows, intermediate), or (rows, 2 × intermediate) when gate and up are apart
    float* gated;  // (rows, intermediate) what `down` reads, and
    float* low;    // (MOST_TOGETHER, rows, rank), where a step has adapters
    float* made;   // (rows, hidden) what a half of a layer gives, where a norm stands before the residual
    ExpertRows experts;
};

class Layers {
public:
    // `step` is read anew by every call.
    Layers(const PjModel& model, const StepRows& step);

    const PjLayer& operator[](int64_t layer) const { return layers_[static_cast<size_t>(layer)]; }
    int64_t widest_window() const { return widest_; }  // keys that the widest window sees; 0: all
    int64_t q_size() const { return model_.num_heads * model_.head_dim; }
    int64_t kv_size() const { return model_.num_kv_heads * model_.head_dim; }
    int64_t qkv_size() const { return std::max(q_size() + 2 * kv_size() + most_gates_, most_taps_ ? 3 * model_.hidden : 0); }
    int64_t attended_size() const { return std::max(q_size(), most_taps_ ? model_.hidden : 0); }
    int64_t input_size() const { return std::max({model_.hidden, q_size(), model_.intermediate, model_.token_inputs}); }
    bool has_experts() const { return num_experts_ > 0; }
    Buffers carve_buffers(Carver& carver, int64_t rows) const;
    // For up to `rows` rows: what each member needs, or what the team does, too.
    void carve_experts(Carver& carver, int64_t rows, bool of_team, ExpertRows& to) const;

    // Whether rows choose what they read of a layer's keys.
    bool chooses(int64_t layer) const { return step_.in.selection.block > 0 && step_.in.choosing[layer] >= 0; }
    PjPages pages(int64_t layer) const;

    // Whether all that convolutions read lies in pages that there are.
    bool convolutions_fit() const;
    // Of a layer with taps what `project` reads, (rows, attended_size), for this member's share of the rows; those that
    // are not `wanted`, where that is given, are left out. Ends without a barrier.
    void convolve(const Team& team, int64_t layer, const uint8_t* wanted, float* attended) const;
    // Of a layer with gates the same: the result of attention times them, in place. Ends with a barrier.
    void gate_heads(const Team& team, int64_t layer, const uint8_t* wanted, float* attended) const;

    // Rows [row, row + count) up to their attention. Ends with a barrier, as `tail` does.
    void head(const Team& team, int64_t layer, int64_t row, int64_t count, const Buffers& b) const;
    // `count` rows from their attention to the next layer, whose first product is `after`. `who`: their adapters;
    // `tokens`: which they are of.
    void tail(const Team& team, int64_t layer, float* hidden, const float* attended, const int32_t* who,
              const int32_t* tokens, int64_t count, const Buffers& b, const PjLinear& after) const;

    // Runs `prepare(i)` for each row: all of them on every member where the buffers are the member's own, else shared
    // out and followed by a barrier.
    template <typename Prepare>
    void each_row(const Team& team, int64_t count, const PjLinear& linear, Prepare prepare) const {
        const bool own = count <= OWN_ROWS || team.members == 1;
        const int64_t begin = own ? 0 : share(count, team.member, team.members);
        const int64_t end = own ? count : share(count, team.member + 1, team.members);
        for (int64_t i = begin; i < end; ++i) prepare(i);
        if (!own) sync(team, linear);
    }
    // Row `row` of rows.x in each form that the `count` layers behind it read.
    void quantize(const PjLinear* linears, int count, const Rows& rows, int64_t row) const {
        for (int i = 0; i < count; ++i) {
            bool done = false;
            for (int before = 0; before < i; ++before) done = done || linears[before].dtype == linears[i].dtype;
            if (!done) quantize_row_for(*step_.ops, linears[i], rows.x + row * linears[i].k, rows, row);
        }
    }
    // A barrier before `linear`.
    static void sync(const Team& team, const PjLinear& linear) {
        team.sync(first_panels(linear, team.member, team.members));
    }

private:
    int64_t act_size() const {
        return std::max(mlp_size(), model_.token_inputs);
    }
    int64_t mlp_size() const {
        return whole_gate_ && step_.rank == 0 ? model_.intermediate : 2 * ((model_.intermediate + 15) / 16 * 16);
    }
    void project(const Team& team, int64_t layer, float* hidden, const float* attended, const int32_t* who,
                 int64_t count, const Buffers& b, const PjLinear& after) const;
    void mlp(const Team& team, int64_t layer, float* hidden, const int32_t* who, int64_t count, const Buffers& b,
             const PjLinear& after) const;
    void take_tokens(const Team& team, int64_t layer, float* hidden, const int32_t* tokens, int64_t count,
                     const Buffers& b, const PjLinear& after) const;
    int64_t expert_places(int64_t rows) const;
    void experts(const Team& team, int64_t layer, float* hidden, int64_t count, const ExpertRows& to,
                 const PjLinear& after) const;
    void experts_together(const Team& team, int64_t layer, float* hidden, int64_t count, const ExpertRows& to,
                          const PjLinear& after) const;
    void adapt(const Team& team, int64_t layer, const int32_t* who, int64_t count, const float* x, int64_t ldx,
               float* low, std::initializer_list<LowRankOut> outs) const;
    void add_normed(const Team& team, const float* norm, float* made, int64_t count, float* hidden,
                    const PjLinear& after) const;
    void norm_heads(const Team& team, const PjLayer& layer, int64_t row, int64_t count) const;
    void store_rotated(int64_t layer, int64_t row, int64_t part) const;
    void gate_inputs(const Team& team, const PjLayer& layer, int64_t row, int64_t count) const;
    float* gated_row(const PjLayer& layer, int64_t slot) const {
        const int64_t slots = step_.in.num_blocks * step_.in.block_size;
        return step_.in.gated + (layer.place * slots + slot) * model_.hidden;
    }

    // Row `row` of rows.x: x behind its norm, or x where there is none.
    void enter_norm(const float* norm, const Rows& rows, int64_t row, const float* x) const {
        float* at = rows.x + row * model_.hidden;
        if (norm) step_.ops->rms_norm_row(x, norm, model_.hidden, model_.eps, at);
        else std::copy_n(x, model_.hidden, at);
    }
    // Makes x a row of the input of `linear`; it may stand there already.
    void enter(const PjLinear& linear, const Rows& rows, int64_t row, const float* x) const {
        float* at = rows.x + row * linear.k;
        if (in_panels(linear)) quantize_row_for(*step_.ops, linear, x, rows, row);
        else if (at != x) memcpy(at, x, static_cast<size_t>(linear.k) * sizeof(float));
    }

    const PjModel& model_;
    const StepRows& step_;
    std::vector<PjLayer> layers_;
    bool whole_gate_ = true, norms_after_ = false;
    int64_t widest_ = 0, num_experts_ = 0, experts_per_row_ = 0, most_taps_ = 0, most_gates_ = 0;  // the most of a layer
};

}  // namespace penjing
