// Exercises the thread pool for ThreadSanitizer: barriers inside a call, callers taking turns, teams that change size.
#include <cstdio>
#include <thread>
#include <vector>

#include "pool.h"

namespace {

struct Ring {
    std::vector<int> cells;  // one a member, written before a barrier and read by the neighbour after it
    int rounds;
    bool good = true;
};

void pass_on(const penjing::Team& team, void* context) {
    Ring& ring = *static_cast<Ring*>(context);
    for (int round = 0; round < ring.rounds; ++round) {
        ring.cells[static_cast<size_t>(team.member)] = round + team.member;
        team.sync();
        const int neighbour = (team.member + 1) % team.members;
        if (ring.cells[static_cast<size_t>(neighbour)] != round + neighbour) ring.good = false;
        team.sync();
    }
}

}  // namespace

int main() {
    bool good = true;
    for (int threads : {1, 2, 4, 3}) {
        penjing::set_num_threads(threads);
        std::vector<std::thread> callers;
        std::vector<Ring> rings(3);
        for (Ring& ring : rings) {
            ring.cells.resize(8);
            ring.rounds = 200;
            callers.emplace_back([&ring] {
                for (int call = 0; call < 20; ++call) penjing::run_team(pass_on, &ring, 8);
            });
        }
        for (std::thread& caller : callers) caller.join();
        for (const Ring& ring : rings) good = good && ring.good;
    }
    penjing::set_num_threads(1);
    std::puts(good ? "the pool passed" : "the pool failed");
    return good ? 0 : 1;
}
