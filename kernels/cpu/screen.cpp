#include "screen.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace penjing {
namespace {

constexpr int64_t SCREEN_TILE = 384;  // columns: whole panels of every width
// Computing a candidate reads as much memory as 4 to 16 columns of a panel, whose cache lines it shares.
constexpr int64_t COLUMNS_A_CANDIDATE = 32, LEAST_CAPACITY = 64;
constexpr double ROUNDING = 1e-5;  // above what float32 sums over the directions can be off
// Of what bounds are made of: their products stay finite, and of full precision.
constexpr float SMALLEST = 1e-15f, LARGEST = 1e10f;

// Calls `visit(begin, end)` for the member's tiles of columns. Members take turns: tokens that are often the largest stand
// in the front of a vocabulary, and one that finds none of them would hold many others to be likely.
template <typename Visit>
void each_tile(const PjLinear& linear, int member, int members, Visit visit) {
    for (int64_t begin = member * SCREEN_TILE; begin < linear.n; begin += members * SCREEN_TILE)
        visit(begin, std::min(begin + SCREEN_TILE, linear.n));
}

// Where column `column` of an INT8 layer stands: 4 weights, and `stride` bytes on the next 4.
struct Column {
    const int8_t* at;
    int64_t stride;
};
Column find_column(const PjLinear& linear, int64_t column) {
    const int64_t first = column / linear.width * linear.width, left = padded_columns(linear) - first;
    const int64_t width = left < linear.width ? left : linear.width;
    return {static_cast<const int8_t*>(linear.weight) + first * padded_k(linear.k) + (column - first) * 4, width * 4};
}

// One output, in the bits that all outputs together have. Meanwhile the column `next` is fetched.
float output(const PjLinear& linear, const Rows& rows, int64_t row, int64_t column, const Column* next) {
    const int64_t fours = padded_k(linear.k) / 4;
    const uint8_t* x = rows.q + row * 4 * fours;
    Column own = find_column(linear, column);
    int32_t sum = -linear.comp[column];
    for (int64_t i = 0; i < fours; ++i, x += 4, own.at += own.stride) {
        if (next) __builtin_prefetch(next->at + i * next->stride);
        sum += x[0] * own.at[0] + x[1] * own.at[1] + x[2] * own.at[2] + x[3] * own.at[3];
    }
    const float scaled = static_cast<float>(sum) * rows.row_scale[row];
    return scaled * linear.scale[column] + linear.bias[column];
}

// Keeps those that may reach `least`; −1 where they are still too many.
int32_t keep_likely(int32_t* id, float* limit, int32_t count, float least, int64_t capacity) {
    int32_t kept = 0;
    for (int32_t i = 0; i < count; ++i) {
        if (limit[i] < least) continue;
        id[kept] = id[i];
        limit[kept++] = limit[i];
    }
    return 2 * kept > capacity ? -1 : kept;
}

void screen_tile(const Ops& ops, const PjScreen& screen, const PjLinear& linear, const Rows& rows, int64_t row, int64_t begin,
                 int64_t width, const ScreenBuffer& b) {
    const float* rough = b.rough + row * SCREEN_TILE;
    const Likely likely = ops.likely_row(rough, screen.lost + begin, width, b.reach[row], b.most);
    if (likely.peak > b.best[row]) {
        b.best[row] = likely.peak;
        const int64_t at = std::find(rough, rough + width, likely.peak) - rough;
        b.least[row] = std::max(b.least[row], output(linear, rows, row, begin + at, nullptr));
    }
    const float least = b.least[row];
    if (likely.limit < least) return;
    int32_t* id = b.id + row * b.capacity;
    float* limit = b.limit + row * b.capacity;
    for (int64_t i = 0; i < width && b.count[row] >= 0; ++i) {
        if (b.most[i] < least) continue;
        if (b.count[row] == b.capacity) b.count[row] = keep_likely(id, limit, b.count[row], least, b.capacity);
        if (b.count[row] < 0) return;
        id[b.count[row]] = static_cast<int32_t>(begin + i);
        limit[b.count[row]++] = b.most[i];
    }
}

}  // namespace

