// Attention over paged keys and values. Query rows × heads of a group are packed into one set of rows (GQA), keys are
// taken in tiles that start at multiples of TILE_KEYS, and a row merges the tiles it sees in order: its bits do not
// depend on the batch, the chunking of the prompt, the block ids or the number of threads.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention_progress.h"
#include "ops.h"
#include "pool.h"

namespace penjing {

struct AttentionShape {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
};

// What all layers of a step share: which rows attend to which tiles, in pieces that keep a team busy.
class AttentionPlan {
public:
    // False when a needed block id lies outside [0, num_blocks); `first_key(s)` on needed ids are those from
    // position context − queries − window + 1 on (window 0: from 0).
    bool build(const PjSequences& sequences, const AttentionShape& shape, int64_t num_blocks, int64_t block_size,
               int64_t window, int threads);

    struct Item {
        int32_t sequence;
        int32_t kv_head;
        int32_t first_row;   // of the whole call
        int32_t num_tokens;  // query tokens
        int32_t position;    // of the first
        int32_t tile_begin;
        int32_t tile_end;
        int32_t unit;
        int32_t piece;       // of all units: those of one follow each other
    };
    struct Unit {
        int32_t pieces;
        int32_t tiles;
        int32_t first;    // of its pieces
        int64_t partial;  // offset of its partial states and of what they are merged into, in floats
    };

    const std::vector<Item>& items() const { return items_; }
    const std::vector<Unit>& units() const { return units_; }
    int64_t partial_floats() const { return partial_floats_; }
    const PjSequences& sequences() const { return sequences_; }
    const AttentionShape& shape() const { return shape_; }
    int64_t max_rows() const { return max_rows_; }
    int64_t max_tiles() const { return max_tiles_; }  // of an item

private:
    std::vector<Item> items_;
    std::vector<Unit> units_;
    int64_t partial_floats_ = 0;
    int64_t max_rows_ = 0, max_tiles_ = 0;
    PjSequences sequences_{};
    AttentionShape shape_{};
};

struct AttentionCall {
    const float* q;  // (rows, num_heads, head_dim), row stride ldq
    float* out;      // the same, row stride ldo
    int64_t ldq;
    int64_t ldo;
    PjPages pages;
    float scale;
    int64_t window;                         // 0: all keys
    float* partial;                         // plan.partial_floats()
    AttentionProgress* progress;
    int32_t turn;                           // of `progress`
    const uint8_t* masks;                   // (rows, num_kv_heads, mask_stride), see SelectionPlan; null: all keys
    int64_t mask_stride;
    float cap;  // scores become cap × tanh(score / cap); 0: they stay
    const float* sinks;  // (num_heads) a score more in each sum that attention divides by; null: none
};

// Floats of working memory for one member.
size_t attention_scratch_floats(const AttentionPlan& plan);
// Takes items from `next` until none is left. `wanted` (items, or null: all) marks those whose results are needed; the
// pieces of a unit are all wanted or none.
void run_attention_items(const Ops& ops, const AttentionPlan& plan, const AttentionCall& call, const uint8_t* wanted,
                         std::atomic<int64_t>& next, float* scratch);

// Writes one head's key and value (null: leaves it) to the page and offset of `slot`, quantized where pages are INT8.
void store_key_value(const Ops& ops, const PjPages& pages, int64_t slot, int64_t kv_head, const float* key, const float* value);

}  // namespace penjing
