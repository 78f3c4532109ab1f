// A whole decoder step in one call: embedding, layers over the paged cache, final norm, LM head on chosen rows.
#pragma once

#include "abi.h"

namespace penjing {

struct StepInput {
    const int32_t* tokens;     // (rows)
    const int32_t* positions;  // (rows)
    const int64_t* slots;      // (rows) page × block_size + offset, −1: not stored
    const int32_t* logit_rows; // (num_logits)
    int64_t rows;
    int64_t num_logits;
    PjSequences sequences;
    void* pool;         // (layers with attention, 2, num_blocks, num_kv_heads, block_size, head_dim) float32, float16, or
                        // int8 with scales
    float* pool_scale;  // null, or (layers with attention, 2, num_blocks, num_kv_heads, block_size)
    int64_t num_blocks;
    int64_t block_size;
    int64_t top;       // 0: all logits are wanted; else the largest ones, as many, in descending order
    float* logits;     // (num_logits, vocab), or (num_logits, top)
    int32_t* top_ids;  // (num_logits, top), −1 beyond the vocabulary; equal logits by ascending id
    const PjLowRank* const* adapters;  // (num_adapters) of (num_layers × 7), q k v out gate up down of each layer; or null
    const int32_t* adapter;            // (rows) whose each row is, −1: no adapter's; null: of all rows
    int64_t num_adapters;
    const float* seen;  // (num_seen, hidden) what token vocab + i enters the first layer with: rows of images
    int64_t num_seen;
    PjSelection selection;  // of the layers that choose, which have no window of their own
    const int32_t* choosing;  // (num_layers) which summaries are a layer's; −1: it reads everything
    int64_t num_choosing;
    int8_t* summary;  // (num_choosing, num_blocks, num_kv_heads, block_size / block, 2, head_dim)
    float* summary_scale;  // the same without head_dim
    float* hidden;  // (num_logits, hidden) what the head is given, in float; null: not wanted
    float* gated;   // (layers with taps, num_blocks, block_size, hidden) gated inputs of convolutions; null: none
    int32_t pool_dtype;  // as PjPages::dtype
    int32_t unused;
};

class Decoder;

Decoder* make_decoder(const PjModel& model);
void free_decoder(Decoder* decoder);
// 0 when done, or the first problem found before anything is computed: −1 no memory, −2 block id, −3 token, −4 position,
// −5 slot, −6 logit row, −7 lengths of the sequences, −8 adapter,
// −9 selection. One step at a time.
int run_step(Decoder& decoder, const StepInput& input);

// The first problem of a step's numbers, as `run_step` returns it, or 0.
int check_step(const PjModel& model, const StepInput& input);

}  // namespace penjing
