// Exercises the thread pool for ThreadSanitizer: barriers inside a call, callers taking turns, teams that change size,
// a caller that goes on alone while its team does not come.
#include <chrono>
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
        team.sync({ring.cells.data(), 32});
        const int neighbour = (team.member + 1) % team.members;
        if (ring.cells[static_cast<size_t>(neighbour)] != round + neighbour) ring.good = false;
        team.sync();
    }
}

// A team whose second member comes late, as if other programs had its core.
struct Late {
    bool late;
    std::vector<int> members;  // of each call
};

void come_late(const penjing::Team& team, void* context) {
    Late& late = *static_cast<Late*>(context);
    if (team.member == 0) late.members.push_back(team.members);
    else if (late.late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    team.sync();
}

// The caller tries the team again after one call alone, then after two, four …, until the team is in time.
bool retreats() {
    penjing::set_num_threads(2);
    Late late{true, {}};
    for (int call = 0; call < 7; ++call) penjing::run_team(come_late, &late, 2);
    late.late = false;
    for (int call = 0; call < 4; ++call) penjing::run_team(come_late, &late, 2);
    return late.members == std::vector<int>{2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 2};
}

}  // namespace

int main() {
    bool good = retreats();
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
