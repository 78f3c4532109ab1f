#include "decoder.h"

namespace penjing {

int check_step(const PjModel& model, const StepInput& in) {
    for (int64_t row = 0; row < in.rows; ++row) {
        if (in.tokens[row] < 0 || in.tokens[row] >= model.vocab + in.num_seen) return -3;
        if (in.positions[row] < 0 || in.positions[row] >= model.num_positions) return -4;
        if (in.slots[row] < -1 || in.slots[row] >= in.num_blocks * in.block_size) return -5;
        if (in.adapter && (in.adapter[row] < -1 || in.adapter[row] >= in.num_adapters)) return -8;
        if (in.adapter && in.adapter[row] >= 0 && !in.adapters[in.adapter[row]]) return -8;
    }
    for (int64_t i = 0; i < in.num_logits; ++i)
        if (in.logit_rows[i] < 0 || in.logit_rows[i] >= in.rows) return -6;
    const PjSequences& s = in.sequences;
    if (s.cu_query[0] != 0 || s.cu_query[s.num_sequences] != in.rows) return -7;
    for (int64_t i = 0; i < s.num_sequences; ++i) {
        const int64_t queries = int64_t{s.cu_query[i + 1]} - s.cu_query[i], keys = s.context_len[i];
        if (queries < 1 || queries > keys || keys > s.table_stride * in.block_size) return -7;
    }
    return 0;
}

}  // namespace penjing
