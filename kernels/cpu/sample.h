// From rows of logits to tokens, and to probabilities of tokens.
#pragma once

#include <cstdint>

namespace penjing {

// What one row wants, and gets. Null where there is none of something.
struct SampleRow {
    const float* logits;         // (vocab), left as they are
    const int32_t* seen;         // (num_seen) tokens of prompt and answer, each once
    const int32_t* counts;       // (num_seen) how often each stands in the answer
    const int32_t* bias_ids;     // (num_bias)
    const float* bias;           // (num_bias)
    const int32_t* forbidden;    // (num_forbidden) tokens that cannot be chosen
    const uint32_t* mask;        // a bit for each token that can be
    int32_t* top_ids;            // (num_logprobs + 1) the most likely tokens, then the chosen one if it is not among them
    double* top_logprobs;        // the same, natural logarithms under the raw logits
    int64_t* top_ranks;          // the same, from 1
    int64_t num_seen;
    int64_t num_bias;
    int64_t num_forbidden;
    double number;               // in [0, 1): where among the cumulative weights
    double top_p;
    float temperature;           // 0: the largest
    float min_p;
    float repetition;
    float presence;
    float frequency;
    int32_t top_k;               // 0: all
    int32_t num_logprobs;        // −1: none
    int32_t token;               // in: −1, or the token that is scored and not chosen; out: the token, −2: not finite
    int32_t num_top;             // out
    int32_t unused;
};

// 0 when done, −1: no memory. Rows are shared out among the team.
int sample_rows(SampleRow* const* rows, int64_t num_rows, int64_t vocab);

}  // namespace penjing
