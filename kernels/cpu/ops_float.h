// Float kernels over one instruction set's lanes: linear layers on weights in place, norms, rotation, gates.
#pragma once

namespace {

template <int DTYPE>
inline V load_weight(const void* w, int64_t at, int n) {
    if (DTYPE == PJ_F32) {
        const float* p = static_cast<const float*>(w) + at;
        return n == W ? v_load(p) : v_load_n(p, n);
    }
    const uint16_t* p = static_cast<const uint16_t*>(w) + at;
    return DTYPE == PJ_BF16 ? v_load_bf16_n(p, n) : v_load_f16_n(p, n);
}

// How far ahead low-rank products fetch their weights: what the processor fetches by itself begins anew with each of many
// small matrices.
constexpr int64_t AHEAD_BYTES = 4096;

// Asks for `bytes` of memory that will be read, AHEAD_BYTES from `at` on; none there is no error.
template <int BYTES>
inline void fetch_ahead(const char* at) {
#pragma GCC unroll 8
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(at + AHEAD_BYTES + i, 0, 2);
}
template <int DTYPE>
constexpr int weight_bytes() {
    return DTYPE == PJ_F32 ? 4 : 2;
}

// MR rows × NR outputs. Each output is W running sums over k, then one fixed tree: no row depends on its neighbours.
template <int DTYPE, int MR, int NR>
inline void float_tile(const PjLinear& linear, const float* x, int64_t ldx, int64_t n0, float* out, int64_t ldo,
                       bool add, penjing::Ahead next) {
    V sum[MR][NR];
    // Every loop over the tile is unrolled by force: one that is not puts the sums on the stack.
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
        for (int n = 0; n < NR; ++n) sum[m][n] = v_zero();
    const int64_t k = linear.k, whole = k - k % W;
    for (int64_t i = 0; i < whole; i += W) {
        V row[MR];
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) row[m] = v_load(x + m * ldx + i);
        for (int line = 0; line < next.lines; ++line, next.at += 64) __builtin_prefetch(next.at, 0, 2);
#pragma GCC unroll 8
        for (int n = 0; n < NR; ++n) {
            const V weight = load_weight<DTYPE>(linear.weight, (n0 + n) * k + i, W);
#pragma GCC unroll 8
            for (int m = 0; m < MR; ++m) sum[m][n] = v_fma(row[m], weight, sum[m][n]);
        }
    }
    if (whole < k) {
        const int rest = static_cast<int>(k - whole);
#pragma GCC unroll 8
        for (int n = 0; n < NR; ++n) {
            const V weight = load_weight<DTYPE>(linear.weight, (n0 + n) * k + whole, rest);
#pragma GCC unroll 8
            for (int m = 0; m < MR; ++m) sum[m][n] = v_fma(v_load_n(x + m * ldx + whole, rest), weight, sum[m][n]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < NR; ++n) {
            const float value = v_sum(sum[m][n]) + (linear.bias ? linear.bias[n0 + n] : 0.0f);
            float* at = out + m * ldo + n0 + n;
            *at = add ? *at + value : value;
        }
    }
}

template <int DTYPE, int NR>
inline void float_rows(int rows, const PjLinear& linear, const float* x, int64_t ldx, int64_t n0, float* out,
                       int64_t ldo, bool add, penjing::Ahead next) {
    switch (rows) {
        case 1: return float_tile<DTYPE, 1, NR>(linear, x, ldx, n0, out, ldo, add, next);
        case 2: return float_tile<DTYPE, FLOAT_ROWS < 2 ? 1 : 2, NR>(linear, x, ldx, n0, out, ldo, add, next);
        case 3: return float_tile<DTYPE, FLOAT_ROWS < 3 ? 1 : 3, NR>(linear, x, ldx, n0, out, ldo, add, next);
        case 4: return float_tile<DTYPE, FLOAT_ROWS < 4 ? 1 : 4, NR>(linear, x, ldx, n0, out, ldo, add, next);
        case 5: return float_tile<DTYPE, FLOAT_ROWS < 5 ? 1 : 5, NR>(linear, x, ldx, n0, out, ldo, add, next);
        default: return float_tile<DTYPE, FLOAT_ROWS < 6 ? 1 : 6, NR>(linear, x, ldx, n0, out, ldo, add, next);
    }
}

template <int DTYPE>
inline void float_linear_typed(const PjLinear& linear, const float* x, int64_t ldx, int64_t rows, int64_t n0,
                               int64_t n1, float* out, int64_t ldo, bool add) {
    constexpr int64_t BYTES = weight_bytes<DTYPE>();
    const int64_t blocks = (rows + FLOAT_ROWS - 1) / FLOAT_ROWS, steps = linear.k / W;
    // The weights of the next outputs are fetched meanwhile, an equal part by each block of rows: what the processor fetches
    // by itself begins anew with each output, and while weights that are there are multiplied again, memory is idle.
    const int lines = static_cast<int>((FLOAT_COLUMNS * W * BYTES / 64 + blocks - 1) / blocks);
    for (int64_t n = n0; n < n1;) {
        const bool wide = n + FLOAT_COLUMNS <= n1;
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t begin = rows * block / blocks, end = rows * (block + 1) / blocks;
            const int count = static_cast<int>(end - begin);
            const int8_t* after = static_cast<const int8_t*>(linear.weight) + (n + FLOAT_COLUMNS) * linear.k * BYTES;
            const penjing::Ahead next{after + block * steps * lines * 64, wide ? lines : 0};
            if (wide)
                float_rows<DTYPE, FLOAT_COLUMNS>(count, linear, x + begin * ldx, ldx, n, out + begin * ldo, ldo, add, next);
            else
                float_rows<DTYPE, 1>(count, linear, x + begin * ldx, ldx, n, out + begin * ldo, ldo, add, next);
        }
        n += wide ? FLOAT_COLUMNS : 1;
    }
}

