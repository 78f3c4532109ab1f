// How much attention blocks of keys may get, from what is known of each, and the value that parts those which are read
// from the others. A block's score depends on that block and the query alone, and is the same on every processor: sums
// are of whole numbers, and every product of floats is rounded by itself.
#pragma once

namespace {

constexpr int SUMMED_DIMS = 512;  // so many products of 16 and 8 bits have a sum of 32

// Dimensions [begin, begin + dims) of some summaries: to[word][CHOICE_KEYS], a word being four dimensions, the last one
// padded with zeros; as many of its lanes are filled as a vector has. Meanwhile those of `ahead` are fetched.
inline void pack_summaries(const int8_t* const* summary, const int8_t* const* ahead, int begin, int dims, int count,
                           float* to) {
    const void *at[W], *next[W];
    for (int lane = 0; lane < W; ++lane) {
        at[lane] = summary[lane < count ? lane : 0] + begin;
        next[lane] = ahead[lane] + begin;
    }
    const int words = dims / 4;
    transpose_rows<float>({at, next, to, count, words, 0, 1, false, false});
    for (int lane = 0; dims % 4 && lane < W; ++lane) {
        const int8_t* rest = static_cast<const int8_t*>(at[lane]) + 4 * words;
        int8_t word[4] = {};
        for (int i = 0; i < dims % 4; ++i) word[i] = rest[i];
        __builtin_memcpy(to + words * CHOICE_KEYS + lane, word, 4);
    }
}

// score[head] = or += the products of a head's query with the summaries that are packed.
template <int HEADS>
inline void score_heads(const int16_t* q, int64_t ldq, int words, const float* packed, const float* q_scale,
                        V scale, int count, bool first, float* score, int64_t stride) {
    VI even_sum[HEADS], odd_sum[HEADS];  // two, because one sum would wait for itself
    for (int head = 0; head < HEADS; ++head) even_sum[head] = odd_sum[head] = vi_zero();
    for (int word = 0; word < words; ++word) {
        const VI four = vi_load(packed + word * CHOICE_KEYS), even = vi_even_bytes(four), odd = vi_odd_bytes(four);
#pragma GCC unroll 4
        for (int head = 0; head < HEADS; ++head) {
            int32_t at_even, at_odd;
            __builtin_memcpy(&at_even, q + head * ldq + word * 4, sizeof(at_even));
            __builtin_memcpy(&at_odd, q + head * ldq + word * 4 + 2, sizeof(at_odd));
            even_sum[head] = vi_dot16(even_sum[head], vi_set(at_even), even);
            odd_sum[head] = vi_dot16(odd_sum[head], vi_set(at_odd), odd);
        }
    }
    for (int head = 0; head < HEADS; ++head) {
        float* to = score + head * stride;
        const V sum = v_from_int(vi_add(even_sum[head], odd_sum[head])), part = v_mul(sum, v_mul(v_set(q_scale[head]), scale));
        v_store_n(to, first ? part : v_add(v_load_n(to, count), part), count);
    }
}

// score[head × stride + block] = q_scale[head] × (scale[0][block] × q[head] · summary[block][0] + scale[1][block] ×
// |q[head]| · summary[block][1]). q is (heads, 2, head_dim in whole words): as quantize_query gives it, and its absolute
// values; summary has SCORED rows of (2, head_dim), scale is (2, SCORED); rows of `ahead`, as many, are fetched meanwhile.
inline void score_blocks(const int16_t* q, const float* q_scale, int heads, int head_dim, const int8_t* const* summary,
                         const int8_t* const* ahead, const float* scale, int count, float* score, int64_t stride) {
    alignas(64) float packed[CHOICE_KEYS * SUMMED_DIMS / 4];
    const int padded = (head_dim + 3) / 4 * 4;
    for (int at = 0; at < count; at += W) {
        const int n = count - at < W ? count - at : W;
        for (int half = 0; half < 2; ++half) {
            const V by = v_load(scale + half * penjing::SCORED_BLOCKS + at);
            for (int begin = 0; begin < head_dim; begin += SUMMED_DIMS) {
                const int dims = head_dim - begin < SUMMED_DIMS ? head_dim - begin : SUMMED_DIMS, words = (dims + 3) / 4;
                pack_summaries(summary + at, ahead + at, half * head_dim + begin, dims, n, packed);
                const int16_t* query = q + half * padded + begin;
                const float* own_scale = q_scale;
                float* to = score + at;
                const bool first = half == 0 && begin == 0;
                const auto next = [&](int done) {
                    query += done * 2 * padded;
                    own_scale += done;
                    to += done * stride;
                };
                int left = heads;
                for (; left >= 4; left -= 4, next(4))
                    score_heads<4>(query, 2 * padded, words, packed, own_scale, by, n, first, to, stride);
                if (left == 3) score_heads<3>(query, 2 * padded, words, packed, own_scale, by, n, first, to, stride);
                if (left == 2) score_heads<2>(query, 2 * padded, words, packed, own_scale, by, n, first, to, stride);
                if (left == 1) score_heads<1>(query, 2 * padded, words, packed, own_scale, by, n, first, to, stride);
            }
        }
    }
}

// value[block] = the sum over the heads of 2^score as a share of the head's own sum. Overwrites the scores.
inline void join_scores(float* score, int heads, int64_t stride, int64_t count, float* value) {
    for (int head = 0; head < heads; ++head, score += stride) {
        V most = v_set(-INFINITY), total = v_zero();
        for (int64_t i = 0; i < count; i += W) {
            const int n = static_cast<int>(count - i < W ? count - i : W);
            most = v_max(v_keep(v_load_n(score + i, n), 0, n), most);
        }
        const V peak = v_set(v_largest(most));
        for (int64_t i = 0; i < count; i += W) {
            const int n = static_cast<int>(count - i < W ? count - i : W);
            const V weight = v_exp2(v_sub(v_keep(v_load_n(score + i, n), 0, n), peak));
            total = v_add(total, weight);
            v_store_n(score + i, weight, n);
        }
        const V share = v_div(v_set(1.0f), v_set(v_sum(total)));
        for (int64_t i = 0; i < count; i += W) {
            const int n = static_cast<int>(count - i < W ? count - i : W);
            const V own = v_mul(v_load_n(score + i, n), share);
            v_store_n(value + i, head == 0 ? own : v_add(v_load_n(value + i, n), own), n);
        }
    }
}

// The value at place `place` (0: the largest) in descending order of n values from 0 on. Their bits order as they do, so
// it is found bit by bit: a pass over all counts what is at least a guess. A sort of 500 values takes six times as long.
inline float nth_largest(const float* x, int64_t n, int64_t place) {
    const auto reached = [&](uint32_t bits) {
        float least;
        __builtin_memcpy(&least, &bits, 4);
        const V bound = v_set(least);
        int64_t count = 0;
        int64_t i = 0;
        for (; i + W <= n; i += W) count += v_count_from(v_load(x + i), bound);
        for (; i < n; ++i) count += x[i] >= least;
        return count > place;
    };
    uint32_t found = 0;
    for (uint32_t bit = 1u << 30; bit != 0; bit >>= 1)
        if ((found | bit) <= 0x7f800000u && reached(found | bit)) found |= bit;
    float value;
    __builtin_memcpy(&value, &found, 4);
    return value;
}

}  // namespace
