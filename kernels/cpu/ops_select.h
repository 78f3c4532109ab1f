// How much attention blocks of keys may get, from what is known of each. A block's result depends on that block and the
// query alone, so it does not matter how many are asked for at once.
#pragma once

namespace {

// score[head × stride + block] = scale[block][0] × Σ weights[head][0] · summary[block][0] + the same of the second halves.
// weights is (heads, 2, head_dim), summary (count, 2, head_dim), scale (count, 2).
template <int HEADS>
inline void score_heads(const float* weights, int head_dim, const int8_t* summary, const float* scale, int count,
                        float* score, int64_t stride) {
    for (int block = 0; block < count; ++block, summary += 2 * head_dim, scale += 2) {
        V sum[HEADS];
        for (int head = 0; head < HEADS; ++head) sum[head] = v_zero();
        for (int half = 0; half < 2; ++half) {
            V part[HEADS];
#pragma GCC unroll 4
            for (int head = 0; head < HEADS; ++head) part[head] = v_zero();
            for (int d = 0; d < head_dim; d += W) {
                const int n = head_dim - d < W ? head_dim - d : W, at = half * head_dim + d;
                const V known = n == W ? v_load_int8(summary + at) : v_load_int8_n(summary + at, n);
#pragma GCC unroll 4
                for (int head = 0; head < HEADS; ++head)
                    part[head] = v_fma(v_load_n(weights + head * 2 * head_dim + at, n), known, part[head]);
            }
            for (int head = 0; head < HEADS; ++head) sum[head] = v_fma(part[head], v_set(scale[half]), sum[head]);
        }
        for (int head = 0; head < HEADS; ++head) score[head * stride + block] = v_sum(sum[head]);
    }
}

inline void score_blocks(const float* weights, int heads, int head_dim, const int8_t* summary, const float* scale,
                         int count, float* score, int64_t stride) {
    for (; heads >= 4; heads -= 4, weights += 8 * head_dim, score += 4 * stride)
        score_heads<4>(weights, head_dim, summary, scale, count, score, stride);
    if (heads == 3) score_heads<3>(weights, head_dim, summary, scale, count, score, stride);
    if (heads == 2) score_heads<2>(weights, head_dim, summary, scale, count, score, stride);
    if (heads == 1) score_heads<1>(weights, head_dim, summary, scale, count, score, stride);
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

}  // namespace
