#include "decoder.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "attention.h"
#include "head.h"
#include "linear.h"
#include "low_rank.h"
#include "memory.h"
#include "ops.h"
#include "pool.h"
#include "select.h"

namespace penjing {
namespace {

// Up to this many rows every member quantizes all of them for itself: cheaper than a barrier.
constexpr int64_t OWN_ROWS = 8;
// From this many rows a member on, rows are shared out and not columns: two barriers a layer, activations stay in cache.
constexpr int64_t ROWS_A_MEMBER = 48;

// Working memory for some rows on their way through a layer.
struct Buffers {
    Rows rows;   // input of the next linear layer
    float* act;  // (rows, intermediate), or (rows, 2 × intermediate) when gate and up are apart
    float* gated;  // (rows, intermediate) what `down` reads, and
    float* low;    // (3, rows, rank), where a step has adapters
    float* made;   // (rows, hidden) what a half of a layer gives, where a norm stands before the residual
};

}  // namespace

class Decoder {
public:
    explicit Decoder(const PjModel& model) : model_(model), layers_(model.layers, model.layers + model.num_layers) {
        for (const PjLayer& layer : layers_) {
            whole_gate_ = whole_gate_ && layer.num_gate_up == 1;
            widest_ = std::max({widest_, layer.window == 0 ? INT64_MAX : layer.window});
            norms_after_ = norms_after_ || layer.out_norm;
        }
    }
    int run(const StepInput& input);

private:
    friend void step_member(const Team& team, void* context);

    int64_t q_size() const { return model_.num_heads * model_.head_dim; }
    int64_t kv_size() const { return model_.num_kv_heads * model_.head_dim; }
    int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
    int64_t act_size() const {
        return whole_gate_ && rank_ == 0 ? model_.intermediate : 2 * ((model_.intermediate + 15) / 16 * 16);
    }
    int64_t input_size() const { return std::max({model_.hidden, q_size(), model_.intermediate}); }

    Buffers carve_buffers(Carver& carver, int64_t rows) const {
        Buffers b{};
        const size_t r = static_cast<size_t>(rows);
        b.rows = carve_rows(carver, rows, input_size());
        b.rows.x = carver.take<float>(r * static_cast<size_t>(input_size()));
        b.act = carver.take<float>(r * static_cast<size_t>(act_size()));
        b.gated = carver.take<float>(rank_ > 0 ? r * static_cast<size_t>(model_.intermediate) : 0);
        b.low = carver.take<float>(r * static_cast<size_t>(MOST_TOGETHER * rank_));
        b.made = carver.take<float>(norms_after_ ? r * static_cast<size_t>(model_.hidden) : 0);
        return b;
    }
    size_t carve(void* memory);
    void mark_wanted();

    void member(const Team& team);
    void by_columns(const Team& team, const Buffers& own);
    void by_rows(const Team& team, const Buffers& own);
    void attention(const Team& team, int64_t layer);
    void logits(const Team& team, const Buffers& own);

