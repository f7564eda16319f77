// The product of a panel with many rows on int8 tiles (AMX). The integer sums are exact and the float operations are
// those of linear.inl in the same order, so the bits are the same as with vectors: the number of rows may choose.
//
// Per group of 32 inputs, C [16 rows x 16 outputs] = A [16 rows x 32 int8 activations] x B [32 inputs x 16 outputs]; the
// packed codes, unpacked and made signed, already lie as the tile wants B: 4 inputs of 16 outputs side by side.

constexpr int kTileRows = 16;
constexpr int kAmxFrom = 24;     // fewer rows are quicker on vectors
constexpr int kChunk = 32;       // groups whose codes are unpacked at one time: 16 KiB, half of the L1 cache
constexpr int kAmxBlock = 256;   // rows that share the unpacked codes

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t column_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Tiles 0, 1: C; 2, 3: A; 4, 5: B. Two of each, so that one group's sums are read while the next ones are computed.
void configure_tiles(int rows, int inputs) {
  TileConfig config;
  for (int i = 0; i < 2; ++i) {
    config.rows[i] = static_cast<std::uint8_t>(rows);
    config.column_bytes[i] = 64;
    config.rows[2 + i] = static_cast<std::uint8_t>(rows);
    config.column_bytes[2 + i] = static_cast<std::uint16_t>(inputs);
    config.rows[4 + i] = static_cast<std::uint8_t>(inputs / 4);
    config.column_bytes[4 + i] = 64;
  }
  _tile_loadconfig(&config);
}

// Up to kChunk groups of a panel, unpacked.
struct Unpacked {
  alignas(64) std::int8_t codes[kChunk][8][64];
  alignas(64) float scale[kChunk][2][16];  // second: inputs 16-31 of q6_k
  alignas(64) float min[kChunk][16];
};

template <WeightType type, int q>
inline void unpack_quads(const std::uint8_t* codes, std::int8_t (*out)[64]) {
  U8 first, second;
  load_codes<type, q>(codes, first, second);
  const __m512i offset = _mm512_set1_epi8(static_cast<char>(code_offset(type)));
  _mm512_store_si512(out[2 * q], _mm512_sub_epi8(first.v, offset));
  _mm512_store_si512(out[2 * q + 1], _mm512_sub_epi8(second.v, offset));
}

template <WeightType type>
const std::uint8_t* unpack_groups(const std::uint8_t* panel, GroupScales<type>& scales, std::int32_t first, int count, Unpacked& out) {
  for (int g = 0; g < count; ++g) {
    panel = scales.load(panel, first + g);
    f_store(out.scale[g][0], scales.scale);
    if constexpr (type == WeightType::q6_k) f_store(out.scale[g][1], scales.scale_high);
    if constexpr (has_min(type)) f_store(out.min[g], scales.min);
    unpack_quads<type, 0>(panel, out.codes[g]);
    unpack_quads<type, 1>(panel, out.codes[g]);
    unpack_quads<type, 2>(panel, out.codes[g]);
    unpack_quads<type, 3>(panel, out.codes[g]);
    panel += code_bytes(type);
  }
  return panel;
}

// The intrinsics take literal tile numbers only, so the two sets are written out.
inline void multiply(bool odd, const std::int8_t* a, std::int64_t stride, const std::int8_t* b, std::int32_t* c) {
  if (odd) {
    _tile_zero(1);
    _tile_loadd(3, a, stride);
    _tile_loadd(5, b, 64);
    _tile_dpbssd(1, 3, 5);
    _tile_stored(1, c, 64);
  } else {
    _tile_zero(0);
    _tile_loadd(2, a, stride);
    _tile_loadd(4, b, 64);
    _tile_dpbssd(0, 2, 4);
    _tile_stored(0, c, 64);
  }
}

// The scales of up to 16 rows and kChunk groups side by side, so that a group's are at fixed distances.
struct RowScales {
  alignas(64) float d[kTileRows][kChunk], dsum[kTileRows][kChunk];

  void load(const std::uint8_t* x, std::int32_t k, std::int32_t first, int groups, std::int64_t stride, int rows, bool with_sums) {
    for (int r = 0; r < rows; ++r) {
      const auto* from = reinterpret_cast<const float*>(x + r * stride + k) + first;
      for (int g = 0; g < groups; g += 16) {
        const int lanes = min_of(16, groups - g);
        store_lanes(d[r] + g, load_lanes(from + g, lanes), lanes);
        if (with_sums) store_lanes(dsum[r] + g, load_lanes(from + k / 32 + g, lanes), lanes);
      }
    }
  }
};

