// Bytes of weights that are stored in steps (pack_stepped.cpp), 64 at a time; AVX-512 and AMX. Included after simd_avx512.h.
#pragma once

namespace {

// Step and offset of 16 columns of a group, each in the places that it has beside four bytes of a column.
struct Steps {
    VI step, offset;
};
inline Steps steps_of(const char* head, int n) {
    const VI both = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(head + 32 * n)));
    const VI steps = _mm512_set4_epi32(static_cast<int>(0x800c800c), static_cast<int>(0x80088008), static_cast<int>(0x80048004), static_cast<int>(0x80008000));
    const VI offsets = _mm512_set4_epi32(0x0d0d0d0d, 0x09090909, 0x05050505, 0x01010101);
    return {_mm512_shuffle_epi8(both, steps), _mm512_shuffle_epi8(both, offsets)};
}

// 15 × 17 still fits a byte, so that one multiplication of 16 bits makes two products.
inline VI stepped(VI numbers, VI step, VI offset) { return _mm512_add_epi8(_mm512_mullo_epi16(numbers, step), offset); }

inline void expand_group(const char* from, int64_t pairs, int64_t columns, int8_t* to) {
    const VI low_half = _mm512_set1_epi8(15);
    for (int n = 0; n < columns / 16; ++n) {
        const Steps at = steps_of(from, n);
        const char* words = from + 2 * columns + 64 * n;
        int8_t* out = to + 64 * n;
        for (int64_t pair = 0; pair < pairs; ++pair, words += 4 * columns, out += 8 * columns) {
            const VI both = _mm512_loadu_si512(words);
            const VI high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
            _mm512_storeu_si512(out, stepped(_mm512_and_si512(both, low_half), at.step, at.offset));
            _mm512_storeu_si512(out + 4 * columns, stepped(high, at.step, at.offset));
        }
    }
}

}  // namespace
