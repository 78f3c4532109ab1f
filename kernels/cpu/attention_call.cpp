#include "attention_call.h"

#include <algorithm>
#include <cstring>

#include "memory.h"
#include "select.h"

namespace penjing {
namespace {

struct Call {
    const Ops& ops;
    const AttentionPlan& plan;
    const SelectionPlan& selection;
    const AttentionCall& call;
    float* scratch;
    size_t scratch_floats;
    uint8_t* masks;
    std::atomic<int64_t> next_choice{0}, next{0};
};

void attention_member(const Team& team, void* context) {
    Call& c = *static_cast<Call*>(context);
    float* scratch = c.scratch + static_cast<size_t>(team.member) * c.scratch_floats;
    if (!c.selection.completed().empty()) {
        summarize_blocks(c.ops, c.selection, c.call.pages, team);
        team.sync();
    }
    if (c.masks) {
        choose_blocks(c.ops, c.selection, c.call, nullptr, c.next_choice, scratch, c.masks);
    }
    run_attention_items(c.ops, c.plan, c.call, nullptr, c.next, scratch);
}

}  // namespace

int run_attention(const float* q, float* out, const PjPages& pages, const PjSequences& sequences,
                  const AttentionShape& shape, float scale, float cap, const float* sinks, int64_t window,
                  const PjSelection* selection, const int64_t* slots, uint8_t* masks) {
    const int threads = num_threads();
    AttentionPlan plan;
    if (!plan.build(sequences, shape, pages.num_blocks, pages.block_size, window, threads)) return -2;
    SelectionPlan choice;
    const PjSelection chosen = selection ? *selection : PjSelection{};
    const int64_t rows = sequences.cu_query[sequences.num_sequences];
    if (chosen.block && (window || !pages.summary)) return -9;
    if (!choice.build(sequences, shape, chosen, slots, rows, pages.block_size)) return -9;
    if (plan.items().empty()) return 0;

    static thread_local Scratch scratch;
    const size_t own = std::max(attention_scratch_floats(plan), choice.scratch_floats());
    const size_t floats = own * static_cast<size_t>(threads) + static_cast<size_t>(plan.partial_floats());
    float* memory = static_cast<float*>(scratch.reserve(floats * sizeof(float) + choice.mask_bytes()));
    if (memory == nullptr) return -1;
    uint8_t* bytes = choice.mask_bytes() ? reinterpret_cast<uint8_t*>(memory + floats) : nullptr;
    if (bytes) memset(bytes, ALL_CHOSEN, choice.mask_bytes());
    AttentionProgress progress;
    choice.begin(plan, progress);
    const int64_t stride = shape.num_heads * shape.head_dim;
    const AttentionCall call{q, out, stride, stride, pages, scale, window, memory + own * static_cast<size_t>(threads),
                             &progress, 1, bytes, choice.tiles(), cap, sinks};
    Call context{ops(), plan, choice, call, memory, own, bytes};
    run_team(attention_member, &context, threads);
    if (masks && bytes) memcpy(masks, bytes, choice.mask_bytes());
    return 0;
}

}  // namespace penjing
