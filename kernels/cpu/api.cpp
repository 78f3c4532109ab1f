// The functions that Python calls through ctypes. Shapes and ranges are checked there; what only a walk over the data
// finds (a block id outside the cache) comes back as a negative number.
#include <atomic>

#include "attention_call.h"
#include "decoder.h"
#include "linear.h"
#include "memory.h"
#include "ops.h"
#include "pool.h"
#include "sample.h"

#define PJ_API extern "C" __attribute__((visibility("default")))

using namespace penjing;

// Raised with every change of a structure or a function below.
PJ_API int32_t pj_abi_version() { return 36; }

// Bytes of a structure, so that a test can hold Python's copy against it.
PJ_API uint64_t pj_struct_bytes(int32_t which) {
    constexpr uint64_t bytes[] = {sizeof(PjLinear), sizeof(PjLayer),   sizeof(PjModel), sizeof(PjSequences),
                                  sizeof(PjPages),  sizeof(StepInput), sizeof(PjPart),
                                  sizeof(SampleRow), sizeof(PjLowRank), sizeof(PjSelection),
                                  sizeof(PjExperts), sizeof(PjScreen)};
    return which >= 0 && which < 12 ? bytes[which] : 0;
}

PJ_API const char* pj_isa() { return ops().name; }
PJ_API int32_t pj_select_isa(const char* name) { return select_ops(name); }
PJ_API int32_t pj_num_threads() { return num_threads(); }
PJ_API void pj_set_num_threads(int32_t count) { set_num_threads(count); }

PJ_API void* pj_allocate(uint64_t bytes) { return allocate_pages(bytes); }
PJ_API void pj_free(void* memory, uint64_t bytes) { free_pages(memory, bytes); }

namespace {
struct Reading {
    const uint32_t* words;
    int64_t count;
    std::atomic<uint32_t> sum{0};
};
void read_member(const Team& team, void* context) {
    Reading& reading = *static_cast<Reading*>(context);
    const int64_t begin = share(reading.count, team.member, team.members);
    const int64_t end = share(reading.count, team.member + 1, team.members);
    reading.sum += ops().sum_words(reading.words + begin, end - begin);
}
}  // namespace

// Sum of 32-bit words, read by the whole team: measures the bandwidth of memory.
PJ_API uint32_t pj_read(const uint32_t* words, int64_t count) {
    Reading reading{words, count};
    run_team(read_member, &reading, num_threads());
    return reading.sum;
}

PJ_API uint64_t pj_packed_bytes(int64_t n, int64_t k, int32_t swiglu, int32_t zero_points) {
    return packed_bytes(n, k, swiglu != 0, zero_points != 0);
}
PJ_API void pj_pack_int8(const PjPart* parts, int32_t num_parts, int64_t n, int64_t k, int32_t swiglu, int32_t zero_points,
                         void* memory, PjLinear* linear) {
    pack_int8(parts, num_parts, n, k, swiglu != 0, zero_points != 0, num_threads(), memory, linear);
}
PJ_API uint64_t pj_packed_stepped_bytes(int64_t n, int64_t k, int32_t swiglu, int32_t group, int32_t zero_points) {
    return packed_stepped_bytes(n, k, swiglu != 0, group, zero_points != 0);
}
PJ_API void pj_pack_stepped(const PjPart* parts, int32_t num_parts, int64_t n, int64_t k, int32_t swiglu, int32_t group,
                            int32_t zero_points, void* memory, PjLinear* linear) {
    pack_stepped(parts, num_parts, n, k, swiglu != 0, group, zero_points != 0, num_threads(), memory, linear);
}
PJ_API uint64_t pj_packed_int4_bytes(int64_t n, int64_t k, int32_t swiglu, int32_t group, int32_t scale_dtype,
                                      int32_t offsets) {
    return packed_int4_bytes(n, k, swiglu != 0, group, scale_dtype, offsets != 0);
}
PJ_API void pj_pack_int4(const PjPart* parts, int32_t num_parts, int64_t n, int64_t k, int32_t swiglu, int32_t group,
                         int32_t scale_dtype, void* memory, PjLinear* linear) {
    pack_int4(parts, num_parts, n, k, swiglu != 0, group, scale_dtype, num_threads(), memory, linear);
}
PJ_API int32_t pj_linear(const PjLinear* linear, const float* x, int64_t rows, float* out) {
    return run_linear(*linear, x, rows, out) ? 0 : -1;
}

