// How far the members of a team are with the attention of a layer: which rows have chosen, which pieces are computed and
// merged. A turn is a layer of a step; numbers of an earlier turn mean "not yet", so that nothing is reset between them.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <vector>

#include "pool.h"

namespace penjing {

class AttentionProgress {
public:
    // Before the first turn of a step; turns count from 1.
    void begin(size_t units, size_t pieces, size_t choices) {
        grow(units_, units);
        grow(computed_, pieces);
        grow(chosen_, choices);
        for (size_t i = 0; i < units; ++i) units_[i].turn = 0;
        for (size_t i = 0; i < pieces; ++i) computed_[i].store(0, std::memory_order_relaxed);
        for (size_t i = 0; i < choices; ++i) chosen_[i].store(NOT_AWAITED, std::memory_order_relaxed);
    }

    // Each turn waits for this choice, a row and a head of keys; the others are there from the beginning.
    void expect_choice(int64_t choice) { chosen_[index(choice)].store(0, std::memory_order_relaxed); }
    void note_choice(int64_t choice, int32_t turn) { chosen_[index(choice)].store(turn, std::memory_order_release); }
    // Somebody is at work on it, for microseconds; where its core was taken away it gets this one.
    void await_choice(int64_t choice, int32_t turn) const {
        for (int spin = 0; chosen_[index(choice)].load(std::memory_order_acquire) < turn; ++spin) {
            if (spin < SPINS) relax();
            else sched_yield();
        }
    }

    // Takes note that a piece was computed, and calls `merge` with those of its unit that nobody has merged, in order, as
    // far as they are computed: one member at a time, and what others leave meanwhile is found by who looks again. True
    // for the member that has merged the last of `pieces`, which are numbered from `first` on.
    template <typename Merge>
    bool note_piece(int64_t piece, int64_t unit, int64_t first, int64_t pieces, int32_t turn, const Merge& merge) {
        computed_[index(piece)].store(turn);
        Unit& of = units_[index(unit)];
        for (;;) {
            if (of.busy.exchange(1) != 0) return false;
            if (of.turn != turn) of.turn = turn, of.merged = 0;
            const int64_t before = of.merged;
            while (of.merged < pieces && computed_[index(first + of.merged)].load() == turn) merge(of.merged++);
            const int64_t merged = of.merged;
            of.busy.store(0);
            if (merged == pieces) return before < pieces;
            if (computed_[index(first + merged)].load() != turn) return false;
        }
    }

private:
    static constexpr int32_t NOT_AWAITED = std::numeric_limits<int32_t>::max();
    static constexpr int SPINS = 2000;  // about 50 µs
    struct Unit {
        std::atomic<int32_t> busy{0};
        int32_t turn = 0;
        int64_t merged = 0;
    };
    static size_t index(int64_t i) { return static_cast<size_t>(i); }
    template <typename T>
    static void grow(std::vector<T>& items, size_t count) {
        if (items.size() < count) items = std::vector<T>(2 * count);
    }

    std::vector<Unit> units_;
    std::vector<std::atomic<int32_t>> computed_, chosen_;
};

}  // namespace penjing
