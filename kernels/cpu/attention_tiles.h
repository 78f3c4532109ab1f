// Where the keys and values of an item's tiles lie, which of them its rows see, and what is fetched ahead.
#pragma once

#include <algorithm>

#include "attention.h"

namespace penjing {

struct TileRows {
    const void* k[TILE_KEYS];
    const void* v[TILE_KEYS];
    float k_scale[TILE_KEYS];  // of INT8 pages
    float v_scale[TILE_KEYS];
};

// What the rows of an item see of one tile.
struct Sight {
    int64_t first, last;  // tokens of the item that see any of it: positions rise, so they are a range
    int64_t key_begin, key_end;
    int chosen;  // bits of AttentionTile::chosen that any row has
};

inline int64_t low_of(const AttentionCall& call, const AttentionPlan::Item& item, int64_t token, int64_t start) {
    return call.window ? std::max<int64_t>(0, item.position + token - call.window + 1 - start) : 0;
}
inline int64_t high_of(const AttentionPlan::Item& item, int64_t token, int64_t start) {
    return std::min<int64_t>(TILE_KEYS, item.position + token + 1 - start);
}

inline int chosen_of(const AttentionPlan& plan, const AttentionCall& call, const AttentionPlan::Item& item,
                     int64_t token, int64_t tile) {
    if (call.masks == nullptr) return ALL_CHOSEN;
    return call.masks[((item.first_row + token) * plan.shape().num_kv_heads + item.kv_head) * call.mask_stride + tile];
}

// Where the keys of an item lie. Ids are widened before they are multiplied: caches have more than 2^31 elements.
class PageRows {
public:
    PageRows(const PjPages& pages, const PjSequences& sequences, const AttentionPlan::Item& item)
        : pages_(pages), table_(sequences.block_table + item.sequence * sequences.table_stride), head_(item.kv_head),
          row_bytes_(bytes_of_row(pages)),
          shift_(pages.block_size & (pages.block_size - 1) ? -1 : __builtin_ctzll(static_cast<uint64_t>(pages.block_size))) {}
    static int64_t bytes_of_row(const PjPages& pages) {
        return pages.head_dim * element_bytes(pages.dtype);
    }
    int64_t left_in_page(int64_t position) const { return pages_.block_size - position + first_of_page(page(position)); }
    int64_t row(int64_t position) const {
        const int64_t at = page(position);
        return (table_[at] * pages_.num_kv_heads + head_) * pages_.block_size + position - first_of_page(at);
    }
    const void* key(int64_t row) const { return static_cast<const char*>(pages_.k) + row * row_bytes_; }
    const void* value(int64_t row) const { return static_cast<const char*>(pages_.v) + row * row_bytes_; }
    int64_t row_bytes() const { return row_bytes_; }

private:
    // A division takes as long as a block's scores of one query; sizes of pages are nearly always powers of two.
    int64_t page(int64_t position) const { return shift_ < 0 ? position / pages_.block_size : position >> shift_; }
    int64_t first_of_page(int64_t page) const { return page * pages_.block_size; }

    const PjPages& pages_;
    const int32_t* table_;
    int64_t head_;
    int64_t row_bytes_;
    int shift_;  // −1: block_size is none
};

// An item and, where rows choose, what its rows see: bits of AttentionTile::chosen that any of them has, tile by tile.
struct SeenItem {
    const AttentionPlan::Item* item = nullptr;
    uint8_t* chosen = nullptr;  // (tiles of the item)

    int chosen_in(int64_t tile) const { return chosen[tile - item->tile_begin]; }
    // Makes it another item.
    void become(const AttentionPlan& plan, const AttentionCall& call, const AttentionPlan::Item* other);
};

// Finds the rows of keys and values of a tile. False when no row of the item sees it.
bool locate(const AttentionPlan& plan, const AttentionCall& call, const SeenItem& seen, int64_t tile, TileRows& rows,
            Sight& sight);

// Blocks of CHOICE_KEYS keys that were chosen, in the order in which they are computed but some of them earlier: so long
// before they are needed they are fetched. Chosen blocks lie apart, and no processor guesses where the next one is.
class Fetcher {
public:
    Fetcher(const AttentionPlan& plan, const AttentionCall& call)
        : plan_(plan), call_(call), row_bytes_(PageRows::bytes_of_row(call.pages)) {}
    // Starts with an item and asks for its first blocks at once.
    void begin(const SeenItem& seen);
    // What comes behind the item that was begun or followed last; its `item` may be null.
    void follow(const SeenItem& next);
    // Rows of keys and values of the next `blocks` blocks; where none are left, the last ones again. Asks for their scales.
    void next(int64_t blocks, const void** k, const void** v);

private:
    bool advance();

    const AttentionPlan& plan_;
    const AttentionCall& call_;
    int64_t row_bytes_;
    SeenItem at_, behind_;
    int64_t tile_ = 0;
    int left_ = 0;  // bits of the tile
    const void *key_ = nullptr, *value_ = nullptr;
};

}  // namespace penjing
