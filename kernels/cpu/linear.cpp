#include "linear.h"

#include <atomic>
#include <cstring>

#include "memory.h"
#include "panels.h"

namespace penjing {
namespace {

struct LinearCall {
    const PjLinear& linear;
    const Ops& ops;
    const float* x;
    int64_t rows;
    float* out;
    Rows buffer;
    bool by_rows;
    int64_t chunk;
    std::atomic<int64_t> next{0};
};

void linear_member(const Team& team, void* context) {
    LinearCall& call = *static_cast<LinearCall*>(context);
    const PjLinear& linear = call.linear;
    Rows rows = call.buffer;
    if (!call.by_rows) {
        if (in_panels(linear)) {
            const int64_t end = share(call.rows, team.member + 1, team.members);
            for (int64_t row = share(call.rows, team.member, team.members); row < end; ++row)
                quantize_row_for(call.ops, linear, call.x + row * linear.k, rows, row);
            team.sync();
        }
        apply_linear(call.ops, linear, rows, call.rows, team.member, team.members, call.out, linear.n, false);
        return;
    }
    for (;;) {
        const int64_t begin = call.next.fetch_add(call.chunk), left = call.rows - begin;
        if (left <= 0) return;
        const int64_t count = left < call.chunk ? left : call.chunk;
        for (int64_t row = begin; row < begin + count; ++row)
            quantize_row_for(call.ops, linear, call.x + row * linear.k, rows, row);
        const Rows part = rows_from(rows, linear, begin);
        apply_linear(call.ops, linear, part, count, 0, 1, call.out + begin * linear.n, linear.n, false);
    }
}

struct Packing {
    const PjLinear& linear;
    const PjPart* parts;
    int num_parts;
    int8_t* panels;
    Int8Columns places;
};

struct PackedRow {
    const int8_t* weight;  // null in the padding
    float scale;
    float bias;
};

PackedRow find_row(const Packing& p, int64_t row) {
    for (int i = 0; row >= 0 && i < p.num_parts; row -= p.parts[i++].rows) {
        const PjPart& part = p.parts[i];
        if (row >= part.rows) continue;
        return {static_cast<const int8_t*>(part.weight) + row * p.linear.k, static_cast<const float*>(part.scale)[row],
                part.bias ? part.bias[row] : 0.0f};
    }
    return {nullptr, 0.0f, 0.0f};
}

void pack_panel(const Packing& p, int64_t panel) {
    const int64_t k = p.linear.k, groups = padded_k(k) / 4, whole = k / 4, first = panel * p.linear.width;
    const int64_t left = padded_columns(p.linear) - first, width = left < p.linear.width ? left : p.linear.width;
    int8_t* to = p.panels + first * groups * 4;
    memset(to, 0, static_cast<size_t>(width * groups * 4));
    const int8_t* from[PANEL];
    for (int64_t c = 0; c < width; ++c) {
        const PackedRow row = find_row(p, source_row(first + c, p.linear.n, p.linear.swiglu != 0));
        from[c] = row.weight;
        const int64_t blocks = row_scales(p.linear), inputs = blocks > 1 ? ABOVE_INPUTS : k;
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t end = (block + 1) * inputs < k ? (block + 1) * inputs : k;
            uint32_t sum = 0;
            for (int64_t i = block * inputs; from[c] && i < end; ++i) sum += static_cast<uint32_t>(int32_t{from[c][i]});
            p.places.comp[first * blocks + block * width + c] = static_cast<int32_t>(p.linear.zero_points ? sum : 128u * sum);
        }
        p.places.scales[first + c] = row.scale;
        p.places.biases[first + c] = row.bias;
    }
    // A cache line of each row at a time: 16 groups of 64 columns are 4 KiB of the panel.
    for (int64_t block = 0; block < whole; block += 16) {
        const int64_t end = block + 16 < whole ? block + 16 : whole;
        for (int64_t c = 0; c < width; ++c)
            for (int64_t g = block; from[c] && g < end; ++g) memcpy(to + (g * width + c) * 4, from[c] + 4 * g, 4);
    }
    for (int64_t c = 0; c < width; ++c)
        for (int64_t i = 4 * whole; from[c] && i < k; ++i) to[(whole * width + c) * 4 + i % 4] = from[c][i];
}

void pack_member(const Team& team, void* context) {
    const Packing& packing = *static_cast<Packing*>(context);
    const int64_t panels = num_panels(packing.linear);
    for (int64_t panel = share(panels, team.member, team.members); panel < share(panels, team.member + 1, team.members);
         ++panel)
        pack_panel(packing, panel);
}

PjLinear describe(int64_t n, int64_t k, bool swiglu, bool zero_points) {
    PjLinear linear{};
    linear.n = n;
    linear.k = k;
    linear.dtype = PJ_INT8;
    linear.swiglu = swiglu;
    linear.zero_points = zero_points;
    return linear;
}

}  // namespace

