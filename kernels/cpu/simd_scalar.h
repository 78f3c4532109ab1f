// Eight float32 lanes in plain C++ for any processor: arrays and loops, which compilers turn into what vectors there are.
// Several lanes also keep sums as accurate as on the wide paths.
#pragma once

#include <cmath>
#include <cstring>

namespace {

constexpr int W = 8;
struct V {
    float lane[W];
};
struct VI {
    int32_t lane[W];
};

// result.lane[i] = EXPRESSION for every lane i
#define PJ_LANES(TYPE, EXPRESSION)                       \
    TYPE result;                                         \
    for (int i = 0; i < W; ++i) result.lane[i] = EXPRESSION; \
    return result

inline V v_set(float x) { PJ_LANES(V, x); }
inline V v_zero() { return v_set(0.0f); }
inline V v_load(const float* p) { PJ_LANES(V, p[i]); }
inline V v_load_n(const float* p, int n) { PJ_LANES(V, i < n ? p[i] : 0.0f); }
inline void v_store(float* p, V x) { memcpy(p, x.lane, sizeof(x.lane)); }
inline void v_store_n(float* p, V x, int n) { memcpy(p, x.lane, static_cast<size_t>(n) * sizeof(float)); }
inline V v_add(V a, V b) { PJ_LANES(V, a.lane[i] + b.lane[i]); }
inline V v_sub(V a, V b) { PJ_LANES(V, a.lane[i] - b.lane[i]); }
inline V v_mul(V a, V b) { PJ_LANES(V, a.lane[i] * b.lane[i]); }
inline V v_div(V a, V b) { PJ_LANES(V, a.lane[i] / b.lane[i]); }
inline V v_fma(V a, V b, V c) { PJ_LANES(V, a.lane[i] * b.lane[i] + c.lane[i]); }
inline V v_fused(V a, V b, V c) { PJ_LANES(V, fmaf(a.lane[i], b.lane[i], c.lane[i])); }  // rounded once, at any cost
inline V v_max(V a, V b) { PJ_LANES(V, a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }  // b where either is NaN
inline V v_min(V a, V b) { PJ_LANES(V, a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }
inline V v_round(V x) { PJ_LANES(V, nearbyintf(x.lane[i])); }
// x, cut to what v_scale2 takes, minus the nearest whole number, which becomes n.
inline V v_fraction(V x, V& n) {
    x = v_min(v_set(128.0f), v_max(v_set(-160.0f), x));
    n = v_round(x);
    return v_sub(x, n);
}
inline float scale2(float p, float n) { return n == n ? ldexpf(p, static_cast<int>(n)) : n; }
inline V v_scale2(V p, V n) { PJ_LANES(V, scale2(p.lane[i], n.lane[i])); }
inline V v_from_int(VI x) { PJ_LANES(V, static_cast<float>(x.lane[i])); }
inline VI vi_load(const void* p) {
    VI x;
    memcpy(x.lane, p, sizeof(x.lane));
    return x;
}
inline VI vi_set(int32_t x) { PJ_LANES(VI, x); }
inline VI vi_zero() { PJ_LANES(VI, 0); }
// The biased sum and its compensation may wrap; their difference does not.
inline int32_t wrapping_sub(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
}
inline VI vi_sub(VI a, VI b) { PJ_LANES(VI, wrapping_sub(a.lane[i], b.lane[i])); }
inline VI vi_add(VI a, VI b) { PJ_LANES(VI, a.lane[i] + b.lane[i]); }
inline int32_t wrapping_mul(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b));
}
inline VI vi_mul(VI a, VI b) { PJ_LANES(VI, wrapping_mul(a.lane[i], b.lane[i])); }
inline V v_keep(V x, int first, int last) { PJ_LANES(V, first <= i && i < last ? x.lane[i] : -INFINITY); }

inline float v_sum(V x) {
    for (int step = W / 2; step > 0; step /= 2)
        for (int i = 0; i < step; ++i) x.lane[i] += x.lane[i + step];
    return x.lane[0];
}
inline float v_largest(V x) {
    float largest = x.lane[0];
    for (int i = 1; i < W; ++i) largest = x.lane[i] > largest ? x.lane[i] : largest;
    return largest;
}

inline int32_t abs_bits(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x7fffffff;
}
inline int32_t greater(int32_t a, int32_t b) { return a > b ? a : b; }
inline VI vi_abs_max(VI peak, V x) { PJ_LANES(VI, greater(peak.lane[i], abs_bits(x.lane[i]))); }
inline uint32_t vi_largest(VI x) {
    for (int i = 1; i < W; ++i) x.lane[0] = greater(x.lane[0], x.lane[i]);
    return static_cast<uint32_t>(x.lane[0]);
}

inline void v_store_bytes(uint8_t* p, V x, uint8_t flip, int n) {
    for (int i = 0; i < n; ++i) {
        const float value = x.lane[i] == x.lane[i] ? x.lane[i] : 0.0f;
        p[i] = static_cast<uint8_t>(static_cast<int8_t>(value)) ^ flip;
    }
}

// Two signed bytes of each word in 16 bits, and sums of two 16-bit products onto each 32-bit lane.
inline int32_t byte_of(int32_t word, int at) { return static_cast<int8_t>(static_cast<uint32_t>(word) >> (8 * at)); }
inline int32_t half_of(int32_t word, int at) { return static_cast<int16_t>(static_cast<uint32_t>(word) >> (16 * at)); }
inline int32_t pair_of(int32_t low, int32_t high) {
    return static_cast<int32_t>((static_cast<uint32_t>(low) & 0xffffu) | (static_cast<uint32_t>(high) << 16));
}
inline VI vi_even_bytes(VI x) { PJ_LANES(VI, pair_of(byte_of(x.lane[i], 0), byte_of(x.lane[i], 2))); }
inline VI vi_odd_bytes(VI x) { PJ_LANES(VI, pair_of(byte_of(x.lane[i], 1), byte_of(x.lane[i], 3))); }
inline int32_t dot16(int32_t a, int32_t b) { return half_of(a, 0) * half_of(b, 0) + half_of(a, 1) * half_of(b, 1); }
inline VI vi_dot16(VI sum, VI a, VI b) { PJ_LANES(VI, sum.lane[i] + dot16(a.lane[i], b.lane[i])); }

inline uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline float from_f16(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 1023u;
    if (exponent == 0) {
        const float x = ldexpf(static_cast<float>(fraction), -24);
        return sign ? -x : x;
    }
    return from_bits(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (fraction << 13));
}
// Rounded half to even; x is NaN or within ±65504.
inline uint16_t to_f16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) half = 0x7e00u | (magnitude >> 13 & 1023u);
    else if (magnitude < 0x38800000u) half = static_cast<uint32_t>(lrintf(ldexpf(from_bits(magnitude), 24)));
    else half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    return static_cast<uint16_t>(sign | half);
}
// Lanes of x that are at least `least`, side by side, and their places from `first` on; how many. May write W of each.
inline int v_pack(V x, V least, int32_t first, float* value, int32_t* id) {
    float lanes[W], bound[W];
    v_store(lanes, x);
    v_store(bound, least);
    int any = 0, found = 0;
    for (int lane = 0; lane < W; ++lane) any |= lanes[lane] >= bound[lane];
    if (!any) return 0;
    for (int lane = 0; lane < W; ++lane) {
        value[found] = lanes[lane];
        id[found] = first + lane;
        found += lanes[lane] >= bound[lane];
    }
    return found;
}

