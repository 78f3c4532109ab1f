// What outputs may be at most, of which screen.cpp looks for the largest; over one instruction set's lanes.
#pragma once

namespace {

// Above what a handful of float32 operations, and sums of a layer's inputs in double, can be off.
constexpr float SCREEN_ROUNDING = 1e-5f;

// The most that outputs may be which `rough` is off by at most lost × reach → `most`; the largest of both.
inline penjing::Likely likely_row(const float* rough, const float* lost, int64_t n, float reach, float* most) {
    const V by = v_set(reach), rounding = v_set(SCREEN_ROUNDING);
    V peak = v_set(-INFINITY), limit = peak;
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        const V x = v_load(rough + i), off = v_mul(v_load(lost + i), by);
        const V sizes = v_add(v_max(x, v_sub(v_zero(), x)), off);
        const V high = v_add(x, v_add(off, v_mul(rounding, sizes)));
        v_store(most + i, high);
        peak = v_max(peak, x);
        limit = v_max(limit, high);
    }
    penjing::Likely found{v_largest(peak), v_largest(limit)};
    for (; i < n; ++i) {
        const float off = lost[i] * reach;
        most[i] = rough[i] + (off + SCREEN_ROUNDING * (fabsf(rough[i]) + off));
        found.peak = rough[i] > found.peak ? rough[i] : found.peak;
        found.limit = most[i] > found.limit ? most[i] : found.limit;
    }
    return found;
}

}  // namespace