size_t packed_bytes(int64_t n, int64_t k, bool swiglu, bool zero_points) {
    const PjLinear linear = describe(n, k, swiglu, zero_points);
    const size_t columns = static_cast<size_t>(padded_columns(linear));
    return columns * (static_cast<size_t>(padded_k(k)) + 4 * static_cast<size_t>(row_scales(linear) + 2));
}

void pack_int8(const PjPart* parts, int num_parts, int64_t n, int64_t k, bool swiglu, bool zero_points, int threads,
               void* memory, PjLinear* linear) {
    *linear = describe(n, k, swiglu, zero_points);
    const int64_t columns = padded_columns(*linear), groups = padded_k(k) / 4;
    linear->width = best_width(columns, {64, 48, 32}, swiglu, threads);
    const Int8Columns places = place_int8(linear, memory, columns * groups * 4);
    Packing packing{*linear, parts, num_parts, static_cast<int8_t*>(memory), places};
    run_team(pack_member, &packing, threads);
}

constexpr size_t MORE_ROWS = 15;  // behind the last, see Int4Rows

Rows carve_rows(Carver& carver, int64_t rows, int64_t k) {
    const size_t r = static_cast<size_t>(rows);
    Rows found{};
    found.q = carver.take<uint8_t>(r * static_cast<size_t>(padded_k(k)));
    found.row_scale = carver.take<float>(r * static_cast<size_t>(above_blocks(k)));
    found.zero = carver.take<int32_t>(r * static_cast<size_t>(above_blocks(k)));
    found.q4 = carver.take<int8_t>(r * static_cast<size_t>(k));
    found.half = carver.take<uint16_t>(r * static_cast<size_t>(k));
    found.start = carver.take<int32_t>(r * static_cast<size_t>(k / LEAST_GROUP + 1));
    found.group_sum = carver.take<float>((r + MORE_ROWS) * static_cast<size_t>(k / LEAST_GROUP + 1));
    found.group_scale = carver.take<float>((r + MORE_ROWS) * static_cast<size_t>(k / LEAST_GROUP + 1));
    return found;
}

Rows rows_from(const Rows& rows, const PjLinear& linear, int64_t row) {
    const int64_t k = linear.k, groups = linear.dtype == PJ_INT4 ? k / linear.group : 0, scales = row * row_scales(linear);
    return {rows.x + row * k, rows.q + row * padded_k(k), rows.row_scale + scales, rows.zero + scales,
            rows.q4 + row * k, rows.half + row * k, rows.start + row * groups, rows.group_sum + row * groups, rows.group_scale + row * groups};
}

void quantize_row_for(const Ops& ops, const PjLinear& linear, const float* x, const Rows& rows, int64_t row) {
    if (!in_panels(linear)) return;
    const Rows at = rows_from(rows, linear, row);
    if (linear.half_inputs) return halve_row(x, linear.k, linear.group, at.half, linear.offsets ? at.group_sum : nullptr);
    if (linear.dtype == PJ_INT8 && linear.zero_points) quantize_above(ops, x, linear.k, at.q, at.row_scale, at.zero);
    else if (linear.dtype == PJ_INT8) quantize_for_panels(ops, x, linear.k, at.q, at.row_scale);
    else if (linear.offsets) quantize_each_group(ops, x, linear.k, linear.group, at.q4, at.group_sum, at.group_scale);
    else quantize_for_groups(ops, x, linear.k, linear.group, at.q4, at.start, at.row_scale);
}

