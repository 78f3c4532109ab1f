// One float32 lane: plain C++ for any processor, the slow path and the readable reference.
#pragma once

#include <cmath>
#include <cstring>

namespace {

constexpr int W = 1;
using V = float;
using VI = int32_t;

inline V v_zero() { return 0.0f; }
inline V v_set(float x) { return x; }
inline V v_load(const float* p) { return *p; }
inline V v_load_n(const float* p, int) { return *p; }
inline void v_store(float* p, V x) { *p = x; }
inline void v_store_n(float* p, V x, int) { *p = x; }
inline V v_add(V a, V b) { return a + b; }
inline V v_sub(V a, V b) { return a - b; }
inline V v_mul(V a, V b) { return a * b; }
inline V v_div(V a, V b) { return a / b; }
inline V v_fma(V a, V b, V c) { return a * b + c; }
inline V v_fnma(V a, V b, V c) { return c - a * b; }
inline V v_max(V a, V b) { return a > b ? a : b; }
inline V v_min(V a, V b) { return a < b ? a : b; }
inline V v_round(V x) { return nearbyintf(x); }
inline V v_scale2(V p, V n) { return n == n ? ldexpf(p, static_cast<int>(n)) : n; }
inline V v_from_int(VI x) { return static_cast<float>(x); }
inline VI vi_load(const int32_t* p) { return *p; }
// 128 × sum and the biased sum may wrap; their difference does not.
inline VI vi_sub(VI a, VI b) { return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b)); }
inline float v_sum(V x) { return x; }
inline float v_largest(V x) { return x; }
inline V v_keep(V x, int first, int last) { return first <= 0 && last > 0 ? x : -INFINITY; }

inline VI vi_abs_max(VI peak, V x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    bits &= 0x7fffffff;
    return bits > peak ? bits : peak;
}
inline VI vi_zero() { return 0; }
inline uint32_t vi_largest(VI x) { return static_cast<uint32_t>(x); }

inline void v_store_bytes(uint8_t* p, V x, uint8_t flip, int) {
    *p = x == x ? static_cast<uint8_t>(static_cast<int8_t>(x)) ^ flip : flip;
}

inline V v_load_bf16_n(const uint16_t* p, int) {
    const uint32_t bits = static_cast<uint32_t>(*p) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline V v_load_f16_n(const uint16_t* p, int) {
    const uint32_t sign = (*p & 0x8000u) << 16, exponent = (*p >> 10) & 31u, fraction = *p & 1023u;
    float x;
    if (exponent == 0) {
        x = ldexpf(static_cast<float>(fraction), -24);
        return sign ? -x : x;
    }
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (fraction << 13);
    memcpy(&x, &bits, 4);
    return x;
}

inline void v_transpose(const float* const* rows, int column, float* out) { *out = rows[0][column]; }

}  // namespace