inline void float_linear(const PjLinear& linear, const float* x, int64_t ldx, int64_t rows, int64_t n0, int64_t n1,
                         float* out, int64_t ldo, bool add) {
    switch (linear.dtype) {
        case PJ_BF16: return float_linear_typed<PJ_BF16>(linear, x, ldx, rows, n0, n1, out, ldo, add);
        case PJ_F16: return float_linear_typed<PJ_F16>(linear, x, ldx, rows, n0, n1, out, ldo, add);
        default: return float_linear_typed<PJ_F32>(linear, x, ldx, rows, n0, n1, out, ldo, add);
    }
}

// MR rows × NB blocks of 16 outputs of a low-rank pair. Each output is one sum over the ranks, in their order; a block
// alone would wait for each sum, so some are computed together.
template <int DTYPE, int MR, int NB>
inline void low_rank_tile(const PjLowRank& pair, int64_t block, const float* low, int64_t ldl, float* out, int64_t ldo,
                          int64_t spread, bool fetch) {
    constexpr int PARTS = 16 / W;
    V sum[MR][NB * PARTS];
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 16
        for (int p = 0; p < NB * PARTS; ++p) sum[m][p] = v_zero();
    const int64_t first = block * pair.rank * 16;
    const char* from = static_cast<const char*>(pair.b) + first * weight_bytes<DTYPE>();
    for (int64_t r = 0; r < pair.rank; ++r) {
        V row[MR];
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) row[m] = v_set(low[m * ldl + r]);
        if (fetch) fetch_ahead<NB * 16 * weight_bytes<DTYPE>()>(from + r * NB * 16 * weight_bytes<DTYPE>());
#pragma GCC unroll 16
        for (int p = 0; p < NB * PARTS; ++p) {
            const V weight = load_weight<DTYPE>(pair.b, first + (p / PARTS * pair.rank + r) * 16 + p % PARTS * W, W);
#pragma GCC unroll 8
            for (int m = 0; m < MR; ++m) sum[m][p] = v_fma(row[m], weight, sum[m][p]);
        }
    }
    const V scale = v_set(pair.scale);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 16
        for (int p = 0; p < NB * PARTS; ++p) {
            const int64_t left = pair.n - (block + p / PARTS) * 16 - p % PARTS * W;
            if (left <= 0) continue;
            const int n = left < W ? static_cast<int>(left) : W;
            float* at = out + m * ldo + p / PARTS * spread + p % PARTS * W;
            v_store_n(at, v_add(v_load_n(at, n), v_mul(sum[m][p], scale)), n);
        }
    }
}

template <int DTYPE, int NB>
inline void low_rank_rows(const PjLowRank& pair, int64_t block, const float* low, int64_t ldl, int64_t rows, float* out,
                          int64_t ldo, int64_t spread) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4)
        low_rank_tile<DTYPE, 4, NB>(pair, block, low + row * ldl, ldl, out + row * ldo, ldo, spread, row == 0);
    for (; row + 2 <= rows; row += 2)
        low_rank_tile<DTYPE, 2, NB>(pair, block, low + row * ldl, ldl, out + row * ldo, ldo, spread, row == 0);
    if (row < rows) low_rank_tile<DTYPE, 1, NB>(pair, block, low + row * ldl, ldl, out + row * ldo, ldo, spread, row == 0);
}

