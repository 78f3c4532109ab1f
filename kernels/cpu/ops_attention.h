// Attention of a few rows to one tile of TILE_KEYS keys. Each score is one chain of multiply-adds over the dimensions
// and each output one chain over the keys, in bfloat16 chains of 16 that are added two by two, so a row's bits depend
// neither on its neighbours nor on how rows are blocked.
// INT8 keys and values are never written out as floats: a key's scale multiplies its score, a value's scale its weight.
#pragma once

namespace {

using penjing::AttentionTile;

// Ranges of a tile's keys that some rows see.
struct Seen {
    int begin[KEY_GROUPS], end[KEY_GROUPS];
    int ranges;
};

template <int MR>
inline Seen seen_by(const AttentionTile& tile, int row) {
    const int32_t *low = tile.low + row, *high = tile.high + row;
    int first = low[0], last = high[0];
    for (int m = 1; m < MR; ++m) {
        first = low[m] < first ? low[m] : first;
        last = high[m] > last ? high[m] : last;
    }
    Seen seen;
    seen.ranges = 1;
    seen.begin[0] = first;
    seen.end[0] = last;
    if (tile.chosen == nullptr) return seen;
    int chosen = 0;
    for (int m = 0; m < MR; ++m) chosen |= tile.chosen[row + m];
    seen.ranges = 0;
    for (int at = first; at < last; at = (at / CHOICE_KEYS + 1) * CHOICE_KEYS) {
        if (!(chosen >> at / CHOICE_KEYS & 1)) continue;
        const int next = (at / CHOICE_KEYS + 1) * CHOICE_KEYS, end = next < last ? next : last;
        if (seen.ranges > 0 && seen.end[seen.ranges - 1] == at) seen.end[seen.ranges - 1] = end;
        else seen.begin[seen.ranges] = at, seen.end[seen.ranges++] = end;
    }
    return seen;
}

// Added to `sum`.
template <int MR, int NR, bool TAIL, typename T>
inline void weighted_values(const float* weight, const void* const* v, int first, int last, int d, int rest,
                            const void* const* ahead, int head_dim, V (&sum)[MR][NR]) {
    for (int64_t key = first; key < last; ++key) {
        if (ahead) fetch_row(ahead[key - first], head_dim * static_cast<int>(sizeof(T)));
        const T* row = static_cast<const T*>(v[key]) + d;
        if (MR < NR) {
            V by[MR];
#pragma GCC unroll 8
            for (int m = 0; m < MR; ++m) by[m] = v_set(weight[m * TILE_KEYS + key]);
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) {
                const V value = load_floats<TAIL>(row + n * W, rest);
#pragma GCC unroll 8
                for (int m = 0; m < MR; ++m) sum[m][n] = v_fma(by[m], value, sum[m][n]);
            }
        } else {
            V value[NR];
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) value[n] = load_floats<TAIL>(row + n * W, rest);
#pragma GCC unroll 8
            for (int m = 0; m < MR; ++m) {
                const V by = v_set(weight[m * TILE_KEYS + key]);
#pragma GCC unroll 4
                for (int n = 0; n < NR; ++n) sum[m][n] = v_fma(by, value[n], sum[m][n]);
            }
        }
    }
}

template <int MR, int NR, bool TAIL, typename T>
inline void values_of(const float* weight, const AttentionTile& tile, const Seen& seen, int d, int rest,
                      const void* const* ahead, V (&sum)[MR][NR]) {
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NR; ++n) sum[m][n] = v_zero();
    for (int range = 0; range < seen.ranges; ++range) {
        const int first = seen.begin[range], last = seen.end[range];
        weighted_values<MR, NR, TAIL, T>(weight, tile.v, first, last, d, rest, ahead, tile.head_dim, sum);
        if (ahead) ahead += last - first;
    }
}