void apply_linear(const Ops& ops, const PjLinear& linear, const Rows& rows, int64_t count, int member, int members,
                  float* out, int64_t ldo, bool add) {
    if (linear.dtype == PJ_INT8) {
        const int64_t panels = num_panels(linear);
        const int32_t* zero = linear.zero_points ? rows.zero : nullptr;
        const Int8Rows task{rows.q, rows.row_scale, zero, out, padded_k(linear.k), ldo, static_cast<int>(count), add};
        ops.int8_panels(linear, share(panels, member, members), share(panels, member + 1, members), task);
        return;
    }
    if (linear.dtype == PJ_INT4) {
        const int64_t panels = num_panels(linear);
        const Int4Rows task{rows.q4, rows.half, rows.start, rows.row_scale, rows.group_sum, rows.group_scale, out, linear.k, linear.k / linear.group, ldo,
                            static_cast<int>(count), add};
        const auto product = linear.half_inputs ? ops.half_int4_panels : ops.int4_panels;
        product(linear, share(panels, member, members), share(panels, member + 1, members), task);
        return;
    }
    // Shares of whole cache lines of output.
    const int64_t lines = (linear.n + 15) / 16;
    const int64_t n0 = share(lines, member, members) * 16, n1 = share(lines, member + 1, members) * 16;
    const int64_t end = n1 < linear.n ? n1 : linear.n;
    if (n0 < end) ops.float_linear(linear, rows.x, linear.k, count, n0, end, out, ldo, add);
}

PjLinear part_of_linear(const PjLinear& linear, int64_t begin, int64_t end) {
    PjLinear part = linear;
    const int64_t bytes = in_panels(linear) ? column_bytes(linear) : linear.k * (linear.dtype == PJ_F32 ? 4 : 2);
    part.weight = static_cast<const char*>(linear.weight) + begin * bytes;
    part.n = end - begin;
    if (linear.scale) part.scale += begin;
    if (linear.comp) part.comp += begin * row_scales(linear);
    if (linear.bias) part.bias += begin;
    return part;
}

void dequantize_row(const PjLinear& linear, int64_t row, float* out) {
    const int64_t first = row / linear.width * linear.width, left = padded_columns(linear) - first;
    const int64_t width = left < linear.width ? left : linear.width, groups = padded_k(linear.k) / 4;
    const int8_t* from = static_cast<const int8_t*>(linear.weight) + (first * groups + row - first) * 4;
    for (int64_t i = 0; i < linear.k; ++i)
        out[i] = static_cast<float>(from[i / 4 * width * 4 + i % 4]) * linear.scale[row];
}

Soon first_panels(const PjLinear& linear, int member, int members) {
    if (!in_panels(linear)) return {};
    const int64_t panels = num_panels(linear), bytes = linear.width * column_bytes(linear);
    const int64_t begin = share(panels, member, members), end = share(panels, member + 1, members);
    const int64_t most = int64_t{128} << 10, mine = (end - begin) * bytes;  // the cache holds activations too
    return {static_cast<const char*>(linear.weight) + begin * bytes, mine < most ? mine : most};
}

int64_t most_chunk_rows(int64_t k) {
    const int64_t fitting = (int64_t{512} << 10) / k;
    return fitting < 24 ? 24 : fitting > 96 ? 96 : fitting;
}

int64_t row_chunk(int64_t rows, int64_t k, int members) {
    const int64_t most = most_chunk_rows(k), rounds = (rows + most * members - 1) / (most * members);
    return (rows + rounds * members - 1) / (rounds * members);
}

bool run_linear(const PjLinear& linear, const float* x, int64_t rows, float* out) {
    if (rows == 0) return true;
    const int threads = num_threads();
    static thread_local Scratch scratch;
    Carver sizes(nullptr);
    const int64_t quantized = in_panels(linear) ? rows : 0;
    carve_rows(sizes, quantized, linear.k);
    void* memory = scratch.reserve(sizes.used() + 64);
    if (memory == nullptr) return false;
    Carver carver(memory);
    Rows buffer = carve_rows(carver, quantized, linear.k);
    buffer.x = const_cast<float*>(x);

    LinearCall call{linear, ops(), x, rows, out, buffer, rows >= 48 * threads, row_chunk(rows, linear.k, threads)};
    run_team(linear_member, &call, threads);
    return true;
}

}  // namespace penjing
