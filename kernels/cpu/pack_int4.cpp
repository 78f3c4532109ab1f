// INT4 weights in panels. A panel holds its groups one behind the other: the group's scales, one a column, its offsets
// where the layer has any, then its pairs of k-groups. A pair is 8 values of each column in 4 bytes: low halves are the first k-group of 4, high halves the
// second, so that a mask and a shift give what one VNNI instruction multiplies.
#include <cstring>

#include "linear.h"
#include "panels.h"

namespace penjing {
namespace {

struct Packing {
    const PjLinear& linear;
    const PjPart* parts;
    int num_parts;
    char* panels;
    float* biases;
};

struct PackedRow {
    const uint8_t* weight;  // null in the padding
    const char* scale;
    const char* offset;  // null where the layer has none
    float bias;
};

PackedRow find_row(const Packing& p, int64_t row) {
    const int64_t k = p.linear.k, scales = k / p.linear.group * scale_bytes(p.linear);
    for (int i = 0; row >= 0 && i < p.num_parts; row -= p.parts[i++].rows) {
        const PjPart& part = p.parts[i];
        if (row >= part.rows) continue;
        return {static_cast<const uint8_t*>(part.weight) + row * (k / 2),
                static_cast<const char*>(part.scale) + row * scales,
                part.offset ? static_cast<const char*>(part.offset) + row * scales : nullptr, part.bias ? part.bias[row] : 0.0f};
    }
    return {nullptr, nullptr, nullptr, 0.0f};
}

void pack_panel(const Packing& p, int64_t panel) {
    const PjLinear& linear = p.linear;
    const int64_t scale = scale_bytes(linear), groups = linear.k / linear.group, pairs = linear.group / 8;
    const int64_t first = panel * linear.width, left = padded_columns(linear) - first;
    const int64_t width = left < linear.width ? left : linear.width;
    char* to = p.panels + first * column_bytes(linear);
    memset(to, 0, static_cast<size_t>(width * column_bytes(linear)));  // a scale of 0 in the padding
    for (int64_t c = 0; c < width; ++c) {
        const PackedRow row = find_row(p, source_row(first + c, linear.n, linear.swiglu != 0));
        p.biases[first + c] = row.bias;
        char* at = to;
        for (int64_t g = 0; row.weight && g < groups; ++g) {
            memcpy(at + c * scale, row.scale + g * scale, static_cast<size_t>(scale));
            if (row.offset) memcpy(at + (width + c) * scale, row.offset + g * scale, static_cast<size_t>(scale));
            at += width * group_bytes(linear);
            for (int64_t pair = 0; pair < pairs; ++pair, at += width * 4) {
                uint32_t eight;
                memcpy(&eight, row.weight + (g * pairs + pair) * 4, 4);
                const uint32_t both = spread_halves(eight & 0xffffu) | (spread_halves(eight >> 16) << 4);
                memcpy(at + c * 4, &both, 4);
            }
        }
    }
}

void pack_member(const Team& team, void* context) {
    const Packing& packing = *static_cast<Packing*>(context);
    const int64_t panels = num_panels(packing.linear), end = share(panels, team.member + 1, team.members);
    for (int64_t panel = share(panels, team.member, team.members); panel < end; ++panel) pack_panel(packing, panel);
}

PjLinear describe(int64_t n, int64_t k, bool swiglu, int32_t group, int32_t scale_dtype, bool offsets) {
    PjLinear linear{};
    linear.n = n;
    linear.k = k;
    linear.dtype = PJ_INT4;
    linear.swiglu = swiglu;
    linear.group = group;
    linear.scale_dtype = scale_dtype;
    linear.offsets = offsets;
    return linear;
}

}  // namespace

size_t packed_int4_bytes(int64_t n, int64_t k, bool swiglu, int32_t group, int32_t scale_dtype, bool offsets) {
    const PjLinear linear = describe(n, k, swiglu, group, scale_dtype, offsets);
    const size_t columns = static_cast<size_t>(padded_columns(linear));
    return columns * static_cast<size_t>(column_bytes(linear)) + columns * 4;
}

void pack_int4(const PjPart* parts, int num_parts, int64_t n, int64_t k, bool swiglu, int32_t group,
               int32_t scale_dtype, int threads, void* memory, PjLinear* linear) {
    *linear = describe(n, k, swiglu, group, scale_dtype, parts[0].offset != nullptr);
    const int64_t columns = padded_columns(*linear);
    // Scales of 48 columns in 16 bits would put every second group across cache lines.
    linear->width = best_width(columns, {64, 32}, swiglu, threads);
    char* panels = static_cast<char*>(memory);
    float* biases = reinterpret_cast<float*>(panels + columns * column_bytes(*linear));
    Packing packing{*linear, parts, num_parts, panels, biases};
    run_team(pack_member, &packing, threads);
    linear->weight = panels;
    linear->bias = biases;
}

}  // namespace penjing
