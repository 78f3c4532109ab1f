// What becomes of sums: a linear layer's outputs, over one instruction set's lanes. Included after ops_math.h.
#pragma once

namespace {

// y = acc × row_scale × column_scale + bias, each product rounded, as the torch reference does.
inline V dequantize(const PjLinear& linear, const int32_t* acc, int64_t column, V row_scale) {
    const V sum = v_from_int(vi_sub(vi_load(acc), vi_load(linear.comp + column)));
    const V scaled = v_mul(v_mul(sum, row_scale), v_load(linear.scale + column));
    return v_add(scaled, v_load(linear.bias + column));
}

// Of a layer with zero points: one row's sums over a block of inputs, each (acc − zero × the column's sum) × scale,
// become the row's total or are added to it. `sums`: of the columns.
inline void add_above(const int32_t* acc, const int32_t* sums, int columns, float scale, int32_t zero, bool more, float* total) {
    const V by = v_set(scale);
    const VI level = vi_set(zero);
    for (int column = 0; column < columns; column += W) {
        const V term = v_mul(v_from_int(vi_sub(vi_load(acc + column), vi_mul(vi_load(sums + column), level))), by);
        v_store(total + column, more ? v_add(v_load(total + column), term) : term);
    }
}

// y = total × column_scale + bias, of such a layer.
inline V finish_above(const PjLinear& linear, const float* total, int64_t column) {
    return v_add(v_mul(v_load(total), v_load(linear.scale + column)), v_load(linear.bias + column));
}

inline void put(float* out, V value, int64_t valid, bool add) {
    if (valid >= W) {
        v_store(out, add ? v_add(v_load(out), value) : value);
    } else if (valid > 0) {
        const int n = static_cast<int>(valid);
        v_store_n(out, add ? v_add(v_load_n(out, n), value) : value, n);
    }
}

// One row of a panel's outputs, whose first is `first`; `value(column)` gives W of them from column `column` of the panel
// on. With SwiGLU 16 columns of gate stand before 16 of up. Whole panels, nearly all, ask for no end.
template <class Value>
inline void finish_row(const PjLinear& linear, int64_t first, int columns, float* out, bool add, Value value) {
    const int64_t n = linear.n;
    if (linear.swiglu) {
        const int32_t kind = linear.swiglu;
        for (int column = 0; column < columns; column += 32) {
            for (int lane = 0; lane < 16; lane += W) {
                const int64_t to = (first + column) / 2 + lane;
                const V gate = value(column + lane), up = value(column + lane + 16);
                const V made = kind == 1 ? v_silu_mul(gate, up) : kind == 2 ? v_gelu_mul(gate, up) : v_relu2_mul(gate, up);
                put(out + to, made, n - to, add);
            }
        }
        return;
    }
    out += first;
    if (n - first < columns) {
        for (int column = 0; column < columns; column += W) put(out + column, value(column), n - first - column, add);
    } else if (add) {
        for (int column = 0; column < columns; column += W) v_store(out + column, v_add(v_load(out + column), value(column)));
    } else {
        for (int column = 0; column < columns; column += W) v_store(out + column, value(column));
    }
}

// y = total × row_scale + bias, each rounded.
inline V finish(const PjLinear& linear, const float* total, int64_t column, V row_scale) {
    return v_add(v_mul(v_load(total), row_scale), v_load(linear.bias + column));
}

// Rows [begin, end) of a panel's outputs, whose sums stand from `acc` on. Layer and rows are copies: outputs that are written
// could be their originals, which would be read again behind each.
inline void finish_int8(PjLinear linear, int64_t first, int columns, penjing::Int8Rows rows, int begin, int end,
                        const int32_t* acc) {
    for (int row = begin; row < end; ++row, acc += penjing::PANEL) {
        const V row_scale = v_set(rows.row_scale[row]);
        finish_row(linear, first, columns, rows.out + row * rows.ldo, rows.add, [&](int column) {
            return dequantize(linear, acc + column, first + column, row_scale);
        });
    }
}

// The same of a layer with zero points, from the totals of its blocks.
inline void finish_blocks(PjLinear linear, int64_t first, int columns, penjing::Int8Rows rows, int begin, int end,
                          const float* total) {
    for (int row = begin; row < end; ++row, total += penjing::PANEL)
        finish_row(linear, first, columns, rows.out + row * rows.ldo, rows.add,
                   [&](int column) { return finish_above(linear, total + column, first + column); });
}

}  // namespace
