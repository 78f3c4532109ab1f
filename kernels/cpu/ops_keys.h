// Keys of a tile by dimension, as scores read them, and what is fetched from memory meanwhile.
#pragma once

namespace {

using penjing::Brain;
using penjing::CHOICE_KEYS;
using penjing::KeyRows;
using penjing::TILE_KEYS;
using penjing::TileKeys;

inline V load_narrow(const float* p, int n) { return v_load_n(p, n); }
inline V load_narrow(const uint16_t* p, int n) { return v_load_f16_n(p, n); }
inline V load_narrow(const Brain* p, int n) { return v_load_bf16_n(&p->bits, n); }

// A little at a time: bursts of requests fill the first-level cache's miss buffers and stall (27 against 37 GB/s).
template <typename T>
inline void transpose_rows(const KeyRows& from) {
    const void *const *k = from.k, *const *ahead = from.ahead;
    const int keys = from.keys, words = from.words;
    for (int group = 0; group * W < keys; ++group) {
        const int whole = group * W / CHOICE_KEYS;
        if (!(from.chosen >> whole & 1)) continue;
        const T* rows[W];
        // Past the last key the first stands in; its scores are masked.
        for (int lane = 0; lane < W; ++lane)
            rows[lane] = static_cast<const T*>(k[group * W + lane < keys ? group * W + lane : 0]);
        float* to = from.room + static_cast<int64_t>(whole) * words * CHOICE_KEYS + group * W % CHOICE_KEYS;
        int d = 0;
        for (; d + W <= words; d += W) {
            for (int lane = 0; lane < W; ++lane) __builtin_prefetch(static_cast<const T*>(ahead[lane]) + d, 0, 2);
            v_transpose(rows, d, to + d * CHOICE_KEYS);
        }
        for (int lane = 0; d < words && lane < W; ++lane) {
            alignas(64) float rest[W];
            const void* at = rows[lane] + d;
            // Bytes, not floats: a word may be four dimensions, and starts anywhere.
            if (sizeof(T) == sizeof(float)) __builtin_memcpy(rest, at, static_cast<size_t>(words - d) * sizeof(float));
            else v_store(rest, load_narrow(static_cast<const T*>(at), words - d));
            for (int i = d; i < words; ++i) __builtin_memcpy(to + i * CHOICE_KEYS + lane, rest + i - d, sizeof(float));
        }
        ahead += W;
    }
}

// Those of turned pages.
template <typename T>
inline void widen_groups(const KeyRows& from) {
    const void* const* ahead = from.ahead;
    for (int first = 0; first < from.keys; first += CHOICE_KEYS) {
        if (!(from.chosen >> first / CHOICE_KEYS & 1)) continue;
        const T* narrow = static_cast<const T*>(from.k[first]);
        float* to = from.room + static_cast<int64_t>(first) * from.words;
        for (int at = 0; at < from.words * CHOICE_KEYS; at += CHOICE_KEYS) {
            __builtin_prefetch(static_cast<const T*>(ahead[0]) + at, 0, 2);
            for (int lane = 0; lane < CHOICE_KEYS; lane += W) v_store(to + at + lane, load_narrow(narrow + at + lane, W));
        }
        ahead += CHOICE_KEYS;
    }
}

inline TileKeys turn_keys(const KeyRows& from) {
    TileKeys keys;
    // Rows are taken ATTENTION_ROWS at a time, and each time 16 bits would be widened again.
    const bool narrow = from.dtype == PJ_F16 || from.dtype == PJ_BF16;
    const bool in_place = from.turned && !(narrow && from.rows > ATTENTION_ROWS);
    for (int group = 0; group < TILE_KEYS / CHOICE_KEYS; ++group) {
        const float* room = from.room + static_cast<int64_t>(group) * from.words * CHOICE_KEYS;
        keys.group[group] = in_place ? from.k[group * CHOICE_KEYS] : room;
    }
    keys.ahead = in_place ? from.ahead : nullptr;
    keys.narrow = in_place && narrow;
    if (in_place) return keys;
    if (from.turned && from.dtype == PJ_BF16) widen_groups<Brain>(from);
    else if (from.turned) widen_groups<uint16_t>(from);
    else if (from.dtype == PJ_BF16) transpose_rows<Brain>(from);
    else if (from.dtype == PJ_F16) transpose_rows<uint16_t>(from);
    else transpose_rows<float>(from);
    return keys;
}

// Scores take whole groups of CHOICE_KEYS keys, GROUPS at once.
constexpr int PARTS = CHOICE_KEYS / W;  // vectors of a group

// Where the keys of some groups lie, and what is fetched while they are read.
template <int GROUPS, typename T>
struct Keys {
    const T* at[GROUPS];
    const T* ahead[GROUPS];
    Keys(const TileKeys& keys, int group, const void* const* rows) {
        for (int g = 0; g < GROUPS; ++g) {
            at[g] = static_cast<const T*>(keys.group[group + g]);
            ahead[g] = rows ? static_cast<const T*>(rows[g * CHOICE_KEYS]) : at[g];  // what is there costs nothing
        }
    }
    // A word's share of as many rows as there are keys, which have the bytes of a key.
    void fetch(int word) const {
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; ++g) __builtin_prefetch(ahead[g] + word * CHOICE_KEYS, 0, 2);
    }
};

}  // namespace
