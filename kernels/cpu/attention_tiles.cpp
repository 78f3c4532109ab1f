#include "attention_tiles.h"

#include <cstring>

namespace penjing {
namespace {

// Where rows lie that follow each other; of a group of turned keys its place alone is asked for.
inline void point_rows(const void* first, int64_t row_bytes, int64_t rows, const void** to) {
    for (int64_t i = 0; i < rows; ++i) to[i] = static_cast<const char*>(first) + i * row_bytes;
}

// Keys [key_begin, key_end) of a tile.
void locate_all(const PjPages& pages, const PageRows& page_rows, const AttentionPlan::Item& item, int64_t start,
                const Sight& sight, TileRows& rows) {
    // Of turned pages whole groups are read, each from its first key's place on; a group lies within one page.
    const int64_t begin = pages.turned ? sight.key_begin / CHOICE_KEYS * CHOICE_KEYS : sight.key_begin;
    for (int64_t key = begin; key < sight.key_end;) {
        const int64_t row = page_rows.row(start + key);
        const int64_t count = std::min(page_rows.left_in_page(start + key), sight.key_end - key);
        // All of them: while values are summed the next tile's keys are fetched row by row.
        point_rows(page_rows.key(row), page_rows.row_bytes(), count, rows.k + key);
        point_rows(page_rows.value(row), page_rows.row_bytes(), count, rows.v + key);
        if (pages.k_scale) {
            memcpy(rows.k_scale + key, pages.k_scale + row, static_cast<size_t>(count) * sizeof(float));
            memcpy(rows.v_scale + key, pages.v_scale + row, static_cast<size_t>(count) * sizeof(float));
        }
        key += count;
    }
    // The next tile's scales are read before its keys are fetched: ask for them now.
    const int64_t next_end = std::min<int64_t>(start + 2 * TILE_KEYS, item.position + item.num_tokens);
    for (int64_t key = start + TILE_KEYS; pages.k_scale && key < next_end;) {
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
    for (int64_t key = 0; key < begin; ++key) stand_in(key, begin);
    for (int64_t key = sight.key_end; key < TILE_KEYS; ++key) stand_in(key, sight.key_end - 1);
}

// Those of its blocks that were chosen; a block lies within one page. Of the others nothing is read but the first key,
// which stands in for keys that do not exist.
void locate_chosen(const PjPages& pages, const PageRows& page_rows, int64_t start, const Sight& sight, TileRows& rows) {
    for (int64_t key = 0; key < sight.key_end; key += CHOICE_KEYS) {
        if (!(sight.chosen >> key / CHOICE_KEYS & 1)) continue;
        const int64_t row = page_rows.row(start + key);
        point_rows(page_rows.key(row), page_rows.row_bytes(), pages.turned ? 1 : CHOICE_KEYS, rows.k + key);
        point_rows(page_rows.value(row), page_rows.row_bytes(), CHOICE_KEYS, rows.v + key);
        if (pages.k_scale) {
            memcpy(rows.k_scale + key, pages.k_scale + row, CHOICE_KEYS * sizeof(float));
            memcpy(rows.v_scale + key, pages.v_scale + row, CHOICE_KEYS * sizeof(float));
        }
    }
    rows.k[0] = rows.k[__builtin_ctz(static_cast<unsigned>(sight.chosen)) * CHOICE_KEYS];
}

}  // namespace

void SeenItem::become(const AttentionPlan& plan, const AttentionCall& call, const AttentionPlan::Item* other) {
    item = other;
    if (other == nullptr || call.masks == nullptr) return;
    const int64_t tiles = other->tile_end - other->tile_begin;
    std::fill_n(chosen, tiles, uint8_t{0});
    for (int64_t token = 0; token < other->num_tokens; ++token) {
        const int64_t row = (other->first_row + token) * plan.shape().num_kv_heads + other->kv_head;
        call.progress->await_choice(row, call.turn);
        const uint8_t* mask = call.masks + row * call.mask_stride + other->tile_begin;
        // Rows that read everything have the bits of keys behind their own too.
        const int64_t position = other->position + token, own = position / TILE_KEYS - other->tile_begin;
        for (int64_t tile = 0; tile < std::min(own, tiles); ++tile)
            chosen[tile] = static_cast<uint8_t>(chosen[tile] | mask[tile]);
        const int before = (2 << position % TILE_KEYS / CHOICE_KEYS) - 1;
        if (own >= 0 && own < tiles) chosen[own] = static_cast<uint8_t>(chosen[own] | (mask[own] & before));
    }
}

bool locate(const AttentionPlan& plan, const AttentionCall& call, const SeenItem& seen, int64_t tile, TileRows& rows,
            Sight& sight) {
    const AttentionPlan::Item& item = *seen.item;
    const int64_t start = tile * TILE_KEYS;
    sight.first = std::max<int64_t>(0, start - item.position);
    sight.last = item.num_tokens;
    if (call.window) sight.last = std::min(sight.last, start + TILE_KEYS - 1 + call.window - item.position);
    if (sight.first >= sight.last) return false;
    sight.key_begin = low_of(call, item, sight.first, start);
    sight.key_end = high_of(item, sight.last - 1, start);
    sight.chosen = call.masks ? seen.chosen_in(tile) : ALL_CHOSEN;
    if (sight.chosen == 0) return false;
    const PageRows page_rows(call.pages, plan.sequences(), item);
    if (call.masks) locate_chosen(call.pages, page_rows, start, sight, rows);
    else locate_all(call.pages, page_rows, item, start, sight, rows);
    return true;
}

void Fetcher::begin(const SeenItem& seen) {
    // So many bytes of keys and values are on their way: some times what memory gives while one line is waited for.
    constexpr int64_t AHEAD_BYTES = 32 << 10;
    at_ = seen;
    behind_.item = nullptr;
    tile_ = seen.item->tile_begin;
    left_ = seen.chosen_in(tile_);
    key_ = call_.pages.k;
    value_ = call_.pages.v;
    const int64_t bytes = row_bytes_ * CHOICE_KEYS;
    const int64_t blocks = std::max<int64_t>(2, AHEAD_BYTES / (2 * bytes));
    for (int64_t block = 0; block < blocks; ++block) {
        const void *k[CHOICE_KEYS], *v[CHOICE_KEYS];
        next(1, k, v);
        for (int64_t at = 0; at < bytes; at += 64) {
            __builtin_prefetch(static_cast<const char*>(k[0]) + at, 0, 2);
            __builtin_prefetch(static_cast<const char*>(v[0]) + at, 0, 2);
        }
    }
}

void Fetcher::follow(const SeenItem& next) {
    if (behind_.item != nullptr) {  // it was not reached yet
        at_ = behind_;
        tile_ = at_.item->tile_begin;
        left_ = at_.chosen_in(tile_);
    }
    behind_ = next;
}

// Goes on to the next chosen block. False: there is none.
bool Fetcher::advance() {
    while (left_ == 0) {
        if (++tile_ < at_.item->tile_end) {
            left_ = at_.chosen_in(tile_);
            continue;
        }
        --tile_;
        if (behind_.item == nullptr) return false;
        at_ = behind_;
        behind_.item = nullptr;
        tile_ = at_.item->tile_begin;
        left_ = at_.chosen_in(tile_);
    }
    return true;
}

void Fetcher::next(int64_t blocks, const void** k, const void** v) {
    for (int64_t block = 0; block < blocks; ++block, k += CHOICE_KEYS, v += CHOICE_KEYS) {
        if (advance()) {
            const PageRows rows(call_.pages, plan_.sequences(), *at_.item);
            const int64_t position = tile_ * TILE_KEYS + __builtin_ctz(static_cast<unsigned>(left_)) * CHOICE_KEYS;
            const int64_t row = rows.row(position);
            left_ &= left_ - 1;
            key_ = rows.key(row);
            value_ = rows.value(row);
            if (call_.pages.k_scale) {
                __builtin_prefetch(call_.pages.k_scale + row, 0, 2);
                __builtin_prefetch(call_.pages.v_scale + row, 0, 2);
            }
        }
        point_rows(key_, row_bytes_, call_.pages.turned ? 1 : CHOICE_KEYS, k);
        point_rows(value_, row_bytes_, CHOICE_KEYS, v);
    }
}

}  // namespace penjing