// acc[r] += scale x d_r x sums_r (+ min x dsum_r), as quantized_tile does. Unrolled, so that `acc` lies in registers.
template <bool with_min, int rows>
inline void accumulate(F (&acc)[kTileRows], const std::int32_t* c, const float* scale, const float* min, const RowScales& x, int g) {
  const F s = f_load(scale);
  F m{};
  if constexpr (with_min) m = f_load(min);
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    const F sums{_mm512_cvtepi32_ps(_mm512_load_si512(c + 16 * r))};
    acc[r] = f_fma(f_mul(sums, s), f_set1(x.d[r][g]), acc[r]);
    if constexpr (with_min) acc[r] = f_fma(m, f_set1(x.dsum[r][g]), acc[r]);
  }
}

// All groups of a chunk for one tile of rows.
template <WeightType type, int rows>
void tile_chunk(const Unpacked& w, int groups, const RowScales& scales, const std::int8_t* q, std::int64_t stride, float (*out)[16]) {
  constexpr int halves = type == WeightType::q6_k ? 2 : 1, inputs = kGroup / halves;
  alignas(64) std::int32_t c[2][kTileRows * 16];
  F acc[kTileRows];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) acc[r] = f_load(out[r]);
  const std::int8_t* codes = w.codes[0][0];
  const int products = groups * halves;
  multiply(false, q, stride, codes, c[0]);
  for (int n = 0; n < products; ++n) {
    if (n + 1 < products) multiply(n % 2 == 0, q + (n + 1) * inputs, stride, codes + (n + 1) * inputs * 16, c[(n + 1) % 2]);
    const int g = n / halves;
    accumulate<has_min(type), rows>(acc, c[n % 2], w.scale[g][n % halves], w.min[g], scales, g);
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) f_store(out[r], acc[r]);
}

// acc[count][16] = the panel x rows [row, row + count).
template <WeightType type>
void tile_rows_of(const std::uint8_t* panel, const LinearTask& t, std::int64_t row, int count, float (*acc)[16]) {
  constexpr int inputs = type == WeightType::q6_k ? 16 : 32;
  Unpacked w;
  RowScales row_scales;
  GroupScales<type> scales{};
  for (int r = 0; r < count; ++r) f_store(acc[r], f_zero());
  int configured = 0;
  for (std::int32_t first = 0; first < t.k / kGroup; first += kChunk) {
    const int groups = min_of(kChunk, t.k / kGroup - first);
    panel = unpack_groups<type>(panel, scales, first, groups, w);
    for (int r = 0; r < count; r += kTileRows) {
      const int rows = min_of(kTileRows, count - r);
      if (rows != configured) configure_tiles(configured = rows, inputs);
      const std::uint8_t* x = t.q8 + (row + r) * t.q8_stride;
      row_scales.load(x, t.k, first, groups, t.q8_stride, rows, has_min(type));
      const auto* q = reinterpret_cast<const std::int8_t*>(x) + first * kGroup;
      // Rows that are not there cost little: their sums are stale numbers that nobody reads.
      if (rows > 8) tile_chunk<type, kTileRows>(w, groups, row_scales, q, t.q8_stride, acc + r);
      else tile_chunk<type, 8>(w, groups, row_scales, q, t.q8_stride, acc + r);
    }
  }
  _tile_release();
}

void run_on_tiles(WeightType type, const std::uint8_t* panel, const LinearTask& t, std::int64_t row, int count, float (*acc)[16]) {
  switch (type) {
    case WeightType::q4_0: return tile_rows_of<WeightType::q4_0>(panel, t, row, count, acc);
    case WeightType::q4_1: return tile_rows_of<WeightType::q4_1>(panel, t, row, count, acc);
    case WeightType::q5_0: return tile_rows_of<WeightType::q5_0>(panel, t, row, count, acc);
    case WeightType::q5_1: return tile_rows_of<WeightType::q5_1>(panel, t, row, count, acc);
    case WeightType::q8_0: return tile_rows_of<WeightType::q8_0>(panel, t, row, count, acc);
    case WeightType::q4_k: return tile_rows_of<WeightType::q4_k>(panel, t, row, count, acc);
    case WeightType::q5_k: return tile_rows_of<WeightType::q5_k>(panel, t, row, count, acc);
    case WeightType::q6_k: return tile_rows_of<WeightType::q6_k>(panel, t, row, count, acc);
    default: return;
  }
}

bool uses_tiles(const LinearTask& t) {
  return t.row_end - t.row_begin >= kAmxFrom && code_bits(t.type) != 0 && (!t.up_panel || code_bits(t.up_type) != 0);
}

void linear_on_tiles(const LinearTask& t) {
  alignas(64) float acc[kAmxBlock][16], up[kAmxBlock][16];
  for (std::int64_t row = t.row_begin; row < t.row_end; row += kAmxBlock) {
    const int count = static_cast<int>(min_of<std::int64_t>(kAmxBlock, t.row_end - row));
    run_on_tiles(t.type, t.panel, t, row, count, acc);
    if (t.up_panel) run_on_tiles(t.up_type, t.up_panel, t, row, count, up);
    for (int r = 0; r < count; ++r) finish_row(t, row + r, f_load(acc[r]), t.up_panel ? f_load(up[r]) : f_zero());
  }
}
