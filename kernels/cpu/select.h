// Which blocks of older keys a row of attention reads. Of each full block a summary lies beside its keys, made of the
// keys as they are stored: for each dimension the middle between its least and its largest value, and half of their
// distance, in INT8. Query · middle + REACH × |query| · half is the block's score; with a reach of 1 it is the bound of
// Quest (https://arxiv.org/abs/2406.10774). Heads that share keys share the choice: each block counts by the sum of its
// shares of their softmax over scores. A row's choice depends on its position, its queries and the keys before it:
// neither on the batch, nor on how the prompt was cut, nor on page ids.
#pragma once

#include <vector>

#include "attention.h"

namespace penjing {

// What all choosing layers of a step share.
class SelectionPlan {
public:
    // False where `block` does not divide the page, or the numbers of `selection` contradict each other. Of each of
    // `slots` (rows, or null) a key is new; −1: none is.
    bool build(const PjSequences& sequences, const AttentionShape& shape, const PjSelection& selection,
               const int64_t* slots, int64_t rows, int64_t block_size);

    struct Row {
        int32_t row;       // of the call
        int32_t position;
        int64_t entries;  // where those of its sequence begin
    };
    // Rows that have to choose; the others read all keys.
    const std::vector<Row>& choosing() const { return choosing_; }
    // Where the summary of each block of the row's sequence lies, of its first head of keys.
    const int64_t* entries(const Row& row) const { return entries_.data() + row.entries; }
    // Slots whose key is the last of its block, so that the block is full.
    const std::vector<int64_t>& completed() const { return completed_; }
    const PjSelection& selection() const { return selection_; }
    const AttentionShape& shape() const { return shape_; }
    int64_t rows() const { return rows_; }
    int64_t tiles() const { return tiles_; }            // stride of the masks
    int64_t most_blocks() const { return most_blocks_; }  // that a row chooses from
    // (rows, num_kv_heads, tiles): bits as in AttentionTile::chosen.
    size_t mask_bytes() const;
    // What attention by `plan` waits for.
    void begin(const AttentionPlan& plan, AttentionProgress& progress) const;
    size_t scratch_floats() const;  // of one member

private:
    std::vector<Row> choosing_;
    std::vector<int64_t> completed_, entries_;
    PjSelection selection_{};
    AttentionShape shape_{};
    int64_t rows_ = 0, tiles_ = 0, most_blocks_ = 0;
};

// A member's share of the summaries of blocks that the step has completed; a barrier lies before and behind.
void summarize_blocks(const Ops& ops, const SelectionPlan& plan, const PjPages& pages, const Team& team);

// Makes masks of one layer, of those that `next` gives this member until none are left, and notes each in the call's
// progress: attention begins while others still choose. `wanted` (rows, or null: all) marks rows whose result is needed.
void choose_blocks(const Ops& ops, const SelectionPlan& plan, const AttentionCall& call, const uint8_t* wanted,
                   std::atomic<int64_t>& next, float* scratch, uint8_t* masks);

}  // namespace penjing
