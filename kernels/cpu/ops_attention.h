// Attention of a few rows to one tile of TILE_KEYS keys. Each score is one chain of multiply-adds over the dimensions
// and each output one chain over the keys, in bfloat16 chains of 16 that are added two by two, so a row's bits depend neither on its neighbours nor on how rows are blocked.
// INT8 keys and values are never written out as floats: a key's scale multiplies its score, a value's scale its weight.
#pragma once

namespace {

using penjing::AttentionTile;

constexpr int KEY_GROUPS = TILE_KEYS / CHOICE_KEYS;
constexpr int CHAIN = 16;  // see scores_in_chains; of keys a group of them
static_assert(CHAIN == CHOICE_KEYS, "values are summed group by group");

inline void quantize_query(const float* x, float factor, int head_dim, int16_t* q, float* scale) {
    VI peak = vi_zero();
    const V by = v_set(factor);
    for (int d = 0; d < head_dim; d += W) {
        const int n = head_dim - d < W ? head_dim - d : W;
        peak = vi_abs_max(peak, v_mul(v_load_n(x + d, n), by));
    }
    const uint32_t bits = vi_largest(peak);
    float largest;
    __builtin_memcpy(&largest, &bits, 4);
    const float divisor = largest / 32767.0f == 0.0f ? 1.0f : largest / 32767.0f;
    *scale = divisor;
    for (int d = 0; d < head_dim; d += W) {
        const int n = head_dim - d < W ? head_dim - d : W;
        const V whole = v_round(v_div(v_mul(v_load_n(x + d, n), by), v_set(divisor)));
        alignas(64) float lane[W];
        v_store(lane, v_max(v_set(-32767.0f), v_min(v_set(32767.0f), whole)));
        for (int i = 0; i < n; i += 4) {  // head_dim is a multiple of 4
            q[d + i] = static_cast<int16_t>(lane[i]);
            q[d + i + 1] = static_cast<int16_t>(lane[i + 2]);
            q[d + i + 2] = static_cast<int16_t>(lane[i + 1]);
            q[d + i + 3] = static_cast<int16_t>(lane[i + 3]);
        }
    }
}

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

template <typename T>
constexpr bool BRAIN = false;
template <>
constexpr bool BRAIN<Brain> = true;

// The first n lanes, or all without a tail.
template <bool TAIL>
inline V load_floats(const float* p, int n) { return TAIL ? v_load_n(p, n) : v_load(p); }
template <bool TAIL>
inline V load_floats(const uint16_t* p, int n) { return TAIL ? v_load_f16_n(p, n) : v_load_f16(p); }
template <bool TAIL>
inline V load_floats(const Brain* p, int n) { return v_load_bf16_n(&p->bits, TAIL ? n : W); }
template <bool TAIL>
inline V load_floats(const int8_t* p, int n) { return TAIL ? v_load_int8_n(p, n) : v_load_int8(p); }

template <int MR, int GROUPS, typename T>
inline void scores(const AttentionTile& tile, int row, int group, const void* const* ahead, float* out) {
    constexpr int NR = GROUPS * PARTS;
    const int64_t head_dim = tile.head_dim;
    const float* q = static_cast<const float*>(tile.q) + row * head_dim;
    V sum[MR][NR];
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NR; ++n) sum[m][n] = v_zero();
    const Keys<GROUPS, T> keys(*tile.keys, group, ahead);
    for (int d = 0; d < head_dim; ++d) {
        keys.fetch(d);
        // What there is less of stays in registers.
        if (MR < NR) {
            V query[MR];
#pragma GCC unroll 8
            for (int m = 0; m < MR; ++m) query[m] = v_set(q[m * head_dim + d]);
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) {
                const V key = load_floats<false>(keys.at[n / PARTS] + d * CHOICE_KEYS + n % PARTS * W, W);
#pragma GCC unroll 8
                for (int m = 0; m < MR; ++m) sum[m][n] = v_fma(query[m], key, sum[m][n]);
            }
        } else {
            V key[NR];
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) key[n] = load_floats<false>(keys.at[n / PARTS] + d * CHOICE_KEYS + n % PARTS * W, W);
#pragma GCC unroll 8
            for (int m = 0; m < MR; ++m) {
                const V query = v_set(q[m * head_dim + d]);
#pragma GCC unroll 4
                for (int n = 0; n < NR; ++n) sum[m][n] = v_fma(query, key[n], sum[m][n]);
            }
        }
    }
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NR; ++n) v_store(out + m * TILE_KEYS + group * CHOICE_KEYS + n * W, sum[m][n]);
}

