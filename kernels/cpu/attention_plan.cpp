// Cuts the attention of a step into pieces that keep a team busy.
#include <algorithm>

#include "attention.h"

namespace penjing {
namespace {

constexpr int64_t QUERY_ROWS = 192;  // query tokens × heads of a group that share the packing of a key tile

int64_t tokens_of_block(const AttentionShape& shape) {
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    return std::max<int64_t>(1, QUERY_ROWS / group);
}

}  // namespace

bool AttentionPlan::build(const PjSequences& sequences, const AttentionShape& shape, int64_t num_blocks,
                          int64_t block_size, int64_t window, int threads) {
    sequences_ = sequences;
    shape_ = shape;
    items_.clear();
    units_.clear();
    partial_floats_ = 0;
    max_rows_ = max_tiles_ = 0;
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
            max_tiles_ = std::max<int64_t>(max_tiles_, span.tile_end - span.tile_begin);
        }
    }

    // Rows × tiles of a piece, at most: a member may have two pieces to do when the others have none left. Twice as many stay
    // whole, where several units keep the members busy: states of pieces are written down and merged.
    const int64_t fair = work / (8 * threads);
    for (const Span& span : spans) {
        const int64_t rows = span.num_tokens * group, tiles = span.tile_end - span.tile_begin;
        const bool whole = threads == 1 || rows * tiles <= 2 * fair;
        const int64_t piece = whole ? tiles : std::max<int64_t>(1, fair / rows);
        const int64_t pieces = (tiles + piece - 1) / piece;
        for (int32_t head = 0; head < shape.num_kv_heads; ++head) {
            const int32_t first = static_cast<int32_t>(items_.size());
            for (int64_t i = 0; i < pieces; ++i) {
                items_.push_back({span.sequence, head, span.first_row, span.num_tokens, span.position,
                                  static_cast<int32_t>(span.tile_begin + tiles * i / pieces),
                                  static_cast<int32_t>(span.tile_begin + tiles * (i + 1) / pieces),
                                  static_cast<int32_t>(units_.size()), static_cast<int32_t>(items_.size())});
            }
            units_.push_back({static_cast<int32_t>(pieces), static_cast<int32_t>(tiles), first, partial_floats_});
            if (pieces > 1) partial_floats_ += rows * (tiles + 1) * (shape.head_dim + 2);
        }
    }
    // The longest first, so that none is left alone at the end; those of one unit in order, in which they are merged.
    const auto size = [&](const Item& item) {
        const Unit& unit = units_[static_cast<size_t>(item.unit)];
        return int64_t{item.num_tokens} * ((unit.tiles + unit.pieces - 1) / unit.pieces);
    };
    std::stable_sort(items_.begin(), items_.end(), [&](const Item& a, const Item& b) { return size(a) > size(b); });
    return true;
}

}  // namespace penjing