template <int DTYPE>
inline void low_rank_typed(const PjLowRank& pair, int64_t begin, int64_t end, const float* low, int64_t ldl,
                           int64_t rows, float* out, int64_t ldo, int64_t spread) {
    constexpr int TOGETHER = W == 16 ? 4 : 1;  // as many sums as registers hold
    int64_t block = begin;
    for (; block + TOGETHER <= end; block += TOGETHER)
        low_rank_rows<DTYPE, TOGETHER>(pair, block, low, ldl, rows, out + block * spread, ldo, spread);
    for (; block < end; ++block) low_rank_rows<DTYPE, 1>(pair, block, low, ldl, rows, out + block * spread, ldo, spread);
}

inline void low_rank_blocks(const PjLowRank& pair, int64_t begin, int64_t end, const float* low, int64_t ldl,
                            int64_t rows, float* out, int64_t ldo, int64_t spread) {
    switch (pair.dtype) {
        case PJ_BF16: return low_rank_typed<PJ_BF16>(pair, begin, end, low, ldl, rows, out, ldo, spread);
        case PJ_F16: return low_rank_typed<PJ_F16>(pair, begin, end, low, ldl, rows, out, ldo, spread);
        default: return low_rank_typed<PJ_F32>(pair, begin, end, low, ldl, rows, out, ldo, spread);
    }
}

inline void rms_norm_row(const float* x, const float* weight, int64_t k, float eps, float* out) {
    V sum = v_zero();
    int64_t i = 0;
    for (; i + W <= k; i += W) {
        const V value = v_load(x + i);
        sum = v_fma(value, value, sum);
    }
    if (i < k) {
        const V value = v_load_n(x + i, static_cast<int>(k - i));
        sum = v_fma(value, value, sum);
    }
    const V factor = v_set(1.0f / sqrtf(v_sum(sum) / static_cast<float>(k) + eps));
    for (i = 0; i + W <= k; i += W) v_store(out + i, v_mul(v_mul(v_load(x + i), factor), v_load(weight + i)));
    if (i < k) {
        const int n = static_cast<int>(k - i);
        v_store_n(out + i, v_mul(v_mul(v_load_n(x + i, n), factor), v_load_n(weight + i, n)), n);
    }
}

// In place; dimension i is paired with i + head_dim / 2.
inline void rotate_head(float* x, const float* cos, const float* sin, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i += W) {
        const int n = half - i < W ? static_cast<int>(half - i) : W;
        const V left = v_load_n(x + i, n), right = v_load_n(x + half + i, n);
        const V c = v_load_n(cos + i, n), s = v_load_n(sin + i, n);
        v_store_n(x + i, v_sub(v_mul(left, c), v_mul(right, s)), n);
        v_store_n(x + half + i, v_add(v_mul(right, c), v_mul(left, s)), n);
    }
}

inline void clamped_row(const float* gate, const float* up, int64_t n, float* out) {
    const V seven = v_set(7.0f), one = v_set(1.0f);
    for (int64_t i = 0; i < n; i += W) {
        const int count = n - i < W ? static_cast<int>(n - i) : W;
        const V g = v_min(seven, v_load_n(gate + i, count));  // NaN stays
        const V u = v_add(v_max(v_set(-7.0f), v_min(seven, v_load_n(up + i, count))), one);
        const V exponential = v_exp2(v_mul(g, v_set(-1.702f * 1.44269504f)));
        v_store_n(out + i, v_mul(v_div(g, v_add(one, exponential)), u), count);
    }
}

inline void swiglu_row(const float* gate, const float* up, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += W) {
        const int count = n - i < W ? static_cast<int>(n - i) : W;
        v_store_n(out + i, v_silu_mul(v_load_n(gate + i, count), v_load_n(up + i, count)), count);
    }
}

inline void geglu_row(const float* gate, const float* up, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += W) {
        const int count = n - i < W ? static_cast<int>(n - i) : W;
        v_store_n(out + i, v_gelu_mul(v_load_n(gate + i, count), v_load_n(up + i, count)), count);
    }
}

inline void relu2_glu_row(const float* gate, const float* up, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += W) {
        const int count = n - i < W ? static_cast<int>(n - i) : W;
        v_store_n(out + i, v_relu2_mul(v_load_n(gate + i, count), v_load_n(up + i, count)), count);
    }
}

// `kind` and `curve`: PjLayer's, of an activation or of gates.
inline void activate_row(const float* x, int32_t kind, const float* curve, int64_t n, float* out) {
    const V one = v_set(1.0f);
    for (int64_t i = 0; i < n; i += W) {
        const int count = n - i < W ? static_cast<int>(n - i) : W;
        const V value = v_load_n(x + i, count), positive = v_max(v_zero(), value);
        const V made = kind == 0   ? v_silu_mul(value, one)
                       : kind == 1 ? v_gelu_mul(value, one)
                       : kind == 2 ? v_gelu(value)
                       : kind == 3 ? v_mul(positive, positive)
                       : kind == 4 ? positive
                       : kind == 7 ? v_sigmoid(value)
                       : kind == 8 ? v_softplus(value)
                                   : v_xielu(value, curve[0], curve[1]);
        v_store_n(out + i, made, count);
    }
}