// The same beside bfloat16, in which keys and queries are: a chain for each CHAIN dimensions, and the sum of two such chains
// is added to what is there. So do AMX's tiles. Products
// of two such numbers are exact, fused or not.
template <int MR, int GROUPS, typename T>
inline void scores_in_chains(const AttentionTile& tile, int row, int group, const void* const* ahead, float* out) {
    constexpr int NR = GROUPS * PARTS;
    const int64_t head_dim = tile.head_dim;
    const float* q = static_cast<const float*>(tile.q) + row * head_dim;
    const Keys<GROUPS, T> keys(*tile.keys, group, ahead);
    V before[MR][NR];
    for (int64_t first = 0; first < head_dim; first += CHAIN) {
        const int64_t end = first + CHAIN < head_dim ? first + CHAIN : head_dim;
        V sum[MR][NR];
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) sum[m][n] = v_zero();
        for (int64_t d = first; d < end; ++d) {
            keys.fetch(static_cast<int>(d));
            V key[NR];
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) key[n] = load_floats<false>(keys.at[n / PARTS] + d * CHOICE_KEYS + n % PARTS * W, W);
#pragma GCC unroll 8
            for (int m = 0; m < MR; ++m) {
                const V query = v_set(q[m * head_dim + d]);
#pragma GCC unroll 4
                for (int n = 0; n < NR; ++n) sum[m][n] = v_fma(query, key[n], sum[m][n]);
            }
        }
        const bool second = first / CHAIN % 2;
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) {
                float* at = out + m * TILE_KEYS + group * CHOICE_KEYS + n * W;
                const V both = second ? v_add(before[m][n], sum[m][n]) : sum[m][n];
                if (!second && end < head_dim) before[m][n] = both;
                else v_store(at, first < 2 * CHAIN ? both : v_add(v_load(at), both));
            }
        }
    }
}

