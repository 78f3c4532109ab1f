// Functions of one variable over one instruction set's lanes.
#pragma once

namespace {

// 2^x to about one unit in the last place: x = n + f with |f| ≤ ½, Taylor series of 2^f. exp2(0) is exactly 1.
inline V v_exp2(V x) {
    x = v_min(v_set(128.0f), v_max(v_set(-160.0f), x));
    const V n = v_round(x), f = v_sub(x, n);
    V p = v_set(1.52527338e-5f);
    p = v_fma(p, f, v_set(1.54035304e-4f));
    p = v_fma(p, f, v_set(1.33335581e-3f));
    p = v_fma(p, f, v_set(9.61812911e-3f));
    p = v_fma(p, f, v_set(5.55041087e-2f));
    p = v_fma(p, f, v_set(2.40226507e-1f));
    p = v_fma(p, f, v_set(6.93147181e-1f));
    p = v_fma(p, f, v_set(1.0f));
    return v_scale2(p, n);
}

// silu(gate) × up
inline V v_silu_mul(V gate, V up) {
    const V exponential = v_exp2(v_mul(gate, v_set(-1.44269504f)));
    return v_mul(v_div(gate, v_add(v_set(1.0f), exponential)), up);
}

}  // namespace
