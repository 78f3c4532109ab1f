#include "layers.h"

#include "attention.h"

namespace penjing {

Layers::Layers(const PjModel& model, const StepRows& step)
    : model_(model), step_(step), layers_(model.layers, model.layers + model.num_layers) {
    bool all_keys = false;
    for (const PjLayer& layer : layers_) {
        whole_gate_ = whole_gate_ && layer.num_gate_up == 1;
        norms_after_ = norms_after_ || layer.out_norm || model.token_inputs;
        all_keys = all_keys || (layer.window == 0 && !layer.taps);
        if (layer.taps) most_taps_ = std::max(most_taps_, layer.num_taps);
        else most_gates_ = std::max(most_gates_, layer.gates);
        if (layer.experts) {
            num_experts_ = std::max(num_experts_, layer.experts->num_experts);
            experts_per_row_ = std::max(experts_per_row_, layer.experts->per_row);
        }
        widest_ = std::max(widest_, layer.window);
    }
    if (all_keys) widest_ = 0;
}

Buffers Layers::carve_buffers(Carver& carver, int64_t rows) const {
    Buffers b{};
    const size_t r = static_cast<size_t>(rows);
    b.rows = carve_rows(carver, rows, input_size());
    b.rows.x = carver.take<float>(r * static_cast<size_t>(input_size()));
    b.act = carver.take<float>(r * static_cast<size_t>(act_size()));
    b.gated = carver.take<float>(step_.rank > 0 ? r * static_cast<size_t>(model_.intermediate) : 0);
    b.low = carver.take<float>(r * static_cast<size_t>(MOST_TOGETHER * step_.rank));
    b.made = carver.take<float>(norms_after_ ? r * static_cast<size_t>(model_.hidden) : 0);
    return b;
}

PjPages Layers::pages(int64_t layer) const {
    const int64_t rows = step_.in.num_blocks * step_.in.block_size * model_.num_kv_heads;
    const int64_t bytes = rows * model_.head_dim * element_bytes(step_.in.pool_dtype);
    const int64_t place = layers_[static_cast<size_t>(layer)].place;
    char* k = static_cast<char*>(step_.in.pool) + place * 2 * bytes;
    float* scale = step_.in.pool_scale ? step_.in.pool_scale + place * 2 * rows : nullptr;
    PjPages pages{k, k + bytes, scale, scale ? scale + rows : nullptr, step_.in.num_blocks, step_.in.block_size,
                  model_.num_kv_heads, model_.head_dim, nullptr, nullptr, step_.in.pool_dtype,
                  step_.in.block_size % CHOICE_KEYS == 0};
    if (chooses(layer)) {
        const int64_t halves = step_.in.choosing[layer] * rows / step_.in.selection.block * 2;
        pages.summary = step_.in.summary + halves * model_.head_dim;
        pages.summary_scale = step_.in.summary_scale + halves;
    }
    return pages;
}

// Norm, projections, head norms, rotation, keys and values into their pages; or a convolution's gated inputs. Ends with a
// barrier.
void Layers::head(const Team& team, int64_t index, int64_t row, int64_t count, const Buffers& b) const {
    const PjLayer& layer = layers_[static_cast<size_t>(index)];
    const int64_t hidden = model_.hidden;
    each_row(team, count, layer.qkv[0], [&](int64_t i) {
        enter_norm(layer.input_norm, b.rows, i, step_.hidden + (row + i) * hidden);
        quantize(layer.qkv, layer.num_qkv, b.rows, i);
    });
    float* out = step_.qkv + row * qkv_size();
    for (int i = 0; i < layer.num_qkv; ++i) {
        apply_linear(*step_.ops, layer.qkv[i], b.rows, count, team.member, team.members, out, qkv_size(), false);
        out += layer.qkv[i].n;
    }
    float *q = step_.qkv + row * qkv_size(), *k = q + q_size(), *v = k + kv_size();
    const int32_t* who = step_.rank > 0 ? step_.in.adapter + row : nullptr;
    const LowRankOut of_q{PROJ_Q, q, qkv_size(), 16};
    if (layer.taps) {
        adapt(team, index, who, count, b.rows.x, hidden, b.low, {of_q});
        sync(team, layer.out);
        gate_inputs(team, layer, row, count);
        return;
    }
    adapt(team, index, who, count, b.rows.x, hidden, b.low,
          {of_q, {PROJ_K, k, qkv_size(), 16}, {PROJ_V, v, qkv_size(), 16},
           {PROJ_HEAD_GATE, v + kv_size(), qkv_size(), 16}});
    sync(team, layer.out);
    if (layer.whole_norm) norm_heads(team, layer, row, count);
    const int64_t parts = model_.num_heads + (layer.borrows ? 0 : 2 * model_.num_kv_heads), total = count * parts;
    for (int64_t i = share(total, team.member, team.members); i < share(total, team.member + 1, team.members); ++i)
        store_rotated(index, row + i / parts, i % parts);
    sync(team, layer.out);
}

// Norms that span all heads of a token's queries or keys. Ends with a barrier.
void Layers::norm_heads(const Team& team, const PjLayer& layer, int64_t row, int64_t count) const {
    for (int64_t i = share(count, team.member, team.members); i < share(count, team.member + 1, team.members); ++i) {
        float *q = step_.qkv + (row + i) * qkv_size(), *k = q + q_size();
        step_.ops->rms_norm_row(q, layer.q_norm, q_size(), model_.eps, q);
        if (!layer.borrows) step_.ops->rms_norm_row(k, layer.k_norm, kv_size(), model_.eps, k);
    }
    sync(team, layer.out);
}

// One head of one token: parts are the query heads, then keys, then values.
void Layers::store_rotated(int64_t index, int64_t row, int64_t part) const {
    const PjLayer& layer = layers_[static_cast<size_t>(index)];
    const int64_t head_dim = model_.head_dim;
    const bool is_value = part >= model_.num_heads + model_.num_kv_heads;
    float* x = step_.qkv + row * qkv_size() + part * head_dim;
    const bool is_query = part < model_.num_heads;
    if (!is_value) {
        const float* norm = is_query ? layer.q_norm : layer.k_norm;
        const bool of_head = norm && !layer.whole_norm;
        if (of_head && !layer.norm_rotated) step_.ops->rms_norm_row(x, norm, head_dim, model_.eps, x);
        const int64_t angle = (layer.rotary * model_.num_positions + step_.in.positions[row]) * (head_dim / 2);
        step_.ops->rotate_head(x, model_.cos + angle, model_.sin + angle, head_dim);
        if (of_head && layer.norm_rotated) step_.ops->rms_norm_row(x, norm, head_dim, model_.eps, x);
    }
    if (is_value && layer.v_norm) step_.ops->rms_norm_row(x, layer.v_norm, head_dim, model_.eps, x);
    const int64_t slot = step_.in.slots[row];
    if (is_query || slot < 0) return;
    const int64_t kv_head = (part - model_.num_heads) % model_.num_kv_heads;
    store_key_value(*step_.ops, pages(index), slot, kv_head, is_value ? nullptr : x, is_value ? x : nullptr);
}

void Layers::gate_heads(const Team& team, int64_t index, const uint8_t* wanted, float* attended) const {
    const PjLayer& layer = layers_[static_cast<size_t>(index)];
    const int64_t rows = step_.in.rows, each = q_size() / layer.gates;  // channels of a gate
    for (int64_t row = share(rows, team.member, team.members); row < share(rows, team.member + 1, team.members); ++row) {
        if (wanted && !wanted[row]) continue;
        float* gate = step_.qkv + row * qkv_size() + q_size() + 2 * kv_size();
        float* x = attended + row * attended_size();
        step_.ops->activate_row(gate, layer.gate_function, layer.curve, layer.gates, gate);
        for (int64_t i = 0; i < layer.gates; ++i)
            for (int64_t j = i * each; j < (i + 1) * each; ++j) x[j] *= gate[i];
    }
    sync(team, layer.out);
}

// What the adapters of some rows add to projections of one input, which the team has computed or is computing. Ends
// without a barrier.
void Layers::adapt(const Team& team, int64_t layer, const int32_t* who, int64_t count, const float* x, int64_t ldx,
                    float* low, std::initializer_list<LowRankOut> outs) const {
    if (step_.rank == 0) return;
    const LowRankCall call{*step_.ops, step_.in.adapters, who, layer, count, x, ldx, low, step_.rank, outs.begin(),
                           static_cast<int>(outs.size())};
    low_rank(call, team);
}

// hidden += norm(made), row by row. Ends with a barrier.
void Layers::add_normed(const Team& team, const float* norm, float* made, int64_t count, float* hidden,
                         const PjLinear& after) const {
    const int64_t width = model_.hidden;
    for (int64_t i = share(count, team.member, team.members); i < share(count, team.member + 1, team.members); ++i) {
        float *x = made + i * width, *to = hidden + i * width;
        step_.ops->rms_norm_row(x, norm, width, model_.eps, x);
        for (int64_t j = 0; j < width; ++j) to[j] += x[j];
    }
    sync(team, after);
}

// Output projection and MLP, each added to `hidden`; the order changes nothing where both are of one input. Ends with a
// barrier.
void Layers::tail(const Team& team, int64_t index, float* hidden, const float* attended, const int32_t* who,
                   const int32_t* tokens, int64_t count, const Buffers& b, const PjLinear& after) const {
    const PjLayer& layer = layers_[static_cast<size_t>(index)];
    const auto inner = [&](const PjLinear& next) {
        if (layer.experts) experts(team, index, hidden, count, b.experts, next);
        else mlp(team, index, hidden, who, count, b, next);
    };
    if (layer.parallel) {
        inner(layer.out);
        project(team, index, hidden, attended, who, count, b, after);
    } else {
        project(team, index, hidden, attended, who, count, b, layer.gate_up[0]);
        inner(after);
    }
    if (model_.token_inputs) take_tokens(team, index, hidden, tokens, count, b, after);
    if (layer.scale == 1) return;
    const int64_t width = model_.hidden;
    const int64_t begin = share(count, team.member, team.members), end = share(count, team.member + 1, team.members);
    for (int64_t i = begin * width; i < end * width; ++i) hidden[i] *= layer.scale;
    sync(team, after);
}

// What attention gives, added to `hidden`. Ends with a barrier.
void Layers::project(const Team& team, int64_t index, float* hidden, const float* attended, const int32_t* who,
                      int64_t count, const Buffers& b, const PjLinear& after) const {
    const PjLayer& layer = layers_[static_cast<size_t>(index)];
    const int64_t width = model_.hidden, inputs = layer.out.k;
    const float* norm = layer.attended_norm;
    const float* read = norm ? b.rows.x : attended;
    const int64_t stride = norm ? inputs : attended_size();
    each_row(team, count, layer.out, [&](int64_t i) {
        if (norm)
            step_.ops->rms_norm_row(attended + i * attended_size(), norm, inputs, model_.eps, b.rows.x + i * inputs);
        enter(layer.out, b.rows, i, read + i * stride);
    });
    const bool after_norm = layer.out_norm != nullptr;
    float* made = after_norm ? b.made : hidden;
    apply_linear(*step_.ops, layer.out, b.rows, count, team.member, team.members, made, width, !after_norm);
    adapt(team, index, who, count, read, stride, b.low, {{PROJ_OUT, made, width, 16}});
    sync(team, after);
    if (after_norm) add_normed(team, layer.out_norm, made, count, hidden, after);
}

// Norm and MLP, added to `hidden`. Ends with a barrier.
void Layers::mlp(const Team& team, int64_t index, float* hidden, const int32_t* who, int64_t count, const Buffers& b,
                  const PjLinear& after) const {
    const PjLayer& layer = layers_[static_cast<size_t>(index)];
    const int64_t width = model_.hidden, inner = layer.down.k;
    const bool after_norm = layer.down_norm != nullptr;
    float* made = after_norm ? b.made : hidden;
    each_row(team, count, layer.gate_up[0], [&](int64_t i) {
        enter_norm(layer.post_norm, b.rows, i, hidden + i * width);
        quantize(layer.gate_up, layer.num_gate_up, b.rows, i);
    });
    const bool pair = layer.gated != 0, whole = layer.num_gate_up == 1, opened = pair && whole && step_.rank > 0;
    PjLinear first = layer.gate_up[0];
    if (opened) {  // adapters add to gate and up: the pair's columns as they are packed, and the product afterwards
        first.n = padded_columns(first);
        first.swiglu = 0;
    }
    const int64_t stride = opened ? first.n : whole ? inner : 2 * inner;
    apply_linear(*step_.ops, first, b.rows, count, team.member, team.members, b.act, stride, false);
    if (!whole)
        apply_linear(*step_.ops, layer.gate_up[1], b.rows, count, team.member, team.members, b.act + inner, stride,
                     false);
    const LowRankOut gate{PROJ_GATE, b.act, stride, opened ? 32 : 16};
    const LowRankOut up{PROJ_UP, b.act + (opened ? 16 : inner), stride, opened ? 32 : 16};
    if (pair) adapt(team, index, who, count, b.rows.x, width, b.low, {gate, up});
    else adapt(team, index, who, count, b.rows.x, width, b.low, {gate});
    sync(team, layer.down);
    const auto product = layer.activation == SQUARED ? step_.ops->relu2_glu_row
                         : layer.activation          ? step_.ops->geglu_row
                                                     : step_.ops->swiglu_row;
    each_row(team, count, layer.down, [&](int64_t i) {
        const float* act = b.act + i * stride;
        if (!pair || !whole || opened) {
            float* to = (step_.rank > 0 ? b.gated : b.rows.x) + i * inner;
            if (!pair) step_.ops->activate_row(act, layer.activation, layer.curve, inner, to);
            else if (opened) open_gated_row(product, act, inner, to);
            else product(act, act + inner, inner, to);
            act = to;
        }
        if (layer.inner_norm) {  // adapters read what it gives
            float* to = (step_.rank > 0 ? b.gated : b.rows.x) + i * inner;
            step_.ops->rms_norm_row(act, layer.inner_norm, inner, model_.eps, to);
            act = to;
        }
        if (layer.hadamard > 0) {
            step_.ops->hadamard_row(act, inner, layer.hadamard, b.rows.x + i * inner);
            act = b.rows.x + i * inner;
        }
        enter(layer.down, b.rows, i, act);
    });
    apply_linear(*step_.ops, layer.down, b.rows, count, team.member, team.members, made, width, !after_norm);
    adapt(team, index, who, count, b.gated, inner, b.low, {{PROJ_DOWN, made, width, 16}});
    sync(team, after);
    if (after_norm) add_normed(team, layer.down_norm, made, count, hidden, after);
}

// What the layer takes of each row's token, behind a gate of the row, added to `hidden`. Ends with a barrier.
void Layers::take_tokens(const Team& team, int64_t index, float* hidden, const int32_t* tokens, int64_t count,
                          const Buffers& b, const PjLinear& after) const {
    const PjLayer& layer = layers_[static_cast<size_t>(index)];
    const int64_t width = model_.hidden, inner = model_.token_inputs;
    const int64_t bytes = inner * (model_.token_dtype == PJ_F32 ? 4 : 2);
    each_row(team, count, layer.token_gate, [&](int64_t i) {
        std::copy_n(hidden + i * width, width, b.rows.x + i * width);
        quantize(&layer.token_gate, 1, b.rows, i);
    });
    apply_linear(*step_.ops, layer.token_gate, b.rows, count, team.member, team.members, b.act, inner, false);
    sync(team, layer.token_out);
    each_row(team, count, layer.token_out, [&](int64_t i) {
        float* to = b.rows.x + i * inner;
        const int64_t row = std::min<int64_t>(tokens[i], model_.vocab - 1) * model_.num_layers + index;
        step_.ops->widen_row(static_cast<const char*>(model_.token_table) + row * bytes, model_.token_dtype, inner, to);
        step_.ops->geglu_row(b.act + i * inner, to, inner, to);
        enter(layer.token_out, b.rows, i, to);
    });
    apply_linear(*step_.ops, layer.token_out, b.rows, count, team.member, team.members, b.made, width, false);
    sync(team, after);
    add_normed(team, layer.token_norm, b.made, count, hidden, after);
}

}  // namespace penjing