// The same for INT8 keys: whole sums of 16 × 8-bit products, two dimensions at a time, then the scales.
template <int MR, int GROUPS>
inline void scores_int8(const AttentionTile& tile, int row, int group, const void* const* ahead, float* out) {
    constexpr int NR = GROUPS * PARTS;
    VI sum[MR][NR];
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NR; ++n) sum[m][n] = vi_zero();
    const int words = tile.head_dim / 4;
    const Keys<GROUPS, int32_t> keys(*tile.keys, group, ahead);
    const int16_t* q = static_cast<const int16_t*>(tile.q) + static_cast<int64_t>(row) * tile.head_dim;
    for (int word = 0; word < words; ++word) {
        keys.fetch(word);
        VI even[NR], odd[NR];
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) {
            const VI four = vi_load(keys.at[n / PARTS] + word * CHOICE_KEYS + n % PARTS * W);
            even[n] = vi_even_bytes(four);
            odd[n] = vi_odd_bytes(four);
        }
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
            // Two copies of 4 bytes: one of 8 goes through general registers, which broadcast slowly.
            int32_t first, second;
            __builtin_memcpy(&first, q + m * tile.head_dim + word * 4, sizeof(first));
            __builtin_memcpy(&second, q + m * tile.head_dim + word * 4 + 2, sizeof(second));
            const VI even_query = vi_set(first), odd_query = vi_set(second);
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n)
                sum[m][n] = vi_dot16(vi_dot16(sum[m][n], even_query, even[n]), odd_query, odd[n]);
        }
    }
    for (int m = 0; m < MR; ++m) {
        const V by = v_set(tile.q_scale[row + m]);
        for (int n = 0; n < NR; ++n) {
            const int at = group * CHOICE_KEYS + n * W;
            const V scaled = v_mul(v_mul(v_from_int(sum[m][n]), by), v_load(tile.k_scale + at));
            v_store(out + m * TILE_KEYS + at, scaled);
        }
    }
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
    V part[2][MR][NR];
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NR; ++n) sum[m][n] = v_zero();
    int range = 0;
    for (int group = 0; group < KEY_GROUPS && range < seen.ranges; ++group) {
        const int begin = group * CHAIN, end = begin + CHAIN;
        V(&own)[MR][NR] = part[group % 2];
        for (int m = 0; m < MR; ++m)
            for (int n = 0; n < NR; ++n) own[m][n] = v_zero();
        if (seen.begin[range] < end) {
            const int first = seen.begin[range] > begin ? seen.begin[range] : begin;
            const int last = seen.end[range] < end ? seen.end[range] : end;
            weighted_values<MR, NR, TAIL, Brain>(weight, tile.v, first, last, d, rest, ahead, tile.head_dim, own);
            if (ahead) ahead += last - first;
            if (seen.end[range] <= end) ++range;  // others begin with a group
        }
        if (group % 2 == 0 && range < seen.ranges) continue;
        for (int m = 0; m < MR; ++m)
            for (int n = 0; n < NR; ++n) sum[m][n] = v_add(sum[m][n], group % 2 ? v_add(part[0][m][n], own[m][n]) : own[m][n]);
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

template <int MR, int GROUPS, typename T>
inline void scores_of(const AttentionTile& tile, int row, int group, const void* const* ahead, float* out) {
    if (sizeof(T) == 1) scores_int8<MR, GROUPS>(tile, row, group, ahead, out);
    else if (BRAIN<T> && tile.keys->narrow) scores_in_chains<MR, GROUPS, Brain>(tile, row, group, ahead, out);
    else if (BRAIN<T>) scores_in_chains<MR, GROUPS, float>(tile, row, group, ahead, out);
    else if (sizeof(T) == 2 && tile.keys->narrow) scores<MR, GROUPS, T>(tile, row, group, ahead, out);
    else scores<MR, GROUPS, float>(tile, row, group, ahead, out);
}

// Of groups [group, end): GROUPS at once, then all that are left, so that as many sums as possible are under way.
template <int MR, int GROUPS, typename T>
inline void scores_until(const AttentionTile& tile, int row, int group, int end, const void* const*& ahead, float* out) {
    for (; group + GROUPS <= end; group += GROUPS) {
        scores_of<MR, GROUPS, T>(tile, row, group, ahead, out);
        if (ahead) ahead += GROUPS * CHOICE_KEYS;
    }
    if constexpr (GROUPS > 1) scores_until<MR, GROUPS - 1, T>(tile, row, group, end, ahead, out);
}

template <int MR, typename T>
inline void attend_rows(const AttentionTile& tile, int row) {
    alignas(64) float weight[MR * TILE_KEYS];
    float peak[MR], total[MR], keep[MR], take[MR];
    const int head_dim = tile.head_dim;
    const int32_t *low = tile.low + row, *high = tile.high + row;
    const Seen seen = seen_by<MR>(tile, row);
    constexpr bool INT8 = sizeof(T) == 1;
    // Few rows take more keys at once, so that enough sums are under way; registers hold them.
    constexpr int NR = MR <= 3 && ATTENTION_VECTORS < 4 ? 4 : ATTENTION_VECTORS, GROUPS = NR / PARTS;
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