namespace {
// Rows that become INT8; a norm or gate before it goes through the member's own part of `scratch`, which stays in cache.
struct Quantizing {
    const float* x;
    const float* second;  // norm: weight (k); SwiGLU: up (rows, k); null: x as it is
    bool gated;
    int64_t rows, k;
    float eps;
    float* scratch;  // (members, k)
    uint8_t* q;
    float* scale;
};
void quantize_member(const Team& team, void* context) {
    const Quantizing& c = *static_cast<Quantizing*>(context);
    const Ops& kernels = ops();
    float* own = c.scratch + team.member * c.k;
    const int64_t end = share(c.rows, team.member + 1, team.members);
    for (int64_t row = share(c.rows, team.member, team.members); row < end; ++row) {
        const float* x = c.x + row * c.k;
        if (c.gated) kernels.swiglu_row(x, c.second + row * c.k, c.k, own);
        else if (c.second) kernels.rms_norm_row(x, c.second, c.k, c.eps, own);
        kernels.quantize_row(c.second ? own : x, c.k, c.q + row * c.k, c.scale + row, 0);
    }
}
void quantize_all(Quantizing call, int members) {
    // Below about 20 µs of work a barrier costs more than it gains.
    run_team(quantize_member, &call, call.rows * call.k < 16384 ? 1 : members);
}
}  // namespace

PJ_API void pj_quantize(const float* x, int64_t rows, int64_t k, int8_t* q, float* scale) {
    quantize_all({x, nullptr, false, rows, k, 0, nullptr, reinterpret_cast<uint8_t*>(q), scale}, num_threads());
}
// scratch is (members, k).
PJ_API void pj_rms_norm_quantize(const float* x, const float* weight, int64_t rows, int64_t k, float eps,
                                 float* scratch, int32_t members, int8_t* q, float* scale) {
    quantize_all({x, weight, false, rows, k, eps, scratch, reinterpret_cast<uint8_t*>(q), scale}, members);
}
PJ_API void pj_swiglu_quantize(const float* gate, const float* up, int64_t rows, int64_t k, float* scratch,
                               int32_t members, int8_t* q, float* scale) {
    quantize_all({gate, up, true, rows, k, 0, scratch, reinterpret_cast<uint8_t*>(q), scale}, members);
}
PJ_API void pj_rms_norm(const float* x, const float* weight, int64_t rows, int64_t k, float eps, float* out) {
    const Ops& kernels = ops();
    for (int64_t row = 0; row < rows; ++row) kernels.rms_norm_row(x + row * k, weight, k, eps, out + row * k);
}
PJ_API void pj_geglu(const float* gate, const float* up, int64_t count, float* out) {
    ops().geglu_row(gate, up, count, out);
}
PJ_API void pj_activate(const float* x, int64_t count, int32_t kind, float p, float n, float* out) {
    const float curve[2] = {p, n};
    ops().activate_row(x, kind, curve, count, out);
}
PJ_API void pj_soft_cap(float* x, int64_t count, float cap) { ops().soft_cap_row(x, cap, count); }
PJ_API void pj_swiglu(const float* gate, const float* up, int64_t count, float* out) {
    ops().swiglu_row(gate, up, count, out);
}
PJ_API void pj_hadamard(const float* x, int64_t rows, int64_t k, int64_t block, float* out) {
    const Ops& kernels = ops();
    for (int64_t row = 0; row < rows; ++row) kernels.hadamard_row(x + row * k, k, block, out + row * k);
}
// In place on (tokens, heads, head_dim); cos and sin are (tokens, head_dim / 2).
PJ_API void pj_rotate(float* x, const float* cos, const float* sin, int64_t tokens, int64_t heads, int64_t head_dim) {
    const Ops& kernels = ops();
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t head = 0; head < heads; ++head)
            kernels.rotate_head(x + (token * heads + head) * head_dim, cos + token * (head_dim / 2),
                                sin + token * (head_dim / 2), head_dim);
}

// k and v are (tokens, num_kv_heads, head_dim); slots of −1 are skipped.
PJ_API void pj_write_kv(const float* k, const float* v, const int64_t* slots, int64_t tokens, const PjPages* pages) {
    const Ops& kernels = ops();
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t head = 0; slots[token] >= 0 && head < pages->num_kv_heads; ++head) {
            const int64_t from = (token * pages->num_kv_heads + head) * pages->head_dim;
            store_key_value(kernels, *pages, slots[token], head, k + from, v + from);
        }
}

PJ_API int32_t pj_attention(const float* q, float* out, const PjPages* pages, const PjSequences* sequences,
                            int64_t num_heads, float scale, float cap, const float* sinks, int64_t window,
                            const PjSelection* selection, const int64_t* slots, uint8_t* masks) {
    return run_attention(q, out, *pages, *sequences, {num_heads, pages->num_kv_heads, pages->head_dim}, scale, cap,
                         sinks, window, selection, slots, masks);
}

PJ_API void* pj_make_decoder(const PjModel* model) { return make_decoder(*model); }
PJ_API void pj_free_decoder(void* decoder) { free_decoder(static_cast<Decoder*>(decoder)); }
PJ_API int32_t pj_step(void* decoder, const StepInput* input) { return run_step(*static_cast<Decoder*>(decoder), *input); }

// Rows of logits of one vocabulary; what they point to must outlive the call.
PJ_API int32_t pj_sample(SampleRow* const* rows, int64_t num_rows, int64_t vocab) {
    return sample_rows(rows, num_rows, vocab);
}
