// Exercises the thread pool for ThreadSanitizer: barriers inside a call, callers taking turns, teams that change size,
// a caller that goes on alone while its team does not come, and callers that sample, each in its own working memory.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "ops.h"
#include "pool.h"
#include "sample.h"

// One instruction set is enough here.
const penjing::Ops& penjing::ops() { return scalar_ops(); }

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

constexpr int SAMPLERS = 3;

// One token of more and more logits, so that working memory grows; all callers begin each size at a time.
bool sample(std::atomic<int>& begun) {
    int together = 0;
    bool good = true;
    for (size_t vocab = 500; vocab < 500000; vocab *= 2) {
        std::vector<float> logits(vocab);
        logits.back() = 1;
        penjing::SampleRow row{};
        row.logits = logits.data();
        row.top_p = row.repetition = 1;
        row.num_logprobs = row.token = -1;
        penjing::SampleRow* rows[] = {&row};
        together += SAMPLERS;
        for (++begun; begun < together;) std::this_thread::yield();
        good = penjing::sample_rows(rows, 1, static_cast<int64_t>(vocab)) == 0 && good;
        good = row.token == static_cast<int32_t>(vocab - 1) && good;
    }
    return good;
}

bool sample_at_a_time() {
    std::atomic<int> begun{0}, good{0};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < SAMPLERS; ++caller) callers.emplace_back([&] { good += sample(begun); });
    for (std::thread& caller : callers) caller.join();
    return good == SAMPLERS;
}

}  // namespace

int main() {
    bool good = retreats() && sample_at_a_time();
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
