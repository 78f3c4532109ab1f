// Eight float32 lanes, with FMA and F16C. The including file has set the compiler's target.
#pragma once

namespace {

constexpr int W = 8;
using V = __m256;
using VI = __m256i;

inline __m256i lanes_below(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline V v_zero() { return _mm256_setzero_ps(); }
inline V v_set(float x) { return _mm256_set1_ps(x); }
inline V v_load(const float* p) { return _mm256_loadu_ps(p); }
inline V v_load_n(const float* p, int n) { return n >= W ? v_load(p) : _mm256_maskload_ps(p, lanes_below(n)); }
inline void v_store(float* p, V x) { _mm256_storeu_ps(p, x); }
inline void v_store_n(float* p, V x, int n) {
    if (n >= W) v_store(p, x);
    else _mm256_maskstore_ps(p, lanes_below(n), x);
}
inline V v_add(V a, V b) { return _mm256_add_ps(a, b); }
inline V v_sub(V a, V b) { return _mm256_sub_ps(a, b); }
inline V v_mul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V v_div(V a, V b) { return _mm256_div_ps(a, b); }
inline V v_fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V v_fused(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }  // on every processor rounded once
inline V v_max(V a, V b) { return _mm256_max_ps(a, b); }  // b where either is NaN
inline V v_min(V a, V b) { return _mm256_min_ps(a, b); }
inline V v_round(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x, cut to what v_scale2 takes, minus the nearest whole number, which becomes n.
inline V v_fraction(V x, V& n) {
    x = v_min(v_set(128.0f), v_max(v_set(-160.0f), x));
    n = v_round(x);
    return v_sub(x, n);
}
// p × 2^n for whole n in [−160, 128], in two steps that each stay in the exponent's range
inline V v_scale2(V p, V n) {
    const VI whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    const VI bias = _mm256_set1_epi32(127);
    const V first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    const V second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(p, first), second);
}
inline V v_from_int(VI x) { return _mm256_cvtepi32_ps(x); }
inline VI vi_load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline VI vi_set(int32_t x) { return _mm256_set1_epi32(x); }
inline VI vi_add(VI a, VI b) { return _mm256_add_epi32(a, b); }
inline VI vi_sub(VI a, VI b) { return _mm256_sub_epi32(a, b); }
inline VI vi_mul(VI a, VI b) { return _mm256_mullo_epi32(a, b); }

inline float v_sum(V x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float v_largest(V x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

inline V v_keep(V x, int first, int last) {
    const VI lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const VI low = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
    const VI high = _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane);
    return _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), x, _mm256_castsi256_ps(_mm256_andnot_si256(low, high)));
}

inline VI vi_abs_max(VI peak, V x) {
    return _mm256_max_epu32(peak, _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)));
}
inline VI vi_zero() { return _mm256_setzero_si256(); }
inline uint32_t vi_largest(VI x) {
    __m128i half = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(half));
}

inline void v_store_bytes(uint8_t* p, V x, uint8_t flip, int n) {
    const VI whole = _mm256_cvtps_epi32(x);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    const __m128i bytes = _mm_xor_si128(_mm_packs_epi16(words, words), _mm_set1_epi8(static_cast<char>(flip)));
    if (n >= W) {
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p), bytes);
        return;
    }
    alignas(16) uint8_t lanes[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(lanes), bytes);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
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
    return __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(x, least, _CMP_GE_OQ))));
}

// The four bits of each word from bit BIT on, minus 8.
template <int BIT>
inline V v_four_bits(const void* words) {
    const VI word = _mm256_srli_epi32(_mm256_loadu_si256(reinterpret_cast<const VI*>(words)), BIT);
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(word, _mm256_set1_epi32(15)), _mm256_set1_epi32(8)));
}

inline V v_load_int8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline V v_load_int8_n(const int8_t* p, int n) {
    if (n >= W) return v_load_int8(p);
    alignas(8) int8_t lanes[8] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return v_load_int8(lanes);
}
// Two signed bytes of each word in 16 bits, and sums of two 16-bit products onto each 32-bit lane.
inline VI vi_even_bytes(VI x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
inline VI vi_odd_bytes(VI x) { return _mm256_srai_epi16(x, 8); }
inline VI vi_dot16(VI sum, VI a, VI b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }

inline __m128i load_halves(const uint16_t* p, int n) {
    if (n >= W) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    alignas(16) uint16_t lanes[8] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return _mm_load_si128(reinterpret_cast<const __m128i*>(lanes));
}
inline V v_load_bf16_n(const uint16_t* p, int n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(p, n)), 16));
}
// To bfloat16, half away from zero; what is below LEAST_BRAIN becomes 0.
inline V v_brain(V x) {
    const VI bits = _mm256_castps_si256(x), size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const VI small = _mm256_cmpgt_epi32(_mm256_castps_si256(_mm256_set1_ps(penjing::LEAST_BRAIN)), size);
    const VI up = _mm256_add_epi32(bits, _mm256_set1_epi32(0x8000));
    const VI cut = _mm256_and_si256(up, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
    return _mm256_castsi256_ps(_mm256_andnot_si256(small, cut));
}
inline V v_load_f16_n(const uint16_t* p, int n) { return _mm256_cvtph_ps(load_halves(p, n)); }
inline V v_load_f16(const uint16_t* p) { return v_load_f16_n(p, W); }
inline void v_store_f16_n(uint16_t* p, V x, int n) {
    const __m128i halves = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    if (n >= W) return _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
    alignas(16) uint16_t lanes[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(lanes), halves);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

inline __m128 load_four(const float* p) { return _mm_loadu_ps(p); }
inline __m128 load_four(const uint16_t* p) { return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline __m128 load_four(const penjing::Brain* p) {
    const __m128i bits = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm_castsi128_ps(_mm_slli_epi32(bits, 16));
}

// Transpose 8 rows × 8 floats, or halves that become floats: out[c × 16 + r] = rows[r][c].
template <typename T>
inline void v_transpose(const T* const* rows, int column, float* out) {
    V r[8];
    for (int i = 0; i < 4; ++i) {
        for (int half = 0; half < 2; ++half) {
            const V x = _mm256_castps128_ps256(load_four(rows[i] + column + 4 * half));
            r[4 * half + i] = _mm256_insertf128_ps(x, load_four(rows[i + 4] + column + 4 * half), 1);
        }
    }
    for (int half = 0; half < 2; ++half) {
        const V* x = r + 4 * half;
        const V low01 = _mm256_unpacklo_ps(x[0], x[1]), high01 = _mm256_unpackhi_ps(x[0], x[1]);
        const V low23 = _mm256_unpacklo_ps(x[2], x[3]), high23 = _mm256_unpackhi_ps(x[2], x[3]);
        float* y = out + 64 * half;
        _mm256_store_ps(y, _mm256_shuffle_ps(low01, low23, 0x44));
        _mm256_store_ps(y + 16, _mm256_shuffle_ps(low01, low23, 0xee));
        _mm256_store_ps(y + 32, _mm256_shuffle_ps(high01, high23, 0x44));
        _mm256_store_ps(y + 48, _mm256_shuffle_ps(high01, high23, 0xee));
    }
}

}  // namespace
