// Sixteen float32 lanes. The including file has set the compiler's target; every function is local to it.
#pragma once

namespace {

constexpr int W = 16;
using V = __m512;
using VI = __m512i;

inline __mmask16 lanes_below(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline V v_zero() { return _mm512_setzero_ps(); }
inline V v_set(float x) { return _mm512_set1_ps(x); }
inline V v_load(const float* p) { return _mm512_loadu_ps(p); }
inline V v_load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(lanes_below(n), p); }
inline void v_store(float* p, V x) { _mm512_storeu_ps(p, x); }
inline void v_store_n(float* p, V x, int n) { _mm512_mask_storeu_ps(p, lanes_below(n), x); }
inline V v_add(V a, V b) { return _mm512_add_ps(a, b); }
inline V v_sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V v_mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V v_div(V a, V b) { return _mm512_div_ps(a, b); }
inline V v_fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V v_fused(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }  // on every processor rounded once
inline V v_max(V a, V b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline V v_min(V a, V b) { return _mm512_min_ps(a, b); }
inline V v_round(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x minus the nearest whole number, which becomes n; together with v_scale2 right for every x.
inline V v_fraction(V x, V& n) {
    const V f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    n = _mm512_sub_ps(x, f);
    return f;
}
inline V v_scale2(V p, V n) { return _mm512_scalef_ps(p, n); }
inline V v_from_int(VI x) { return _mm512_cvtepi32_ps(x); }
inline VI vi_load(const void* p) { return _mm512_loadu_si512(p); }
inline VI vi_set(int32_t x) { return _mm512_set1_epi32(x); }
inline VI vi_add(VI a, VI b) { return _mm512_add_epi32(a, b); }
inline VI vi_sub(VI a, VI b) { return _mm512_sub_epi32(a, b); }
inline VI vi_mul(VI a, VI b) { return _mm512_mullo_epi32(a, b); }

inline float v_sum(V x) {
    const __m256 low = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(low), _mm256_extractf128_ps(low, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline float v_largest(V x) {
    const __m256 low = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(low), _mm256_extractf128_ps(low, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

// Lanes [first, last) of x, −inf elsewhere.
inline V v_keep(V x, int first, int last) {
    const int low = first < 0 ? 0 : first, high = last > W ? W : last;
    const unsigned kept = low < high ? ((1u << high) - 1u) & ~((1u << low) - 1u) : 0u;
    return _mm512_mask_blend_ps(static_cast<__mmask16>(kept), _mm512_set1_ps(-INFINITY), x);
}

// Bits of |x|, greatest over all lanes: orders as the floats do, with NaN above infinity.
inline VI vi_abs_max(VI peak, V x) {
    return _mm512_max_epu32(peak, _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)));
}
inline VI vi_zero() { return _mm512_setzero_si512(); }
inline uint32_t vi_largest(VI x) { return _mm512_reduce_max_epu32(x); }

// Whole numbers in [−127, 127] to bytes, the bits of `flip` inverted.
inline void v_store_bytes(uint8_t* p, V x, uint8_t flip, int n) {
    const __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x));
    _mm_mask_storeu_epi8(p, lanes_below(n), _mm_xor_si128(bytes, _mm_set1_epi8(static_cast<char>(flip))));
}

// Lanes of x that are at least `least`, side by side, and their places from `first` on; how many. Writes W of each.
inline int v_pack(V x, V least, int32_t first, float* value, int32_t* id) {
    const __mmask16 kept = _mm512_cmp_ps_mask(x, least, _CMP_GE_OQ);
    if (!kept) return 0;
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    _mm512_storeu_ps(value, _mm512_maskz_compress_ps(kept, x));
    _mm512_storeu_si512(id, _mm512_maskz_compress_epi32(kept, _mm512_add_epi32(lane, _mm512_set1_epi32(first))));
    return __builtin_popcount(kept);
}

// How many lanes of x are at least `least`.
inline int v_count_from(V x, V least) { return __builtin_popcount(_mm512_cmp_ps_mask(x, least, _CMP_GE_OQ)); }

// The four bits of each word from bit BIT on, minus 8.
template <int BIT>
inline V v_four_bits(const void* words) {
    const V values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const VI word = _mm512_loadu_si512(words);
    return _mm512_permutexvar_ps(BIT ? _mm512_srli_epi32(word, BIT) : word, values);
}

inline V v_load_int8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline V v_load_int8_n(const int8_t* p, int n) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes_below(n), p)));
}
// Two signed bytes of each word in 16 bits, and sums of two 16-bit products onto each 32-bit lane.
inline VI vi_even_bytes(VI x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
inline VI vi_odd_bytes(VI x) { return _mm512_srai_epi16(x, 8); }
inline VI vi_dot16(VI sum, VI a, VI b) { return _mm512_dpwssd_epi32(sum, a, b); }

inline V v_load_bf16_n(const uint16_t* p, int n) {
    const __m256i half = _mm256_maskz_loadu_epi16(lanes_below(n), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
// To bfloat16, half away from zero; what is below LEAST_BRAIN becomes 0.
inline V v_brain(V x) {
    const VI bits = _mm512_castps_si512(x), size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const VI least = _mm512_castps_si512(_mm512_set1_ps(penjing::LEAST_BRAIN));
    const VI up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
    const __mmask16 kept = _mm512_cmp_epi32_mask(size, least, _MM_CMPINT_NLT);
    return _mm512_castsi512_ps(_mm512_maskz_and_epi32(kept, up, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline V v_load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline V v_load_f16_n(const uint16_t* p, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes_below(n), p));
}
inline void v_store_f16_n(uint16_t* p, V x, int n) {
    _mm256_mask_storeu_epi16(p, lanes_below(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline V v_load_key(const float* p) { return _mm512_loadu_ps(p); }
inline V v_load_key(const uint16_t* p) { return v_load_f16(p); }
inline V v_load_key(const penjing::Brain* p) { return v_load_bf16_n(&p->bits, W); }

// Transpose 16 rows × 16 floats, or halves that become floats: out[c × 16 + r] = rows[r][c].
template <typename T>
inline void v_transpose(const T* const* rows, int column, float* out) {
    V x[16], y[16];
    for (int i = 0; i < 16; ++i) x[i] = v_load_key(rows[i] + column);
    // Within 128 bits: y[4i + j] holds, in each quarter q, column 4q + j of rows 4i … 4i + 3.
    for (int i = 0; i < 16; i += 4) {
        const V low01 = _mm512_unpacklo_ps(x[i], x[i + 1]), high01 = _mm512_unpackhi_ps(x[i], x[i + 1]);
        const V low23 = _mm512_unpacklo_ps(x[i + 2], x[i + 3]), high23 = _mm512_unpackhi_ps(x[i + 2], x[i + 3]);
        y[i] = _mm512_shuffle_ps(low01, low23, 0x44);
        y[i + 1] = _mm512_shuffle_ps(low01, low23, 0xee);
        y[i + 2] = _mm512_shuffle_ps(high01, high23, 0x44);
        y[i + 3] = _mm512_shuffle_ps(high01, high23, 0xee);
    }
    // Across quarters, a 4 × 4 transpose of 128-bit pieces for each j.
    for (int j = 0; j < 4; ++j) {
        const V even01 = _mm512_shuffle_f32x4(y[j], y[j + 4], 0x88), odd01 = _mm512_shuffle_f32x4(y[j], y[j + 4], 0xdd);
        const V even23 = _mm512_shuffle_f32x4(y[j + 8], y[j + 12], 0x88);
        const V odd23 = _mm512_shuffle_f32x4(y[j + 8], y[j + 12], 0xdd);
        _mm512_store_ps(out + 16 * j, _mm512_shuffle_f32x4(even01, even23, 0x88));
        _mm512_store_ps(out + 16 * (j + 4), _mm512_shuffle_f32x4(odd01, odd23, 0x88));
        _mm512_store_ps(out + 16 * (j + 8), _mm512_shuffle_f32x4(even01, even23, 0xdd));
        _mm512_store_ps(out + 16 * (j + 12), _mm512_shuffle_f32x4(odd01, odd23, 0xdd));
    }
}

}  // namespace
