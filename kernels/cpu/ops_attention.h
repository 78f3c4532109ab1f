// Attention of a few rows to one tile of TILE_KEYS keys. Each score is one chain of multiply-adds over the dimensions
// and each output one chain over the keys, so a row's bits depend neither on its neighbours nor on how rows are blocked.
#pragma once

namespace {

using penjing::AttentionTile;
using penjing::TILE_KEYS;

constexpr int KEY_GROUPS = TILE_KEYS / W;

// Keys and values of other sequences and layers are cold, and 4 KiB pages are short for the hardware's prefetcher: the
// values are fetched while keys are packed, and the next tile's keys while values are summed.
inline void fetch_row(const float* row, int head_dim) {
    for (int d = 0; d < head_dim; d += 16) __builtin_prefetch(row + d, 0, 2);
}

// A little at a time: bursts of requests fill the first-level cache's miss buffers and stall (27 against 37 GB/s).
inline void pack_keys(const float* const* k, const float* const* ahead, int keys, int head_dim, float* out) {
    for (int group = 0; group * W < keys; ++group) {
        const float* rows[W];
        // Past the last key the first stands in; its scores are masked.
        for (int lane = 0; lane < W; ++lane) rows[lane] = k[group * W + lane < keys ? group * W + lane : 0];
        float* to = out + static_cast<int64_t>(group) * head_dim * W;
        int d = 0;
        for (; d + W <= head_dim; d += W) {
            for (int lane = 0; lane < W; ++lane) __builtin_prefetch(ahead[group * W + lane] + d, 0, 2);
            v_transpose(rows, d, to + d * W);
        }
        for (; d < head_dim; ++d)
            for (int lane = 0; lane < W; ++lane) to[d * W + lane] = rows[lane][d];
    }
}

template <int MR, int NR>
inline void scores(const float* q, const float* k, int head_dim, int group, float* out) {
    V sum[MR][NR];
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NR; ++n) sum[m][n] = v_zero();
    const float* keys = k + static_cast<int64_t>(group) * head_dim * W;
    const int64_t next = static_cast<int64_t>(head_dim) * W;
    for (int d = 0; d < head_dim; ++d) {
        V key[NR];
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) key[n] = v_load(keys + n * next + d * W);
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
            const V query = v_set(q[m * head_dim + d]);
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) sum[m][n] = v_fma(query, key[n], sum[m][n]);
        }
    }
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NR; ++n) v_store(out + m * TILE_KEYS + (group + n) * W, sum[m][n]);
}

template <int MR, int NR, bool TAIL>
inline void weighted_values(const float* weight, const float* const* v, int first, int last, int d, int rest,
                            const float* const* ahead, int head_dim, V (&sum)[MR][NR]) {
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NR; ++n) sum[m][n] = v_zero();
    for (int key = first; key < last; ++key) {
        if (ahead) fetch_row(ahead[key], head_dim);
        V value[NR];
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) value[n] = TAIL ? v_load_n(v[key] + d, rest) : v_load(v[key] + d + n * W);
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
            const V by = v_set(weight[m * TILE_KEYS + key]);
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) sum[m][n] = v_fma(by, value[n], sum[m][n]);
        }
    }
}

// running = running × keep + tile × take
template <int MR, int NR, bool TAIL>
inline void merge_values(const V (&sum)[MR][NR], const float* keep, const float* take, float* out, int head_dim,
                         int rest) {
    for (int m = 0; m < MR; ++m) {
        for (int n = 0; n < NR; ++n) {
            float* at = out + m * head_dim + n * W;
            const V added = v_mul(sum[m][n], v_set(take[m]));
            if (TAIL) v_store_n(at, v_fma(v_load_n(at, rest), v_set(keep[m]), added), rest);
            else v_store(at, v_fma(v_load(at), v_set(keep[m]), added));
        }
    }
}

// Weights of a running state and of a tile's when they meet. One of them is 1, the other 2^−|difference|.
template <int MR>
inline void meet(const float* peak, const float* total, float* running_peak, float* running_total, float* keep,
                 float* take) {
    constexpr int LANES = (MR + W - 1) / W * W;
    alignas(64) float distance[LANES] = {};
    for (int m = 0; m < MR; ++m) {
        const float gap = peak[m] - running_peak[m];
        distance[m] = gap > 0 ? -gap : gap;
    }
    for (int m = 0; m < LANES; m += W) v_store(distance + m, v_exp2(v_load(distance + m)));
    for (int m = 0; m < MR; ++m) {
        const bool higher = peak[m] > running_peak[m];
        keep[m] = higher ? distance[m] : 1.0f;
        take[m] = higher ? 1.0f : distance[m];
        running_peak[m] = higher ? peak[m] : running_peak[m];
        running_total[m] = running_total[m] * keep[m] + total[m] * take[m];
    }
}

