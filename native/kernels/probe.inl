// Loops at the limit of what this instruction set can read and compute. Included by kernels.inl.

constexpr int kProbeSums = 8;                       // vectors read side by side
constexpr int kChains = min_of(kSums, 12);          // independent sums that hide an instruction's latency

template <bool prefetch>
float read_floats(const float* data, std::int64_t floats) {
  F sum[kProbeSums];
  for (int i = 0; i < kProbeSums; ++i) sum[i] = f_zero();
  for (std::int64_t at = 0; at < floats; at += 16 * kProbeSums)
    for (int i = 0; i < kProbeSums; ++i) {
      if constexpr (prefetch) __builtin_prefetch(reinterpret_cast<const char*>(data + at + 16 * i) + kPrefetch);
      sum[i] = f_add(sum[i], f_load(data + at + 16 * i));
    }
  for (int i = 1; i < kProbeSums; ++i) sum[0] = f_add(sum[0], sum[i]);
  return f_sum(sum[0]);
}
float probe_read(const float* data, std::int64_t floats, bool prefetch) {
  return prefetch ? read_floats<true>(data, floats) : read_floats<false>(data, floats);
}

#ifdef YEOUL_AMX
// Four independent sums of [16 x 64] x [64 x 16] products.
double probe_tiles(std::int64_t rounds, float* out) {
  alignas(64) std::int8_t a[16][64], b[16][64];
  alignas(64) std::int32_t c[16][16];
  for (int i = 0; i < 16 * 64; ++i) a[i / 64][i % 64] = b[i / 64][i % 64] = static_cast<std::int8_t>(i % 7 - 3);
  TileConfig config;
  for (int i = 0; i < 6; ++i) {
    config.rows[i] = kTileRows;
    config.column_bytes[i] = 64;
  }
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, a, 64);
  _tile_loadd(5, b, 64);
  for (std::int64_t r = 0; r < rounds; ++r) {
    _tile_dpbssd(0, 4, 5);
    _tile_dpbssd(1, 4, 5);
    _tile_dpbssd(2, 4, 5);
    _tile_dpbssd(3, 4, 5);
  }
  _tile_stored(0, c, 64);
  _tile_release();
  *out = static_cast<float>(c[0][0]);
  return 4.0 * 2 * 16 * 16 * 64 * static_cast<double>(rounds);
}
#else
// Here and below the barriers hide from the compiler that every round does the same.
double probe_dot(std::int64_t rounds, float* out) {
  alignas(64) std::uint8_t codes[64];
  alignas(64) std::int8_t values[4] = {3, -5, 7, 1};
  for (int i = 0; i < 64; ++i) codes[i] = static_cast<std::uint8_t>(i % 16);
  const std::int8_t* x = values;
  const U8 w = u_load(codes);
  I sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = i_zero();
  for (std::int64_t r = 0; r < rounds; ++r) {
    __asm__ volatile("" : "+r"(x));
    for (int i = 0; i < kChains; ++i) sum[i] = dot4(sum[i], w, x);
  }
  float total = 0;
  for (int i = 0; i < kChains; ++i) total += static_cast<float>(i_sum(sum[i]) & 0xffff);
  *out = total;
  return 2.0 * 64 * kChains * static_cast<double>(rounds);
}
#endif

double probe_fma(std::int64_t rounds, float* out) {
  alignas(64) float values[16];
  for (int i = 0; i < 16; ++i) values[i] = 0.5f;
  const float* x = values;
  F sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = f_set1(static_cast<float>(i));
  for (std::int64_t r = 0; r < rounds; ++r) {
    __asm__ volatile("" : "+r"(x));
    const F factor = f_load(x);
    for (int i = 0; i < kChains; ++i) sum[i] = f_fma(sum[i], factor, factor);
  }
  for (int i = 1; i < kChains; ++i) sum[0] = f_add(sum[0], sum[i]);
  *out = f_sum(sum[0]);
  return 2.0 * 16 * kChains * static_cast<double>(rounds);
}