    void embed(int64_t begin, int64_t end);
    void head(const Team& team, int64_t layer, int64_t row, int64_t count, const Buffers& b);
    void tail(const Team& team, int64_t layer, float* hidden, const float* attended, const int32_t* who, int64_t count,
              const Buffers& b, const PjLinear& after);
    void project(const Team& team, int64_t layer, float* hidden, const float* attended, const int32_t* who,
                 int64_t count, const Buffers& b, const PjLinear& after);
    void mlp(const Team& team, int64_t layer, float* hidden, const int32_t* who, int64_t count, const Buffers& b,
             const PjLinear& after);
    void adapt(const Team& team, int64_t layer, const int32_t* who, int64_t count, const float* x, int64_t ldx,
               float* low, std::initializer_list<LowRankOut> outs) const;
    void add_normed(const Team& team, const float* norm, float* made, int64_t count, float* hidden,
                    const PjLinear& after) const;
    void norm_heads(const Team& team, const PjLayer& layer, int64_t row, int64_t count);
    void store_rotated(int64_t layer, int64_t row, int64_t part);
    bool chooses(int64_t layer) const { return in_.selection.block > 0 && in_.choosing[layer] >= 0; }
    PjPages pages(int64_t layer) const;

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
    // A barrier before `linear`.
    static void sync(const Team& team, const PjLinear& linear) {
        team.sync(first_panels(linear, team.member, team.members));
    }
    // Row `row` of rows.x in each form that the `count` layers behind it read.
    void quantize(const PjLinear* linears, int count, const Rows& rows, int64_t row) const {
        for (int i = 0; i < count; ++i) {
            bool done = false;
            for (int before = 0; before < i; ++before) done = done || linears[before].dtype == linears[i].dtype;
            if (!done) quantize_row_for(*ops_, linears[i], rows.x + row * linears[i].k, rows, row);
        }
    }
    // Row `row` of rows.x: x behind its norm, or x where there is none.
    void enter_norm(const float* norm, const Rows& rows, int64_t row, const float* x) const {
        float* at = rows.x + row * model_.hidden;
        if (norm) ops_->rms_norm_row(x, norm, model_.hidden, model_.eps, at);
        else std::copy_n(x, model_.hidden, at);
    }
    // Makes x a row of the input of `linear`; it may stand there already.
    void enter(const PjLinear& linear, const Rows& rows, int64_t row, const float* x) const {
        float* at = rows.x + row * linear.k;
        if (in_panels(linear)) quantize_row_for(*ops_, linear, x, rows, row);
        else if (at != x) memcpy(at, x, static_cast<size_t>(linear.k) * sizeof(float));
    }

    PjModel model_;
    std::vector<PjLayer> layers_;
    bool whole_gate_ = true, norms_after_ = false;
    int64_t widest_ = 0;  // keys that the widest window sees

