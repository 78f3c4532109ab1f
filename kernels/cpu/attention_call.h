// Attention of one layer with a team of its own: what serves models whose layers run on torch, and tests.
#pragma once

#include "attention.h"

namespace penjing {

// Rows read what `selection` (null, or with a block of 0: everything) makes them choose. `slots` (rows) of the keys that
// are new: the summaries of blocks that they complete are written first. `masks` (rows, num_kv_heads, tiles of the longest
// context), or null, gets what the rows chose.
// 0 when done, −1 without memory, −2 for a block id outside the cache, −9 for a selection that does not fit the pages.
int run_attention(const float* q, float* out, const PjPages& pages, const PjSequences& sequences,
                  const AttentionShape& shape, float scale, float cap, const float* sinks, int64_t window,
                  const PjSelection* selection, const int64_t* slots, uint8_t* masks);

}  // namespace penjing
