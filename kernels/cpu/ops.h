// What an instruction set provides: the inner kernels behind a table of functions, one table each for AMX, AVX-512 with
// BF16, AVX-512 VNNI, AVX-VNNI, AVX2 and plain C++. Everything above the table (threads, blocking, paging) is compiled once for any processor.
#pragma once

#include "abi.h"

namespace penjing {

constexpr int TILE_KEYS = 64;  // keys of an attention tile; tiles start at multiples of it (absolute positions)
constexpr int CHOICE_KEYS = 16;  // keys that a bit of AttentionTile::chosen stands for
constexpr int ALL_CHOSEN = (1 << TILE_KEYS / CHOICE_KEYS) - 1;
constexpr int SCORED_BLOCKS = 16;  // most blocks of keys that are scored at once
constexpr int PANEL = 64;      // most columns of an INT8 panel
constexpr int MAX_VECTOR = 16;
constexpr int MAX_HADAMARD = 256;

// Where the rows of an INT8 product go.
struct Int8Rows {
    const uint8_t* x;        // (rows, k rounded up to 4) activations + 128, or + zero
    const float* row_scale;  // (rows), with zero points (rows, above_blocks(k))
    const int32_t* zero;     // (rows, above_blocks(k)) what stands for 0 in x; null: 128 does
    float* out;              // (rows, n)
    int64_t ldx;
    int64_t ldo;
    int rows;
    bool add;  // out += instead of out =
};

// Where the rows of an INT4 product go.
struct Int4Rows {
    const int8_t* x;           // (rows, k) activations
    const uint16_t* half;      // (rows, k) the same in bfloat16, of a layer that rounds them so; see halve_row
    const int32_t* start;      // (rows, groups) −8 × the sum of each group
    const float* row_scale;    // (rows)
    const float* group_sum;    // with offsets (rows + 15, groups), in place of start: the sum of each group, and
    const float* group_scale;  // in place of row_scale, where activations are rounded; what stands behind the rows is
                               // read, and does not matter
    float* out;                // (rows, n)
    int64_t ldx;
    int64_t lds;
    int64_t ldo;
    int rows;
    bool add;  // out += instead of out =
};

// Memory that a product asks for meanwhile: so many cache lines for each of its k-groups, from `at` on.
struct Ahead {
    const int8_t* at;
    int lines;
    int64_t far = 0;  // of an INT8 product with AVX2: bytes between the lines of one k-group
};

// Where dimension d of a key lies in turned pages, in elements of T; `row` counts keys from the first of a page.
template <typename T>
inline int64_t turned_place(int64_t row, int64_t d, int64_t head_dim) {
    constexpr int64_t in_word = sizeof(T) == 1 ? 4 : 1;
    const int64_t first = row / CHOICE_KEYS * CHOICE_KEYS;
    return first * head_dim + (d / in_word * CHOICE_KEYS + row - first) * in_word + d % in_word;
}

inline int64_t element_bytes(int32_t dtype) { return dtype == PJ_F32 ? 4 : dtype == PJ_INT8 ? 1 : 2; }

// Keys of a tile as scores read them: of each CHOICE_KEYS keys (words, CHOICE_KEYS), where a word is a float, 16
// bits, or four dimensions in INT8; or as attention by tiles reads them.
struct TileKeys {
    const void* group[TILE_KEYS / CHOICE_KEYS];
    const void* const* ahead;  // TILE_KEYS rows to be fetched while scores are computed; null: nothing
    bool narrow;  // 16 bits each, where they lie
};

// Where the keys of a tile lie, and what turn_keys needs beside them.
struct KeyRows {
    const void* const* k;      // (TILE_KEYS) rows; of turned pages every CHOICE_KEYS-th is the place of a group
    const void* const* ahead;  // (TILE_KEYS) rows that are read next
    float* room;               // (TILE_KEYS, words)
    int keys;                  // the first so many are read
    int words;                 // of 32 bits in a row: a float, or four dimensions in INT8; or of 16: dimensions
    int rows;                  // of queries
    int chosen;                // bits as in AttentionTile
    int dtype;                 // as PjPages::dtype
    bool turned;               // as PjPages::turned
    bool tiles;                // see Ops::by_tiles
};

// What attention by tiles makes of a tile's values, once for all rows that read it.
struct TileValues {
    float* room;     // (TILE_KEYS, head_dim)
    int begin, end;  // keys that any row sees
    int chosen;      // bits as in AttentionTile
    bool ready;
};

// Keys and values are float32 or float16; or bfloat16, and then queries and weights too; or INT8 with a scale for each: then
// queries are 16-bit, so that scores are exact sums of integers and only the cache itself costs accuracy.
struct AttentionTile {
    const void* q;             // (rows, head_dim), times scale × log2(e): of take_heads or quantize_query
    const float* q_scale;      // INT8: (rows)
    const TileKeys* keys;
    const float* k_scale;      // INT8: (TILE_KEYS); null: floats
    const float* v_scale;      // the same
    const void* const* v;      // TILE_KEYS rows of head_dim, of `dtype`
    TileValues* values;
    const void* const* ahead;  // TILE_KEYS rows that the next tile starts with, to be fetched meanwhile; or null
    const int32_t* low;         // (rows) keys [low, high) of the tile are visible; at least one is
    const int32_t* high;
    const uint8_t* chosen;      // (rows) bit b: keys 16 b … 16 b + 15 are seen, at least one of them; null: all
    float* peak;                // (rows) running maximum of the scores, −inf at first
    float* total;               // (rows) running sum of weights
    float* out;                 // (rows, head_dim) running weighted sum, not yet divided by total
    int rows;
    int head_dim;
    int dtype;  // as PjPages::dtype
    bool tiles;  // see Ops::by_tiles
    float cap;  // scores, times log2(e), become cap × tanh(score / cap); 0: they stay
};

// A number of pages in bfloat16.
struct Brain {
    uint16_t bits;
};
// The least that a number of a page in bfloat16, of a query or of a weight beside it may be; what is smaller becomes 0. So
// products are multiples of 2^-126 and no sum of them is subnormal, which tiles of AMX would take for 0.
constexpr float LEAST_BRAIN = 1.38777878e-17f;  // 2^-56
// The bits of a float in bfloat16, rounded half to even; NaN stays.
inline uint32_t brain_bits(uint32_t bits) {
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return nan ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
}

// Of some outputs: the largest one as it is roughly known, and the most that any of them may be; see ops_screen.h.
struct Likely {
    float peak;
    float limit;
};

struct Ops {
    const char* name;

