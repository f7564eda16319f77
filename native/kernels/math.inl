// Elementary functions of 16 lanes.

// exp(x): 2^n x p(r), r = x - n ln 2 in two parts (Cody and Waite, 1980), p a degree-6 polynomial with p(0) = 1 exactly.
// exp(0) = 1, exp(x) = 0 below -87 (so exp(-inf) = 0), relative error below 2^-22. For x <= 88.
inline F exp16(F x) {
  const F low = f_set1(-87.0f);
  const F clamped = f_min(f_max(x, low), f_set1(88.0f));
  const I n = i_round(f_mul(clamped, f_set1(1.44269504088896341f)));
  const F whole = i_float(n);
  F r = f_fma(whole, f_set1(-0.693359375f), clamped);
  r = f_fma(whole, f_set1(2.12194440e-4f), r);
  F p = f_set1(1.9875691500e-4f);
  p = f_fma(p, r, f_set1(1.3981999507e-3f));
  p = f_fma(p, r, f_set1(8.3334519073e-3f));
  p = f_fma(p, r, f_set1(4.1665795894e-2f));
  p = f_fma(p, r, f_set1(1.6666665459e-1f));
  p = f_fma(p, r, f_set1(5.0000001201e-1f));
  p = f_add(f_fma(f_mul(r, r), p, r), f_set1(1.0f));
  return f_if_ge(x, low, f_scale_exponent(p, n), f_zero());
}

inline float exp1(float x) {
  float out[16];
  f_store(out, exp16(f_set1(x)));
  return out[0];
}

// x / (1 + exp(-x))
inline F silu16(F x) { return f_div(x, f_add(f_set1(1.0f), exp16(f_sub(f_zero(), x)))); }

// 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), written as x / (1 + exp(-2 u)).
inline F gelu_tanh16(F x) {
  const F cube = f_mul(f_mul(x, x), x);
  const F u = f_mul(f_set1(-1.5957691216057308f), f_fma(cube, f_set1(0.044715f), x));
  return f_div(x, f_add(f_set1(1.0f), exp16(u)));
}

inline F activate(F gate, Act act) { return act == Act::silu ? silu16(gate) : gelu_tanh16(gate); }
