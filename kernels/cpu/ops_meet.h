// What attention by vectors and by tiles have in common.
#pragma once

namespace {

// Keys and values of other sequences and layers are cold, and 4 KiB pages are short for the hardware's prefetcher: the
// values are fetched while keys are read, and the next tile's keys while values are summed.
inline void fetch_row(const void* row, int bytes) {
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(row) + at, 0, 2);
}

// Weights of a running state and of a tile's when they meet. One of them is 1, the other 2^−|difference|.
template <int MR>
inline void meet(const float* peak, const float* total, float* running_peak, float* running_total, float* keep,
                 float* take, int rows = MR) {
    constexpr int LANES = (MR + W - 1) / W * W;
    alignas(64) float distance[LANES] = {};
    for (int m = 0; m < rows; ++m) {
        const float gap = peak[m] - running_peak[m];
        distance[m] = gap > 0 ? -gap : gap;
    }
    for (int m = 0; m < LANES; m += W) v_store(distance + m, v_exp2(v_load(distance + m)));
    for (int m = 0; m < rows; ++m) {
        const bool higher = peak[m] > running_peak[m];
        keep[m] = higher ? distance[m] : 1.0f;
        take[m] = higher ? 1.0f : distance[m];
        running_peak[m] = higher ? peak[m] : running_peak[m];
        running_total[m] = running_total[m] * keep[m] + total[m] * take[m];
    }
}

}  // namespace
