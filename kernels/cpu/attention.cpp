#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention_tiles.h"
#include "memory.h"

namespace penjing {
namespace {

constexpr float LOG2_E = 1.44269504f;

struct Working {
    void* q;  // floats, or 16-bit whole numbers with `q_scale`
    float* q_scale;
    float* keys;
    float* values;
    float* out;
    float* peak;
    float* total;
    int32_t* low;
    int32_t* high;
    uint8_t* chosen;
    TileRows* rows;    // two: of the tile that is computed and of the next
    uint8_t* seen[2];  // of the item that is computed and of the next, see SeenItem
    size_t floats;
};

Working carve(float* scratch, const AttentionPlan& plan) {
    const int64_t rows = plan.max_rows(), head_dim = plan.shape().head_dim;
    Carver carver(scratch);
    Working w{};
    const size_t count = static_cast<size_t>(rows * head_dim), r = static_cast<size_t>(rows);
    w.q = carver.take<float>(count);
    w.q_scale = carver.take<float>(r);
    w.keys = carver.take<float>(static_cast<size_t>(TILE_KEYS * head_dim));
    w.values = carver.take<float>(static_cast<size_t>(TILE_KEYS * head_dim));
    w.out = carver.take<float>(count);
    w.peak = carver.take<float>(r);
    w.total = carver.take<float>(r);
    w.low = carver.take<int32_t>(r);
    w.high = carver.take<int32_t>(r);
    w.chosen = carver.take<uint8_t>(r);
    w.rows = carver.take<TileRows>(2);
    for (uint8_t*& seen : w.seen) seen = carver.take<uint8_t>(static_cast<size_t>(plan.max_tiles()));
    w.floats = carver.used() / sizeof(float);
    return w;
}

void clear_state(float* peak, float* total, float* out, int64_t rows, int64_t head_dim) {
    std::fill(peak, peak + rows, -INFINITY);
    std::fill(total, total + rows, 0.0f);
    std::fill(out, out + rows * head_dim, 0.0f);
}

// A tile's state among a unit's partial ones: peaks, totals, outputs.
struct Partial {
    float* peak;
    float* total;
    float* out;
};
Partial partial_of(float* base, int64_t tile, int64_t rows, int64_t head_dim) {
    float* peak = base + tile * rows * (head_dim + 2);
    return {peak, peak + rows, peak + 2 * rows};
}

int64_t query_bytes(const PjPages& pages, bool tiles) {
    return static_cast<int64_t>(pages.k_scale || tiles ? sizeof(int16_t) : sizeof(float));
}

bool goes_by_tiles(const Ops& ops, const AttentionPlan& plan, const AttentionCall& call, const AttentionPlan::Item& item) {
    const AttentionShape& shape = plan.shape();
    return ops.by_tiles(call.pages.dtype, shape.head_dim, item.num_tokens * (shape.num_heads / shape.num_kv_heads));
}

// The item's queries, times scale × log2(e); the heads of a group lie side by side.
void take_queries(const Ops& ops, const AttentionPlan& plan, const AttentionCall& call, const AttentionPlan::Item& item,
                  const Working& w) {
    const int64_t head_dim = plan.shape().head_dim, group = plan.shape().num_heads / plan.shape().num_kv_heads;
    const float factor = call.scale * LOG2_E;
    const bool tiles = goes_by_tiles(ops, plan, call, item);
    for (int64_t token = 0; token < item.num_tokens; ++token) {
        const float* from = call.q + (item.first_row + token) * call.ldq + item.kv_head * group * head_dim;
        for (int64_t i = 0; i < group * head_dim; i += 16) __builtin_prefetch(from + 4 * call.ldq + i);
        if (!call.pages.k_scale) {
            ops.take_heads(from, factor, group, head_dim, call.pages.dtype, tiles,
                           static_cast<char*>(w.q) + token * group * head_dim * query_bytes(call.pages, tiles));
            continue;
        }
        for (int64_t row = token * group; row < (token + 1) * group; ++row, from += head_dim)
            ops.quantize_query(from, factor, static_cast<int>(head_dim), static_cast<int16_t*>(w.q) + row * head_dim,
                               w.q_scale + row);
    }
}

// Attends the item's rows to one tile, into the given running state. While keys are read `ahead_k` is fetched, while
// values are summed `ahead_v` (null: nothing).
void attend(const Ops& ops, const AttentionPlan& plan, const AttentionCall& call, const AttentionPlan::Item& item,
            int64_t tile, const Working& w, const TileRows& rows, const Sight& sight, const void* const* ahead_k,
            const void* const* ahead_v, const Partial& state) {
    const AttentionShape& shape = plan.shape();
    const int64_t group = shape.num_heads / shape.num_kv_heads, start = tile * TILE_KEYS;
    for (int64_t token = sight.first; token < sight.last; ++token) {
        for (int64_t head = 0; head < group; ++head) {
            w.low[token * group + head] = static_cast<int32_t>(low_of(call, item, token, start));
            w.high[token * group + head] = static_cast<int32_t>(high_of(item, token, start));
            w.chosen[token * group + head] = static_cast<uint8_t>(chosen_of(plan, call, item, token, tile));
        }
    }
    const bool int8 = call.pages.k_scale != nullptr, tiles = goes_by_tiles(ops, plan, call, item);
    const int head_dim = static_cast<int>(shape.head_dim);
    TileKeys keys = ops.turn_keys({rows.k, ahead_k, w.keys, static_cast<int>(sight.key_end), int8 ? head_dim / 4 : head_dim,
                                   static_cast<int>((sight.last - sight.first) * group), sight.chosen,
                                   call.pages.dtype, call.pages.turned != 0, tiles});
    TileValues values{w.values, static_cast<int>(sight.key_begin), static_cast<int>(sight.key_end), sight.chosen, false};
    for (int64_t first = sight.first; first < sight.last; ahead_v = nullptr, keys.ahead = nullptr) {
        // Tokens that see none of the tile stay as they are; they lie between others where rows choose.
        int64_t last = first;
        while (last < sight.last && w.chosen[last * group] != 0) ++last;
        if (last == first) {
            ++first;
            continue;
        }
        const int64_t row = first * group;
        const char* q = static_cast<const char*>(w.q) + row * head_dim * query_bytes(call.pages, tiles);
        ops.attend_tile({q, w.q_scale + row, &keys, int8 ? rows.k_scale : nullptr, rows.v_scale, rows.v, &values, ahead_v,
                         w.low + row, w.high + row, call.masks ? w.chosen + row : nullptr, state.peak + row,
                         state.total + row, state.out + row * head_dim, static_cast<int>((last - first) * group), head_dim,
                         call.pages.dtype, tiles, call.cap * LOG2_E});
        first = last;
    }
}

void finish(const Ops& ops, const AttentionPlan& plan, const AttentionCall& call, const AttentionPlan::Item& item,
            const Partial& state) {
    const AttentionShape& shape = plan.shape();
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    for (int64_t row = 0; row < item.num_tokens * group; ++row) {
        const int64_t head = item.kv_head * group + row % group;
        float* to = call.out + (item.first_row + row / group) * call.ldo + head * shape.head_dim;
        const float sink = call.sinks ? std::exp2(call.sinks[head] * LOG2_E - state.peak[row]) : 0.0f;
        ops.scale_row(state.out + row * shape.head_dim, 1.0f / (state.total[row] + sink), shape.head_dim, to);
    }
}

// The states that an item's tiles are merged into: one of all, or, for a unit in pieces, one a tile.
class States {
public:
    States(const AttentionPlan& plan, const AttentionCall& call, const AttentionPlan::Item& item, const Working& w)
        : unit_(plan.units()[static_cast<size_t>(item.unit)]), item_(item), base_(call.partial + unit_.partial),
          head_dim_(plan.shape().head_dim),
          rows_(item.num_tokens * (plan.shape().num_heads / plan.shape().num_kv_heads)),
          first_((item.position + item.num_tokens - 1) / TILE_KEYS + 1 - unit_.tiles),
          whole_(unit_.pieces == 1 ? Partial{w.peak, w.total, w.out} : partial(first_ + unit_.tiles)) {
        if (unit_.pieces == 1) clear(whole_);
        // Of a tile that nobody sees the peaks alone are read.
        for (int64_t tile = item.tile_begin; unit_.pieces > 1 && tile < item.tile_end; ++tile)
            std::fill_n(partial(tile).peak, rows_, -INFINITY);
    }
    // Where a tile goes that is computed now.
    Partial take(int64_t tile) const {
        if (unit_.pieces == 1) return whole_;
        const Partial state = partial(tile);
        clear(state);
        return state;
    }
    // Merges this piece and others into the whole as far as all before them are there. True when all of them are.
    bool join(const Ops& ops, const AttentionCall& call) const {
        if (unit_.pieces == 1) return true;
        const auto merge = [&](int64_t piece) {
            if (piece == 0) clear(whole_);
            const int64_t begin = unit_.tiles * piece / unit_.pieces, end = unit_.tiles * (piece + 1) / unit_.pieces;
            for (int64_t tile = first_ + begin; tile < first_ + end; ++tile) {
                const Partial state = partial(tile);
                ops.merge_tile(state.peak, state.total, state.out, static_cast<int>(rows_), static_cast<int>(head_dim_),
                               whole_.peak, whole_.total, whole_.out);
            }
        };
        return call.progress->note_piece(item_.piece, item_.unit, unit_.first, unit_.pieces, call.turn, merge);
    }
    const Partial& whole() const { return whole_; }

private:
    Partial partial(int64_t tile) const { return partial_of(base_, tile - first_, rows_, head_dim_); }
    void clear(const Partial& state) const { clear_state(state.peak, state.total, state.out, rows_, head_dim_); }

