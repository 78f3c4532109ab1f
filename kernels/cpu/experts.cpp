// Experts in place of an MLP: rows are sorted by expert, and each expert's layers are computed on its own rows.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "layers.h"

namespace penjing {
namespace {

// Rows that are sent to experts together: their copies, inner rows and outputs are a few tens of megabytes.
constexpr int64_t ROWS_TOGETHER = 256;

// Chooses the largest of a row's scores and the largest of the others, equals by index, each weighed by a softmax of those
// that lie less than `margin` below it, as a share of what is larger.
void mix_two(const float* score, int64_t num, float margin, float factor, int32_t* chosen, float* weight) {
    for (int k = 0; k < 2; ++k) {
        int64_t best = k == 1 && chosen[0] == 0 ? 1 : 0;
        const auto left = [&](int64_t i) { return k == 0 || i != chosen[0]; };
        for (int64_t i = 0; i < num; ++i)
            if (left(i) && score[i] > score[best]) best = i;
        float total = 0;
        for (int64_t i = 0; i < num; ++i) {
            const float below = (score[best] - score[i]) / std::max(std::fabs(score[i]), score[best]);
            if (left(i) && !(below > margin)) total += std::exp(score[i] - score[best]);
        }
        chosen[k] = static_cast<int32_t>(best);
        weight[k] = factor / total;
    }
}

// Turns a row's outputs of the router into shares of one, or into their logistic function.
void score_experts(const PjExperts& experts, int64_t num, float* score) {
    if (experts.logistic) {
        for (int64_t i = 0; i < num; ++i) score[i] = 1 / (1 + std::exp(-score[i]));
        return;
    }
    const float peak = *std::max_element(score, score + num);
    float total = 0;
    for (int64_t i = 0; i < num; ++i) total += score[i] = std::exp(score[i] - peak);
    for (int64_t i = 0; i < num; ++i) score[i] /= total;
}

// Chooses the experts with a row's largest scores, with `bias` if there is one, equals by index, and weighs them by their
// scores.
void choose_experts(const PjExperts& experts, float* score, int32_t* chosen, float* weight) {
    const int64_t num = experts.num_experts - experts.shared, count = experts.per_row - experts.shared;
    if (experts.margin >= 0) return mix_two(score, num, experts.margin, experts.factor, chosen, weight);
    if (!experts.bias_of_logits) score_experts(experts, num, score);
    // Each is the first behind the one before it, by standing and then by index; what is no number stands last.
    const auto standing = [&](int64_t i) {
        const float found = experts.bias ? score[i] + experts.bias[i] : score[i];
        return std::isnan(found) ? -INFINITY : found;
    };
    float last = INFINITY;
    for (int64_t k = 0, before = -1; k < count; ++k) {
        int64_t best = -1;
        for (int64_t i = 0; i < num; ++i) {
            const float own = standing(i);
            const bool left = own < last || (own == last && i > before);
            if (left && (best < 0 || own > standing(best))) best = i;
        }
        chosen[k] = static_cast<int32_t>(best);
        last = standing(best);
        before = best;
    }
    if (experts.bias_of_logits) score_experts(experts, num, score);
    float total = 1e-20f;
    for (int64_t k = 0; k < count; ++k) total += score[chosen[k]];
    const float factor = experts.normed ? experts.factor / total : experts.factor;
    for (int64_t k = 0; k < count; ++k) weight[k] = score[chosen[k]] * factor;
    if (experts.shared) {
        chosen[count] = static_cast<int32_t>(num);
        weight[count] = experts.router.n > num ? 1 / (1 + std::exp(-score[num])) : 1;
    }
}

// Where each expert's rows begin, (num_experts + 1), and for each of them the place among `chosen` that it is for; the
// place of each of `chosen` among the sorted ones.
void sort_by_expert(const int32_t* chosen, int64_t count, int64_t num_experts, const ExpertRows& to) {
    std::fill(to.begin, to.begin + num_experts + 1, 0);
    for (int64_t i = 0; i < count; ++i) ++to.begin[chosen[i] + 1];
    for (int64_t e = 0; e < num_experts; ++e) to.begin[e + 1] += to.begin[e];
    for (int64_t i = 0; i < count; ++i) {
        const int32_t at = to.begin[chosen[i]]++;
        to.order[at] = static_cast<int32_t>(i);
        to.place[i] = at;
    }
    for (int64_t e = num_experts; e > 0; --e) to.begin[e] = to.begin[e - 1];
    to.begin[0] = 0;
}

// Runs `prepare(i)` for the member's share of `count`, then meets the others.
template <typename Prepare>
void share_out(const Team& team, int64_t count, const PjLinear& before, Prepare prepare) {
    const int64_t end = share(count, team.member + 1, team.members);
    for (int64_t i = share(count, team.member, team.members); i < end; ++i) prepare(i);
    Layers::sync(team, before);
}

}  // namespace

int64_t Layers::expert_places(int64_t rows) const { return std::min(rows, ROWS_TOGETHER) * experts_per_row_; }

void Layers::carve_experts(Carver& carver, int64_t rows, bool of_team, ExpertRows& to) const {
    const int64_t together = std::min(rows, ROWS_TOGETHER), places = expert_places(rows);
    const size_t p = static_cast<size_t>(places), r = static_cast<size_t>(together);
    to.order = carver.take<int32_t>(p);
    to.place = carver.take<int32_t>(p);
    to.begin = carver.take<int32_t>(static_cast<size_t>(num_experts_ + 1));
    if (!of_team) return;
    to.normed = carver.take<float>(r * static_cast<size_t>(model_.hidden));
    to.score = carver.take<float>(r * static_cast<size_t>(num_experts_));
    to.chosen = carver.take<int32_t>(p);
    to.weight = carver.take<float>(p);
    to.rows = carve_rows(carver, places, input_size());
    to.rows.x = carver.take<float>(p * static_cast<size_t>(input_size()));
    to.act = carver.take<float>(p * static_cast<size_t>(2 * model_.intermediate));
    to.made = carver.take<float>(p * static_cast<size_t>(model_.hidden));
}

// Norm and experts, added to `hidden`. Ends with a barrier.
void Layers::experts(const Team& team, int64_t index, float* hidden, int64_t count, const ExpertRows& to,
                     const PjLinear& after) const {
    for (int64_t row = 0; row < count; row += ROWS_TOGETHER) {
        const int64_t rows = std::min(ROWS_TOGETHER, count - row);
        experts_together(team, index, hidden + row * model_.hidden, rows, to, after);
    }
}

void Layers::experts_together(const Team& team, int64_t index, float* hidden, int64_t count, const ExpertRows& to,
                              const PjLinear& after) const {
    const PjLayer& layer = layers_[static_cast<size_t>(index)];
    const PjExperts& experts = *layer.experts;
    const Ops& ops = *step_.ops;
    const int64_t width = model_.hidden, per_row = experts.per_row, places = count * per_row;
    const int num = layer.num_gate_up;
    // The last expert may be wider. Its rows are the last ones, so that they begin behind those of the others.
    const int64_t stride = num * experts.down[experts.num_experts - 1].k;
    Rows normed{};
    normed.x = to.normed;
    share_out(team, count, experts.router, [&](int64_t i) { enter_norm(layer.post_norm, normed, i, hidden + i * width); });
    apply_linear(ops, experts.router, normed, count, team.member, team.members, to.score, experts.router.n, false);
    sync(team, layer.gate_up[0]);
    share_out(team, count, layer.gate_up[0], [&](int64_t i) {
        choose_experts(experts, to.score + i * experts.router.n, to.chosen + i * per_row, to.weight + i * per_row);
    });
    sort_by_expert(to.chosen, places, experts.num_experts, to);
    const auto expert_of = [&](int64_t place) { return to.chosen[to.order[place]]; };
    share_out(team, places, layer.gate_up[0], [&](int64_t place) {
        const PjLinear* first = experts.gate_up + expert_of(place) * num;
        memcpy(to.rows.x + place * width, to.normed + to.order[place] / per_row * width,
               static_cast<size_t>(width) * sizeof(float));
        quantize(first, num, to.rows, place);
    });
    const auto product = [&](const PjLinear& linear, int64_t expert, float* out, int64_t ldo) {
        const int64_t begin = to.begin[expert], some = to.begin[expert + 1] - begin;
        if (some == 0) return;
        apply_linear(ops, linear, rows_from(to.rows, linear, begin), some, team.member, team.members, out + begin * ldo,
                     ldo, false);
    };
    for (int64_t expert = 0; expert < experts.num_experts; ++expert)
        for (int i = 0; i < num; ++i)
            product(experts.gate_up[expert * num + i], expert, to.act + i * experts.down[expert].k, stride);
    sync(team, layer.down);
    const auto gated = layer.activation == CLAMPED ? ops.clamped_row : layer.activation ? ops.geglu_row : ops.swiglu_row;
    share_out(team, places, layer.down, [&](int64_t place) {
        const PjLinear& down = experts.down[expert_of(place)];
        const int64_t inner = down.k;
        const float* act = to.act + place * stride;
        if (num == 2) {
            gated(act, act + inner, inner, to.rows.x + place * inner);
            act = to.rows.x + place * inner;
        }
        enter(down, to.rows, place, act);
    });
    for (int64_t expert = 0; expert < experts.num_experts; ++expert)
        product(experts.down[expert], expert, to.made, width);
    sync(team, after);
    share_out(team, count, after, [&](int64_t i) {
        const bool apart = layer.down_norm || experts.sum_norm;
        float *at = hidden + i * width, *sum = apart ? to.normed + i * width : at;
        if (apart) std::fill_n(sum, width, 0.0f);
        const int64_t normed_apart = experts.sum_norm ? experts.shared : 0;
        for (int64_t k = i * per_row; k < (i + 1) * per_row - normed_apart; ++k) {
            const float* made = to.made + to.place[k] * width;
            for (int64_t j = 0; j < width; ++j) sum[j] += to.weight[k] * made[j];
        }
        if (experts.sum_norm) {
            float* made = to.made + to.place[(i + 1) * per_row - 1] * width;
            ops.rms_norm_row(sum, experts.sum_norm, width, model_.eps, sum);
            ops.rms_norm_row(made, experts.shared_norm, width, model_.eps, made);
            for (int64_t j = 0; j < width; ++j) sum[j] += made[j];
        }
        if (!apart) return;
        if (layer.down_norm) ops.rms_norm_row(sum, layer.down_norm, width, model_.eps, sum);
        for (int64_t j = 0; j < width; ++j) at[j] += sum[j];
    });
}

}  // namespace penjing
