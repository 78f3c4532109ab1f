#include "sample.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "memory.h"
#include "ops.h"
#include "pool.h"

namespace penjing {
namespace {

constexpr int64_t BLOCK = 256;
constexpr float LARGEST = std::numeric_limits<float>::max();
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Working memory of a member.
struct Room {
    float* logits;
    float* weight;
    float* value;
    float* spare;
    int32_t* id;
};
Room carve_room(Carver& carver, int64_t vocab) {
    const size_t size = static_cast<size_t>(vocab);
    return {carver.take<float>(size), carver.take<float>(size), carver.take<float>(size), carver.take<float>(size),
            carver.take<int32_t>(size)};
}

void change_logits(const SampleRow& row, float* x, int64_t vocab) {
    memcpy(x, row.logits, static_cast<size_t>(vocab) * sizeof(float));
    if (row.repetition != 1.0f) {
        for (int64_t i = 0; i < row.num_seen; ++i) {
            float& value = x[row.seen[i]];
            const float changed = value > 0 ? value / row.repetition : value * row.repetition;
            value = std::min(std::max(changed, -LARGEST), LARGEST);
        }
    }
    if (row.presence != 0 || row.frequency != 0) {
        for (int64_t i = 0; i < row.num_seen; ++i)
            if (row.counts[i] > 0) x[row.seen[i]] -= row.presence + row.frequency * static_cast<float>(row.counts[i]);
    }
    for (int64_t i = 0; i < row.num_bias; ++i) x[row.bias_ids[i]] += row.bias[i];
    for (int64_t i = 0; i < row.num_forbidden; ++i) x[row.forbidden[i]] = NEVER;
}

void forbid_by_mask(const uint32_t* mask, float* x, int64_t vocab) {
    for (int64_t begin = 0; begin < vocab; begin += 32) {
        const uint32_t bits = mask[begin / 32];
        const int64_t end = std::min(begin + 32, vocab);
        if (bits == 0) std::fill(x + begin, x + end, NEVER);
        else if (bits != ~0u)
            for (int64_t i = begin; i < end; ++i)
                if (!(bits >> (i - begin) & 1)) x[i] = NEVER;
    }
}

int64_t count_allowed(const uint32_t* mask, int64_t vocab) {
    int64_t count = 0;
    for (int64_t begin = 0; begin < vocab; begin += 32) {
        const uint32_t within = vocab - begin < 32 ? (1u << (vocab - begin)) - 1 : ~0u;
        count += __builtin_popcount(mask[begin / 32] & within);
    }
    return count;
}

// The logits of allowed tokens, which may lie where `x` does, and the tokens.
int64_t gather_allowed(const uint32_t* mask, const float* x, int64_t vocab, float* value, int32_t* id) {
    int64_t count = 0;
    for (int64_t begin = 0; begin < vocab; begin += 32) {
        for (uint32_t bits = mask[begin / 32]; bits; bits &= bits - 1) {
            const int64_t token = begin + __builtin_ctz(bits);
            if (token >= vocab) break;
            value[count] = x[token];
            id[count++] = static_cast<int32_t>(token);
        }
    }
    return count;
}

// The k-th largest of n values, 1 ≤ k ≤ n.
float kth_largest(const Ops& ops, const float* x, int64_t n, int64_t k, const Room& room) {
    const int64_t groups = ops.peaks_of_groups(x, n, room.spare);
    int64_t count = n;
    if (k <= groups) {  // so many groups reach this far, hence as many values
        std::nth_element(room.spare, room.spare + (k - 1), room.spare + groups, std::greater<float>());
        count = ops.gather_from(x, n, room.spare[k - 1], room.spare, room.id);
    } else {
        memcpy(room.spare, x, static_cast<size_t>(n) * sizeof(float));
    }
    std::nth_element(room.spare, room.spare + (k - 1), room.spare + count, std::greater<float>());
    return room.spare[k - 1];
}

// The smallest weight of the smallest set of largest weights that holds `goal`, if `above` is held by larger ones than
// those in `value`; all of these hold at least the rest.
float nucleus(const Ops& ops, float* value, int64_t n, double above, double goal) {
    float *begin = value, *end = value + n;
    for (int round = 0; end - begin > 64 && round < 64; ++round) {
        float *middle = begin + (end - begin) / 2;
        const float pivot = std::max(std::min(*begin, *middle), std::min(std::max(*begin, *middle), *(end - 1)));
        float* less = begin + ops.split(begin, end - begin, pivot, false);
        const double largest = ops.sum_weights(begin, less - begin);
        if (above + largest < goal && less < end) {
            above += largest;
            begin = less;
            continue;
        }
        float* equal = begin + ops.split(begin, less - begin, pivot, true);
        if (above + ops.sum_weights(begin, equal - begin) < goal) return pivot;
        end = equal;
    }
    std::sort(begin, end, std::greater<float>());
    for (float* at = begin; at < end; ++at) {
        above += ops.sum_weights(at, 1);
        if (above >= goal) return *at;
    }
    return end[-1];
}

// Where the running sum of the weights passes number × their sum; never at a weight of 0.
int64_t draw(const Ops& ops, const float* weight, int64_t n, double total, double number) {
    const double goal = number * total;
    double sum = 0;
    int64_t begin = 0, last = 0;
    for (; begin < n; begin += BLOCK) {
        const int64_t count = std::min(BLOCK, n - begin);
        const double part = ops.sum_weights(weight + begin, count);
        if (part > 0) last = begin;
        if (sum + part > goal) break;
        sum += part;
    }
    if (begin >= n) {  // rounding put the goal at the total: the last weight that is not 0 is meant
        for (int64_t i = std::min(last + BLOCK, n) - 1; i > last; --i)
            if (ops.sum_weights(weight + i, 1) > 0) return i;
        return last;
    }
    for (int64_t i = begin;; ++i) {
        sum += ops.sum_weights(weight + i, 1);
        if (sum > goal) return i;
    }
}

// `peak`: the largest logit.
int32_t choose(const Ops& ops, const SampleRow& row, int64_t vocab, float peak, const Room& room) {
    const float* x = row.logits;
    int64_t count = vocab;
    const int32_t* id = nullptr;  // null: the place is the token
    const int64_t allowed = row.mask && row.top_k <= 0 ? count_allowed(row.mask, vocab) : vocab;
    const bool few = allowed > 0 && allowed < vocab / 8;  // one by one more of them take longer than all in vectors
    const bool many = row.mask && !few;
    if (row.repetition != 1.0f || row.presence != 0 || row.frequency != 0 || row.num_bias || row.num_forbidden || many) {
        change_logits(row, room.logits, vocab);
        x = room.logits;
    }
    if (many) forbid_by_mask(row.mask, room.logits, vocab);
    if (few) {
        count = gather_allowed(row.mask, x, vocab, room.logits, room.id);
        x = room.logits;
        id = room.id;
    }
    if (x != row.logits) peak = ops.peak_of_row(x, count);
    if (row.temperature == 0 || peak == NEVER) {
        const int64_t at = std::find(x, x + count, peak) - x;
        return id ? id[at] : static_cast<int32_t>(at);
    }
    if (row.top_k > 0 && row.top_k < vocab) {
        const float least = kth_largest(ops, x, vocab, row.top_k, room);
        count = ops.gather_from(x, vocab, least, room.value, room.id);
        x = room.value;
        id = room.id;
    }
    float* weight = room.weight;
    double total = ops.weigh_row(x, count, peak, row.temperature, weight);
    if (row.top_p < 1 || row.min_p > 0) {
        // From here on `value` holds weights, and `other` the places of those that are still of interest.
        int32_t* other = reinterpret_cast<int32_t*>(room.logits);
        int64_t large = 0;
        float least = row.min_p;
        if (row.top_p < 1) {
            const double goal = row.top_p * total;
            // Bands of weights from the largest down, until they hold enough. Smaller than the last bound is less than
            // half of what may be left out.
            const double small = std::max((1 - row.top_p) * total / static_cast<double>(2 * count) - 1e-10, 0.0);
            float bound = 1, last = 1;
            double above = 0, held = 0;
            do {
                last = bound;
                above = held;
                bound = bound / 32 > small && bound > 1.0f / (1 << 20) ? bound / 32 : static_cast<float>(small);
                large = ops.gather_from(weight, count, bound, room.value, other);
                held = ops.sum_weights(room.value, large);
            } while (held < goal && bound > static_cast<float>(small));
            memcpy(room.spare, room.value, static_cast<size_t>(large) * sizeof(float));
            int64_t known = above > 0 ? ops.split(room.spare, large, last, false) : 0;
            if (known == large) known = 0, above = 0;  // rounding: nothing is enough
            least = std::max(least, nucleus(ops, room.spare + known, large - known, above, goal));
        } else {
            large = ops.gather_from(weight, count, least, room.value, other);
        }
        int32_t* place = reinterpret_cast<int32_t*>(room.spare);
        count = ops.gather_from(room.value, large, least, weight, place);
        for (int64_t i = 0; i < count; ++i) other[i] = id ? id[other[place[i]]] : other[place[i]];
        id = other;
        total = ops.sum_weights(weight, count);
    }
    const int64_t at = draw(ops, weight, count, total, row.number);
    return id ? id[at] : static_cast<int32_t>(at);
}

void score(const Ops& ops, SampleRow& row, int64_t vocab, float peak, const Room& room) {
    const float* x = row.logits;
    const double log_total = static_cast<double>(peak) + std::log(ops.sum_of_powers(x, vocab, peak));
    const int64_t wanted = std::min<int64_t>(row.num_logprobs, vocab);
    bool seen = false;
    if (wanted > 0) {
        const float least = kth_largest(ops, x, vocab, wanted, room);
        const int64_t count = ops.gather_from(x, vocab, least, room.value, room.id);
        std::partial_sort(room.id, room.id + wanted, room.id + count,
                          [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
    }
    row.num_top = static_cast<int32_t>(wanted);
    for (int64_t i = 0; i < wanted; ++i) {
        row.top_ids[i] = room.id[i];
        row.top_logprobs[i] = static_cast<double>(x[room.id[i]]) - log_total;
        row.top_ranks[i] = i + 1;
        seen |= room.id[i] == row.token;
    }
    if (seen) return;
    row.top_ids[wanted] = row.token;
    row.top_logprobs[wanted] = static_cast<double>(x[row.token]) - log_total;
    row.top_ranks[wanted] = ops.count_before(x, vocab, x[row.token], row.token) + 1;
    row.num_top = static_cast<int32_t>(wanted + 1);
}

struct Sampling {
    SampleRow* const* rows;
    int64_t num_rows, vocab;
    Room room[64];
    std::atomic<int64_t> next{0};
};

void sample_member(const Team& team, void* context) {
    Sampling& call = *static_cast<Sampling*>(context);
    const Ops& kernels = ops();
    const Room& room = call.room[team.member];
    for (int64_t i; (i = call.next.fetch_add(1)) < call.num_rows;) {
        SampleRow& row = *call.rows[i];
        const float peak = kernels.peak_of_row(row.logits, call.vocab);
        if (!std::isfinite(peak)) {
            row.token = -2;
            continue;
        }
        if (row.token < 0) row.token = choose(kernels, row, call.vocab, peak, room);
        if (row.num_logprobs >= 0) score(kernels, row, call.vocab, peak, room);
    }
}

}  // namespace

int sample_rows(SampleRow* const* rows, int64_t num_rows, int64_t vocab) {
    static thread_local Scratch scratch;
    Sampling call{rows, num_rows, vocab, {}, {}};
    const int members = static_cast<int>(std::min<int64_t>({num_threads(), num_rows, 64}));
    Carver counting(nullptr);
    for (int i = 0; i < members; ++i) carve_room(counting, vocab);
    void* memory = scratch.reserve(counting.used());
    if (memory == nullptr) return -1;
    Carver carver(memory);
    for (int i = 0; i < members; ++i) call.room[i] = carve_room(carver, vocab);
    run_team(sample_member, &call, members);
    return 0;
}

}  // namespace penjing
