// Exercises the progress of attention for ThreadSanitizer: pieces that several members compute are merged once each, in
// order and by one member at a time, over turns that reset nothing; who waits for a choice sees what it was made of.
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "attention_progress.h"

namespace {

constexpr int MEMBERS = 4, UNITS = 3, PIECES = 17, TURNS = 3000;

struct Work {
    penjing::AttentionProgress progress;
    std::atomic<int64_t> next_choice[TURNS] = {}, next_piece[TURNS] = {};
    std::atomic<int> arrived{0};
    std::atomic<bool> good{true};
    int chosen[UNITS] = {};                // plain memory, so that an order that is not kept is a race
    int computed[UNITS * PIECES] = {};
    std::vector<int> merged[UNITS];
    int completions[UNITS] = {};
};

void member(Work& work) {
    for (int turn = 1; turn <= TURNS; ++turn) {
        for (int64_t i; (i = work.next_choice[turn - 1].fetch_add(1)) < UNITS;) {
            work.chosen[i] = turn;
            work.progress.note_choice(i, turn);
        }
        for (int64_t i; (i = work.next_piece[turn - 1].fetch_add(1)) < UNITS * PIECES;) {
            const int64_t unit = i / PIECES, first = unit * PIECES;
            work.progress.await_choice(unit, turn);
            if (work.chosen[unit] != turn) work.good = false;
            work.computed[i] = turn;
            const bool all = work.progress.note_piece(i, unit, first, PIECES, turn, [&](int64_t piece) {
                if (work.computed[first + piece] != turn) work.good = false;
                work.merged[unit].push_back(static_cast<int>(piece));
            });
            if (all) ++work.completions[unit];
        }
        ++work.arrived;  // a turn begins when the one before has ended, as behind a barrier
        while (work.arrived < MEMBERS * turn) std::this_thread::yield();
    }
}

}  // namespace

int main() {
    Work work;
    work.progress.begin(UNITS, UNITS * PIECES, UNITS);
    for (int unit = 0; unit < UNITS; ++unit) work.progress.expect_choice(unit);
    std::vector<std::thread> members;
    for (int i = 0; i < MEMBERS; ++i) members.emplace_back([&] { member(work); });
    for (std::thread& thread : members) thread.join();
    bool good = work.good;
    for (int unit = 0; unit < UNITS; ++unit) {
        good = good && work.completions[unit] == TURNS && work.merged[unit].size() == size_t{TURNS} * PIECES;
        for (size_t i = 0; good && i < work.merged[unit].size(); ++i) good = work.merged[unit][i] == static_cast<int>(i % PIECES);
    }
    std::puts(good ? "the progress passed" : "the progress failed");
    return good ? 0 : 1;
}
