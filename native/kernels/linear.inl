// One panel of 16 outputs against rows of activations. A weight group is unpacked once for all rows of a tile.

#include "layout.inl"

constexpr int kPrefetch = 4096;  // bytes ahead in the packed weights
// Scales of one group. `min` is already negated where the type subtracts it.
template <WeightType type>
struct GroupScales {
  F scale, scale_high, min;   // scale_high: inputs 16-31 of q6_k
  F d, dmin;

  const std::uint8_t* load(const std::uint8_t* p, std::int32_t group) {
    if constexpr (is_k_quant(type)) {
      if (group % 8 == 0) {
        d = f_from_f16(p);
        if constexpr (has_min(type)) dmin = f_sub(f_zero(), f_from_f16(p + 32));
        p += super_bytes(type);
      }
      if constexpr (has_min(type)) {
        scale = f_mul(d, i_float(i_from_u8(p)));
        min = f_mul(dmin, i_float(i_from_u8(p + 16)));
      } else {
        scale = f_mul(d, i_float(i_from_s8(p)));
        scale_high = f_mul(d, i_float(i_from_s8(p + 16)));
      }
    } else {
      scale = f_from_f16(p);
      if constexpr (has_min(type)) min = f_from_f16(p + 32);
    }
    return p + scale_bytes(type);
  }
};

// Codes of inputs 8q .. 8q + 7 of a group: two vectors of 16 outputs x 4 inputs.
template <WeightType type, int q>
inline void load_codes(const std::uint8_t* p, U8& first, U8& second) {
  if constexpr (code_bits(type) == 8) {
    first = u_load(p + 128 * q);
    second = u_load(p + 128 * q + 64);
    return;
  }
  const U8 nibbles = u_load(p + 64 * q);
  first = u_low(nibbles);
  second = u_high(nibbles);
  if constexpr (code_bits(type) == 5) {
    first = u_add_bit4(first, p + 256 + 16 * q);
    second = u_add_bit4(second, p + 256 + 16 * q + 8);
  } else if constexpr (code_bits(type) == 6) {
    const U8 high = u_load(p + 256 + 64 * (q / 2));
    first = u_add_bits45<4 * (q % 2)>(first, high);
    second = u_add_bits45<4 * (q % 2) + 2>(second, high);
  }
}

template <WeightType type>
inline I dot(I acc, const U8& codes, const std::int8_t* x) {
  if constexpr (code_bits(type) == 8) return dot4_w8(acc, codes, x);
  else return dot4(acc, codes, x);
}

template <WeightType type, int rows, int q>
inline void dot_quads(const std::uint8_t* codes, const std::int8_t* x, std::int64_t stride, I* sum) {
  U8 first, second;
  load_codes<type, q>(codes, first, second);
  for (int r = 0; r < rows; ++r) {
    sum[r] = dot<type>(sum[r], first, x + r * stride + 8 * q);
    sum[r] = dot<type>(sum[r], second, x + r * stride + 8 * q + 4);
  }
}

// The integer sums start at -offset x (sum of the activations), so that they are those of (code - offset).
template <WeightType type>
inline I start_sum(std::int32_t activation_sum) {
  if constexpr (code_offset(type) == 0 || (code_bits(type) == 8 && kSignedW8)) return i_zero();
  else return i_set1(-code_offset(type) * activation_sum);
}