// How many lanes of x are at least `least`.
inline int v_count_from(V x, V least) {
    int count = 0;
    for (int lane = 0; lane < W; ++lane) count += x.lane[lane] >= least.lane[lane];
    return count;
}

// The four bits of each word from bit BIT on, minus 8.
template <int BIT>
inline V v_four_bits(const void* words) {
    const VI word = vi_load(words);
    PJ_LANES(V, static_cast<float>(static_cast<int>(static_cast<uint32_t>(word.lane[i]) >> (BIT) & 15u) - 8));
}

inline V v_load_int8(const int8_t* p) { PJ_LANES(V, static_cast<float>(p[i])); }
inline V v_load_int8_n(const int8_t* p, int n) { PJ_LANES(V, i < n ? static_cast<float>(p[i]) : 0.0f); }
inline V v_load_bf16_n(const uint16_t* p, int n) { PJ_LANES(V, i < n ? from_bits(uint32_t{p[i]} << 16) : 0.0f); }
// To bfloat16, half away from zero; what is below LEAST_BRAIN becomes 0.
inline V v_brain(V x) {
    PJ_LANES(V, (to_bits(x.lane[i]) & 0x7fffffffu) < to_bits(penjing::LEAST_BRAIN)
                    ? 0.0f
                    : from_bits((to_bits(x.lane[i]) + 0x8000u) & 0xffff0000u));
}
inline V v_load_f16_n(const uint16_t* p, int n) { PJ_LANES(V, i < n ? from_f16(p[i]) : 0.0f); }
inline V v_load_f16(const uint16_t* p) { PJ_LANES(V, from_f16(p[i])); }
inline void v_store_f16_n(uint16_t* p, V x, int n) {
    for (int i = 0; i < n; ++i) p[i] = to_f16(x.lane[i]);
}

#undef PJ_LANES

// out[c × 16 + r] = rows[r][c]. Rows may be bytes that start anywhere.
inline void v_transpose(const float* const* rows, int column, float* out) {
    for (int c = 0; c < W; ++c)
        for (int r = 0; r < W; ++r) memcpy(out + c * 16 + r, rows[r] + column + c, sizeof(float));
}
inline void v_transpose(const uint16_t* const* rows, int column, float* out) {
    for (int c = 0; c < W; ++c)
        for (int r = 0; r < W; ++r) out[c * 16 + r] = from_f16(rows[r][column + c]);
}
inline void v_transpose(const penjing::Brain* const* rows, int column, float* out) {
    for (int c = 0; c < W; ++c)
        for (int r = 0; r < W; ++r) out[c * 16 + r] = from_bits(uint32_t{rows[r][column + c].bits} << 16);
}

}  // namespace
