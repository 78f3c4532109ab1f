// Structures and constants shared with Python (`kernels/cpu/abi.py` mirrors them field by field).
#pragma once

#include <cstdint>

extern "C" {

// Element type of a float weight, embedding or norm.
enum PjDtype : int32_t { PJ_F32 = 0, PJ_BF16 = 1, PJ_F16 = 2, PJ_INT8 = 3, PJ_INT4 = 4 };

// A linear layer y = x · Wᵀ + bias. INT8 and INT4: panels as linear.cpp, pack_stepped.cpp and pack_int4.cpp describe them,
// INT4 with the scales of its groups among them; float: row-major (n, k), used in place.
struct PjLinear {
    const void* weight;
    const float* scale;   // INT8: (columns) factor of each column, in packed order
    const float* bias;    // INT8, INT4: (columns) in packed order, always present; float: (n) or null
    const int32_t* comp;  // INT8: (columns) 128 × the column's sum of weights; with zero points, of each panel, the sums
                          // themselves of each block of inputs: (blocks, columns of the panel)
    int64_t n;            // output features (of a SwiGLU pair: of the product)
    int64_t k;            // input features
    int32_t dtype;        // PjDtype
    int32_t width;        // INT8, INT4: columns of a panel, a multiple of 16, at most 64
    int32_t swiglu;       // INT8, INT4: gate and up columns alternate in groups of 16; the output is silu(gate) × up;
                          // 2: gelu by its tanh formula in place of silu; 3: the square of what is positive
    int32_t group;        // INT4: inputs of a group, a multiple of 32 that divides k; INT8: the same, at most 256, of
                          // weights that are stored as step × 4 bits + offset (pack_stepped.cpp); 0: as bytes
    int32_t scale_dtype;  // INT4: PjDtype of the groups' scales, one of the floats
    int32_t offsets;      // INT4: a group also has an offset, and activations have a scale for each group of inputs
    int32_t zero_points;  // INT8: activations have a scale and a zero point for each ABOVE_INPUTS of a token, not one
                          // scale with zero in the middle of their range
    int32_t half_inputs;  // INT4: activations are rounded to bfloat16, not to 8 bits
};

// Rows of a weight as they are stored, one of the layers that are packed as one.
struct PjPart {
    const void* weight;  // INT8: (rows, k); INT4: (rows, k / 2), each byte two of w + 8, the first in its low half; INT8
                         // in steps: the same, w + 8 being the number of steps
    const void* scale;   // INT8: (rows) float32; INT4: (rows, k / group)
    const void* offset;  // INT4: (rows, k / group) as the scales, or null; INT8 in steps: (rows, k / group, 2) bytes, a
                         // step and an offset
    const float* bias;   // (rows) or null
    int64_t rows;
};

// Experts in place of an MLP: a row goes to `per_row` of them, those with the largest scores of the router.
struct PjExperts {
    PjLinear router;          // (num_experts − shared, hidden), a float layer; a row more: of the shared one's weight
    const PjLinear* gate_up;  // (num_experts, the layer's num_gate_up)
    const PjLinear* down;     // (num_experts)
    const float* bias;        // (num_experts − shared) added for the choice alone; null: nothing
    const float* sum_norm;    // (hidden) norm of what the chosen ones give together, and
    const float* shared_norm; // (hidden) of what the shared one gives; null: neither
    int64_t num_experts;
    int64_t per_row;          // with the shared ones
    float factor;             // of what the chosen ones give
    float margin;             // 0 or above: two are chosen, as `sparsemixer` of core/models/moe.py does; else −1
    int32_t normed;           // their weights are divided by their sum
    int32_t logistic;         // scores become their logistic function, not shares of one
    int32_t bias_of_logits;   // `bias` is added to scores before that
    int32_t shared;           // 1: the last one takes every row, with the weight 1 or the logistic function of its row of
                              // the router; it is as wide as the others or wider
};

// One decoder layer. A fused projection has its product in the first slot and count 1; else q, k, v (gate, up) apart, and
// behind v what gates the result of attention, where there is such. A
// layer with `taps` has a gated convolution over the last tokens in place of attention: the first slot gives (3, hidden),
// what gates the input, what gates the result, and the input; there are no head norms, sinks or window.
struct PjLayer {
    PjLinear qkv[4];
    PjLinear out;
    PjLinear gate_up[2];
    PjLinear down;
    const float* input_norm;   // (hidden) or null
    const float* post_norm;    // (hidden) or null
    const float* out_norm;     // (hidden) or null: of what attention adds to the residual
    const float* down_norm;    // (hidden) or null: of what the MLP adds
    const float* q_norm;       // (head_dim), with whole_norm (heads × head_dim), or null
    const float* k_norm;
    const float* v_norm;       // (head_dim) or null
    PjLinear token_gate;       // (token_inputs, hidden) and, behind its GELU times what the layer takes of a token,
    PjLinear token_out;        // (hidden, token_inputs), added behind its norm; where the model has token_inputs
    const float* token_norm;   // (hidden)
    const float* attended_norm;  // (heads × head_dim) or null: of what `out` reads
    const float* inner_norm;   // (k of down) or null: of what `down` reads, before its transform
    const float* sinks;        // (heads) a score more in each sum that attention divides by, or null
    const float* taps;         // (hidden, num_taps) factors of the channels of so many tokens, the last one's own, or null
    const float* tap_bias;     // (hidden) or null
    const PjExperts* experts;  // or null; with experts, gate_up and down are those of the first one
    int64_t window;            // keys a query sees, itself included; 0: all
    int64_t hadamard;          // block of the Hadamard transform before `down`, see ops.h; 0: none
    int64_t num_taps;
    int64_t place;             // which of the layers with attention it is, whose pages follow each other; or with taps
    int64_t borrows;           // 1: its keys and values are those of the layer before it with the same place
    float curve[2];            // of xIELU: its factors where inputs are positive, and where they are negative
    int64_t gates;             // of the result of attention: one a head, or one a channel; 0: none
    int32_t num_qkv;           // 1, 3 or 4
    int32_t num_gate_up;       // 1 or 2
    int32_t activation;        // of the gate: 0 silu, 1 gelu by its tanh formula, 3 relu²; without `gated` also 2 gelu,
                               // 4 relu, 5 xIELU; of experts' gates also 6, see clamped_row
    int32_t whole_norm;        // q_norm and k_norm span all heads
    int32_t rotary;            // which of the tables of cos and sin
    int32_t gated;             // 0: gate_up has the gate alone, which is activated and not multiplied
    int32_t parallel;          // the MLP reads what attention reads; out_norm and down_norm are null
    int32_t norm_rotated;      // q_norm and k_norm come after the rotation
    int32_t gate_function;     // 7: the gates' logistic function, 8: their softplus
    float scale;               // of what leaves the layer
};

// What finds the largest output of an INT8 LM head from a copy in 4 bits, see screen.h.
struct PjScreen {
    PjLinear rough;           // (vocab, hidden + count) INT8 in steps, with the scales of the head: the copy, and what it
                              // lacks along the directions
    const float* directions;  // (count, hidden)
    const float* factors;     // (count) a direction's product with an input, times this, is its part in it
    const float* lost;        // (vocab) the norm of what the copy lacks, times the head's scale
    int64_t count;            // of directions
    float beside;             // the norm of what is lacking along the directions as a share of that, the most of all outputs
    int32_t unused;
};

struct PjModel {
    const PjLayer* layers;
    const void* embedding;    // (vocab, hidden); null: it is the weight of `head`, which is INT8
    const float* embedding_scale;  // INT8: (vocab); null embedding: (hidden) factors of the channels of a row
    const float* positions;   // (longest context, hidden) what is added to a token's row at each position; null: nothing
    const void* token_table;  // (vocab, num_layers, token_inputs) of `token_dtype`: what each layer takes of a token
    const float* final_norm;  // (hidden); null: what leaves the last layer enters the head
    PjLinear head;
    const PjScreen* screen;  // of the head, which is INT8 without bias and zero points; null: none
    const float* cos;  // (tables, positions, head_dim / 2)
    const float* sin;
    int64_t num_layers;
    int64_t vocab;
    int64_t hidden;
    int64_t intermediate;  // of the widest layer; a layer's own is its down.k
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t num_positions;  // rows of cos and sin
    int64_t token_inputs;   // 0: there are none
    float eps;
    float attention_scale;
    float attention_cap;  // scores become cap × tanh(score / cap); 0: they stay
    float logit_cap;      // the same of logits
    int32_t embedding_dtype;
    int32_t token_dtype;
    int32_t unused;
    int32_t table_hadamard;  // block of the Hadamard transform behind the embedding and before the head; 0: none
};

// A low-rank pair beside a linear layer, y += scale × (x · Aᵀ) · Bᵀ; weights in place.
struct PjLowRank {
    const void* a;  // (rank, k)
    const void* b;  // (blocks, rank, 16): B of shape (n, rank) in blocks of 16 outputs, the last one filled up
    int64_t n;
    int64_t k;
    int64_t rank;   // 0: there is none
    float scale;
    int32_t dtype;  // PjDtype, a float, of both
};

// Sequences of one attention call. `cu_query` (s + 1), `context_len` (s), `block_table` (s, table_stride).
struct PjSequences {
    const int32_t* cu_query;
    const int32_t* context_len;
    const int32_t* block_table;
    int64_t table_stride;
    int64_t num_sequences;
};

// Which older keys a row reads: those of the row's own block and the `window − 1` before it, of the first `sink`, and of
// others that the row chooses, until they are `budget`. Keys lie in blocks of `block`: 16, 32 or 64, counted from the
// sequence's first. A row at block b reads all keys where b < budget.
struct PjSelection {
    int64_t block;   // 0: every key is read
    int64_t sink;
    int64_t window;  // at least 1
    int64_t budget;  // at least sink + window
};

// One layer's pages: (num_blocks, num_kv_heads, block_size, head_dim), float32 or float16, or int8 with scales. These are
// (num_blocks, num_kv_heads, block_size): apart, so that rows stay aligned and scales of neighbours share cache lines.
// What is known of each block of keys: (num_blocks, num_kv_heads, block_size / block, 2, head_dim) and their scales
// without the last dimension; see select.h.
struct PjPages {
    void* k;
    void* v;
    float* k_scale;  // both or none
    float* v_scale;
    int64_t num_blocks;
    int64_t block_size;
    int64_t num_kv_heads;
    int64_t head_dim;
    int8_t* summary;  // both or none
    float* summary_scale;
    int32_t dtype;  // PjDtype: PJ_F32, PJ_F16, PJ_BF16 or PJ_INT8
    // Each 16 keys of a page lie by dimension, as scores read them: (words, 16 keys), a word being one dimension, or four
    // in INT8. block_size is a multiple of 16 then. Values and scales lie by token all the same.
    int32_t turned;
};
}