template <WeightType type, int rows>
inline void quantized_tile(const std::uint8_t* panel, std::int32_t k, const std::uint8_t* x, std::int64_t stride, F* out) {
  GroupScales<type> scales{};
  F acc[rows];  // not `out` itself, which the compiler would have to keep in memory
  for (int r = 0; r < rows; ++r) acc[r] = f_zero();
  for (std::int32_t g = 0; g < k / kGroup; ++g) {
    // Few rows wait for memory: the hardware follows a panel of a few KiB too late.
    if constexpr (rows <= 4)
      for (int line = 0; line < scale_bytes(type) + code_bytes(type); line += 64) __builtin_prefetch(panel + kPrefetch + line);
    panel = scales.load(panel, g);
    const auto* q = reinterpret_cast<const std::int8_t*>(x) + g * kGroup;
    const std::uint8_t* d = x + k + 4 * g;
    const std::uint8_t* dsum = d + k / 8;
    const std::uint8_t* isum = x + k + k / 4 + 8 * g;
    auto f32 = [&](const std::uint8_t* base, int r) { return *reinterpret_cast<const float*>(base + r * stride); };
    auto sum_of = [&](int r, int half) { return reinterpret_cast<const std::int32_t*>(isum + r * stride)[half]; };
    I sum[rows];
    if constexpr (type == WeightType::q6_k) {  // a scale for every 16 inputs
      for (int r = 0; r < rows; ++r) sum[r] = start_sum<type>(sum_of(r, 0));
      dot_quads<type, rows, 0>(panel, q, stride, sum);
      dot_quads<type, rows, 1>(panel, q, stride, sum);
      for (int r = 0; r < rows; ++r) {
        acc[r] = f_fma(f_mul(i_float(sum[r]), scales.scale), f_set1(f32(d, r)), acc[r]);
        sum[r] = start_sum<type>(sum_of(r, 1));
      }
      dot_quads<type, rows, 2>(panel, q, stride, sum);
      dot_quads<type, rows, 3>(panel, q, stride, sum);
      for (int r = 0; r < rows; ++r) acc[r] = f_fma(f_mul(i_float(sum[r]), scales.scale_high), f_set1(f32(d, r)), acc[r]);
    } else {
      for (int r = 0; r < rows; ++r) {
        if constexpr (code_offset(type) != 0) sum[r] = start_sum<type>(sum_of(r, 0) + sum_of(r, 1));
        else sum[r] = i_zero();
      }
      dot_quads<type, rows, 0>(panel, q, stride, sum);
      dot_quads<type, rows, 1>(panel, q, stride, sum);
      dot_quads<type, rows, 2>(panel, q, stride, sum);
      dot_quads<type, rows, 3>(panel, q, stride, sum);
      for (int r = 0; r < rows; ++r) {
        acc[r] = f_fma(f_mul(i_float(sum[r]), scales.scale), f_set1(f32(d, r)), acc[r]);
        if constexpr (has_min(type)) acc[r] = f_fma(scales.min, f_set1(f32(dsum, r)), acc[r]);
      }
    }
    panel += code_bytes(type);
  }
  for (int r = 0; r < rows; ++r) out[r] = acc[r];
}

template <WeightType type>
inline F load_floats(const std::uint8_t* p) {
  if constexpr (type == WeightType::f16) return f_from_f16(p);
  else if constexpr (type == WeightType::bf16) return f_from_bf16(p);
  else return f_load(reinterpret_cast<const float*>(p));
}

// Four interleaved sums over k hide the latency of the multiply-add at one row; the order is the same at every row count.
template <WeightType type, int rows>
inline void float_tile(const std::uint8_t* panel, std::int32_t k, const float* x, std::int64_t stride, F* acc) {
  F sum[4][rows];
  for (int j = 0; j < 4; ++j)
    for (int r = 0; r < rows; ++r) sum[j][r] = f_zero();
  auto step = [&](std::int32_t i, int j) {
    const F w = load_floats<type>(panel + static_cast<std::int64_t>(i) * kPanel * float_bytes(type));
    for (int r = 0; r < rows; ++r) sum[j][r] = f_fma(w, f_set1(x[r * stride + i]), sum[j][r]);
  };
  std::int32_t i = 0;
  for (; i + 4 <= k; i += 4)
    for (int j = 0; j < 4; ++j) step(i + j, j);
  for (int j = 0; i + j < k; ++j) step(i + j, j);
  for (int r = 0; r < rows; ++r) acc[r] = f_add(f_add(sum[0][r], sum[1][r]), f_add(sum[2][r], sum[3][r]));
}

