// INT8 weights that are stored in 4 bits: a weight of a group is offset + step × u, u from 0 to 15, step from 1 to 16 and
// offset such that all of them fit a byte. A panel holds its groups one behind the other: two bytes a column, step and
// offset, then pairs of k-groups as pack_int4.cpp has them. Behind the panels stands what pack_int8 puts there, so that
// products, once the bytes are expanded, are those of any INT8 layer.
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
    Int8Columns places;
};

struct PackedRow {
    const uint8_t* weight;  // null in the padding
    const uint8_t* steps;   // two bytes a group
    float scale;
    float bias;
};

PackedRow find_row(const Packing& p, int64_t row) {
    const int64_t k = p.linear.k, groups = k / p.linear.group;
    for (int i = 0; row >= 0 && i < p.num_parts; row -= p.parts[i++].rows) {
        const PjPart& part = p.parts[i];
        if (row >= part.rows) continue;
        return {static_cast<const uint8_t*>(part.weight) + row * (k / 2),
                static_cast<const uint8_t*>(part.offset) + row * groups * 2,
                static_cast<const float*>(part.scale)[row], part.bias ? part.bias[row] : 0.0f};
    }
    return {nullptr, nullptr, 0.0f, 0.0f};
}

void pack_panel(const Packing& p, int64_t panel) {
    const PjLinear& linear = p.linear;
    const int64_t groups = linear.k / linear.group, pairs = linear.group / 8;
    const int64_t blocks = row_scales(linear), most = linear.zero_points ? ABOVE_INPUTS / linear.group : groups;
    const int64_t first = panel * linear.width, left = padded_columns(linear) - first;
    const int64_t width = left < linear.width ? left : linear.width;
    char* to = p.panels + first * column_bytes(linear);
    memset(to, 0, static_cast<size_t>(width * column_bytes(linear)));  // step and offset of 0 in the padding
    for (int64_t c = 0; c < width; ++c) {
        const PackedRow row = find_row(p, source_row(first + c, linear.n, linear.swiglu != 0));
        char* at = to;
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t end = (block + 1) * most < groups ? (block + 1) * most : groups;
            int64_t sum = 0;  // of the column's weights
            for (int64_t g = block * most; row.weight && g < end; ++g) {
                memcpy(at + 2 * c, row.steps + 2 * g, 2);
                at += width * 2;
                int64_t numbers = 0;
                for (int64_t pair = 0; pair < pairs; ++pair, at += width * 4) {
                    uint32_t eight;
                    memcpy(&eight, row.weight + (g * pairs + pair) * 4, 4);
                    const uint32_t first_four = spread_halves(eight & 0xffffu), second_four = spread_halves(eight >> 16);
                    const uint32_t both = first_four | (second_four << 4);
                    memcpy(at + c * 4, &both, 4);
                    for (int i = 0; i < 32; i += 4) numbers += eight >> i & 15u;
                }
                sum += numbers * row.steps[2 * g] + linear.group * static_cast<int8_t>(row.steps[2 * g + 1]);
            }
            p.places.comp[first * blocks + block * width + c] = static_cast<int32_t>(linear.zero_points ? sum : 128 * sum);
        }
        p.places.scales[first + c] = row.scale;
        p.places.biases[first + c] = row.bias;
    }
}

void pack_member(const Team& team, void* context) {
    const Packing& packing = *static_cast<Packing*>(context);
    const int64_t panels = num_panels(packing.linear), end = share(panels, team.member + 1, team.members);
    for (int64_t panel = share(panels, team.member, team.members); panel < end; ++panel) pack_panel(packing, panel);
}

PjLinear describe(int64_t n, int64_t k, bool swiglu, int32_t group, bool zero_points) {
    PjLinear linear{};
    linear.n = n;
    linear.k = k;
    linear.dtype = PJ_INT8;
    linear.swiglu = swiglu;
    linear.group = group;
    linear.zero_points = zero_points;
    return linear;
}

}  // namespace

size_t packed_stepped_bytes(int64_t n, int64_t k, bool swiglu, int32_t group, bool zero_points) {
    const PjLinear linear = describe(n, k, swiglu, group, zero_points);
    const size_t columns = static_cast<size_t>(padded_columns(linear));
    return columns * (static_cast<size_t>(column_bytes(linear)) + 4 * static_cast<size_t>(row_scales(linear) + 2));
}

void pack_stepped(const PjPart* parts, int num_parts, int64_t n, int64_t k, bool swiglu, int32_t group, bool zero_points,
                  int threads, void* memory, PjLinear* linear) {
    *linear = describe(n, k, swiglu, group, zero_points);
    const int64_t columns = padded_columns(*linear);
    linear->width = best_width(columns, {64, 32}, swiglu, threads);  // 48 columns would end amid cache lines
    const Int8Columns places = place_int8(linear, memory, columns * column_bytes(*linear));
    Packing packing{*linear, parts, num_parts, static_cast<char*>(memory), places};
    run_team(pack_member, &packing, threads);
}

}  // namespace penjing