inline void soft_cap_row(float* x, float cap, int64_t n) {
    for (int64_t i = 0; i < n; i += W) {
        const int count = n - i < W ? static_cast<int>(n - i) : W;
        v_store_n(x + i, v_soft_cap(v_load_n(x + i, count), cap), count);
    }
}

// One stage: pairs that lie `half` apart become their sum and their difference.
template <int HALF>
inline void butterfly(float* x, int64_t block) {
    for (int64_t i = 0; i < block; i += 2 * HALF) {
        for (int j = 0; j < HALF; ++j) {
            const float a = x[i + j], b = x[i + j + HALF];
            x[i + j] = a + b;
            x[i + j + HALF] = a - b;
        }
    }
}

inline void hadamard_row(const float* x, int64_t k, int64_t block, float* out) {
    alignas(64) float own[penjing::MAX_HADAMARD];
    const float factor = static_cast<float>(1.0 / sqrt(static_cast<double>(block)));
    for (int64_t at = 0; at < k; at += block) {
        __builtin_memcpy(own, x + at, static_cast<size_t>(block) * sizeof(float));
        if (block > 128) butterfly<128>(own, block);
        if (block > 64) butterfly<64>(own, block);
        if (block > 32) butterfly<32>(own, block);
        if (block > 16) butterfly<16>(own, block);
        if (block > 8) butterfly<8>(own, block);
        if (block > 4) butterfly<4>(own, block);
        if (block > 2) butterfly<2>(own, block);
        butterfly<1>(own, block);
        for (int64_t i = 0; i < block; ++i) out[at + i] = own[i] * factor;
    }
}

inline void widen_row(const void* x, int32_t dtype, int64_t k, float* out) {
    for (int64_t i = 0; i < k; i += W) {
        const int n = k - i < W ? static_cast<int>(k - i) : W;
        const V value = dtype == PJ_F32    ? load_weight<PJ_F32>(x, i, n)
                        : dtype == PJ_BF16 ? load_weight<PJ_BF16>(x, i, n)
                                           : load_weight<PJ_F16>(x, i, n);
        v_store_n(out + i, value, n);
    }
}

inline void narrow_row(const float* x, int32_t dtype, int64_t k, uint16_t* out) {
    if (dtype == PJ_BF16) {
        for (int64_t i = 0; i < k; ++i) {
            uint32_t bits;
            __builtin_memcpy(&bits, x + i, 4);
            const float size = x[i] < 0 ? -x[i] : x[i];
            out[i] = size < penjing::LEAST_BRAIN ? 0 : static_cast<uint16_t>(penjing::brain_bits(bits) >> 16);
        }
        return;
    }
    const V most = v_set(65504.0f), least = v_set(-65504.0f);
    for (int64_t i = 0; i < k; i += W) {
        const int n = k - i < W ? static_cast<int>(k - i) : W;
        v_store_f16_n(out + i, v_max(least, v_min(most, v_load_n(x + i, n))), n);  // NaN stays
    }
}

inline uint32_t sum_words(const uint32_t* words, int64_t count) {
    uint32_t sums[64] = {};
    for (int64_t i = 0; i + 64 <= count; i += 64)
        for (int lane = 0; lane < 64; ++lane) sums[lane] += words[i + lane];
    for (int64_t i = count / 64 * 64; i < count; ++i) sums[0] += words[i];
    for (int lane = 1; lane < 64; ++lane) sums[0] += sums[lane];
    return sums[0];
}

inline void scale_row(const float* x, float factor, int64_t k, float* out) {
    const V by = v_set(factor);
    for (int64_t i = 0; i < k; i += W) {
        const int n = k - i < W ? static_cast<int>(k - i) : W;
        v_store_n(out + i, v_mul(v_load_n(x + i, n), by), n);
    }
}

inline bool by_tiles(int32_t, int64_t, int64_t) { return false; }

inline void take_heads(const float* x, float factor, int64_t heads, int64_t head_dim, int32_t dtype, bool, void* out) {
    float* to = static_cast<float*>(out);
    scale_row(x, factor, heads * head_dim, to);
    for (int64_t i = 0; dtype == PJ_BF16 && i < heads * head_dim; i += W) {
        const int n = heads * head_dim - i < W ? static_cast<int>(heads * head_dim - i) : W;
        v_store_n(to + i, v_brain(v_load_n(to + i, n)), n);
    }
}

}  // namespace
