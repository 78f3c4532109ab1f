// Scores of a few rows' queries and groups of CHOICE_KEYS keys.
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

// Products of dimensions [first, end) are added, one chain a score; keys stay in registers.
template <int MR, int GROUPS, typename T>
inline void add_chain(const float* q, int64_t head_dim, const Keys<GROUPS, T>& keys, int64_t first, int64_t end,
                      V (&sum)[MR][GROUPS * PARTS]) {
    constexpr int NR = GROUPS * PARTS;
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
}

template <int MR, int NR>
inline void clear(V (&sum)[MR][NR]) {
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) sum[m][n] = v_zero();
}

template <int MR, int GROUPS, typename T>
inline void scores(const AttentionTile& tile, int row, int group, const void* const* ahead, float* out) {
    constexpr int NR = GROUPS * PARTS;
    const int64_t head_dim = tile.head_dim;
    const Keys<GROUPS, T> keys(*tile.keys, group, ahead);
    V sum[MR][NR];
    clear(sum);
    const float* q = static_cast<const float*>(tile.q) + row * head_dim;
    if (MR >= NR) {
        add_chain<MR>(q, head_dim, keys, 0, head_dim, sum);
    } else {  // what there is less of stays in registers: queries
        for (int d = 0; d < head_dim; ++d) {
            keys.fetch(d);
            V query[MR];
#pragma GCC unroll 8
            for (int m = 0; m < MR; ++m) query[m] = v_set(q[m * head_dim + d]);
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) {
                const V key = load_floats<false>(keys.at[n / PARTS] + d * CHOICE_KEYS + n % PARTS * W, W);
#pragma GCC unroll 8
                for (int m = 0; m < MR; ++m) sum[m][n] = v_fma(query[m], key, sum[m][n]);
            }
        }
    }
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NR; ++n) v_store(out + m * TILE_KEYS + group * CHOICE_KEYS + n * W, sum[m][n]);
}

// The same beside bfloat16, in which keys and queries are: a chain for each CHAIN dimensions, and the sum of two such chains
// is added to what is there. So do AMX's tiles. Products of two such numbers are exact, fused or not.
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
        clear(sum);
        add_chain<MR>(q, head_dim, keys, first, end, sum);
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

}  // namespace