    const AttentionPlan::Unit& unit_;
    const AttentionPlan::Item& item_;
    float* base_;
    int64_t head_dim_, rows_, first_;  // the unit's first tile
    Partial whole_;
};

// Tiles in order, with this one's values and the next one's keys fetched meanwhile.
void run_tiles(const Ops& ops, const AttentionPlan& plan, const AttentionCall& call, const SeenItem& seen,
               const SeenItem& following, const States& states, const Working& w) {
    const AttentionPlan::Item& item = *seen.item;
    Sight sight{}, next_sight{};
    int64_t side = 0;
    // The first tile from `tile` on that a row of `of` sees.
    const auto find = [&](const SeenItem& of, int64_t tile, TileRows& found, Sight& sees) {
        while (tile < of.item->tile_end && !locate(plan, call, of, tile, found, sees)) ++tile;
        return tile;
    };
    for (int64_t tile = find(seen, item.tile_begin, w.rows[side], sight); tile < item.tile_end; side ^= 1) {
        TileRows &rows = w.rows[side], &next_rows = w.rows[side ^ 1];
        const int64_t next = find(seen, tile + 1, next_rows, next_sight);
        bool more = next < item.tile_end;
        if (!more && following.item)
            more = find(following, following.item->tile_begin, next_rows, next_sight) < following.item->tile_end;
        attend(ops, plan, call, item, tile, w, rows, sight, rows.v, more ? next_rows.k : nullptr, states.take(tile));
        tile = next;
        sight = next_sight;
    }
}

// Tiles of which anything was chosen, in order; `fetcher` knows what comes later.
void run_chosen_tiles(const Ops& ops, const AttentionPlan& plan, const AttentionCall& call, const SeenItem& seen,
                      Fetcher& fetcher, const States& states, const Working& w) {
    const AttentionPlan::Item& item = *seen.item;
    TileRows &rows = w.rows[0], &ahead = w.rows[1];
    Sight sight{};
    for (int64_t tile = item.tile_begin; tile < item.tile_end; ++tile) {
        if (!locate(plan, call, seen, tile, rows, sight)) continue;
        fetcher.next(__builtin_popcount(static_cast<unsigned>(sight.chosen)), ahead.k, ahead.v);
        attend(ops, plan, call, item, tile, w, rows, sight, ahead.k, ahead.v, states.take(tile));
    }
}

// One element of a key to each group of 16.
template <typename T>
void scatter(const PjPages& pages, int64_t row, int64_t first, const T* x, int64_t count) {
    T* to = static_cast<T*>(pages.k);
    for (int64_t i = 0; i < count; ++i) to[turned_place<T>(row, first + i, pages.head_dim)] = x[i];
}

void store_turned(const Ops& ops, const PjPages& pages, int64_t row, const float* key) {
    constexpr int64_t PART = 512;  // no INT8 row is longer
    const int64_t head_dim = pages.head_dim;
    for (int64_t first = 0; first < head_dim; first += PART) {
        const int64_t count = std::min(PART, head_dim - first);
        if (pages.k_scale) {
            int8_t q[PART];
            ops.quantize_row(key, head_dim, reinterpret_cast<uint8_t*>(q), pages.k_scale + row, 0);
            scatter(pages, row, first, q, count);
        } else if (pages.dtype != PJ_F32) {
            uint16_t narrow[PART];
            ops.narrow_row(key + first, pages.dtype, count, narrow);
            scatter(pages, row, first, narrow, count);
        } else {
            scatter(pages, row, first, key + first, count);
        }
    }
}

}  // namespace

size_t attention_scratch_floats(const AttentionPlan& plan) {
    return carve(nullptr, plan).floats;
}

void run_attention_items(const Ops& ops, const AttentionPlan& plan, const AttentionCall& call, const uint8_t* wanted,
                         std::atomic<int64_t>& next, float* scratch) {
    const int64_t count = static_cast<int64_t>(plan.items().size());
    const Working w = carve(scratch, plan);
    const auto take = [&]() -> const AttentionPlan::Item* {
        for (int64_t i; (i = next.fetch_add(1)) < count;)
            if (wanted == nullptr || wanted[i]) return &plan.items()[static_cast<size_t>(i)];
        return nullptr;
    };
    // One item is taken ahead, so that its first keys are fetched while the one before it is computed.
    SeenItem seen{nullptr, w.seen[0]}, following{nullptr, w.seen[1]};
    Fetcher fetcher(plan, call);
    seen.become(plan, call, take());
    if (seen.item && call.masks) fetcher.begin(seen);
    for (; seen.item != nullptr; std::swap(seen, following)) {
        following.become(plan, call, take());
        take_queries(ops, plan, call, *seen.item, w);
        const States states(plan, call, *seen.item, w);
        if (call.masks) {
            fetcher.follow(following);
            run_chosen_tiles(ops, plan, call, seen, fetcher, states, w);
        } else {
            run_tiles(ops, plan, call, seen, following, states, w);
        }
        if (states.join(ops, call)) finish(ops, plan, call, *seen.item, states.whole());
    }
    ops.end_attention();
}

void store_key_value(const Ops& ops, const PjPages& pages, int64_t slot, int64_t kv_head, const float* key,
                     const float* value) {
    const int64_t page = slot / pages.block_size, offset = slot % pages.block_size, head_dim = pages.head_dim;
    const int64_t row = (page * pages.num_kv_heads + kv_head) * pages.block_size + offset;
    if (key && pages.turned) {
        store_turned(ops, pages, row, key);
        key = nullptr;
    }
    const auto store = [&](const float* x, void* to, float* scale) {
        if (scale) ops.quantize_row(x, head_dim, static_cast<uint8_t*>(to) + row * head_dim, scale + row, 0);
        else if (pages.dtype != PJ_F32) ops.narrow_row(x, pages.dtype, head_dim, static_cast<uint16_t*>(to) + row * head_dim);
        else memcpy(static_cast<float*>(to) + row * head_dim, x, static_cast<size_t>(head_dim) * sizeof(float));
    };
    if (key) store(key, pages.k, pages.k_scale);
    if (value) store(value, pages.v, pages.v_scale);
}

}  // namespace penjing
