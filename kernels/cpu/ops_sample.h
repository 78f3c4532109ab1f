// Passes over a row of logits. Every product and sum is rounded by itself (no fused ones), so that all instruction sets
// and the reference in numpy (`serve/sampling/sampler.py`) give the same bits.
#pragma once

namespace {

// e^x for x ≤ 0 within 2 units in the last place (Cephes' expf); below −87, −inf too, e^−87.
inline V v_exp_unfused(V x) {
    x = v_max(v_set(-87.0f), x);
    const V n = v_round(v_mul(x, v_set(1.44269504f)));
    const V r = v_sub(v_sub(x, v_mul(n, v_set(0.693359375f))), v_mul(n, v_set(-2.12194440e-4f)));
    V p = v_set(1.9875691500e-4f);
    p = v_add(v_mul(p, r), v_set(1.3981999507e-3f));
    p = v_add(v_mul(p, r), v_set(8.3334519073e-3f));
    p = v_add(v_mul(p, r), v_set(4.1665795894e-2f));
    p = v_add(v_mul(p, r), v_set(1.6666665459e-1f));
    p = v_add(v_mul(p, r), v_set(5.0000001201e-1f));
    p = v_add(v_add(v_mul(p, v_mul(r, r)), r), v_set(1.0f));
    return v_scale2(p, n);
}

// The largest value; NaN where there is one.
inline float peak_of_row(const float* x, int64_t n) {
    V peak = v_set(-INFINITY);
    VI bits = vi_zero();
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        const V value = v_load(x + i);
        peak = v_max(peak, value);
        bits = vi_abs_max(bits, value);
    }
    float largest = v_largest(peak);
    bool wrong = vi_largest(bits) > 0x7f800000u;  // beyond infinity
    for (; i < n; ++i) {
        largest = x[i] > largest ? x[i] : largest;
        wrong |= !(x[i] == x[i]);
    }
    return wrong ? NAN : largest;
}

// A weight as a multiple of 2^−34: sums of 2^19 of them are exact, so their order is nobody's business.
inline double exact(float weight) {
    constexpr double shift = 1.5 * (1 << 18);
    return (static_cast<double>(weight) + shift) - shift;
}

inline double sum_weights(const float* weight, int64_t n) {
    constexpr int LANES = 32;  // one sum of a few lanes would wait for itself
    double sums[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; ++lane) sums[lane] += exact(weight[i + lane]);
    for (; i < n; ++i) sums[0] += exact(weight[i]);
    double sum = 0;
    for (double part : sums) sum += part;
    return sum;
}

// Weights e^((x − peak) ÷ temperature) and their sum.
inline double weigh_row(const float* x, int64_t n, float peak, float temperature, float* weight) {
    constexpr int64_t BLOCK = 1024;  // is summed while it is in the first cache
    const V top = v_set(peak), by = v_set(temperature);
    double sum = 0;
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        const int64_t end = begin + BLOCK < n ? begin + BLOCK : n;
        for (int64_t i = begin; i < end; i += W) {
            const int count = end - i < W ? static_cast<int>(end - i) : W;
            v_store_n(weight + i, v_exp_unfused(v_div(v_sub(v_load_n(x + i, count), top), by)), count);
        }
        sum += sum_weights(weight + begin, end - begin);
    }
    return sum;
}

// Moves values of at least `least` (or, if `above`, larger ones) to the front; how many. Without a branch, since
// nobody can guess it.
inline int64_t split(float* x, int64_t n, float least, bool above) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; ++i) {
        const float value = x[i];
        x[i] = x[found];
        x[found] = value;
        found += above ? value > least : value >= least;
    }
    return found;
}

// Values of at least `least` and where they stand, in order; how many.
inline int64_t gather_from(const float* x, int64_t n, float least, float* value, int32_t* id) {
    const V bound = v_set(least);
    int64_t found = 0, i = 0;
    for (; i + W <= n; i += W)
        found += v_pack(v_load(x + i), bound, static_cast<int32_t>(i), value + found, id + found);
    for (; i < n; ++i) {
        value[found] = x[i];
        id[found] = static_cast<int32_t>(i);
        found += x[i] >= least;
    }
    return found;
}

// Largest values of groups of 16, in any order; how many.
inline int64_t peaks_of_groups(const float* x, int64_t n, float* peak) {
    int64_t found = 0, i = 0;
    for (; i + 16 * W <= n; i += 16 * W, found += W) {
        V most = v_load(x + i);
        for (int part = 1; part < 16; ++part) most = v_max(most, v_load(x + i + part * W));
        v_store(peak + found, most);
    }
    for (; i < n; ++i) peak[found++] = x[i];
    return found;
}

// Sum of e^(x − peak) in double precision, for x ≤ peak.
inline double sum_of_powers(const float* x, int64_t n, float peak) {
    constexpr double shift = 6755399441055744.0;  // 1.5 · 2^52: adding it leaves the nearest whole number in the low bits
    constexpr int LANES = 64;
    double sums[LANES] = {};
    for (int64_t begin = 0; begin < n; begin += LANES) {
        const int count = n - begin < LANES ? static_cast<int>(n - begin) : LANES;
        double d[LANES];
        for (int lane = 0; lane < LANES; ++lane) d[lane] = -1000.0;
        for (int lane = 0; lane < count; ++lane) d[lane] = static_cast<double>(x[begin + lane]) - peak;
        for (int lane = 0; lane < LANES; ++lane) {
            const double away = d[lane] < -700.0 ? -700.0 : d[lane];
            const double t = away * 1.4426950408889634 + shift, k = t - shift;
            const double r = (away - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
            double p = 1.0 / 479001600;
            p = p * r + 1.0 / 39916800;
            p = p * r + 1.0 / 3628800;
            p = p * r + 1.0 / 362880;
            p = p * r + 1.0 / 40320;
            p = p * r + 1.0 / 5040;
            p = p * r + 1.0 / 720;
            p = p * r + 1.0 / 120;
            p = p * r + 1.0 / 24;
            p = p * r + 1.0 / 6;
            p = p * r + 0.5;
            p = (p * r + 1.0) * r + 1.0;
            uint64_t bits;
            __builtin_memcpy(&bits, &t, 8);
            bits = (bits << 52) + (1023ull << 52);
            double scale;
            __builtin_memcpy(&scale, &bits, 8);
            sums[lane] += p * scale;
        }
    }
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    return sums[0];
}

// How many of the values come before `value` at `position` in descending order, equals by position.
inline int64_t count_before(const float* x, int64_t n, float value, int64_t position) {
    int64_t count = 0;
    for (int64_t i = 0; i < position; ++i) count += x[i] >= value;
    for (int64_t i = position + 1; i < n; ++i) count += x[i] > value;
    return count;
}

}  // namespace
