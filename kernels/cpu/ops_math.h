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

// The square of what is positive of the gate, × up; NaN stays.
inline V v_relu2_mul(V gate, V up) {
    const V positive = v_max(v_zero(), gate);
    return v_mul(v_mul(positive, positive), up);
}

// gelu(x) = x Φ(x): Φ(−|x|) is half of erfc(|x| / √2), to 1.5e-7 (Abramowitz and Stegun, 7.1.26).
inline V v_gelu(V x) {
    const V size = v_min(v_max(x, v_sub(v_zero(), x)), v_set(3.40282347e38f));  // infinity × 0 would be no number
    const V t = v_div(v_set(1.0f), v_fma(size, v_set(0.231641888f), v_set(1.0f)));  // 0.3275911 / √2
    V p = v_set(1.061405429f);
    p = v_fma(p, t, v_set(-1.453152027f));
    p = v_fma(p, t, v_set(1.421413741f));
    p = v_fma(p, t, v_set(-0.284496736f));
    p = v_fma(p, t, v_set(0.254829592f));
    const V tail = v_mul(v_mul(p, t), v_exp2(v_mul(v_mul(x, x), v_set(-0.72134752f))));
    return v_sub(v_max(v_zero(), x), v_mul(v_mul(size, v_set(0.5f)), tail));
}

// p x² + x / 2 of what is positive, n (eˣ − 1 − x) + x / 2 of the rest, to 1e-7 of n.
inline V v_xielu(V x, float p, float n) {
    const V positive = v_max(v_zero(), x), negative = v_min(v_zero(), x);
    const V curved = v_sub(v_sub(v_exp2(v_mul(negative, v_set(1.44269504f))), v_set(1.0f)), negative);
    const V halved = v_fma(curved, v_set(n), v_mul(x, v_set(0.5f)));
    return v_fma(v_mul(positive, positive), v_set(p), halved);
}

// The logistic function.
inline V v_sigmoid(V x) { return v_div(v_set(1.0f), v_add(v_set(1.0f), v_exp2(v_mul(x, v_set(-1.44269504f))))); }

// log(1 + eˣ) = max(x, 0) + log(1 + t) with t = e^−|x|, and log(1 + t) = 2 artanh(t / (2 + t)), whose series ends below
// 1e-8 of it.
inline V v_softplus(V x) {
    const V size = v_max(x, v_sub(v_zero(), x));
    const V t = v_exp2(v_mul(size, v_set(-1.44269504f)));
    const V s = v_div(t, v_add(v_set(2.0f), t)), square = v_mul(s, s);
    V p = v_set(2.0f / 15.0f);
    p = v_fma(p, square, v_set(2.0f / 13.0f));
    p = v_fma(p, square, v_set(2.0f / 11.0f));
    p = v_fma(p, square, v_set(2.0f / 9.0f));
    p = v_fma(p, square, v_set(2.0f / 7.0f));
    p = v_fma(p, square, v_set(2.0f / 5.0f));
    p = v_fma(p, square, v_set(2.0f / 3.0f));
    p = v_fma(p, square, v_set(2.0f));
    return v_fma(p, s, v_max(v_zero(), x));
}

// cap × tanh(x / cap); tanh(z) = 1 − 2 / (1 + exp(2 z)).
inline V v_soft_cap(V x, float cap) {
    const V exponential = v_exp2(v_mul(x, v_set(2.88539008f / cap)));
    const V gap = v_div(v_set(2.0f * cap), v_add(v_set(1.0f), exponential));
    return v_sub(v_set(cap), gap);
}

}  // namespace