    // q = clamp(round_half_even(x / scale)) with scale = amax / 127 (1 where that is 0); bytes XOR flip.
    void (*quantize_row)(const float* x, int64_t k, uint8_t* q, float* scale, uint8_t flip);

    // q = clamp(round_half_even(x / scale) + zero) in 0 … 255, with scale = (max − min) / 255 (1 where that is 0) of the
    // row and 0, and zero = round_half_even(−min / scale).
    void (*quantize_row_above)(const float* x, int64_t k, uint8_t* q, float* scale, int32_t* zero);

    // Panels [begin, end) of an INT8 linear layer for some rows.
    void (*int8_panels)(const PjLinear& linear, int64_t begin, int64_t end, const Int8Rows& rows);

    // The same of an INT4 layer; start[g] = factor × the sum of group g of a row's bytes.
    void (*int4_panels)(const PjLinear& linear, int64_t begin, int64_t end, const Int4Rows& rows);
    void (*half_int4_panels)(const PjLinear& linear, int64_t begin, int64_t end, const Int4Rows& rows);  // half_inputs
    void (*group_starts)(const int8_t* q, int64_t k, int64_t group, int32_t factor, int32_t* start);

    // Outputs [n0, n1) of a float linear layer.
    void (*float_linear)(const PjLinear& linear, const float* x, int64_t ldx, int64_t rows, int64_t n0, int64_t n1,
                         float* out, int64_t ldo, bool add);

    // Outputs [16 × begin, 16 × end) of a low-rank pair, added for some rows of x · Aᵀ (rows, ldl) to (rows, ldo), where
    // each 16 of a row stand `spread` behind the 16 before.
    void (*low_rank_blocks)(const PjLowRank& pair, int64_t begin, int64_t end, const float* low, int64_t ldl,
                            int64_t rows, float* out, int64_t ldo, int64_t spread);

    void (*rms_norm_row)(const float* x, const float* weight, int64_t k, float eps, float* out);
    void (*rotate_head)(float* x, const float* cos, const float* sin, int64_t head_dim);
    // g × sigmoid(1.702 g) × (u + 1) with g = min(gate, 7) and u = up within −7 and 7
    void (*clamped_row)(const float* gate, const float* up, int64_t n, float* out);
    void (*swiglu_row)(const float* gate, const float* up, int64_t n, float* out);
    void (*geglu_row)(const float* gate, const float* up, int64_t n, float* out);
    void (*relu2_glu_row)(const float* gate, const float* up, int64_t n, float* out);
    // The activation of a PjLayer without a gate's product; out may be x.
    void (*activate_row)(const float* x, int32_t kind, const float* curve, int64_t n, float* out);
    void (*soft_cap_row)(float* x, float cap, int64_t n);
    // x · H in blocks of `block` (a power of two up to MAX_HADAMARD that divides k), H orthogonal; out may be x.
    void (*hadamard_row)(const float* x, int64_t k, int64_t block, float* out);
    void (*widen_row)(const void* x, int32_t dtype, int64_t k, float* out);
    // x in float16 or bfloat16, rounded half to even; what lies beyond ±65504 becomes that in float16.
    void (*narrow_row)(const float* x, int32_t dtype, int64_t k, uint16_t* out);
    void (*scale_row)(const float* x, float factor, int64_t k, float* out);

