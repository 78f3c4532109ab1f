// Layers with a gated convolution over the last tokens in place of attention. The gated inputs of a step's rows lie where
// their queries would, and in pages for later steps; pages hold the very floats, so that both give a row the same bits.
#include "layers.h"

namespace penjing {

bool Layers::convolutions_fit() const {
    const StepInput& in = step_.in;
    if (most_taps_ == 0) return true;
    if (in.gated == nullptr) return false;
    const PjSequences& s = in.sequences;
    for (int64_t i = 0; i < s.num_sequences; ++i) {
        const int64_t start = s.context_len[i] - (s.cu_query[i + 1] - s.cu_query[i]);
        for (int64_t at = std::max<int64_t>(0, start - most_taps_ + 1); at < start; ++at) {
            const int32_t block = s.block_table[i * s.table_stride + at / in.block_size];
            if (block < 0 || block >= in.num_blocks) return false;
        }
    }
    return true;
}

// Multiplies inputs by their gates, in place of these, and stores them. Ends with a barrier.
void Layers::gate_inputs(const Team& team, const PjLayer& layer, int64_t row, int64_t count) const {
    const int64_t hidden = model_.hidden, end = share(count, team.member + 1, team.members);
    for (int64_t i = share(count, team.member, team.members); i < end; ++i) {
        float* x = step_.qkv + (row + i) * qkv_size();
        const float* input = x + 2 * hidden;
        for (int64_t j = 0; j < hidden; ++j) x[j] *= input[j];
        if (const int64_t slot = step_.in.slots[row + i]; slot >= 0) std::copy_n(x, hidden, gated_row(layer, slot));
    }
    sync(team, layer.out);
}

void Layers::convolve(const Team& team, int64_t index, const uint8_t* wanted, float* attended) const {
    const StepInput& in = step_.in;
    const PjSequences& s = in.sequences;
    const PjLayer& layer = layers_[static_cast<size_t>(index)];
    const int64_t hidden = model_.hidden, stride = qkv_size();
    const int64_t begin = share(in.rows, team.member, team.members), end = share(in.rows, team.member + 1, team.members);
    for (int64_t i = 0; i < s.num_sequences; ++i) {
        const int64_t first = s.cu_query[i], behind = s.cu_query[i + 1];
        const int64_t start = s.context_len[i] - (behind - first);  // of the first row in its sequence
        for (int64_t row = std::max(begin, first); row < std::min(end, behind); ++row) {
            if (wanted && !wanted[row]) continue;
            float* out = attended + row * attended_size();
            std::fill_n(out, hidden, 0.0f);
            for (int64_t tap = 0; tap < layer.num_taps; ++tap) {
                const int64_t from = row - (layer.num_taps - 1 - tap), at = start + from - first;
                if (at < 0) continue;
                const float* x = step_.qkv + from * stride;
                if (from < first) {
                    const int64_t block = s.block_table[i * s.table_stride + at / in.block_size];
                    x = gated_row(layer, block * in.block_size + at % in.block_size);
                }
                for (int64_t j = 0; j < hidden; ++j) out[j] += layer.taps[j * layer.num_taps + tap] * x[j];
            }
            for (int64_t j = 0; layer.tap_bias && j < hidden; ++j) out[j] += layer.tap_bias[j];
            const float* gate = step_.qkv + row * stride + hidden;
            for (int64_t j = 0; j < hidden; ++j) out[j] *= gate[j];
        }
    }
}

}  // namespace penjing