    // Of the step that runs.
    const Ops* ops_ = nullptr;
    StepInput in_{};
    int threads_ = 1;
    bool split_rows_ = false;
    int64_t rank_ = 0;  // the largest of the step's adapters; 0: no row has one
    std::vector<int32_t> last_who_;  // adapters of the rows whose logits are wanted
    AttentionPlan plan_;
    SelectionPlan choice_;
    uint8_t* masks_ = nullptr;  // of the layer that runs
    std::vector<uint8_t> wanted_rows_;  // by row, what `wanted_` is by item
    Scratch scratch_;
    float *hidden_ = nullptr, *qkv_ = nullptr, *attended_ = nullptr, *partial_ = nullptr;
    float *last_hidden_ = nullptr, *last_attended_ = nullptr;
    Buffers shared_{};
    std::vector<Buffers> own_;
    std::vector<float*> attention_scratch_;
    std::vector<TopBuffer> top_;
    std::vector<std::atomic<int32_t>> unfinished_;
    std::vector<uint8_t> wanted_;  // items of attention that the last layer needs: those with logit rows
    std::vector<std::atomic<int64_t>> next_;  // one counter a phase
};

void step_member(const Team& team, void* context) { static_cast<Decoder*>(context)->member(team); }

size_t Decoder::carve(void* memory) {
    Carver carver(memory);
    const size_t rows = static_cast<size_t>(in_.rows), logits = static_cast<size_t>(in_.num_logits);
    hidden_ = carver.take<float>(rows * static_cast<size_t>(model_.hidden));
    qkv_ = carver.take<float>(rows * static_cast<size_t>(qkv_size()));
    attended_ = carver.take<float>(rows * static_cast<size_t>(q_size()));
    last_hidden_ = carver.take<float>(logits * static_cast<size_t>(model_.hidden));
    last_attended_ = carver.take<float>(logits * static_cast<size_t>(q_size()));
    partial_ = carver.take<float>(static_cast<size_t>(plan_.partial_floats()));
    masks_ = carver.take<uint8_t>(choice_.mask_bytes());
    split_rows_ = in_.rows >= ROWS_A_MEMBER * threads_;
    shared_ = carve_buffers(carver, std::max(split_rows_ ? 0 : in_.rows, in_.num_logits));
    const int64_t own_rows = split_rows_ ? std::max(OWN_ROWS, most_chunk_rows(input_size())) : OWN_ROWS;
    own_.resize(static_cast<size_t>(threads_));
    attention_scratch_.resize(static_cast<size_t>(threads_));
    top_.resize(static_cast<size_t>(threads_));
    for (int i = 0; i < threads_; ++i) {
        own_[static_cast<size_t>(i)] = carve_buffers(carver, own_rows);
        attention_scratch_[static_cast<size_t>(i)] = carver.take<float>(
            std::max(attention_scratch_floats(plan_), choice_.scratch_floats()));
        if (in_.top > 0) top_[static_cast<size_t>(i)] = carve_top(carver, in_.num_logits, static_cast<int>(in_.top));
    }
    return carver.used();
}

void Decoder::mark_wanted() {
    std::vector<uint8_t> rows(static_cast<size_t>(in_.rows), 0);
    for (int64_t i = 0; i < in_.num_logits; ++i) rows[static_cast<size_t>(in_.logit_rows[i])] = 1;
    wanted_.clear();
    wanted_rows_.assign(static_cast<size_t>(in_.rows), 0);
    for (const AttentionPlan::Item& item : plan_.items()) {
        const auto begin = rows.begin() + item.first_row;
        wanted_.push_back(std::find(begin, begin + item.num_tokens, 1) != begin + item.num_tokens);
        if (wanted_.back()) std::fill_n(wanted_rows_.begin() + item.first_row, item.num_tokens, 1);
    }
}

int Decoder::run(const StepInput& input) {
    in_ = input;
    if (const int problem = check_step(model_, in_)) return problem;
    rank_ = in_.adapter ? largest_rank(in_.adapters, model_.num_layers, in_.adapter, in_.rows) : 0;
    last_who_.clear();
    for (int64_t i = 0; rank_ > 0 && i < in_.num_logits; ++i) last_who_.push_back(in_.adapter[in_.logit_rows[i]]);
    ops_ = &ops();
    threads_ = num_threads();
    const AttentionShape shape{model_.num_heads, model_.num_kv_heads, model_.head_dim};
    const int64_t window = widest_ == INT64_MAX ? 0 : widest_;
    if (!plan_.build(in_.sequences, shape, in_.num_blocks, in_.block_size, window, threads_)) return -2;
    if (!choice_.build(in_.sequences, shape, in_.selection, in_.slots, in_.rows, in_.block_size)) return -9;
    if (in_.selection.block && (!in_.choosing || !in_.summary)) return -9;
    for (int64_t layer = 0; in_.selection.block && layer < model_.num_layers; ++layer)
        if (in_.choosing[layer] >= in_.num_choosing || (chooses(layer) && layers_[static_cast<size_t>(layer)].window)) return -9;
    void* memory = scratch_.reserve(carve(nullptr));
    if (memory == nullptr) return -1;
    carve(memory);
    if (choice_.mask_bytes()) memset(masks_, ALL_CHOSEN, choice_.mask_bytes());
    mark_wanted();
    if (unfinished_.size() < plan_.units().size())
        unfinished_ = std::vector<std::atomic<int32_t>>(plan_.units().size() * 2);
    for (size_t i = 0; i < plan_.units().size(); ++i) unfinished_[i].store(plan_.units()[i].pieces);
    if (next_.empty()) next_ = std::vector<std::atomic<int64_t>>(static_cast<size_t>(2 * model_.num_layers + 2));
    for (std::atomic<int64_t>& counter : next_) counter.store(0);
    run_team(step_member, this, threads_);
    return 0;
}

void Decoder::member(const Team& team) {
    const Buffers& own = own_[static_cast<size_t>(team.member)];
    if (split_rows_) by_rows(team, own);
    else by_columns(team, own);
    if (in_.num_logits > 0) logits(team, own);
}

void Decoder::by_columns(const Team& team, const Buffers& own) {
    Buffers b = in_.rows <= OWN_ROWS ? own : shared_;
    b.act = shared_.act;
    b.low = shared_.low;
    b.made = shared_.made;
    embed(share(in_.rows, team.member, team.members), share(in_.rows, team.member + 1, team.members));
    team.sync();
    for (int64_t layer = 0; layer < model_.num_layers; ++layer) {
        head(team, layer, 0, in_.rows, b);
        attention(team, layer);
        if (layer + 1 < model_.num_layers)
            tail(team, layer, hidden_, attended_, in_.adapter, in_.rows, b,
                 layers_[static_cast<size_t>(layer + 1)].qkv[0]);
    }
}

void Decoder::by_rows(const Team& team, const Buffers& own) {
    const Team alone{0, 1, nullptr};
    const int64_t chunk = row_chunk(in_.rows, input_size(), team.members);
    for (int64_t layer = 0; layer < model_.num_layers; ++layer) {
        std::atomic<int64_t>& next = next_[static_cast<size_t>(2 * layer)];
        for (int64_t row; (row = next.fetch_add(chunk)) < in_.rows;) {
            const int64_t count = std::min(chunk, in_.rows - row);
            if (layer == 0) {
                embed(row, row + count);
            } else {
                tail(alone, layer - 1, hidden_ + row * model_.hidden, attended_ + row * q_size(),
                     rank_ > 0 ? in_.adapter + row : nullptr, count, own, layers_[static_cast<size_t>(layer)].qkv[0]);
            }
            head(alone, layer, row, count, own);
        }
        team.sync();
        attention(team, layer);
    }
}

PjPages Decoder::pages(int64_t layer) const {
    const int64_t rows = in_.num_blocks * in_.block_size * model_.num_kv_heads;
    const int64_t bytes = rows * model_.head_dim * element_bytes(in_.pool_dtype);
    char* k = static_cast<char*>(in_.pool) + layer * 2 * bytes;
    float* scale = in_.pool_scale ? in_.pool_scale + layer * 2 * rows : nullptr;
    PjPages pages{k, k + bytes, scale, scale ? scale + rows : nullptr, in_.num_blocks, in_.block_size,
                  model_.num_kv_heads, model_.head_dim, nullptr, nullptr, in_.pool_dtype, in_.block_size % CHOICE_KEYS == 0};
    if (chooses(layer)) {
        const int64_t halves = in_.choosing[layer] * rows / in_.selection.block * 2;
        pages.summary = in_.summary + halves * model_.head_dim;
        pages.summary_scale = in_.summary_scale + halves;
    }
    return pages;
}

// Ends with a barrier.
void Decoder::attention(const Team& team, int64_t layer) {
    const bool last = layer + 1 == model_.num_layers, choosing = chooses(layer) && choice_.mask_bytes() > 0;
    const AttentionCall call{qkv_, attended_, qkv_size(), q_size(), pages(layer), model_.attention_scale,
                             layers_[static_cast<size_t>(layer)].window, partial_, unfinished_.data(),
                             choosing ? masks_ : nullptr, choice_.tiles(), model_.attention_cap};
    float* scratch = attention_scratch_[static_cast<size_t>(team.member)];
    if (chooses(layer) && !choice_.completed().empty()) {
        summarize_blocks(*ops_, choice_, call.pages, team);
        if (choosing) team.sync();
    }
    if (choosing) {
        choose_blocks(*ops_, choice_, call.pages, qkv_, qkv_size(), model_.attention_scale,
                      last ? wanted_rows_.data() : nullptr, team, scratch, masks_);
        team.sync();
    }
    std::atomic<int64_t>& next = next_[static_cast<size_t>(2 * layer + 1)];
    run_attention_items(*ops_, plan_, call, last ? wanted_.data() : nullptr, next, scratch);
    sync(team, layers_[static_cast<size_t>(layer)].out);
}

void Decoder::embed(int64_t begin, int64_t end) {
    const int64_t hidden = model_.hidden, bytes = hidden * (model_.embedding_dtype == PJ_F32 ? 4 : 2);
    for (int64_t row = begin; row < end; ++row) {
        const int64_t token = in_.tokens[row];
        float* to = hidden_ + row * hidden;
        if (token >= model_.vocab) {
            std::copy_n(in_.seen + (token - model_.vocab) * hidden, hidden, to);
        } else if (model_.embedding == nullptr) {
            dequantize_row(model_.head, token, to);
            for (int64_t i = 0; i < hidden; ++i) to[i] *= model_.embedding_scale[i];
        } else if (model_.embedding_dtype == PJ_INT8) {
            const int8_t* from = static_cast<const int8_t*>(model_.embedding) + token * hidden;
            for (int64_t i = 0; i < hidden; ++i) to[i] = static_cast<float>(from[i]) * model_.embedding_scale[token];
        } else {
            ops_->widen_row(static_cast<const char*>(model_.embedding) + token * bytes, model_.embedding_dtype, hidden, to);
        }
    }
}

// Norm, projections, head norms, rotation, keys and values into their pages. Ends with a barrier.
void Decoder::head(const Team& team, int64_t index, int64_t row, int64_t count, const Buffers& b) {
    const PjLayer& layer = layers_[static_cast<size_t>(index)];
    const int64_t hidden = model_.hidden;
    each_row(team, count, layer.qkv[0], [&](int64_t i) {
        enter_norm(layer.input_norm, b.rows, i, hidden_ + (row + i) * hidden);
        quantize(layer.qkv, layer.num_qkv, b.rows, i);
    });
    float* out = qkv_ + row * qkv_size();
    for (int i = 0; i < layer.num_qkv; ++i) {
        apply_linear(*ops_, layer.qkv[i], b.rows, count, team.member, team.members, out, qkv_size(), false);
        out += layer.qkv[i].n;
    }
    float *q = qkv_ + row * qkv_size(), *k = q + q_size(), *v = k + kv_size();
    adapt(team, index, rank_ > 0 ? in_.adapter + row : nullptr, count, b.rows.x, hidden, b.low,
          {{PROJ_Q, q, qkv_size(), 16}, {PROJ_K, k, qkv_size(), 16}, {PROJ_V, v, qkv_size(), 16}});
    sync(team, layer.out);
    if (layer.whole_norm) norm_heads(team, layer, row, count);
    const int64_t parts = model_.num_heads + 2 * model_.num_kv_heads, total = count * parts;
    for (int64_t i = share(total, team.member, team.members); i < share(total, team.member + 1, team.members); ++i)
        store_rotated(index, row + i / parts, i % parts);
    sync(team, layer.out);
}

// Norms that span all heads of a token's queries or keys. Ends with a barrier.
void Decoder::norm_heads(const Team& team, const PjLayer& layer, int64_t row, int64_t count) {
    for (int64_t i = share(count, team.member, team.members); i < share(count, team.member + 1, team.members); ++i) {
        float *q = qkv_ + (row + i) * qkv_size(), *k = q + q_size();
        ops_->rms_norm_row(q, layer.q_norm, q_size(), model_.eps, q);
        ops_->rms_norm_row(k, layer.k_norm, kv_size(), model_.eps, k);
    }
    sync(team, layer.out);
}

// One head of one token: parts are the query heads, then keys, then values.
void Decoder::store_rotated(int64_t index, int64_t row, int64_t part) {
    const PjLayer& layer = layers_[static_cast<size_t>(index)];
    const int64_t head_dim = model_.head_dim;
    const bool is_value = part >= model_.num_heads + model_.num_kv_heads;
    float* x = qkv_ + row * qkv_size() + part * head_dim;
    const bool is_query = part < model_.num_heads;
    if (!is_value) {
        const float* norm = is_query ? layer.q_norm : layer.k_norm;
        const bool of_head = norm && !layer.whole_norm;
        if (of_head && !layer.norm_rotated) ops_->rms_norm_row(x, norm, head_dim, model_.eps, x);
        const int64_t angle = (layer.rotary * model_.num_positions + in_.positions[row]) * (head_dim / 2);
        ops_->rotate_head(x, model_.cos + angle, model_.sin + angle, head_dim);
        if (of_head && layer.norm_rotated) ops_->rms_norm_row(x, norm, head_dim, model_.eps, x);
    }
    const int64_t slot = in_.slots[row];
    if (is_query || slot < 0) return;
    const int64_t kv_head = (part - model_.num_heads) % model_.num_kv_heads;
    store_key_value(*ops_, pages(index), slot, kv_head, is_value ? nullptr : x, is_value ? x : nullptr);
}

// What the adapters of some rows add to projections of one input, which the team has computed or is computing. Ends
// without a barrier.
void Decoder::adapt(const Team& team, int64_t layer, const int32_t* who, int64_t count, const float* x, int64_t ldx,
                    float* low, std::initializer_list<LowRankOut> outs) const {
    if (rank_ == 0) return;
    const LowRankCall call{*ops_, in_.adapters, who, layer, count, x, ldx, low, rank_, outs.begin(),
                           static_cast<int>(outs.size())};
    low_rank(call, team);
}

// hidden += norm(made), row by row. Ends with a barrier.
void Decoder::add_normed(const Team& team, const float* norm, float* made, int64_t count, float* hidden,
                         const PjLinear& after) const {
    const int64_t width = model_.hidden;
    for (int64_t i = share(count, team.member, team.members); i < share(count, team.member + 1, team.members); ++i) {
        float *x = made + i * width, *to = hidden + i * width;
        ops_->rms_norm_row(x, norm, width, model_.eps, x);
        for (int64_t j = 0; j < width; ++j) to[j] += x[j];
    }
    sync(team, after);
}

// Output projection and MLP, each added to `hidden`; the order changes nothing where both are of one input. Ends with a
// barrier.
void Decoder::tail(const Team& team, int64_t index, float* hidden, const float* attended, const int32_t* who,
                   int64_t count, const Buffers& b, const PjLinear& after) {
    const PjLayer& layer = layers_[static_cast<size_t>(index)];
    if (layer.parallel) {
        mlp(team, index, hidden, who, count, b, layer.out);
        project(team, index, hidden, attended, who, count, b, after);
    } else {
        project(team, index, hidden, attended, who, count, b, layer.gate_up[0]);
        mlp(team, index, hidden, who, count, b, after);
    }
}

// What attention gives, added to `hidden`. Ends with a barrier.
void Decoder::project(const Team& team, int64_t index, float* hidden, const float* attended, const int32_t* who,
                      int64_t count, const Buffers& b, const PjLinear& after) {
    const PjLayer& layer = layers_[static_cast<size_t>(index)];
    const int64_t width = model_.hidden, heads = q_size();
    each_row(team, count, layer.out, [&](int64_t i) { enter(layer.out, b.rows, i, attended + i * heads); });
    const bool after_norm = layer.out_norm != nullptr;
    float* made = after_norm ? b.made : hidden;
    apply_linear(*ops_, layer.out, b.rows, count, team.member, team.members, made, width, !after_norm);
    adapt(team, index, who, count, attended, heads, b.low, {{PROJ_OUT, made, width, 16}});
    sync(team, after);
    if (after_norm) add_normed(team, layer.out_norm, made, count, hidden, after);
}

// Norm and MLP, added to `hidden`. Ends with a barrier.
void Decoder::mlp(const Team& team, int64_t index, float* hidden, const int32_t* who, int64_t count, const Buffers& b,
                  const PjLinear& after) {
    const PjLayer& layer = layers_[static_cast<size_t>(index)];
    const int64_t width = model_.hidden, inner = layer.down.k;
    const bool after_norm = layer.down_norm != nullptr;
    float* made = after_norm ? b.made : hidden;
    each_row(team, count, layer.gate_up[0], [&](int64_t i) {
        enter_norm(layer.post_norm, b.rows, i, hidden + i * width);
        quantize(layer.gate_up, layer.num_gate_up, b.rows, i);
    });
    const bool pair = layer.gated != 0, whole = layer.num_gate_up == 1, opened = pair && whole && rank_ > 0;
    PjLinear first = layer.gate_up[0];
    if (opened) {  // adapters add to gate and up: the pair's columns as they are packed, and the product afterwards
        first.n = padded_columns(first);
        first.swiglu = 0;
    }
    const int64_t stride = opened ? first.n : whole ? inner : 2 * inner;
    apply_linear(*ops_, first, b.rows, count, team.member, team.members, b.act, stride, false);
    if (!whole)
        apply_linear(*ops_, layer.gate_up[1], b.rows, count, team.member, team.members, b.act + inner, stride, false);
    const LowRankOut gate{PROJ_GATE, b.act, stride, opened ? 32 : 16};
    const LowRankOut up{PROJ_UP, b.act + (opened ? 16 : inner), stride, opened ? 32 : 16};
    if (pair) adapt(team, index, who, count, b.rows.x, width, b.low, {gate, up});
    else adapt(team, index, who, count, b.rows.x, width, b.low, {gate});
    sync(team, layer.down);
    const auto product = layer.activation ? ops_->geglu_row : ops_->swiglu_row;
    each_row(team, count, layer.down, [&](int64_t i) {
        const float* act = b.act + i * stride;
        if (!pair || !whole || opened) {
            float* to = (rank_ > 0 ? b.gated : b.rows.x) + i * inner;
            if (!pair) ops_->activate_row(act, layer.activation, inner, to);
            else if (opened) open_gated_row(product, act, inner, to);
            else product(act, act + inner, inner, to);
            act = to;
        }
        if (layer.hadamard > 0) {
            ops_->hadamard_row(act, inner, layer.hadamard, b.rows.x + i * inner);
            act = b.rows.x + i * inner;
        }
        enter(layer.down, b.rows, i, act);
    });
    apply_linear(*ops_, layer.down, b.rows, count, team.member, team.members, made, width, !after_norm);
    adapt(team, index, who, count, b.gated, inner, b.low, {{PROJ_DOWN, made, width, 16}});
    sync(team, after);
    if (after_norm) add_normed(team, layer.down_norm, made, count, hidden, after);
}

// The last layer's tail, the final norm and the head, for the rows whose logits are wanted.
void Decoder::logits(const Team& team, const Buffers& own) {
    const int64_t count = in_.num_logits, width = model_.hidden, heads = q_size();
    Buffers b = count <= OWN_ROWS ? own : shared_;
    b.act = shared_.act;
    b.low = shared_.low;
    b.made = shared_.made;
    for (int64_t i = share(count, team.member, team.members); i < share(count, team.member + 1, team.members); ++i) {
        const int64_t row = in_.logit_rows[i];
        memcpy(last_hidden_ + i * width, hidden_ + row * width, static_cast<size_t>(width) * sizeof(float));
        memcpy(last_attended_ + i * heads, attended_ + row * heads, static_cast<size_t>(heads) * sizeof(float));
    }
    team.sync();
    tail(team, model_.num_layers - 1, last_hidden_, last_attended_, last_who_.data(), count, b, model_.head);
    each_row(team, count, model_.head, [&](int64_t i) {
        float* normed = b.rows.x + i * width;
        ops_->rms_norm_row(last_hidden_ + i * width, model_.final_norm, width, model_.eps, normed);
        if (in_.hidden) std::copy_n(normed, width, in_.hidden + i * width);
        quantize(&model_.head, 1, b.rows, i);
    });
    if (in_.top == 0) {
        apply_linear(*ops_, model_.head, b.rows, count, team.member, team.members, in_.logits, model_.vocab, false);
        if (model_.logit_cap > 0) {
            team.sync();
            for (int64_t i = share(count, team.member, team.members); i < share(count, team.member + 1, team.members); ++i)
                ops_->soft_cap_row(in_.logits + i * model_.vocab, model_.logit_cap, model_.vocab);
        }
        return;
    }
    const int k = static_cast<int>(in_.top);
    top_of_columns(*ops_, model_.head, b.rows, count, team.member, team.members, k, model_.logit_cap,
                   top_[static_cast<size_t>(team.member)]);
    team.sync();
    for (int64_t i = share(count, team.member, team.members); i < share(count, team.member + 1, team.members); ++i)
        merge_top(top_.data(), team.members, i, k, in_.logits + i * k, in_.top_ids + i * k);
}

Decoder* make_decoder(const PjModel& model) { return new (std::nothrow) Decoder(model); }
void free_decoder(Decoder* decoder) { delete decoder; }
int run_step(Decoder& decoder, const StepInput& input) { return decoder.run(input); }

}  // namespace penjing
