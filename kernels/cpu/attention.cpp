#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "memory.h"

namespace penjing {
namespace {

constexpr int64_t QUERY_ROWS = 192;  // query tokens × heads of a group that share the packing of a key tile
constexpr float LOG2_E = 1.44269504f;

int64_t tokens_of_block(const AttentionShape& shape) {
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    return std::max<int64_t>(1, QUERY_ROWS / group);
}

struct TileRows {
    const void* k[TILE_KEYS];
    const void* v[TILE_KEYS];
    float k_scale[TILE_KEYS];  // of INT8 pages
    float v_scale[TILE_KEYS];
    const void* fetch[TILE_KEYS];  // where rows choose: those of k that are read, in order; then the last again
};

struct Working {
    void* q;  // floats, or 16-bit whole numbers with `q_scale`
    float* q_scale;
    float* keys;
    float* out;
    float* peak;
    float* total;
    int32_t* low;
    int32_t* high;
    uint8_t* chosen;
    TileRows* rows;  // two: of the tile that is computed and of the next
    size_t floats;
};

Working carve(float* scratch, int64_t rows, int64_t head_dim) {
    Carver carver(scratch);
    Working w{};
    const size_t count = static_cast<size_t>(rows * head_dim), r = static_cast<size_t>(rows);
    w.q = carver.take<float>(count);
    w.q_scale = carver.take<float>(r);
    w.keys = carver.take<float>(static_cast<size_t>(TILE_KEYS * head_dim));
    w.out = carver.take<float>(count);
    w.peak = carver.take<float>(r);
    w.total = carver.take<float>(r);
    w.low = carver.take<int32_t>(r);
    w.high = carver.take<int32_t>(r);
    w.chosen = carver.take<uint8_t>(r);
    w.rows = carver.take<TileRows>(2);
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

// Where the keys of an item lie. Ids are widened before they are multiplied: caches have more than 2^31 elements.
class PageRows {
public:
    PageRows(const PjPages& pages, const PjSequences& sequences, const AttentionPlan::Item& item)
        : pages_(pages), table_(sequences.block_table + item.sequence * sequences.table_stride), head_(item.kv_head),
          row_bytes_(pages.head_dim * (pages.k_scale ? 1 : static_cast<int64_t>(sizeof(float)))) {}
    int64_t left_in_page(int64_t position) const { return pages_.block_size - position % pages_.block_size; }
    int64_t row(int64_t position) const {
        const int64_t page = table_[position / pages_.block_size];
        return (page * pages_.num_kv_heads + head_) * pages_.block_size + position % pages_.block_size;
    }
    const void* key(int64_t row) const { return static_cast<const char*>(pages_.k) + row * row_bytes_; }
    const void* value(int64_t row) const { return static_cast<const char*>(pages_.v) + row * row_bytes_; }

private:
    const PjPages& pages_;
    const int32_t* table_;
    int64_t head_;
    int64_t row_bytes_;
};

// What the rows of an item see of one tile.
struct Sight {
    int64_t first, last;  // tokens of the item that see any of it: positions rise, so they are a range
    int64_t key_begin, key_end;
    int chosen;  // bits of AttentionTile::chosen that any row has
};

int64_t low_of(const AttentionCall& call, const AttentionPlan::Item& item, int64_t token, int64_t start) {
    return call.window ? std::max<int64_t>(0, item.position + token - call.window + 1 - start) : 0;
}
int64_t high_of(const AttentionPlan::Item& item, int64_t token, int64_t start) {
    return std::min<int64_t>(TILE_KEYS, item.position + token + 1 - start);
}

int chosen_of(const AttentionPlan& plan, const AttentionCall& call, const AttentionPlan::Item& item, int64_t token,
              int64_t tile) {
    if (call.masks == nullptr) return ALL_CHOSEN;
    return call.masks[((item.first_row + token) * plan.shape().num_kv_heads + item.kv_head) * call.mask_stride + tile];
}

// Finds the rows of keys and values of a tile. False when no row of the item sees it.
bool locate(const AttentionPlan& plan, const AttentionCall& call, const AttentionPlan::Item& item, int64_t tile,
            TileRows& rows, Sight& sight) {
    const int64_t start = tile * TILE_KEYS;
    sight.first = std::max<int64_t>(0, start - item.position);
    sight.last = item.num_tokens;
    if (call.window) sight.last = std::min(sight.last, start + TILE_KEYS - 1 + call.window - item.position);
    if (sight.first >= sight.last) return false;
    sight.key_begin = low_of(call, item, sight.first, start);
    sight.key_end = high_of(item, sight.last - 1, start);
    sight.chosen = call.masks ? 0 : ALL_CHOSEN;
    for (int64_t token = sight.first; call.masks && token < sight.last; ++token)
        sight.chosen |= chosen_of(plan, call, item, token, tile);
    if (sight.chosen == 0) return false;

    const PjPages& pages = call.pages;
    const PageRows page_rows(pages, plan.sequences(), item);
    int64_t fetched = 0;
    for (int64_t key = sight.key_begin; key < sight.key_end;) {
        int64_t left = page_rows.left_in_page(start + key);
        if (call.masks) {
            left = std::min(left, CHOICE_KEYS - key % CHOICE_KEYS);
            if (!(sight.chosen >> key / CHOICE_KEYS & 1)) {
                key += left;
                continue;
            }
        }
        const int64_t row = page_rows.row(start + key), count = std::min(left, sight.key_end - key);
        for (int64_t i = 0; i < count; ++i) {
            rows.k[key + i] = page_rows.key(row + i);
            if (call.masks) rows.fetch[fetched++] = rows.k[key + i];
            rows.v[key + i] = page_rows.value(row + i);
        }
        if (pages.k_scale) {
            memcpy(rows.k_scale + key, pages.k_scale + row, static_cast<size_t>(count) * sizeof(float));
            memcpy(rows.v_scale + key, pages.v_scale + row, static_cast<size_t>(count) * sizeof(float));
        }
        key += count;
    }
    for (int64_t i = fetched; call.masks && i < TILE_KEYS; ++i) rows.fetch[i] = rows.fetch[fetched - 1];
    // The next tile's scales are read before its keys are fetched: ask for them now.
    const int64_t next_end = std::min<int64_t>(start + 2 * TILE_KEYS, item.position + item.num_tokens);
    for (int64_t key = start + TILE_KEYS; pages.k_scale && !call.masks && key < next_end;) {
        const int64_t count = page_rows.left_in_page(key), row = page_rows.row(key);
        for (int64_t i = 0; i < std::min(count, next_end - key); i += 16) {
            __builtin_prefetch(pages.k_scale + row + i);
            __builtin_prefetch(pages.v_scale + row + i);
        }
        key += count;
    }
    // Keys outside may lie in pages that were given away or do not exist: ones that are read stand in. Scales need none: masked
    // scores are replaced, and weights outside are not read.
    const auto stand_in = [&](int64_t key, int64_t by) {
        rows.k[key] = rows.k[by];
        rows.v[key] = rows.v[by];
    };
    for (int64_t key = 0; key < sight.key_begin; ++key) stand_in(key, sight.key_begin);
    for (int64_t key = sight.key_end; key < TILE_KEYS; ++key) stand_in(key, sight.key_end - 1);
    for (int64_t key = 0; call.masks && key < TILE_KEYS; ++key) {
        if (!(sight.chosen >> key / CHOICE_KEYS & 1)) rows.k[key] = rows.v[key] = rows.fetch[0];
    }
    return true;
}

int64_t query_bytes(const PjPages& pages) {
    return static_cast<int64_t>(pages.k_scale ? sizeof(int16_t) : sizeof(float));
}

// The item's queries, times scale × log2(e); the heads of a group lie side by side.
void take_queries(const Ops& ops, const AttentionPlan& plan, const AttentionCall& call, const AttentionPlan::Item& item,
                  const Working& w) {
    const int64_t head_dim = plan.shape().head_dim, group = plan.shape().num_heads / plan.shape().num_kv_heads;
    const float factor = call.scale * LOG2_E;
    for (int64_t token = 0; token < item.num_tokens; ++token) {
        const float* from = call.q + (item.first_row + token) * call.ldq + item.kv_head * group * head_dim;
        for (int64_t i = 0; i < group * head_dim; i += 16) __builtin_prefetch(from + 4 * call.ldq + i);
        if (!call.pages.k_scale) {
            ops.scale_row(from, factor, group * head_dim, static_cast<float*>(w.q) + token * group * head_dim);
            continue;
        }
        for (int64_t row = token * group; row < (token + 1) * group; ++row, from += head_dim)
            ops.quantize_query(from, factor, static_cast<int>(head_dim), static_cast<int16_t*>(w.q) + row * head_dim,
                               w.q_scale + row);
    }
}

// Attends the item's rows to one tile, into the given running state.
void attend(const Ops& ops, const AttentionPlan& plan, const AttentionCall& call, const AttentionPlan::Item& item,
            int64_t tile, const Working& w, const TileRows& rows, const Sight& sight, const void* const* ahead,
            float* peak, float* total, float* out) {
    const AttentionShape& shape = plan.shape();
    const int64_t group = shape.num_heads / shape.num_kv_heads, start = tile * TILE_KEYS;
    for (int64_t token = sight.first; token < sight.last; ++token) {
        for (int64_t head = 0; head < group; ++head) {
            w.low[token * group + head] = static_cast<int32_t>(low_of(call, item, token, start));
            w.high[token * group + head] = static_cast<int32_t>(high_of(item, token, start));
            w.chosen[token * group + head] = static_cast<uint8_t>(chosen_of(plan, call, item, token, tile));
        }
    }
    const bool int8 = call.pages.k_scale != nullptr;
    const int head_dim = static_cast<int>(shape.head_dim);
    ops.pack_keys(rows.k, rows.v, static_cast<int>(sight.key_end), int8 ? head_dim / 4 : head_dim, sight.chosen, w.keys);
    for (int64_t first = sight.first; first < sight.last; ahead = nullptr) {
        // Tokens that see none of the tile stay as they are; they lie between others where rows choose.
        int64_t last = first;
        while (last < sight.last && w.chosen[last * group] != 0) ++last;
        if (last == first) {
            ++first;
            continue;
        }
        const int64_t row = first * group;
        const char* q = static_cast<const char*>(w.q) + row * head_dim * query_bytes(call.pages);
        ops.attend_tile({q, w.q_scale + row, w.keys, int8 ? rows.k_scale : nullptr, rows.v_scale, rows.v, ahead,
                         w.low + row, w.high + row, call.masks ? w.chosen + row : nullptr, peak + row, total + row,
                         out + row * head_dim, static_cast<int>((last - first) * group), head_dim, call.cap * LOG2_E});
        first = last;
    }
}

void finish(const Ops& ops, const AttentionPlan& plan, const AttentionCall& call, const AttentionPlan::Item& item,
            const Working& w) {
    const AttentionShape& shape = plan.shape();
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    for (int64_t row = 0; row < item.num_tokens * group; ++row) {
        const int64_t head = item.kv_head * group + row % group;
        float* to = call.out + (item.first_row + row / group) * call.ldo + head * shape.head_dim;
        ops.scale_row(w.out + row * shape.head_dim, 1.0f / w.total[row], shape.head_dim, to);
    }
}

}  // namespace

bool AttentionPlan::build(const PjSequences& sequences, const AttentionShape& shape, int64_t num_blocks,
                          int64_t block_size, int64_t window, int threads) {
    sequences_ = sequences;
    shape_ = shape;
    items_.clear();
    units_.clear();
    partial_floats_ = 0;
    max_rows_ = 0;
    const int64_t group = shape.num_heads / shape.num_kv_heads, block_tokens = tokens_of_block(shape);

    struct Span {
        int32_t sequence, first_row, num_tokens, position, tile_begin, tile_end;
    };
    std::vector<Span> spans;
    int64_t work = 0;  // rows × tiles
    for (int64_t s = 0; s < sequences.num_sequences; ++s) {
        const int64_t begin = sequences.cu_query[s], tokens = sequences.cu_query[s + 1] - begin;
        if (tokens == 0) continue;
        const int64_t first_position = sequences.context_len[s] - tokens;
        const int64_t first_key = window ? std::max<int64_t>(0, first_position - window + 1) : 0;
        for (int64_t page = first_key / block_size; page <= (sequences.context_len[s] - 1) / block_size; ++page) {
            const int32_t id = sequences.block_table[s * sequences.table_stride + page];
            if (id < 0 || id >= num_blocks) return false;
        }
        for (int64_t token = 0; token < tokens; token += block_tokens) {
            const int64_t count = std::min(block_tokens, tokens - token), position = first_position + token;
            const int64_t low = window ? std::max<int64_t>(0, position - window + 1) : 0;
            const Span span{static_cast<int32_t>(s), static_cast<int32_t>(begin + token), static_cast<int32_t>(count),
                            static_cast<int32_t>(position), static_cast<int32_t>(low / TILE_KEYS),
                            static_cast<int32_t>((position + count - 1) / TILE_KEYS + 1)};
            spans.push_back(span);
            work += count * group * (span.tile_end - span.tile_begin) * shape.num_kv_heads;
            max_rows_ = std::max(max_rows_, count * group);
        }
    }

    const int64_t fair = work / (4 * threads);  // rows × tiles of a piece, at most
    for (const Span& span : spans) {
        const int64_t rows = span.num_tokens * group, tiles = span.tile_end - span.tile_begin;
        const int64_t piece = threads == 1 ? tiles : std::max<int64_t>(1, fair / rows);
        const int64_t pieces = (tiles + piece - 1) / piece;
        for (int32_t head = 0; head < shape.num_kv_heads; ++head) {
            for (int64_t i = 0; i < pieces; ++i) {
                items_.push_back({span.sequence, head, span.first_row, span.num_tokens, span.position,
                                  static_cast<int32_t>(span.tile_begin + tiles * i / pieces),
                                  static_cast<int32_t>(span.tile_begin + tiles * (i + 1) / pieces),
                                  static_cast<int32_t>(units_.size())});
            }
            units_.push_back({static_cast<int32_t>(pieces), static_cast<int32_t>(tiles), partial_floats_});
            if (pieces > 1) partial_floats_ += rows * tiles * (shape.head_dim + 2);
        }
    }
    // The longest first, so that none is left alone at the end.
    std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
        return int64_t{a.num_tokens} * (a.tile_end - a.tile_begin) > int64_t{b.num_tokens} * (b.tile_end - b.tile_begin);
    });
    return true;
}