constexpr int row_tile(WeightType type) { return code_bits(type) != 0 ? kRowTile : max_of(1, kRowTile / 2); }

template <WeightType type, int rows>
void tile(const std::uint8_t* panel, const LinearTask& t, std::int64_t row, F* acc) {
  if constexpr (code_bits(type) != 0) quantized_tile<type, rows>(panel, t.k, t.q8 + row * t.q8_stride, t.q8_stride, acc);
  else float_tile<type, rows>(panel, t.k, t.x + row * t.x_stride, t.x_stride, acc);
}

// `rows` (at most row_tile) rows, by the instantiation for exactly that many.
template <WeightType type, int rows = row_tile(type)>
void tile_rows(const std::uint8_t* panel, const LinearTask& t, std::int64_t row, int count, F* acc) {
  if (count == rows) tile<type, rows>(panel, t, row, acc);
  else if constexpr (rows > 1) tile_rows<type, rows - 1>(panel, t, row, count, acc);
}

void run_tile(WeightType type, const std::uint8_t* panel, const LinearTask& t, std::int64_t row, int count, F* acc) {
  switch (type) {
    case WeightType::f32: return tile_rows<WeightType::f32>(panel, t, row, count, acc);
    case WeightType::f16: return tile_rows<WeightType::f16>(panel, t, row, count, acc);
    case WeightType::bf16: return tile_rows<WeightType::bf16>(panel, t, row, count, acc);
    case WeightType::q4_0: return tile_rows<WeightType::q4_0>(panel, t, row, count, acc);
    case WeightType::q4_1: return tile_rows<WeightType::q4_1>(panel, t, row, count, acc);
    case WeightType::q5_0: return tile_rows<WeightType::q5_0>(panel, t, row, count, acc);
    case WeightType::q5_1: return tile_rows<WeightType::q5_1>(panel, t, row, count, acc);
    case WeightType::q8_0: return tile_rows<WeightType::q8_0>(panel, t, row, count, acc);
    case WeightType::q4_k: return tile_rows<WeightType::q4_k>(panel, t, row, count, acc);
    case WeightType::q5_k: return tile_rows<WeightType::q5_k>(panel, t, row, count, acc);
    case WeightType::q6_k: return tile_rows<WeightType::q6_k>(panel, t, row, count, acc);
  }
}

// Bias, activation of a gated pair, residual: what follows the product of one row.
inline void finish_row(const LinearTask& t, std::int64_t row, F y, F up) {
  if (t.bias) y = f_add(y, load_lanes(t.bias, t.columns));
  if (t.up_panel) y = f_mul(activate(y, t.act), t.up_bias ? f_add(up, load_lanes(t.up_bias, t.columns)) : up);
  const std::int64_t at = row * t.y_stride;
  if (t.residual) y = f_add(load_lanes(t.residual + at, t.columns), y);
  store_lanes(t.y + at, y, t.columns);
}

void linear_on_vectors(const LinearTask& t) {
  int step = row_tile(t.type);
  if (t.up_panel) step = min_of(step, row_tile(t.up_type));
  for (std::int64_t row = t.row_begin; row < t.row_end; row += step) {
    const int count = static_cast<int>(min_of<std::int64_t>(step, t.row_end - row));
    F acc[kRowTile], up[kRowTile] = {};
    run_tile(t.type, t.panel, t, row, count, acc);
    if (t.up_panel) run_tile(t.up_type, t.up_panel, t, row, count, up);
    for (int r = 0; r < count; ++r) finish_row(t, row + r, acc[r], up[r]);
  }
}

#ifdef YEOUL_AMX
#include "amx.inl"
void linear(const LinearTask& t) { uses_tiles(t) ? linear_on_tiles(t) : linear_on_vectors(t); }
#else
void linear(const LinearTask& t) { linear_on_vectors(t); }
#endif
