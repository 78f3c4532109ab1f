// Functions of one variable over one instruction set's lanes.
#pragma once

namespace {

// 2^x to 1.5 units in the last place: x = n + f with |f| ≤ ½, a minimax polynomial of 2^f whose constant is 1, so that
// 2^0 is exactly 1. −inf gives 0, NaN gives NaN.
inline V v_exp2(V x) {
    V n;
    const V f = v_fraction(x, n);
    V p = v_set(1.3264708791e-3f);
    p = v_fma(p, f, v_set(9.6715114712e-3f));
    p = v_fma(p, f, v_set(5.5507337765e-2f));
    p = v_fma(p, f, v_set(2.4022242104e-1f));
    p = v_fma(p, f, v_set(6.9314697759e-1f));
    p = v_fma(p, f, v_set(1.0f));
    return v_scale2(p, n);
}

// silu(gate) × up
inline V v_silu_mul(V gate, V up) {
    const V exponential = v_exp2(v_mul(gate, v_set(-1.44269504f)));
    return v_mul(v_div(gate, v_add(v_set(1.0f), exponential)), up);
}

// gelu(gate) × up with gelu's tanh formula: ½ (1 + tanh(z)) is the logistic function of 2 z, z = √(2 / π) (x + 0.044715 x³).
inline V v_gelu_mul(V gate, V up) {
    const V cubic = v_mul(v_fma(v_mul(gate, gate), v_set(0.044715f), v_set(1.0f)), gate);
    const V exponential = v_exp2(v_mul(cubic, v_set(-2.30220820f)));  // −2 √(2 / π) log2(e)
    return v_mul(v_div(gate, v_add(v_set(1.0f), exponential)), up);
}

}  // namespace
