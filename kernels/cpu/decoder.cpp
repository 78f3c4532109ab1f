#include "decoder.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "attention.h"
#include "head.h"
#include "layers.h"
#include "screen.h"
#include "select.h"

namespace penjing {
namespace {

// From this many rows a member on, rows are shared out and not columns: two barriers a layer, activations in the cache.
constexpr int64_t ROWS_A_MEMBER = 48;

}  // namespace

class Decoder {
public:
    explicit Decoder(const PjModel& model) : model_(model), layers_(model_, step_) {}
    int run(const StepInput& input);

private:
    friend void step_member(const Team& team, void* context);

    size_t carve(void* memory);
    void mark_wanted();

    void member(const Team& team);
    void by_columns(const Team& team, const Buffers& own);
    void by_rows(const Team& team, const Buffers& own);
    void attention(const Team& team, int64_t layer);
    void logits(const Team& team, const Buffers& own);
    void embed(int64_t begin, int64_t end);
    Buffers of_team(const Buffers& own, int64_t rows) const;

    PjModel model_;
    StepRows step_{};
    Layers layers_;

    // Of the step that runs.
    int threads_ = 1;
    bool split_rows_ = false;
    std::vector<int32_t> last_who_;  // adapters of the rows whose logits are wanted
    std::vector<int32_t> last_tokens_;
    AttentionPlan plan_;
    SelectionPlan choice_;
    uint8_t* masks_ = nullptr;  // of the layer that runs
    std::vector<uint8_t> wanted_rows_;  // by row, what `wanted_` is by item
    Scratch scratch_;
    float *attended_ = nullptr, *partial_ = nullptr, *last_hidden_ = nullptr, *last_attended_ = nullptr;
    Buffers shared_{};
    std::vector<Buffers> own_;
    std::vector<float*> attention_scratch_;
    std::vector<TopBuffer> top_;
    std::vector<ScreenBuffer> screened_;  // of a step whose largest logits are looked for so
    AttentionProgress progress_;
    std::vector<uint8_t> wanted_;  // items of attention that the last layer needs: those with logit rows
    std::vector<std::atomic<int64_t>> next_;  // one counter a phase
};

void step_member(const Team& team, void* context) { static_cast<Decoder*>(context)->member(team); }

size_t Decoder::carve(void* memory) {
    Carver carver(memory);
    const StepInput& in = step_.in;
    const size_t rows = static_cast<size_t>(in.rows), logits = static_cast<size_t>(in.num_logits);
    step_.hidden = carver.take<float>(rows * static_cast<size_t>(model_.hidden));
    step_.qkv = carver.take<float>(rows * static_cast<size_t>(layers_.qkv_size()));
    attended_ = carver.take<float>(rows * static_cast<size_t>(layers_.attended_size()));
    last_hidden_ = carver.take<float>(logits * static_cast<size_t>(model_.hidden));
    last_attended_ = carver.take<float>(logits * static_cast<size_t>(layers_.attended_size()));
    partial_ = carver.take<float>(static_cast<size_t>(plan_.partial_floats()));
    masks_ = carver.take<uint8_t>(choice_.mask_bytes());
    // Each expert is read once for all rows of the team.
    split_rows_ = !layers_.has_experts() && in.rows >= ROWS_A_MEMBER * threads_;
    const int64_t most_rows = std::max(in.rows, in.num_logits);
    shared_ = layers_.carve_buffers(carver, std::max(split_rows_ ? 0 : in.rows, in.num_logits));
    if (layers_.has_experts()) layers_.carve_experts(carver, most_rows, true, shared_.experts);
    const int64_t own_rows = split_rows_ ? std::max(OWN_ROWS, most_chunk_rows(layers_.input_size())) : OWN_ROWS;
    own_.resize(static_cast<size_t>(threads_));
    attention_scratch_.resize(static_cast<size_t>(threads_));
    top_.resize(static_cast<size_t>(threads_));
    const bool screens = model_.screen && in.top == 1 && in.num_logits > 0 && in.num_logits <= SCREENED_ROWS;
    screened_.resize(screens ? static_cast<size_t>(threads_) : 0);
    for (int i = 0; i < threads_; ++i) {
        own_[static_cast<size_t>(i)] = layers_.carve_buffers(carver, own_rows);
        if (layers_.has_experts()) layers_.carve_experts(carver, most_rows, false, own_[static_cast<size_t>(i)].experts);
        attention_scratch_[static_cast<size_t>(i)] = carver.take<float>(
            std::max(attention_scratch_floats(plan_), choice_.scratch_floats()));
        if (in.top > 0) top_[static_cast<size_t>(i)] = carve_top(carver, in.num_logits, static_cast<int>(in.top));
        if (screens) screened_[static_cast<size_t>(i)] = carve_screen(carver, *model_.screen, in.num_logits, threads_);
    }
    return carver.used();
}

void Decoder::mark_wanted() {
    const StepInput& in = step_.in;
    std::vector<uint8_t> rows(static_cast<size_t>(in.rows), 0);
    for (int64_t i = 0; i < in.num_logits; ++i) rows[static_cast<size_t>(in.logit_rows[i])] = 1;
    wanted_.clear();
    wanted_rows_.assign(static_cast<size_t>(in.rows), 0);
    for (const AttentionPlan::Item& item : plan_.items()) {
        const auto begin = rows.begin() + item.first_row;
        wanted_.push_back(std::find(begin, begin + item.num_tokens, 1) != begin + item.num_tokens);
        if (wanted_.back()) std::fill_n(wanted_rows_.begin() + item.first_row, item.num_tokens, 1);
    }
}

int Decoder::run(const StepInput& input) {
    step_.in = input;
    const StepInput& in = step_.in;
    if (const int problem = check_step(model_, in)) return problem;
    step_.rank = in.adapter ? largest_rank(in.adapters, model_.num_layers, in.adapter, in.rows) : 0;
    last_who_.clear();
    for (int64_t i = 0; step_.rank > 0 && i < in.num_logits; ++i) last_who_.push_back(in.adapter[in.logit_rows[i]]);
    last_tokens_.clear();
    for (int64_t i = 0; i < in.num_logits; ++i) last_tokens_.push_back(in.tokens[in.logit_rows[i]]);
    step_.ops = &ops();
    threads_ = num_threads();
    const AttentionShape shape{model_.num_heads, model_.num_kv_heads, model_.head_dim};
    if (!plan_.build(in.sequences, shape, in.num_blocks, in.block_size, layers_.widest_window(), threads_)) return -2;
    if (!layers_.convolutions_fit()) return -2;
    if (!choice_.build(in.sequences, shape, in.selection, in.slots, in.rows, in.block_size)) return -9;
    if (in.selection.block && (!in.choosing || !in.summary)) return -9;
    for (int64_t layer = 0; in.selection.block && layer < model_.num_layers; ++layer)
        if (in.choosing[layer] >= in.num_choosing || (layers_.chooses(layer) && layers_[layer].window)) return -9;
    void* memory = scratch_.reserve(carve(nullptr));
    if (memory == nullptr) return -1;
    carve(memory);
    if (choice_.mask_bytes()) memset(masks_, ALL_CHOSEN, choice_.mask_bytes());
    mark_wanted();
    choice_.begin(plan_, progress_);
    if (next_.empty()) next_ = std::vector<std::atomic<int64_t>>(static_cast<size_t>(3 * model_.num_layers));
    for (std::atomic<int64_t>& counter : next_) counter.store(0);
    run_team(step_member, this, threads_);
    return 0;
}

void Decoder::member(const Team& team) {
    const Buffers& own = own_[static_cast<size_t>(team.member)];
    if (split_rows_) by_rows(team, own);
    else by_columns(team, own);
    if (step_.in.num_logits > 0) logits(team, own);
}

// Where a member takes rows whose columns the team shares out: few rows are its own, what all write is the team's.
Buffers Decoder::of_team(const Buffers& own, int64_t rows) const {
    Buffers b = rows <= OWN_ROWS ? own : shared_;
    b.act = shared_.act;
    b.low = shared_.low;
    b.made = shared_.made;
    b.experts = shared_.experts;
    b.experts.order = own.experts.order;
    b.experts.place = own.experts.place;
    b.experts.begin = own.experts.begin;
    return b;
}

void Decoder::by_columns(const Team& team, const Buffers& own) {
    const StepInput& in = step_.in;
    const Buffers b = of_team(own, in.rows);
    embed(share(in.rows, team.member, team.members), share(in.rows, team.member + 1, team.members));
    team.sync();
    for (int64_t layer = 0; layer < model_.num_layers; ++layer) {
        layers_.head(team, layer, 0, in.rows, b);
        attention(team, layer);
        if (layer + 1 < model_.num_layers)
            layers_.tail(team, layer, step_.hidden, attended_, in.adapter, in.tokens, in.rows, b, layers_[layer + 1].qkv[0]);
    }
}

void Decoder::by_rows(const Team& team, const Buffers& own) {
    const StepInput& in = step_.in;
    const Team alone{0, 1, nullptr};
    const int64_t chunk = row_chunk(in.rows, layers_.input_size(), team.members);
    for (int64_t layer = 0; layer < model_.num_layers; ++layer) {
        std::atomic<int64_t>& next = next_[static_cast<size_t>(3 * layer)];
        for (int64_t row; (row = next.fetch_add(chunk)) < in.rows;) {
            const int64_t count = std::min(chunk, in.rows - row);
            if (layer == 0) {
                embed(row, row + count);
            } else {
                layers_.tail(alone, layer - 1, step_.hidden + row * model_.hidden,
                             attended_ + row * layers_.attended_size(), step_.rank > 0 ? in.adapter + row : nullptr,
                             in.tokens + row, count, own, layers_[layer].qkv[0]);
            }
            layers_.head(alone, layer, row, count, own);
        }
        team.sync();
        attention(team, layer);
    }
}

// Ends with a barrier.
void Decoder::attention(const Team& team, int64_t layer) {
    const bool last = layer + 1 == model_.num_layers;
    if (layers_[layer].taps) {
        layers_.convolve(team, layer, last ? wanted_rows_.data() : nullptr, attended_);
        Layers::sync(team, layers_[layer].out);
        return;
    }
    const bool choosing = layers_.chooses(layer) && choice_.mask_bytes() > 0;
    const Ops& ops = *step_.ops;
    const AttentionCall call{step_.qkv, attended_, layers_.qkv_size(), layers_.attended_size(), layers_.pages(layer),
                             model_.attention_scale, layers_[layer].window, partial_, &progress_,
                             static_cast<int32_t>(layer + 1), choosing ? masks_ : nullptr, choice_.tiles(), model_.attention_cap,
                             layers_[layer].sinks};
    float* scratch = attention_scratch_[static_cast<size_t>(team.member)];
    if (layers_.chooses(layer) && !choice_.completed().empty()) {
        summarize_blocks(ops, choice_, call.pages, team);
        if (choosing) team.sync();
    }
    if (choosing) {
        std::atomic<int64_t>& next = next_[static_cast<size_t>(3 * layer + 1)];
        choose_blocks(ops, choice_, call, last ? wanted_rows_.data() : nullptr, next, scratch, masks_);
    }
    std::atomic<int64_t>& next = next_[static_cast<size_t>(3 * layer + 2)];
    run_attention_items(ops, plan_, call, last ? wanted_.data() : nullptr, next, scratch);
    Layers::sync(team, layers_[layer].out);
    if (layers_[layer].gates) layers_.gate_heads(team, layer, last ? wanted_rows_.data() : nullptr, attended_);
}

void Decoder::embed(int64_t begin, int64_t end) {
    const int64_t hidden = model_.hidden, bytes = hidden * (model_.embedding_dtype == PJ_F32 ? 4 : 2);
    for (int64_t row = begin; row < end; ++row) {
        const int64_t token = step_.in.tokens[row];
        float* to = step_.hidden + row * hidden;
        if (token >= model_.vocab) {
            std::copy_n(step_.in.seen + (token - model_.vocab) * hidden, hidden, to);
        } else if (model_.embedding == nullptr) {
            dequantize_row(model_.head, token, to);
            for (int64_t i = 0; i < hidden; ++i) to[i] *= model_.embedding_scale[i];
        } else if (model_.embedding_dtype == PJ_INT8) {
            const int8_t* from = static_cast<const int8_t*>(model_.embedding) + token * hidden;
            for (int64_t i = 0; i < hidden; ++i) to[i] = static_cast<float>(from[i]) * model_.embedding_scale[token];
        } else {
            const char* from = static_cast<const char*>(model_.embedding) + token * bytes;
            step_.ops->widen_row(from, model_.embedding_dtype, hidden, to);
        }
        if (model_.table_hadamard && token < model_.vocab)
            step_.ops->hadamard_row(to, hidden, model_.table_hadamard, to);
        if (model_.positions) {
            const float* added = model_.positions + step_.in.positions[row] * hidden;
            for (int64_t i = 0; i < hidden; ++i) to[i] += added[i];
        }
    }
}

// The last layer's tail, the final norm and the head, for the rows whose logits are wanted.
void Decoder::logits(const Team& team, const Buffers& own) {
    const StepInput& in = step_.in;
    const Ops& ops = *step_.ops;
    const int64_t count = in.num_logits, width = model_.hidden, heads = layers_.attended_size();
    const int64_t first = share(count, team.member, team.members), last = share(count, team.member + 1, team.members);
    const Buffers b = of_team(own, count);
    for (int64_t i = first; i < last; ++i) {
        const int64_t row = in.logit_rows[i];
        memcpy(last_hidden_ + i * width, step_.hidden + row * width, static_cast<size_t>(width) * sizeof(float));
        memcpy(last_attended_ + i * heads, attended_ + row * heads, static_cast<size_t>(heads) * sizeof(float));
    }
    team.sync();
    const bool screens = !screened_.empty();
    const PjLinear& next = screens ? model_.screen->rough : model_.head;
    layers_.tail(team, model_.num_layers - 1, last_hidden_, last_attended_, last_who_.data(), last_tokens_.data(), count, b, next);
    layers_.each_row(team, count, next, [&](int64_t i) {
        float* normed = b.rows.x + i * width;
        const float* left = last_hidden_ + i * width;
        if (model_.final_norm)
            ops.rms_norm_row(left, model_.final_norm, width, model_.eps, normed);
        else
            std::copy_n(left, width, normed);
        if (in.hidden) std::copy_n(normed, width, in.hidden + i * width);
        if (model_.table_hadamard) ops.hadamard_row(normed, width, model_.table_hadamard, normed);
        layers_.quantize(&model_.head, 1, b.rows, i);
        if (screens) enter_screen(*model_.screen, b.rows, i, screened_[static_cast<size_t>(team.member)]);
    });
    if (in.top == 0) {
        apply_linear(ops, model_.head, b.rows, count, team.member, team.members, in.logits, model_.vocab, false);
        if (model_.logit_cap > 0) {
            team.sync();
            for (int64_t i = first; i < last; ++i)
                ops.soft_cap_row(in.logits + i * model_.vocab, model_.logit_cap, model_.vocab);
        }
        return;
    }
    const int k = static_cast<int>(in.top);
    const TopBuffer& top = top_[static_cast<size_t>(team.member)];
    if (screens) {
        screen_columns(ops, *model_.screen, model_.head, b.rows, count, team.member, team.members,
                       screened_[static_cast<size_t>(team.member)]);
        team.sync();
        top_of_screened(ops, model_.head, b.rows, count, team.member, team.members, screened_, top);
    } else {
        top_of_share(ops, model_.head, b.rows, count, team.member, team.members, k, model_.logit_cap, top);
    }
    team.sync();
    for (int64_t i = first; i < last; ++i)
        merge_top(top_.data(), team.members, i, k, in.logits + i * k, in.top_ids + i * k);
}

Decoder* make_decoder(const PjModel& model) { return new (std::nothrow) Decoder(model); }
void free_decoder(Decoder* decoder) { delete decoder; }
int run_step(Decoder& decoder, const StepInput& input) { return decoder.run(input); }

}  // namespace penjing
