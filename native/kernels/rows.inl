// Kernels over one row: quantization, normalization, rotary embedding, element-wise ops, reductions over the vocabulary.

template <class Fn>
inline void for_lanes(std::int32_t n, Fn fn) {  // fn(offset, lanes)
  for (std::int32_t i = 0; i < n; i += 16) fn(i, min_of(16, n - i));
}
inline F load_lanes(const float* p, int lanes) { return lanes == 16 ? f_load(p) : f_load_n(p, lanes); }
inline void store_lanes(float* p, F a, int lanes) { lanes == 16 ? f_store(p, a) : f_store_n(p, a, lanes); }

// Per 32 values: d = amax / 127, q = round(x x 127 / amax), or 0 where 127 / amax is infinite. A group that holds a NaN
// or an infinity gets d = NaN, so that it shows.
void quantize(const float* x, std::int32_t k, std::uint8_t* out) {
  auto* q = reinterpret_cast<std::int8_t*>(out);
  auto* d = reinterpret_cast<float*>(out + k);
  auto* dsum = reinterpret_cast<float*>(out + k + k / 8);
  auto* isum = reinterpret_cast<std::int32_t*>(out + k + k / 4);
  for (std::int32_t g = 0; g < k / kGroup; ++g) {
    const F a = f_load(x + g * kGroup), b = f_load(x + g * kGroup + 16);
    const float amax = f_largest(f_max(f_abs(a), f_abs(b)));
    const bool good = amax <= kLargest && !f_any_nan(f_add(a, b));
    const float ratio = 127.0f / amax;
    const F inverse = f_set1(ratio <= kLargest ? ratio : 0.0f);
    const I qa = good ? i_round(f_mul(a, inverse)) : i_zero(), qb = good ? i_round(f_mul(b, inverse)) : i_zero();
    i_store_s8(q + g * kGroup, qa);
    i_store_s8(q + g * kGroup + 16, qb);
    d[g] = good ? amax / 127.0f : __builtin_nanf("");
    isum[2 * g] = i_sum(qa);
    isum[2 * g + 1] = i_sum(qb);
    dsum[g] = d[g] * static_cast<float>(isum[2 * g] + isum[2 * g + 1]);
  }
}

void rms_norm(const float* x, const float* weight, float eps, std::int32_t n, float* out) {
  F squares = f_zero();
  for_lanes(n, [&](std::int32_t i, int lanes) {
    const F a = load_lanes(x + i, lanes);
    squares = f_fma(a, a, squares);
  });
  const F inverse = f_set1(1.0f / f_sqrt1(f_sum(squares) / static_cast<float>(n) + eps));
  for_lanes(n, [&](std::int32_t i, int lanes) {
    store_lanes(out + i, f_mul(f_mul(load_lanes(x + i, lanes), inverse), load_lanes(weight + i, lanes)), lanes);
  });
}

void rope(const float* x, std::int32_t heads, std::int32_t head_size, const float* cos_sin, std::int32_t half,
          bool interleaved, float* out) {
  const float *cosine = cos_sin, *sine = cos_sin + half;
  for (std::int32_t h = 0; h < heads; ++h, x += head_size, out += head_size) {
    for (std::int32_t i = 0; i < half; ++i) {
      const std::int32_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
      const float a = x[first], b = x[second];
      out[first] = a * cosine[i] - b * sine[i];
      out[second] = b * cosine[i] + a * sine[i];
    }
    for (std::int32_t i = 2 * half; i < head_size; ++i) out[i] = x[i];
  }
}

void gated(const float* gate, const float* up, std::int32_t n, Act act, float* out) {
  for_lanes(n, [&](std::int32_t i, int lanes) {
    store_lanes(out + i, f_mul(activate(load_lanes(gate + i, lanes), act), load_lanes(up + i, lanes)), lanes);
  });
}

void add(const float* a, const float* b, std::int32_t n, float* out) {
  for_lanes(n, [&](std::int32_t i, int lanes) {
    store_lanes(out + i, f_add(load_lanes(a + i, lanes), load_lanes(b + i, lanes)), lanes);
  });
}

void scale(const float* x, float factor, std::int32_t n, float* out) {
  for_lanes(n, [&](std::int32_t i, int lanes) { store_lanes(out + i, f_mul(load_lanes(x + i, lanes), f_set1(factor)), lanes); });
}

bool argmax(const float* x, std::int32_t n, float* value, std::int32_t* index) {
  F largest = f_set1(-kInf);
  bool nan = false;
  for_lanes(n, [&](std::int32_t i, int lanes) {
    const F a = f_lanes(load_lanes(x + i, lanes), 0, lanes, f_set1(-kInf));
    nan |= f_any_nan(a);
    largest = f_max(largest, a);
  });
  *value = f_largest(largest);
  *index = 0;
  if (nan || *value == kInf || *value == -kInf) return false;
  const F wanted = f_set1(*value);
  for (std::int32_t i = 0;; i += 16) {
    const int lanes = min_of(16, n - i);
    if (const std::uint32_t mask = f_mask_eq(load_lanes(x + i, lanes), wanted) & ((1u << lanes) - 1)) {
      *index = i + __builtin_ctz(mask);
      return true;
    }
  }
}

double exp_sum(const float* x, std::int32_t n, float max, float factor, float* out) {
  constexpr std::int32_t kPartition = 1024;
  double sum = 0.0;
  for (std::int32_t begin = 0; begin < n; begin += kPartition) {
    F partial = f_zero();
    for_lanes(min_of(kPartition, n - begin), [&](std::int32_t i, int lanes) {
      const F a = f_lanes(f_mul(f_sub(load_lanes(x + begin + i, lanes), f_set1(max)), f_set1(factor)), 0, lanes, f_set1(-kInf));
      const F e = exp16(a);
      if (out) store_lanes(out + begin + i, e, lanes);
      partial = f_add(partial, e);
    });
    sum += static_cast<double>(f_sum(partial));
  }
  return sum;
}