// The same beside bfloat16: a chain for each group of keys, added as scores_in_chains does.
template <int MR, int NR, bool TAIL>
inline void values_in_chains(const float* weight, const AttentionTile& tile, const Seen& seen, int d, int rest,
                             const void* const* ahead, V (&sum)[MR][NR]) {
    V before[MR][NR];
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NR; ++n) sum[m][n] = v_zero();
    int range = 0;
    for (int group = 0; group < KEY_GROUPS && range < seen.ranges; ++group) {
        const int begin = group * CHAIN, end = begin + CHAIN;
        V own[MR][NR];
        for (int m = 0; m < MR; ++m)
            for (int n = 0; n < NR; ++n) own[m][n] = v_zero();
        if (seen.begin[range] < end) {
            const int first = seen.begin[range] > begin ? seen.begin[range] : begin;
            const int last = seen.end[range] < end ? seen.end[range] : end;
            weighted_values<MR, NR, TAIL, Brain>(weight, tile.v, first, last, d, rest, ahead, tile.head_dim, own);
            if (ahead) ahead += last - first;
            if (seen.end[range] <= end) ++range;  // others begin with a group
        }
        const bool first = group % 2 == 0, waits = first && range < seen.ranges;
        for (int m = 0; m < MR; ++m) {
            for (int n = 0; n < NR; ++n) {
                if (waits) before[m][n] = own[m][n];
                else sum[m][n] = v_add(sum[m][n], first ? own[m][n] : v_add(before[m][n], own[m][n]));
            }
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

template <int MR, typename T>
inline void attend_rows(const AttentionTile& tile, int row) {
    alignas(64) float weight[MR * TILE_KEYS];
    float peak[MR], total[MR], keep[MR], take[MR];
    const int head_dim = tile.head_dim;
    const int32_t *low = tile.low + row, *high = tile.high + row;
    const Seen seen = seen_by<MR>(tile, row);
    constexpr bool INT8 = sizeof(T) == 1;
    // Few rows take more keys at once, so that enough sums are under way; registers hold them. Chains that wait for the ones
    // they are added to need registers too (many rows are a third faster for it).
    constexpr int FEW = MR <= 3 && ATTENTION_VECTORS < 4 ? 4 : ATTENTION_VECTORS;
    constexpr int NR = BRAIN<T> && MR > 4 && PARTS <= 2 ? 2 : FEW, GROUPS = NR / PARTS;
    const void* const* ahead = row == 0 ? tile.keys->ahead : nullptr;
    for (int range = 0; range < seen.ranges; ++range) {
        const int end = (seen.end[range] + CHOICE_KEYS - 1) / CHOICE_KEYS;
        const int group = seen.begin[range] / CHOICE_KEYS;
        scores_until<MR, GROUPS, T>(tile, row, group, end, ahead, weight);
    }

    for (int m = 0; m < MR; ++m) {
        float* p = weight + m * TILE_KEYS;
        const int chosen = tile.chosen ? tile.chosen[row + m] : ~0;
        V most = v_set(-INFINITY), sum = v_zero();
        for (int range = 0; range < seen.ranges; ++range) {
            for (int group = seen.begin[range] / W; group * W < seen.end[range]; ++group) {
                V score = v_load(p + group * W);
                if (tile.cap > 0.0f) {
                    score = v_soft_cap(score, tile.cap);
                    v_store(p + group * W, score);
                }
                if (!(chosen >> (group * W / CHOICE_KEYS) & 1)) {
                    score = v_set(-INFINITY);
                    v_store(p + group * W, score);
                } else if (group * W < low[m] || (group + 1) * W > high[m]) {
                    score = v_keep(score, low[m] - group * W, high[m] - group * W);
                    v_store(p + group * W, score);
                }
                most = v_max(most, score);
            }
        }
        peak[m] = v_largest(most);
        for (int range = 0; range < seen.ranges; ++range) {
            for (int group = seen.begin[range] / W; group * W < seen.end[range]; ++group) {
                const V power = v_exp2(v_sub(v_load(p + group * W), v_set(peak[m])));
                const V part = BRAIN<T> ? v_brain(power) : power;
                v_store(p + group * W, INT8 ? v_mul(part, v_load(tile.v_scale + group * W)) : part);
                sum = v_add(sum, part);
            }
        }
        total[m] = v_sum(sum);
    }
    meet<MR>(peak, total, tile.peak + row, tile.total + row, keep, take);

    float* out = tile.out + static_cast<int64_t>(row) * head_dim;
    ahead = row == 0 ? tile.ahead : nullptr;
    int d = 0;
    for (; d + NR * W <= head_dim; d += NR * W) {
        V sum[MR][NR];
        if (BRAIN<T>) values_in_chains<MR, NR, false>(weight, tile, seen, d, 0, ahead, sum);
        else values_of<MR, NR, false, T>(weight, tile, seen, d, 0, ahead, sum);
        ahead = nullptr;
        merge_values<MR, NR, false>(sum, keep, take, out + d, head_dim, 0);
    }
    for (; d < head_dim; d += W) {
        V sum[MR][1];
        const int rest = head_dim - d < W ? head_dim - d : W;
        if (BRAIN<T>) values_in_chains<MR, 1, true>(weight, tile, seen, d, rest, ahead, sum);
        else values_of<MR, 1, true, T>(weight, tile, seen, d, rest, ahead, sum);
        ahead = nullptr;
        merge_values<MR, 1, true>(sum, keep, take, out + d, head_dim, rest);
    }
}

template <typename T>
inline void attend_blocks(const AttentionTile& tile) {
    const int blocks = (tile.rows + ATTENTION_ROWS - 1) / ATTENTION_ROWS;
    for (int block = 0; block < blocks; ++block) {
        const int begin = tile.rows * block / blocks, end = tile.rows * (block + 1) / blocks;
        switch (end - begin) {
            case 1: attend_rows<1, T>(tile, begin); break;
            case 2: attend_rows<2, T>(tile, begin); break;
            case 3: attend_rows<3, T>(tile, begin); break;
            case 4: attend_rows<4, T>(tile, begin); break;
            case 5: attend_rows<ATTENTION_ROWS < 5 ? 4 : 5, T>(tile, begin); break;
            default: attend_rows<ATTENTION_ROWS < 6 ? 4 : 6, T>(tile, begin); break;
        }
    }
}

inline void attend_tile(const AttentionTile& tile) {
    if (tile.k_scale) attend_blocks<int8_t>(tile);
    else if (tile.dtype == PJ_F16) attend_blocks<uint16_t>(tile);
    else if (tile.dtype == PJ_BF16) attend_blocks<Brain>(tile);
    else attend_blocks<float>(tile);
}

inline void end_attention() {}

inline void merge_tile(const float* peak, const float* total, const float* out, int rows, int head_dim,
                       float* running_peak, float* running_total, float* running_out) {
    constexpr int MOST = 4;  // rows whose powers of two are computed at once
    for (int row = 0; row < rows;) {
        int count = 0;
        while (count < MOST && row + count < rows && peak[row + count] != -INFINITY) ++count;
        if (count == 0) {
            ++row;
            continue;
        }
        float keep[MOST], take[MOST];
        meet<MOST>(peak + row, total + row, running_peak + row, running_total + row, keep, take, count);
        for (int m = 0; m < count; ++m, ++row) {
            const float* from = out + static_cast<int64_t>(row) * head_dim;
            float* to = running_out + static_cast<int64_t>(row) * head_dim;
            int d = 0;
            for (; d + W <= head_dim; d += W)
                v_store(to + d, v_fma(v_load(to + d), v_set(keep[m]), v_mul(v_load(from + d), v_set(take[m]))));
            if (d < head_dim) {
                const int n = head_dim - d;
                const V added = v_mul(v_load_n(from + d, n), v_set(take[m]));
                v_store_n(to + d, v_fma(v_load_n(to + d, n), v_set(keep[m]), added), n);
            }
        }
    }
}

}  // namespace
