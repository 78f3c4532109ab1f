#include "select.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "memory.h"

namespace penjing {
namespace {

constexpr float LOG2_E = 1.44269504f;
// How far towards the most that a block's keys could give (Quest takes all of it) its score lies: the best of 0.3 … 1.
constexpr float REACH = 0.4f;
constexpr int64_t BLOCKS_OF_TILE = TILE_KEYS / CHOICE_KEYS;

// x in INT8 with one scale.
void store_summary(const float* x, int64_t head_dim, int8_t* to, float* scale) {
    float peak = 0.0f;
    for (int64_t d = 0; d < head_dim; ++d) peak = std::max(peak, std::fabs(x[d]));
    const float divisor = peak / 127.0f == 0.0f ? 1.0f : peak / 127.0f;
    for (int64_t d = 0; d < head_dim; ++d) {
        const float whole = std::nearbyint(x[d] / divisor);
        to[d] = static_cast<int8_t>(whole >= -127.0f ? std::min(whole, 127.0f) : -127.0f);  // NaN: −127
    }
    *scale = divisor;
}

// `row` is the first of the block's keys; `low` and `high` are room for (head_dim).
void summarize(const PjPages& pages, int64_t row, int64_t keys, int64_t entry, float* low, float* high) {
    const int64_t head_dim = pages.head_dim;
    for (int64_t key = 0; key < keys; ++key) {
        for (int64_t d = 0; d < head_dim; ++d) {
            const int64_t at = (row + key) * head_dim + d;
            const float x = pages.k_scale
                                ? static_cast<float>(static_cast<const int8_t*>(pages.k)[at]) * pages.k_scale[row + key]
                                : static_cast<const float*>(pages.k)[at];
            low[d] = key == 0 || x < low[d] ? x : low[d];
            high[d] = key == 0 || x > high[d] ? x : high[d];
        }
    }
    for (int64_t d = 0; d < head_dim; ++d) {
        const float middle = (low[d] + high[d]) * 0.5f;
        high[d] = (high[d] - low[d]) * 0.5f;
        low[d] = middle;
    }
    store_summary(low, head_dim, pages.summary + entry * 2 * head_dim, pages.summary_scale + entry * 2);
    store_summary(high, head_dim, pages.summary + (entry * 2 + 1) * head_dim, pages.summary_scale + entry * 2 + 1);
}

struct Working {
    float* weights;  // (heads of a group, 2, head_dim)
    float* score;    // (heads of a group, most blocks)
    float* value;    // (most blocks)
    float* order;    // the same
};
Working carve(float* scratch, const SelectionPlan& plan, size_t* floats) {
    Carver carver(scratch);
    const size_t group = static_cast<size_t>(plan.shape().num_heads / plan.shape().num_kv_heads);
    const size_t blocks = static_cast<size_t>(plan.most_blocks());
    Working w{};
    w.weights = carver.take<float>(group * 2 * static_cast<size_t>(plan.shape().head_dim));
    w.score = carver.take<float>(group * blocks);
    w.value = carver.take<float>(blocks);
    w.order = carver.take<float>(blocks);
    if (floats) *floats = carver.used() / sizeof(float);
    return w;
}

// Sets the bits of some blocks.
class Mask {
public:
    Mask(uint8_t* bytes, int64_t block) : bytes_(bytes), bits_(block / CHOICE_KEYS) {}
    void add(int64_t begin, int64_t end) {
        for (int64_t bit = begin * bits_; bit < end * bits_; ++bit)
            bytes_[bit / BLOCKS_OF_TILE] = static_cast<uint8_t>(bytes_[bit / BLOCKS_OF_TILE] | 1 << bit % BLOCKS_OF_TILE);
    }

private:
    uint8_t* bytes_;
    int64_t bits_;
};

// The `count` largest values, of equal ones those that come first.
template <typename Add>
void each_largest(const float* value, int64_t num_values, int64_t count, float* order, Add add) {
    std::copy(value, value + num_values, order);
    std::nth_element(order, order + count - 1, order + num_values, std::greater<float>());
    const float least = order[count - 1];
    int64_t equal = count - std::count_if(order, order + count, [least](float x) { return x > least; });
    for (int64_t i = 0; i < num_values; ++i) {
        if (value[i] > least) add(i);
        else if (value[i] == least && equal-- > 0) add(i);
    }
}

}  // namespace

bool SelectionPlan::build(const PjSequences& sequences, const AttentionShape& shape, const PjSelection& selection,
                          const int64_t* slots, int64_t rows, int64_t block_size) {
    selection_ = selection;
    sequences_ = sequences;
    shape_ = shape;
    rows_ = rows;
    tiles_ = most_blocks_ = 0;
    choosing_.clear();
    completed_.clear();
    const int64_t block = selection.block;
    if (block == 0) return true;
    if (block < CHOICE_KEYS || TILE_KEYS % block || block_size % block) return false;
    if (selection.sink < 0 || selection.window < 1 || selection.budget < selection.sink + selection.window) return false;
    for (int64_t row = 0; slots && row < rows; ++row)
        if (slots[row] >= 0 && slots[row] % block == block - 1) completed_.push_back(slots[row]);
    for (int64_t s = 0; s < sequences.num_sequences; ++s) {
        const int64_t begin = sequences.cu_query[s], end = sequences.cu_query[s + 1], context = sequences.context_len[s];
        tiles_ = std::max(tiles_, (context + TILE_KEYS - 1) / TILE_KEYS);
        for (int64_t row = begin; row < end; ++row) {
            const int64_t position = context - end + row;
            if (position / block < selection.budget) continue;
            choosing_.push_back({static_cast<int32_t>(row), static_cast<int32_t>(s), static_cast<int32_t>(position)});
            most_blocks_ = std::max(most_blocks_, position / block - selection.window + 1 - selection.sink);
        }
    }
    return true;
}

size_t SelectionPlan::mask_bytes() const {
    return choosing_.empty() ? 0 : static_cast<size_t>(rows_ * shape_.num_kv_heads * tiles_);
}

size_t SelectionPlan::scratch_floats() const {
    size_t floats = 0;
    if (!choosing_.empty()) carve(nullptr, *this, &floats);
    return floats;
}

void summarize_blocks(const SelectionPlan& plan, const PjPages& pages, const Team& team) {
    const int64_t heads = pages.num_kv_heads, block = plan.selection().block, head_dim = pages.head_dim;
    const int64_t total = static_cast<int64_t>(plan.completed().size()) * heads;
    std::vector<float> room(static_cast<size_t>(2 * head_dim));
    for (int64_t i = share(total, team.member, team.members); i < share(total, team.member + 1, team.members); ++i) {
        const int64_t slot = plan.completed()[static_cast<size_t>(i / heads)] - (block - 1), head = i % heads;
        const int64_t page = slot / pages.block_size * heads + head, offset = slot % pages.block_size;
        const int64_t entry = page * (pages.block_size / block) + offset / block;
        summarize(pages, page * pages.block_size + offset, block, entry, room.data(), room.data() + head_dim);
    }
}

void choose_blocks(const Ops& ops, const SelectionPlan& plan, const PjPages& pages, const float* q, int64_t ldq,
                   float scale, const uint8_t* wanted, const Team& team, float* scratch, uint8_t* masks) {
    const AttentionShape& shape = plan.shape();
    const PjSelection& selection = plan.selection();
    const int64_t heads = shape.num_kv_heads, group = shape.num_heads / heads, head_dim = shape.head_dim;
    const int64_t in_page = pages.block_size / selection.block;
    const Working w = carve(scratch, plan, nullptr);
    const float factor = scale * LOG2_E;
    const int64_t total = static_cast<int64_t>(plan.choosing().size()) * heads;
    for (int64_t i = share(total, team.member, team.members); i < share(total, team.member + 1, team.members); ++i) {
        const SelectionPlan::Row& row = plan.choosing()[static_cast<size_t>(i / heads)];
        if (wanted && !wanted[row.row]) continue;
        const int64_t head = i % heads, own = row.position / selection.block;
        const int64_t first = selection.sink, last = own - selection.window + 1, count = last - first;
        const float* from = q + row.row * ldq + head * group * head_dim;
        for (int64_t h = 0; h < group; ++h) {
            for (int64_t d = 0; d < head_dim; ++d) {
                const float x = from[h * head_dim + d] * factor;
                w.weights[2 * h * head_dim + d] = x;
                w.weights[(2 * h + 1) * head_dim + d] = std::fabs(x) * REACH;
            }
        }
        const int32_t* table = plan.sequences().block_table + row.sequence * plan.sequences().table_stride;
        for (int64_t block = first; block < last;) {
            const int64_t inside = block % in_page, some = std::min(in_page - inside, last - block);
            const int64_t entry = (table[block / in_page] * heads + head) * in_page + inside;
            ops.score_blocks(w.weights, static_cast<int>(group), static_cast<int>(head_dim),
                             pages.summary + entry * 2 * head_dim, pages.summary_scale + entry * 2,
                             static_cast<int>(some), w.score + (block - first), plan.most_blocks());
            block += some;
        }
        ops.join_scores(w.score, static_cast<int>(group), plan.most_blocks(), count, w.value);
        for (int64_t b = 0; b < count; ++b) w.value[b] = w.value[b] >= 0.0f ? w.value[b] : 0.0f;  // NaN has no order

        uint8_t* bytes = masks + (row.row * heads + head) * plan.tiles();
        memset(bytes, 0, static_cast<size_t>(plan.tiles()));
        Mask mask(bytes, selection.block);
        mask.add(0, first);
        mask.add(last, own + 1);
        const int64_t chosen = selection.budget - selection.sink - selection.window;
        if (chosen > 0) each_largest(w.value, count, chosen, w.order, [&](int64_t b) { mask.add(first + b, first + b + 1); });
    }
}

}  // namespace penjing