size_t attention_scratch_floats(const AttentionPlan& plan) {
    return carve(nullptr, plan.max_rows(), plan.shape().head_dim).floats;
}

namespace {

void run_item(const Ops& ops, const AttentionPlan& plan, const AttentionCall& call, const AttentionPlan::Item& item,
              const AttentionPlan::Item* following, const Working& w) {
    const AttentionPlan::Unit& unit = plan.units()[static_cast<size_t>(item.unit)];
    const AttentionShape& shape = plan.shape();
    const int64_t group = shape.num_heads / shape.num_kv_heads, rows = item.num_tokens * group;
    const int64_t head_dim = shape.head_dim;
    take_queries(ops, plan, call, item, w);

    // A unit in pieces keeps a state for each tile, counted from the unit's first.
    const int64_t last_tile = (item.position + item.num_tokens - 1) / TILE_KEYS, base_tile = last_tile + 1 - unit.tiles;
    const bool whole = unit.pieces == 1;
    float* base = call.partial + unit.partial;
    if (whole) clear_state(w.peak, w.total, w.out, rows, head_dim);
    for (int64_t tile = item.tile_begin; !whole && tile < item.tile_end; ++tile) {
        const Partial state = partial_of(base, tile - base_tile, rows, head_dim);
        clear_state(state.peak, state.total, state.out, rows, head_dim);
    }
    Sight sight{}, next_sight{};
    int64_t side = 0;
    // The first tile from `tile` on that a row of `of` sees.
    const auto find = [&](const AttentionPlan::Item& of, int64_t tile, TileRows& found, Sight& seen) {
        while (tile < of.tile_end && !locate(plan, call, of, tile, found, seen)) ++tile;
        return tile;
    };
    for (int64_t tile = find(item, item.tile_begin, w.rows[side], sight); tile < item.tile_end; side ^= 1) {
        Partial state{w.peak, w.total, w.out};
        if (!whole) state = partial_of(base, tile - base_tile, rows, head_dim);
        TileRows& next_rows = w.rows[side ^ 1];
        const int64_t next = find(item, tile + 1, next_rows, next_sight);
        bool more = next < item.tile_end;
        if (!more && following)
            more = find(*following, following->tile_begin, next_rows, next_sight) < following->tile_end;
        attend(ops, plan, call, item, tile, w, w.rows[side], sight, !more ? nullptr : call.masks ? next_rows.fetch : next_rows.k, state.peak,
               state.total, state.out);
        tile = next;
        sight = next_sight;
    }
    if (!whole) {
        std::atomic<int32_t>& unfinished = call.unfinished[item.unit];
        if (unfinished.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        unfinished.store(unit.pieces, std::memory_order_relaxed);
        clear_state(w.peak, w.total, w.out, rows, head_dim);
        for (int64_t tile = 0; tile < unit.tiles; ++tile) {
            const Partial state = partial_of(base, tile, rows, head_dim);
            ops.merge_tile(state.peak, state.total, state.out, static_cast<int>(rows), static_cast<int>(head_dim),
                           w.peak, w.total, w.out);
        }
    }
    finish(ops, plan, call, item, w);
}

}  // namespace

void run_attention_items(const Ops& ops, const AttentionPlan& plan, const AttentionCall& call, const uint8_t* wanted,
                         std::atomic<int64_t>& next, float* scratch) {
    const int64_t count = static_cast<int64_t>(plan.items().size());
    const Working w = carve(scratch, plan.max_rows(), plan.shape().head_dim);
    const auto take = [&]() -> const AttentionPlan::Item* {
        for (int64_t i; (i = next.fetch_add(1)) < count;)
            if (wanted == nullptr || wanted[i]) return &plan.items()[static_cast<size_t>(i)];
        return nullptr;
    };
    // One item is taken ahead, so that its first keys are fetched while the one before it is computed.
    for (const AttentionPlan::Item* item = take(); item != nullptr;) {
        const AttentionPlan::Item* following = take();
        run_item(ops, plan, call, *item, following, w);
        item = following;
    }
}

void store_key_value(const Ops& ops, const PjPages& pages, int64_t slot, int64_t kv_head, const float* key,
                     const float* value) {
    const int64_t page = slot / pages.block_size, offset = slot % pages.block_size, head_dim = pages.head_dim;
    const int64_t row = (page * pages.num_kv_heads + kv_head) * pages.block_size + offset;
    const auto store = [&](const float* x, void* to, float* scale) {
        if (scale) ops.quantize_row(x, head_dim, static_cast<uint8_t*>(to) + row * head_dim, scale + row, 0);
        else memcpy(static_cast<float*>(to) + row * head_dim, x, static_cast<size_t>(head_dim) * sizeof(float));
    };
    if (key) store(key, pages.k, pages.k_scale);
    if (value) store(value, pages.v, pages.v_scale);
}

}  // namespace penjing