    // Sum of the 32-bit words of some memory: the reading speed that other kernels are measured against.
    uint32_t (*sum_words)(const uint32_t* words, int64_t count);

    // Keys of a tile by dimension: those of turned pages where they lie, others in `room`. Those of 16 bits that many
    // queries read are widened there. What none chose is left out. `ahead` is fetched meanwhile, or left to the scores.
    TileKeys (*turn_keys)(const KeyRows& rows);
    // Whether attention of so many rows of an item goes by tiles of the processor. Not a bit depends on it.
    bool (*by_tiles)(int32_t dtype, int64_t head_dim, int64_t rows);
    // x × factor as attend_tile reads queries beside pages of a float `dtype`: floats, beside bfloat16 rounded to that; for
    // tiles in 16 bits.
    void (*take_heads)(const float* x, float factor, int64_t heads, int64_t head_dim, int32_t dtype, bool tiles, void* out);
    // x × factor in 16 bits with one scale, amax / 32767. Of each four dimensions the even ones come first.
    void (*quantize_query)(const float* x, float factor, int head_dim, int16_t* q, float* scale);
    // Attention of some rows to one tile, merged into their running state.
    void (*attend_tile)(const AttentionTile& tile);
    // What attend_tile leaves for the next call of the same thread is given back.
    void (*end_attention)();
    // Merges the state of a tile (peak −inf: nothing seen) into a running state, as attend_tile does itself.
    void (*merge_tile)(const float* peak, const float* total, const float* out, int rows, int head_dim,
                       float* running_peak, float* running_total, float* running_out);

    // How much `heads` queries may find in up to SCORED_BLOCKS blocks of keys, and what parts the best; see ops_select.h.
    void (*score_blocks)(const int16_t* q, const float* q_scale, int heads, int head_dim, const int8_t* const* summary,
                         const int8_t* const* ahead, const float* scale, int count, float* score, int64_t stride);
    void (*join_scores)(float* score, int heads, int64_t stride, int64_t count, float* value);
    float (*nth_largest)(const float* x, int64_t n, int64_t place);

    Likely (*likely_row)(const float* rough, const float* lost, int64_t n, float reach, float* most);