template <int MR>
inline void attend_rows(const AttentionTile& tile, int row) {
    alignas(64) float weight[MR * TILE_KEYS];
    float peak[MR], total[MR], keep[MR], take[MR];
    const int head_dim = tile.head_dim;
    const int32_t *low = tile.low + row, *high = tile.high + row;
    int first = low[0], last = high[0];
    for (int m = 1; m < MR; ++m) {
        first = low[m] < first ? low[m] : first;
        last = high[m] > last ? high[m] : last;
    }

    const float* q = tile.q + static_cast<int64_t>(row) * head_dim;
    const int begin = first / W, end = (last + W - 1) / W;
    int group = begin;
    for (; group + ATTENTION_VECTORS <= end; group += ATTENTION_VECTORS)
        scores<MR, ATTENTION_VECTORS>(q, tile.k, head_dim, group, weight);
    for (; group < end; ++group) scores<MR, 1>(q, tile.k, head_dim, group, weight);

    for (int m = 0; m < MR; ++m) {
        float* p = weight + m * TILE_KEYS;
        V most = v_set(-INFINITY), sum = v_zero();
        for (group = begin; group < end; ++group) {
            V score = v_load(p + group * W);
            if (group * W < low[m] || (group + 1) * W > high[m]) {
                score = v_keep(score, low[m] - group * W, high[m] - group * W);
                v_store(p + group * W, score);
            }
            most = v_max(most, score);
        }
        peak[m] = v_largest(most);
        for (group = begin; group < end; ++group) {
            const V part = v_exp2(v_sub(v_load(p + group * W), v_set(peak[m])));
            v_store(p + group * W, part);
            sum = v_add(sum, part);
        }
        total[m] = v_sum(sum);
    }
    meet<MR>(peak, total, tile.peak + row, tile.total + row, keep, take);

    float* out = tile.out + static_cast<int64_t>(row) * head_dim;
    const float* const* ahead = row == 0 ? tile.ahead : nullptr;
    constexpr int NR = ATTENTION_VECTORS;
    int d = 0;
    for (; d + NR * W <= head_dim; d += NR * W) {
        V sum[MR][NR];
        weighted_values<MR, NR, false>(weight, tile.v, first, last, d, 0, ahead, head_dim, sum);
        ahead = nullptr;
        merge_values<MR, NR, false>(sum, keep, take, out + d, head_dim, 0);
    }
    for (; d < head_dim; d += W) {
        V sum[MR][1];
        const int rest = head_dim - d < W ? head_dim - d : W;
        weighted_values<MR, 1, true>(weight, tile.v, first, last, d, rest, ahead, head_dim, sum);
        ahead = nullptr;
        merge_values<MR, 1, true>(sum, keep, take, out + d, head_dim, rest);
    }
}

inline void attend_tile(const AttentionTile& tile) {
    const int blocks = (tile.rows + ATTENTION_ROWS - 1) / ATTENTION_ROWS;
    for (int block = 0; block < blocks; ++block) {
        const int begin = tile.rows * block / blocks, end = tile.rows * (block + 1) / blocks;
        switch (end - begin) {
            case 1: attend_rows<1>(tile, begin); break;
            case 2: attend_rows<2>(tile, begin); break;
            case 3: attend_rows<3>(tile, begin); break;
            case 4: attend_rows<4>(tile, begin); break;
            case 5: attend_rows<ATTENTION_ROWS < 5 ? 4 : 5>(tile, begin); break;
            default: attend_rows<ATTENTION_ROWS < 6 ? 4 : 6>(tile, begin); break;
        }
    }
}

inline void merge_tile(const float* peak, const float* total, const float* out, int rows, int head_dim,
                       float* running_peak, float* running_total, float* running_out) {
    for (int row = 0; row < rows; ++row) {
        if (peak[row] == -INFINITY) continue;
        float keep, take;
        meet<1>(peak + row, total + row, running_peak + row, running_total + row, &keep, &take);
        const float* from = out + static_cast<int64_t>(row) * head_dim;
        float* to = running_out + static_cast<int64_t>(row) * head_dim;
        for (int d = 0; d < head_dim; d += W) {
            const int n = head_dim - d < W ? head_dim - d : W;
            const V added = v_mul(v_load_n(from + d, n), v_set(take));
            v_store_n(to + d, v_fma(v_load_n(to + d, n), v_set(keep), added), n);
        }
    }
}

}  // namespace