ScreenBuffer carve_screen(Carver& carver, const PjScreen& screen, int64_t rows, int members) {
    const size_t r = static_cast<size_t>(rows);
    ScreenBuffer b{};
    b.capacity = std::max(screen.rough.n / members / COLUMNS_A_CANDIDATE, LEAST_CAPACITY);
    b.x = carver.take<float>(static_cast<size_t>(screen.rough.k - screen.count));
    b.q = carver.take<uint8_t>(r * static_cast<size_t>(screen.rough.k));
    for (float** each : {&b.reach, &b.best, &b.least}) *each = carver.take<float>(r);
    b.count = carver.take<int32_t>(r);
    b.rough = carver.take<float>(r * SCREEN_TILE);
    b.most = carver.take<float>(SCREEN_TILE);
    b.id = carver.take<int32_t>(r * static_cast<size_t>(b.capacity));
    b.limit = carver.take<float>(r * static_cast<size_t>(b.capacity));
    return b;
}

void enter_screen(const PjScreen& screen, const Rows& rows, int64_t row, const ScreenBuffer& b) {
    const int64_t k = screen.rough.k - screen.count;
    const uint8_t* q = rows.q + row * k;
    uint8_t* to = b.q + row * screen.rough.k;
    std::copy_n(q, k, to);
    double all = 0, across = 0, along = 0;
    for (int64_t i = 0; i < k; ++i) {
        b.x[i] = static_cast<float>(q[i] - 128);
        all += static_cast<double>(b.x[i]) * b.x[i];
    }
    for (int64_t d = 0; d < screen.count; ++d) {
        const float* direction = screen.directions + d * k;
        float lane[16] = {}, part = 0;
        for (int64_t i = 0; i < k; i += 16)
            for (int64_t j = 0; j < 16; ++j) lane[j] += direction[i + j] * b.x[i + j];
        for (float each : lane) part += each;
        part = std::nearbyint(std::max(-127.0f, std::min(127.0f, part * screen.factors[d])));
        to[k + d] = static_cast<uint8_t>(static_cast<int>(part) + 128);
        along += static_cast<double>(part) * part;
        for (int64_t i = 0; i < k; ++i) b.x[i] -= part * direction[i];
    }
    for (int64_t i = 0; i < k; ++i) across += static_cast<double>(b.x[i]) * b.x[i];
    const double off = std::sqrt(across) + screen.beside * std::sqrt(along) + ROUNDING * std::sqrt(all);
    b.reach[row] = rows.row_scale[row] * static_cast<float>(off);
}

void screen_columns(const Ops& ops, const PjScreen& screen, const PjLinear& linear, const Rows& rows, int64_t count,
                    int member, int members, const ScreenBuffer& b) {
    constexpr float none = -std::numeric_limits<float>::infinity();
    for (int64_t row = 0; row < count; ++row) {
        b.best[row] = b.least[row] = none;
        b.count[row] = b.reach[row] > SMALLEST && b.reach[row] < LARGEST ? 0 : -1;
    }
    Rows extended = rows;
    extended.q = b.q;
    each_tile(linear, member, members, [&](int64_t begin, int64_t end) {
        apply_linear(ops, part_of_linear(screen.rough, begin, end), extended, count, 0, 1, b.rough, SCREEN_TILE, false);
        for (int64_t row = 0; row < count; ++row)
            if (b.count[row] >= 0) screen_tile(ops, screen, linear, rows, row, begin, end - begin, b);
    });
}

void top_of_screened(const Ops& ops, const PjLinear& linear, const Rows& rows, int64_t count, int member, int members,
                     const std::vector<ScreenBuffer>& buffers, const TopBuffer& top) {
    const ScreenBuffer& b = buffers[static_cast<size_t>(member)];
    clear_top(top, count, 1);
    for (int64_t row = 0; row < count; ++row) {
        const TopBuffer to = row_of(top, row, 1);
        if (b.count[row] < 0) {
            const Rows alone = rows_from(rows, linear, row);
            each_tile(linear, member, members, [&](int64_t begin, int64_t end) {
                top_of_columns(ops, linear, alone, 1, begin, end, 1, 0, to);
            });
            continue;
        }
        float least = b.least[row];
        for (int other = 0; other < members; ++other)
            least = std::max(least, buffers[static_cast<size_t>(other)].least[row]);
        TopList list{to.value, to.id, 1};
        const int32_t* id = b.id + row * b.capacity;
        const float* limit = b.limit + row * b.capacity;
        const auto following = [&](int32_t i) {
            while (i < b.count[row] && limit[i] < least) ++i;
            return i;
        };
        for (int32_t i = following(0), next; i < b.count[row]; i = next) {
            next = following(i + 1);
            const Column ahead = find_column(linear, id[next < b.count[row] ? next : i]);
            list.add(output(linear, rows, row, id[i], &ahead), id[i]);
        }
        *to.nan = list.nan;
    }
}

}  // namespace penjing