    // Rows of logits and their weights; see ops_sample.h.
    float (*peak_of_row)(const float* x, int64_t n);
    double (*weigh_row)(const float* x, int64_t n, float peak, float temperature, float* weight);
    double (*sum_weights)(const float* weight, int64_t n);
    int64_t (*split)(float* x, int64_t n, float least, bool above);
    int64_t (*gather_from)(const float* x, int64_t n, float least, float* value, int32_t* id);
    int64_t (*peaks_of_groups)(const float* x, int64_t n, float* peak);
    double (*sum_of_powers)(const float* x, int64_t n, float peak);
    int64_t (*count_before)(const float* x, int64_t n, float value, int64_t position);
};

const Ops& scalar_ops();
#if defined(__x86_64__)
const Ops& avx2_ops();
const Ops& avx512_ops();
// Compilers since GCC 11 and clang 12 know tiles.
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define PJ_HAS_AMX 1
const Ops& amx_ops();  // what AVX-512 does, with linear layers of several rows by tiles
#define PJ_HAS_BF16 1
const Ops& bf16_ops();  // what AVX-512 does, with products of bfloat16
#endif
// GCC writes these for an assembler that came a year after its version 11.
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 12
#define PJ_HAS_AVX_VNNI 1
const Ops& avx_vnni_ops();  // what AVX2 does, with products of bytes
#endif
#endif

// The best table this processor runs, or the one forced by `select_ops`.
const Ops& ops();
// 0 when done; −1: unknown name; −2: this processor cannot run it.
int select_ops(const char* name);

// Panels of an INT8 or INT4 layer and where each lies.
inline int64_t padded_columns(const PjLinear& linear) {
    const int64_t half = (linear.n + 15) / 16 * 16;
    return linear.swiglu ? 2 * half : half;
}
inline int64_t num_panels(const PjLinear& linear) {
    return (padded_columns(linear) + linear.width - 1) / linear.width;
}
inline int64_t padded_k(int64_t k) { return (k + 3) / 4 * 4; }
// Inputs of a layer with zero points that share a scale and a zero point; the last ones of a token may be fewer.
constexpr int64_t ABOVE_INPUTS = 256;
inline int64_t above_blocks(int64_t k) { return (k + ABOVE_INPUTS - 1) / ABOVE_INPUTS; }
// Scales of one row of the input of an INT8 layer.
inline int64_t row_scales(const PjLinear& linear) { return linear.zero_points ? above_blocks(linear.k) : 1; }
inline bool in_panels(const PjLinear& linear) { return linear.dtype == PJ_INT8 || linear.dtype == PJ_INT4; }
inline int64_t scale_bytes(const PjLinear& linear) { return linear.scale_dtype == PJ_F32 ? 4 : 2; }
// Of a group of one column: its scale, and its offset where there are any.
inline int64_t group_bytes(const PjLinear& linear) { return scale_bytes(linear) * (linear.offsets ? 2 : 1); }
// Of a packed layer, without comp, scale and bias of an INT8 one; the panel of column c begins at c times this.
inline bool in_steps(const PjLinear& linear) { return linear.dtype == PJ_INT8 && linear.group != 0; }
inline int64_t column_bytes(const PjLinear& linear) {
    if (in_steps(linear)) return linear.k / 2 + linear.k / linear.group * 2;
    if (linear.dtype == PJ_INT8) return padded_k(linear.k);
    return linear.k / 2 + linear.k / linear.group * group_bytes(linear);
}

// One row in the form that int8_panel reads: activations + 128, padded to whole groups of 4.
inline void quantize_for_panels(const Ops& ops, const float* x, int64_t k, uint8_t* q, float* scale) {
    ops.quantize_row(x, k, q, scale, 0x80);
    for (int64_t i = k; i < padded_k(k); ++i) q[i] = 0x80;
}

// The same for a layer whose activations have zero points: activations + zero, a block of inputs at a time.
inline void quantize_above(const Ops& ops, const float* x, int64_t k, uint8_t* q, float* scale, int32_t* zero) {
    for (int64_t at = 0; at < k; at += ABOVE_INPUTS)
        ops.quantize_row_above(x + at, k - at < ABOVE_INPUTS ? k - at : ABOVE_INPUTS, q + at, scale++, zero++);
    for (int64_t i = k; i < padded_k(k); ++i) q[i] = 0x80;  // any: the weights there are 0
}

// One row in the form that int4_panel reads.
inline void quantize_for_groups(const Ops& ops, const float* x, int64_t k, int64_t group, int8_t* q, int32_t* start,
                                float* scale) {
    ops.quantize_row(x, k, reinterpret_cast<uint8_t*>(q), scale, 0);
    ops.group_starts(q, k, group, -8, start);
}

// The same for a layer with offsets: a scale for each group, and the sums of groups.
inline void quantize_each_group(const Ops& ops, const float* x, int64_t k, int64_t group, int8_t* q, float* sum,
                                float* scale) {
    for (int64_t at = 0; at < k; at += group) {
        int32_t whole;
        ops.quantize_row(x + at, group, reinterpret_cast<uint8_t*>(q + at), scale++, 0);
        ops.group_starts(q + at, group, group, 1, &whole);
        *sum++ = static_cast<float>(whole);
    }
}

// One row in the form that half_int4_panel reads: bfloat16, rounded half to even, and of each eight inputs those whose
// weights share a word's shift side by side: 0 2, 4 6, 1 3, 5 7. What is smaller than 2^-119 becomes 0: AVX-512's BF16
// instruction takes subnormal numbers for 0, and sums of multiples of 2^-126 are none. With `sum` also the sum of each
// group of them, added up in eight parts, so that every compiler and processor gives the same bits.
inline void halve_row(const float* x, int64_t k, int64_t group, uint16_t* half, float* sum) {
    constexpr int input_of[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    float part[8];
    for (int64_t at = 0; at < k; at += 8) {
        if (at % group == 0)
            for (float& each : part) each = 0.0f;
        for (int lane = 0; lane < 8; ++lane) {
            uint32_t bits;
            __builtin_memcpy(&bits, x + at + input_of[lane], 4);
            bits = brain_bits(bits);
            if ((bits & 0x7fffffffu) < 0x04000000u) bits = 0;  // exponent 8 of 127 + (-119)
            half[at + lane] = static_cast<uint16_t>(bits >> 16);
            bits &= 0xffff0000u;
            float rounded;
            __builtin_memcpy(&rounded, &bits, 4);
            part[lane] += rounded;
        }
        if (sum && (at + 8) % group == 0)
            *sum++ = ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
    }
}

}  // namespace penjing
