#include "low_rank.h"

#include <algorithm>

namespace penjing {
namespace {

// Calls `work(parts, first, rows)` for each run of neighbouring rows with one adapter.
template <typename Work>
void each_run(const LowRankCall& call, Work work) {
    for (int64_t begin = 0, end; begin < call.count; begin = end) {
        end = begin + 1;
        while (end < call.count && call.who[end] == call.who[begin]) ++end;
        if (call.who[begin] < 0) continue;
        work(call.adapters[call.who[begin]] + call.layer * NUM_PROJECTIONS, begin, end - begin);
    }
}

float* low_of(const LowRankCall& call, int part, int64_t row) { return call.low + (part * call.count + row) * call.rank; }

// The member's share of the ranks, which fills `low`.
void reduce(const LowRankCall& call, int member, int members) {
    each_run(call, [&](const PjLowRank* parts, int64_t first, int64_t rows) {
        for (int i = 0; i < call.num_outs; ++i) {
            const PjLowRank& pair = parts[call.outs[i].which];
            PjLinear a{};
            a.weight = pair.a;
            a.n = pair.rank;
            a.k = pair.k;
            a.dtype = pair.dtype;
            const int64_t begin = share(pair.rank, member, members), end = share(pair.rank, member + 1, members);
            if (begin < end)
                call.ops.float_linear(a, call.x + first * call.ldx, call.ldx, rows, begin, end, low_of(call, i, first),
                                      call.rank, false);
        }
    });
}

// The member's share of the outputs, which are added to.
void expand(const LowRankCall& call, int member, int members) {
    each_run(call, [&](const PjLowRank* parts, int64_t first, int64_t rows) {
        for (int i = 0; i < call.num_outs; ++i) {
            const LowRankOut& to = call.outs[i];
            const PjLowRank& pair = parts[to.which];
            if (pair.rank == 0) continue;
            const int64_t blocks = (pair.n + 15) / 16;
            call.ops.low_rank_blocks(pair, share(blocks, member, members), share(blocks, member + 1, members),
                                     low_of(call, i, first), call.rank, rows, to.out + first * to.ldo, to.ldo, to.spread);
        }
    });
}

}  // namespace

int64_t largest_rank(const PjLowRank* const* adapters, int64_t num_layers, const int32_t* who, int64_t count) {
    int64_t most = 0;
    for (int64_t row = 0; row < count; ++row) {
        if (who[row] < 0 || (row > 0 && who[row] == who[row - 1])) continue;
        for (int64_t i = 0; i < num_layers * NUM_PROJECTIONS; ++i) most = std::max(most, adapters[who[row]][i].rank);
    }
    return most;
}

void low_rank(const LowRankCall& call, const Team& team) {
    reduce(call, team.member, team.members);
    team.sync();
    expand(call, team.member, team.members);
}

void open_gated_row(void (*gated)(const float*, const float*, int64_t, float*), const float* x, int64_t n, float* out) {
    for (int64_t at = 0; at < n; at += 16)
        gated(x + 2 * at, x + 2 * at + 16, std::min<int64_t>(16, n - at), out + at);
}

}  // namespace penjing
