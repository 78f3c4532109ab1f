#include "select.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <cstdlib>

#include "memory.h"

namespace penjing {
namespace {

constexpr float LOG2_E = 1.44269504f;
// How far towards the most that a block's keys could give (Quest takes all of it) its score lies: the best of 0.3 … 1.
constexpr float REACH = 0.4f;
constexpr int64_t BLOCKS_OF_TILE = TILE_KEYS / CHOICE_KEYS;

// x in INT8 with one scale. In eight parts, which compilers put into vectors.
void store_summary(const float* x, int64_t head_dim, int8_t* to, float* scale) {
    float part[8] = {};
    for (int64_t d = 0; d < head_dim; ++d) part[d % 8] = std::max(part[d % 8], std::fabs(x[d]));
    const float peak = *std::max_element(part, part + 8);
    const float divisor = peak / 127.0f == 0.0f ? 1.0f : peak / 127.0f;
    for (int64_t d = 0; d < head_dim; ++d)
        to[d] = static_cast<int8_t>(std::max(-127l, std::min(std::lrintf(x[d] / divisor), 127l)));  // NaN: −127
    *scale = divisor;
}

// Least and largest value of each dimension of some keys. Pointers do not overlap, so that loops become vectors.
template <typename T>
void range_of(const T* key, const float* scale, int64_t keys, int64_t head_dim, float* __restrict low,
              float* __restrict high) {
    std::fill_n(low, head_dim, INFINITY);
    std::fill_n(high, head_dim, -INFINITY);
    for (int64_t i = 0; i < keys; ++i) {
        const T* __restrict from = key + i * head_dim;
        const float by = scale ? scale[i] : 1.0f;
        for (int64_t d = 0; d < head_dim; ++d) {
            const float x = static_cast<float>(from[d]) * by;
            low[d] = x < low[d] ? x : low[d];
            high[d] = x > high[d] ? x : high[d];
        }
    }
}

// The same of turned pages; `key` is the place of the first group.
template <typename T>
void range_of_turned(const T* key, const float* scale, int64_t keys, int64_t head_dim, float* low, float* high) {
    for (int64_t d = 0; d < head_dim; ++d) {
        float least = INFINITY, most = -INFINITY;
        for (int64_t i = 0; i < keys; ++i) {
            const float x = static_cast<float>(key[turned_place<T>(i, d, head_dim)]) * (scale ? scale[i] : 1.0f);
            least = x < least ? x : least;
            most = x > most ? x : most;
        }
        low[d] = least;
        high[d] = most;
    }
}

// `row` is the first of the block's keys; `low` and `high` are room for (head_dim), `wide` for the keys.
void summarize(const Ops& ops, const PjPages& pages, int64_t row, int64_t keys, int64_t entry, float* low, float* high,
               float* wide) {
    const int64_t head_dim = pages.head_dim, at = row * head_dim;
    const auto range = [&](const auto* key, const float* scale) {
        if (pages.turned) range_of_turned(key, scale, keys, head_dim, low, high);
        else range_of(key, scale, keys, head_dim, low, high);
    };
    if (pages.k_scale) {
        range(static_cast<const int8_t*>(pages.k) + at, pages.k_scale + row);
    } else if (pages.dtype != PJ_F32) {
        ops.widen_row(static_cast<const uint16_t*>(pages.k) + at, pages.dtype, keys * head_dim, wide);
        range(static_cast<const float*>(wide), nullptr);
    } else {
        range(static_cast<const float*>(pages.k) + at, nullptr);
    }
    for (int64_t d = 0; d < head_dim; ++d) {
        const float middle = (low[d] + high[d]) * 0.5f;
        high[d] = (high[d] - low[d]) * 0.5f;
        low[d] = middle;
    }
    store_summary(low, head_dim, pages.summary + entry * 2 * head_dim, pages.summary_scale + entry * 2);
    store_summary(high, head_dim, pages.summary + (entry * 2 + 1) * head_dim, pages.summary_scale + entry * 2 + 1);
}

// Summaries are fetched so many blocks before they are read.
constexpr int64_t AHEAD = 2 * SCORED_BLOCKS;

struct Working {
    int16_t* q;              // (heads of a group, 2, head_dim in whole words): the query and its absolute values
    float* q_scale;          // (heads of a group)
    const int8_t** summary;  // (blocks + AHEAD) that are scored
    float* score;            // (heads of a group, most blocks)
    float* value;            // (most blocks)
    uint8_t* marked;         // (blocks of a row, to the end of its last tile) that it reads
};
Working carve(float* scratch, const SelectionPlan& plan, size_t* floats) {
    Carver carver(scratch);
    const size_t group = static_cast<size_t>(plan.shape().num_heads / plan.shape().num_kv_heads);
    const size_t blocks = static_cast<size_t>(plan.most_blocks()), padded = static_cast<size_t>(plan.shape().head_dim + 15);
    Working w{};
    w.q = carver.take<int16_t>(group * 2 * padded);
    w.q_scale = carver.take<float>(group);
    w.summary = carver.take<const int8_t*>(blocks + AHEAD);
    w.score = carver.take<float>(group * blocks);
    w.value = carver.take<float>(blocks);
    w.marked = carver.take<uint8_t>(blocks + static_cast<size_t>(plan.selection().sink + plan.selection().window) + 4);
    if (floats) *floats = carver.used() / sizeof(float);
    return w;
}

// The queries of one row that share keys, in 16 bits; a kernel sums so many products exactly.
void take_queries(const Ops& ops, const float* q, float factor, int64_t group, int64_t head_dim, const Working& w) {
    const int64_t padded = (head_dim + 3) / 4 * 4;
    for (int64_t head = 0; head < group; ++head) {
        int16_t* to = w.q + head * 2 * padded;
        ops.quantize_query(q + head * head_dim, factor, static_cast<int>(head_dim), to, w.q_scale + head);
        for (int64_t d = 0; d < padded; ++d) to[padded + d] = static_cast<int16_t>(std::abs(to[d]));
    }
}

// Scores of `count` blocks whose summaries lie at `entry`, for each head of a group.
void score(const Ops& ops, const SelectionPlan& plan, const PjPages& pages, int64_t head, const int64_t* entry,
           int64_t count, const Working& w) {
    const int64_t head_dim = pages.head_dim, group = plan.shape().num_heads / plan.shape().num_kv_heads;
    const int64_t to_head = head * (pages.block_size / plan.selection().block);
    for (int64_t i = 0; i < count; ++i) w.summary[i] = pages.summary + (entry[i] + to_head) * 2 * head_dim;
    std::fill_n(w.summary + count, AHEAD, w.summary[count - 1]);
    for (int64_t at = 0; at < count; at += SCORED_BLOCKS) {
        const int64_t some = std::min<int64_t>(SCORED_BLOCKS, count - at);
        alignas(64) float scale[2 * SCORED_BLOCKS] = {};
        for (int64_t i = 0; i < some; ++i) {
            const float* both = pages.summary_scale + (entry[at + i] + to_head) * 2;
            scale[i] = both[0];
            scale[SCORED_BLOCKS + i] = both[1] * REACH;
        }
        ops.score_blocks(w.q, w.q_scale, static_cast<int>(group), static_cast<int>(head_dim), w.summary + at,
                         w.summary + at + AHEAD, scale, static_cast<int>(some), w.score + at, plan.most_blocks());
    }
}

// Marks the `count` largest values with 1, the others with 0; of equal ones those that come first are marked. Without a
// branch for each, since nobody can guess it.
void mark_largest(const Ops& ops, const float* __restrict value, int64_t num_values, int64_t count,
                  uint8_t* __restrict marked) {
    const float least = ops.nth_largest(value, num_values, count - 1);
    int32_t larger = 0;
    for (int64_t i = 0; i < num_values; ++i) marked[i] = value[i] > least;
    for (int64_t i = 0; i < num_values; ++i) larger += marked[i];
    int64_t equal = count - larger;  // that are still to be marked
    for (int64_t i = 0; equal > 0 && i < num_values; ++i) {
        if (value[i] == least) marked[i] = 1, --equal;
    }
}

// Bits as in AttentionTile::chosen, of blocks that are marked; a block never crosses a tile.
void write_mask(const uint8_t* marked, int64_t block, int64_t num_tiles, uint8_t* bytes) {
    const int bits = static_cast<int>(block / CHOICE_KEYS), whole = (1 << bits) - 1;
    static_assert(BLOCKS_OF_TILE == 4, "four bytes are gathered at once");
    for (int64_t tile = 0; bits == 1 && tile < num_tiles; ++tile) {
        uint32_t four;
        memcpy(&four, marked + tile * BLOCKS_OF_TILE, sizeof(four));
        bytes[tile] = static_cast<uint8_t>(four * 0x01020408u >> 24 & 15);  // byte i, which is 0 or 1, becomes bit i
    }
    for (int64_t tile = 0; bits > 1 && tile < num_tiles; ++tile) {
        int byte = 0;
        for (int bit = 0; bit < BLOCKS_OF_TILE; bit += bits) byte |= *marked++ * whole << bit;
        bytes[tile] = static_cast<uint8_t>(byte);
    }
}

}  // namespace

bool SelectionPlan::build(const PjSequences& sequences, const AttentionShape& shape, const PjSelection& selection,
                          const int64_t* slots, int64_t rows, int64_t block_size) {
    selection_ = selection;
    shape_ = shape;
    rows_ = rows;
    tiles_ = most_blocks_ = 0;
    choosing_.clear();
    completed_.clear();
    entries_.clear();
    const int64_t block = selection.block;
    if (block == 0) return true;
    if (block < CHOICE_KEYS || TILE_KEYS % block || block_size % block) return false;
    if (selection.sink < 0 || selection.window < 1 || selection.budget < selection.sink + selection.window) return false;
    for (int64_t row = 0; slots && row < rows; ++row)
        if (slots[row] >= 0 && slots[row] % block == block - 1) completed_.push_back(slots[row]);
    for (int64_t s = 0; s < sequences.num_sequences; ++s) {
        const int64_t begin = sequences.cu_query[s], end = sequences.cu_query[s + 1], context = sequences.context_len[s];
        const int64_t entries = static_cast<int64_t>(entries_.size());
        tiles_ = std::max(tiles_, (context + TILE_KEYS - 1) / TILE_KEYS);
        for (int64_t row = begin; row < end; ++row) {
            const int64_t position = context - end + row;
            if (position / block < selection.budget) continue;
            choosing_.push_back({static_cast<int32_t>(row), static_cast<int32_t>(position), entries});
            most_blocks_ = std::max(most_blocks_, position / block - selection.window + 1 - selection.sink);
        }
        if (choosing_.empty() || choosing_.back().entries != entries) continue;
        const int64_t in_page = block_size / block, blocks = choosing_.back().position / block - selection.window + 1;
        const int32_t* table = sequences.block_table + s * sequences.table_stride;
        for (int64_t i = 0; i < blocks; ++i)
            entries_.push_back(table[i / in_page] * shape.num_kv_heads * in_page + i % in_page);
    }
    return true;
}

size_t SelectionPlan::mask_bytes() const {
    return choosing_.empty() ? 0 : static_cast<size_t>(rows_ * shape_.num_kv_heads * tiles_);
}

void SelectionPlan::begin(const AttentionPlan& plan, AttentionProgress& progress) const {
    const int64_t heads = shape_.num_kv_heads;
    progress.begin(plan.units().size(), plan.items().size(), choosing_.empty() ? 0 : static_cast<size_t>(rows_ * heads));
    for (const Row& row : choosing_)
        for (int64_t head = 0; head < heads; ++head) progress.expect_choice(row.row * heads + head);
}

size_t SelectionPlan::scratch_floats() const {
    size_t floats = 0;
    if (!choosing_.empty()) carve(nullptr, *this, &floats);
    return floats;
}

void summarize_blocks(const Ops& ops, const SelectionPlan& plan, const PjPages& pages, const Team& team) {
    const int64_t heads = pages.num_kv_heads, block = plan.selection().block, head_dim = pages.head_dim;
    const int64_t total = static_cast<int64_t>(plan.completed().size()) * heads;
    std::vector<float> room(static_cast<size_t>((2 + block) * head_dim));
    float *low = room.data(), *high = low + head_dim, *wide = high + head_dim;
    for (int64_t i = share(total, team.member, team.members); i < share(total, team.member + 1, team.members); ++i) {
        const int64_t slot = plan.completed()[static_cast<size_t>(i / heads)] - (block - 1), head = i % heads;
        const int64_t page = slot / pages.block_size * heads + head, offset = slot % pages.block_size;
        const int64_t entry = page * (pages.block_size / block) + offset / block;
        summarize(ops, pages, page * pages.block_size + offset, block, entry, low, high, wide);
    }
}

void choose_blocks(const Ops& ops, const SelectionPlan& plan, const AttentionCall& call, const uint8_t* wanted,
                   std::atomic<int64_t>& next, float* scratch, uint8_t* masks) {
    const AttentionShape& shape = plan.shape();
    const PjPages& pages = call.pages;
    const PjSelection& selection = plan.selection();
    const int64_t heads = shape.num_kv_heads, group = shape.num_heads / heads, head_dim = shape.head_dim;
    const Working w = carve(scratch, plan, nullptr);
    const int64_t total = static_cast<int64_t>(plan.choosing().size()) * heads;
    for (int64_t i; (i = next.fetch_add(1)) < total;) {
        const SelectionPlan::Row& row = plan.choosing()[static_cast<size_t>(i / heads)];
        if (wanted && !wanted[row.row]) continue;
        const int64_t head = i % heads, own = row.position / selection.block;
        const int64_t first = selection.sink, last = own - selection.window + 1, count = last - first;
        const float* q = call.q + row.row * call.ldq + head * group * head_dim;
        take_queries(ops, q, call.scale * LOG2_E, group, head_dim, w);
        score(ops, plan, pages, head, plan.entries(row) + first, count, w);
        ops.join_scores(w.score, static_cast<int>(group), plan.most_blocks(), count, w.value);
        for (int64_t b = 0; b < count; ++b) w.value[b] = w.value[b] >= 0.0f ? w.value[b] : 0.0f;  // NaN has no order

        // Blocks behind the row's own stay 0, up to the end of its tile.
        std::fill_n(w.marked, own + 1 + BLOCKS_OF_TILE, uint8_t{0});
        std::fill_n(w.marked, first, uint8_t{1});
        std::fill(w.marked + last, w.marked + own + 1, uint8_t{1});
        const int64_t chosen = selection.budget - selection.sink - selection.window;
        if (chosen > 0) mark_largest(ops, w.value, count, chosen, w.marked + first);
        uint8_t* bytes = masks + (row.row * heads + head) * plan.tiles();
        const int64_t tiles = row.position / TILE_KEYS + 1;
        write_mask(w.marked, selection.block, tiles, bytes);
        memset(bytes + tiles, 0, static_cast<size_t>(plan.tiles() - tiles));
        call.progress->note_choice(row.row * heads + head, call.turn);
    }
}

}  // namespace penjing
