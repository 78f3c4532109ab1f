// Tiles of AMX: their shapes, and exact sums of bytes over one panel. Included by ops_amx.cpp alone.
//
// A panel as linear.cpp packs it for VNNI is a tile already: 16 of its rows of k-groups, 64 bytes (16 columns) of each,
// are 64 inputs of 16 outputs. So AMX reads the same memory, with the panel's width as the stride.
#pragma once

namespace {

using penjing::PANEL;

// Fewer rows wait for memory, and tiles do not help.
constexpr int LEAST_ROWS = 9;
constexpr int TILE_ROWS = 16;    // of activations
constexpr int TILE_GROUPS = 16;  // k-groups of 4 inputs

// Shapes of the eight tiles: 0–3 sums, 4 and 5 activations, 6 and 7 weights.
struct alignas(64) TileShapes {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// The calling thread's tiles, until `_tile_release`: `rows` of activations and `groups` k-groups at a time.
inline void shape_tiles(int rows, int groups) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
        shapes.bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? 4 * groups : 64);
        shapes.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : groups);
    }
    _tile_loadconfig(&shapes);
}

// The same, where it takes a hundred nanoseconds too long for each call: kept until `end_attention`.
thread_local int kept_rows = 0;
inline void keep_shape(int rows, int groups) {
    if (kept_rows == rows) return;
    shape_tiles(rows, groups);
    kept_rows = rows;
}
void end_attention() {
    if (kept_rows) _tile_release();
    kept_rows = 0;
}

// Rows in tiles of equal height, so that one shape serves: the last tile may begin among the rows of the one before.
struct RowTiles {
    explicit RowTiles(int all) : rows(all), count((all + TILE_ROWS - 1) / TILE_ROWS), height((all + count - 1) / count) {}
    int first(int tile) const { return tile * height < rows - height ? tile * height : rows - height; }
    int rows, count, height;
};

// GCC's macros for tile loads do not say that they read memory: what was written for them must have happened.
inline void written() { asm volatile("" ::: "memory"); }

inline void fetch(const int8_t*& ahead, int lines) {
    for (int i = 0; i < lines; ++i, ahead += 64) _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
}

// Sums of one tile of rows and NR·16 columns over `steps` × 64 inputs, `more`: added to what is there, fetching `lines` cache lines from `ahead` on with
// each 16 columns. Registers of tiles are named in the source, hence no loops over them.
template <int NR>
inline void sum_1(const uint8_t* x, int64_t ldx, const int8_t* w, int64_t width, int64_t steps, const int8_t* ahead,
                  int lines, bool more, int32_t* acc) {
    const int64_t row = 4 * width, step = row * TILE_GROUPS, lda = 4 * PANEL;
    if (more) {
        _tile_loadd(0, acc, lda);
        if (NR > 1) _tile_loadd(1, acc + 16, lda);
        if (NR > 2) _tile_loadd(2, acc + 32, lda);
        if (NR > 3) _tile_loadd(3, acc + 48, lda);
    } else {
        _tile_zero(0);
        if (NR > 1) _tile_zero(1);
        if (NR > 2) _tile_zero(2);
        if (NR > 3) _tile_zero(3);
    }
    for (int64_t s = 0; s < steps; ++s, x += 4 * TILE_GROUPS, w += step) {
        _tile_loadd(4, x, ldx);
        fetch(ahead, lines);
        _tile_loadd(6, w, row);
        _tile_dpbusd(0, 4, 6);
        if (NR > 1) {
            fetch(ahead, lines);
            _tile_loadd(7, w + 64, row);
            _tile_dpbusd(1, 4, 7);
        }
        if (NR > 2) {
            fetch(ahead, lines);
            _tile_loadd(6, w + 128, row);
            _tile_dpbusd(2, 4, 6);
        }
        if (NR > 3) {
            fetch(ahead, lines);
            _tile_loadd(7, w + 192, row);
            _tile_dpbusd(3, 4, 7);
        }
    }
    _tile_stored(0, acc, lda);
    if (NR > 1) _tile_stored(1, acc + 16, lda);
    if (NR > 2) _tile_stored(2, acc + 32, lda);
    if (NR > 3) _tile_stored(3, acc + 48, lda);
}

// The same of two tiles of rows and NR·16 columns, NR being 1 or 2.
template <int NR>
inline void sum_2(const uint8_t* x, const uint8_t* second, int64_t ldx, const int8_t* w, int64_t width, int64_t steps,
                  const int8_t* ahead, int lines, bool more, int32_t* acc) {
    const int64_t row = 4 * width, step = row * TILE_GROUPS, lda = 4 * PANEL;
    int32_t* below = acc + TILE_ROWS * PANEL;
    if (more) {
        _tile_loadd(0, acc, lda);
        _tile_loadd(2, below, lda);
        if (NR > 1) _tile_loadd(1, acc + 16, lda);
        if (NR > 1) _tile_loadd(3, below + 16, lda);
    } else {
        _tile_zero(0);
        _tile_zero(2);
        if (NR > 1) _tile_zero(1);
        if (NR > 1) _tile_zero(3);
    }
    for (int64_t s = 0; s < steps; ++s, x += 4 * TILE_GROUPS, second += 4 * TILE_GROUPS, w += step) {
        fetch(ahead, lines);
        _tile_loadd(6, w, row);
        _tile_loadd(4, x, ldx);
        _tile_dpbusd(0, 4, 6);
        _tile_loadd(5, second, ldx);
        _tile_dpbusd(2, 5, 6);
        if (NR > 1) {
            _tile_loadd(7, w + 64, row);
            _tile_dpbusd(1, 4, 7);
            _tile_dpbusd(3, 5, 7);
        }
    }
    _tile_stored(0, acc, lda);
    _tile_stored(2, below, lda);
    if (NR > 1) _tile_stored(1, acc + 16, lda);
    if (NR > 1) _tile_stored(3, below + 16, lda);
}

// Adds the k-groups that fill no tile: `groups` of them for some rows and columns.
inline void sum_rest(int rows, int columns, const uint8_t* x, int64_t ldx, const int8_t* w, int64_t width,
                     int64_t groups, int32_t* acc) {
    for (int m = 0; m < rows; ++m, x += ldx, acc += PANEL) {
        for (int column = 0; column < columns; column += 16) {
            VI sum = vi_load(acc + column);
            for (int64_t g = 0; g < groups; ++g) {
                int32_t four;
                __builtin_memcpy(&four, x + 4 * g, 4);
                sum = _mm512_dpbusd_epi32(sum, vi_set(four), vi_load(w + 4 * (g * width + column)));
            }
            _mm512_storeu_si512(acc + column, sum);
        }
    }
}

}  // namespace
