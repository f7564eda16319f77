// KV write and paged attention. One reduction serves decode, verification and prefill: keys in tiles of 64 and splits
// of 512, both aligned to absolute positions, with an online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022)
// inside a split and the splits merged in ascending order. A masked key contributes exactly zero.

constexpr float kHalfMax = 65504.0f;
constexpr int kKeyBlocks = kTileKeys / kBlock;

template <KVType type>
constexpr int kv_bytes() { return kKVBytes[static_cast<int>(type)]; }
template <KVType type>
constexpr bool has_scales() { return kKVScaleBytes[static_cast<int>(type)] > 0; }
// Bytes of one head in a block.
template <KVType type>
constexpr std::int64_t head_bytes(std::int32_t size) { return kBlock * (std::int64_t{size} * kv_bytes<type>() + kKVScaleBytes[static_cast<int>(type)]); }

// fn.operator()<type>()
template <class Fn>
inline auto for_type(KVType type, const Fn& fn) {
  switch (type) {
    case KVType::f16: return fn.template operator()<KVType::f16>();
    case KVType::bf16: return fn.template operator()<KVType::bf16>();
    case KVType::int8: return fn.template operator()<KVType::int8>();
    case KVType::fp8_e4m3: return fn.template operator()<KVType::fp8_e4m3>();
    case KVType::fp8_e5m2: return fn.template operator()<KVType::fp8_e5m2>();
    case KVType::f32: break;
  }
  return fn.template operator()<KVType::f32>();
}

// 16 stored numbers, still to be multiplied with the type's unit or the token's scale.
template <KVType type>
inline F load_kv(const std::uint8_t* p) {
  if constexpr (type == KVType::f16) return f_from_f16(p);
  else if constexpr (type == KVType::bf16) return f_from_bf16(p);
  else if constexpr (type == KVType::int8) return i_float(i_from_s8(p));
  else if constexpr (type == KVType::fp8_e4m3) return f_from_e4m3(p);
  else if constexpr (type == KVType::fp8_e5m2) return f_from_e5m2(p);
  else return f_load(reinterpret_cast<const float*>(p));
}

// What the numbers of load_kv are multiplied with; the scales of int8 are the tokens' own.
inline float unit(KVType type, float scale) {
  return type == KVType::fp8_e4m3 ? kE4M3Unit * scale : type == KVType::fp8_e5m2 ? scale : 1.0f;
}

template <KVType type>
constexpr float largest_of() {
  switch (type) {
    case KVType::f16: return kHalfMax;
    case KVType::bf16: return 3.38953139e38f;
    case KVType::fp8_e4m3: return 448.0f;
    case KVType::fp8_e5m2: return 57344.0f;
    default: return kLargest;
  }
}

// The value as the cache holds it: NaN as 0, beyond the range as the largest. So a cached V is finite and 0 x V is 0.
template <KVType type>
inline F storable(F x) {
  const F clean = f_if_eq(x, x, x, f_zero()), largest = f_set1(largest_of<type>());
  return f_max(f_min(clean, largest), f_sub(f_zero(), largest));
}

inline std::uint32_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }

// The upper 16 bits, rounded to nearest, ties to even.
inline std::uint16_t to_bf16(float x) {
  const std::uint32_t bits = bits_of(x);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// A float within the type's range as sign, exponent (of this bias) and `fraction` bits, to nearest, ties to even.
template <int fraction, int bias>
inline std::uint8_t to_fp8(float x) {
  constexpr std::uint32_t smallest_normal = (128u - bias) << 23;
  constexpr float shift = __builtin_bit_cast(float, (151u - bias - fraction) << 23);  // its last bit is the type's last bit
  const std::uint32_t bits = bits_of(x), sign = bits >> 24 & 0x80u, rest = bits & 0x7fffffffu;
  if (rest < smallest_normal) return static_cast<std::uint8_t>(sign | (bits_of(__builtin_bit_cast(float, rest) + shift) - bits_of(shift)));
  constexpr int dropped = 23 - fraction;
  const std::uint32_t rounded = rest + ((1u << (dropped - 1)) - 1) + (rest >> dropped & 1u);
  return static_cast<std::uint8_t>(sign | ((rounded - ((127u - bias) << 23)) >> dropped));
}

// The 16 bytes-or-more that the cache holds of 16 storable values; `step` is the scale of int8 codes, 0 if all are 0.
template <KVType type>
inline void pack_kv(std::uint8_t* packed, F x, float step) {
  if constexpr (type == KVType::f16) return f_to_f16(packed, x);
  if constexpr (type == KVType::f32) return f_store(reinterpret_cast<float*>(packed), x);
  if constexpr (type == KVType::int8) {
    const F code = step > 0.0f ? f_div(x, f_set1(step)) : f_zero();
    return i_store_s8(reinterpret_cast<std::int8_t*>(packed), i_round(f_max(f_min(code, f_set1(127.0f)), f_set1(-127.0f))));
  }
  float values[16];
  f_store(values, x);
  for (int i = 0; i < 16; ++i) {
    if constexpr (type == KVType::bf16) {
      const std::uint16_t code = to_bf16(values[i]);
      __builtin_memcpy(packed + 2 * i, &code, 2);
    } else {
      packed[i] = type == KVType::fp8_e4m3 ? to_fp8<3, 7>(values[i]) : to_fp8<2, 15>(values[i]);
    }
  }
}

// The scale of a head's int8 codes, max |x| / 127 rounded to f16, which is also left at `target`.
inline float write_step(const float* x, std::int32_t size, std::uint8_t* target) {
  F largest = f_zero();
  for_lanes(size, [&](std::int32_t i, int lanes) { largest = f_max(largest, f_abs(storable<KVType::int8>(load_lanes(x + i, lanes)))); });
  alignas(64) std::uint8_t half[32];
  f_to_f16(half, storable<KVType::f16>(f_set1(f_largest(largest) / 127.0f)));
  __builtin_memcpy(target, half, 2);
  float step[16];
  f_store(step, f_from_f16(half));
  return step[0];
}

template <KVType type>
bool write_kv(const KVLayout& kv, std::int32_t block, std::int32_t offset, const float* source, bool key) {
  const std::int32_t size = key ? kv.key_size : kv.value_size;
  const bool scaled = type == KVType::fp8_e4m3 || type == KVType::fp8_e5m2;
  const F scale = f_set1(scaled ? (key ? kv.k_scale : kv.v_scale) : 1.0f);
  std::uint8_t* target = (key ? kv.k : kv.v) + block * (key ? kv.k_stride : kv.v_stride);
  bool good = true;
  for (std::int32_t h = 0; h < kv.kv_heads; ++h, source += size, target += head_bytes<type>(size)) {
    float step = 0.0f;
    if constexpr (has_scales<type>()) step = write_step(source, size, target + kBlock * size + 2 * offset);
    for_lanes(size, [&](std::int32_t i, int lanes) {
      const F x = load_lanes(source + i, lanes);
      good &= !f_any_nan(x);
      alignas(64) std::uint8_t packed[64];
      pack_kv<type>(packed, storable<type>(scaled ? f_div(x, scale) : x), step);
      for (int lane = 0; lane < lanes; ++lane) {  // keys lie transposed: 16 tokens side by side
        const std::int64_t at = key ? (i + lane) * kBlock + offset : offset * size + i + lane;
        __builtin_memcpy(target + at * kv_bytes<type>(), packed + lane * kv_bytes<type>(), kv_bytes<type>());
      }
    });
  }
  return good;
}

bool kv_write(const KVLayout& kv, std::int32_t block, std::int32_t offset, const float* k, const float* v) {
  const bool good_k = for_type(kv.k_type, [&]<KVType type>() { return write_kv<type>(kv, block, offset, k, true); });
  return for_type(kv.v_type, [&]<KVType type>() { return write_kv<type>(kv, block, offset, v, false); }) && good_k;
}

constexpr int kMaxHead = 512;  // largest key or value size (checked when the program is built)
// Floats from one query's values to the next one's: a constant, so that addresses need one register; not a power of
// two, so that queries do not share the sets of the cache.
constexpr int kQueryStride = kMaxHead + 16;

// Vectors (blocks of keys, or dims of values) that are summed at one time, so that few queries too keep the
// multiply-adds busy. Which sums run side by side changes no bits.
template <int queries>
constexpr int side_by_side() { return max_of(1, min_of(4, kSums / queries)); }

// scores[q][16 lanes] = q . k of the 16 keys of each block, the dims added in ascending order.
template <KVType type, int queries, int blocks>
inline void block_scores(const std::uint8_t* const* k, const float* q, std::int32_t size, float* scores) {
  F sum[blocks][queries];
  for (int b = 0; b < blocks; ++b)
    for (int n = 0; n < queries; ++n) sum[b][n] = f_zero();
  for (std::int32_t d = 0; d < size; ++d) {
    F keys[blocks];
    for (int b = 0; b < blocks; ++b) keys[b] = load_kv<type>(k[b] + d * kBlock * kv_bytes<type>());
    for (int n = 0; n < queries; ++n) {
      const F query = f_set1(q[n * kQueryStride + d]);
      for (int b = 0; b < blocks; ++b) sum[b][n] = f_fma(keys[b], query, sum[b][n]);
    }
  }
  for (int b = 0; b < blocks; ++b)
    for (int n = 0; n < queries; ++n) {
      if constexpr (has_scales<type>()) sum[b][n] = f_mul(sum[b][n], f_from_f16(k[b] + kBlock * size));
      f_store(scores + n * kTileKeys + b * kBlock, sum[b][n]);
    }
}

// Scores of blocks [begin, end) of a tile.
template <KVType type, int queries>
inline void tile_scores(const std::uint8_t* const* k, int begin, int end, const float* q, std::int32_t size, float* scores) {
  constexpr int width = side_by_side<queries>();
  for (; begin + width <= end; begin += width) block_scores<type, queries, width>(k + begin, q, size, scores + begin * kBlock);
  for (; begin < end; ++begin) block_scores<type, queries, 1>(k + begin, q, size, scores + begin * kBlock);
}

// 16 values of a token; at the end of a head size that is no multiple of 16 (`whole` false) never past the row.
template <KVType type, bool whole>
inline F load_values(const std::uint8_t* at, int lanes) {
  if constexpr (whole) return load_kv<type>(at);
  alignas(64) std::uint8_t row[64] = {};
  __builtin_memcpy(row, at, static_cast<unsigned>(lanes * kv_bytes<type>()));
  return load_kv<type>(row);
}

// acc[q][dims] = acc x correction + sum over the tile's keys [low, high) of p x v, keys in ascending order, for the
// 16 x `chunks` dims from `d`; not `whole`: for `lanes` dims only.
template <KVType type, int queries, int chunks, bool whole>
inline void dim_values(const std::uint8_t* const* v, const float* p, int low, int high, std::int32_t size, std::int32_t d, int lanes,
                       const float* correction, float* acc) {
  F sum[chunks][queries];
  for (int n = 0; n < queries; ++n)
    for (int c = 0; c < chunks; ++c) {
      const float* at = acc + n * kQueryStride + d + 16 * c;
      sum[c][n] = f_mul(whole ? f_load(at) : f_load_n(at, lanes), f_set1(correction[n]));
    }
  for (int b = low / kBlock; b * kBlock < high; ++b) {
    const int begin = max_of(low, b * kBlock), end = min_of(high, (b + 1) * kBlock);
    const std::uint8_t* at = v[b] + (static_cast<std::int64_t>(begin - b * kBlock) * size + d) * kv_bytes<type>();
    for (int j = begin; j < end; ++j, at += size * kv_bytes<type>()) {
      F value[chunks];
      for (int c = 0; c < chunks; ++c) value[c] = load_values<type, whole>(at + 16 * c * kv_bytes<type>(), lanes);
      for (int n = 0; n < queries; ++n) {
        const F weight = f_set1(p[n * kTileKeys + j]);
        for (int c = 0; c < chunks; ++c) sum[c][n] = f_fma(value[c], weight, sum[c][n]);
      }
    }
  }
  for (int n = 0; n < queries; ++n)
    for (int c = 0; c < chunks; ++c) {
      float* at = acc + n * kQueryStride + d + 16 * c;
      whole ? f_store(at, sum[c][n]) : f_store_n(at, sum[c][n], lanes);
    }
}

template <KVType type, int queries>
inline void tile_values(const std::uint8_t* const* v, const float* p, int low, int high, std::int32_t size, const float* correction, float* acc) {
  constexpr int width = side_by_side<queries>();
  std::int32_t d = 0;
  for (; d + 16 * width <= size; d += 16 * width) dim_values<type, queries, width, true>(v, p, low, high, size, d, 16, correction, acc);
  for (; d + 16 <= size; d += 16) dim_values<type, queries, 1, true>(v, p, low, high, size, d, 16, correction, acc);
  if (d < size) dim_values<type, queries, 1, false>(v, p, low, high, size, d, size - d, correction, acc);
}

// The instantiations for `count` queries.
template <KVType type, int queries = kQueryTile>
void scores_of(int count, const std::uint8_t* const* k, int begin, int end, const float* q, std::int32_t size, float* scores) {
  if (count == queries) tile_scores<type, queries>(k, begin, end, q, size, scores);
  else if constexpr (queries > 1) scores_of<type, queries - 1>(count, k, begin, end, q, size, scores);
}

template <KVType type, int queries = kQueryTile>
void values_of(int count, const std::uint8_t* const* v, const float* p, int low, int high, std::int32_t size,
               const float* correction, float* acc) {
  if (count == queries) tile_values<type, queries>(v, p, low, high, size, correction, acc);
  else if constexpr (queries > 1) values_of<type, queries - 1>(count, v, p, low, high, size, correction, acc);
}

struct QueryState {
  float q[kQueryTile * kQueryStride];    // scaled
  float acc[kQueryTile * kQueryStride];  // of the current split
  float m[kQueryTile], l[kQueryTile];
  std::int32_t first[kQueryTile], last[kQueryTile];  // the keys each query sees: first .. last
};

// One tile's scores become weights: m, l and the correction of acc are updated for every query.
void softmax_tile(QueryState& s, int count, std::int32_t tile, float* scores, float* correction) {
  for (int n = 0; n < count; ++n) {
    float* row = scores + n * kTileKeys;
    F x[kKeyBlocks];
    F largest = f_set1(-kInf);
    for (int b = 0; b < kKeyBlocks; ++b) {
      const std::int32_t base = tile + b * kBlock;
      x[b] = f_lanes(f_load(row + b * kBlock), s.first[n] - base, s.last[n] + 1 - base, f_set1(-kInf));
      largest = f_max(largest, x[b]);
    }
    const float m = max_of(s.m[n], f_largest(largest));
    if (m == -kInf) {  // nothing seen yet
      correction[n] = 1.0f;
      for (int b = 0; b < kKeyBlocks; ++b) f_store(row + b * kBlock, f_zero());
      continue;
    }
    for (int b = 0; b < kKeyBlocks; ++b) {
      x[b] = exp16(f_sub(x[b], f_set1(m)));
      f_store(row + b * kBlock, x[b]);
    }
    correction[n] = exp1(s.m[n] - m);
    s.l[n] = s.l[n] * correction[n] + f_sum(f_add(f_add(x[0], x[1]), f_add(x[2], x[3])));
    s.m[n] = m;
  }
}

// The weights p of blocks [begin, end) times what their values are still to be multiplied with, once for all dims.
template <KVType type>
void scale_weights(const std::uint8_t* const* v, int begin, int end, int count, std::int32_t size, float factor, float* p) {
  if (!has_scales<type>() && factor == 1.0f) return;
  for (int b = begin; b < end; ++b) {
    F scale = f_set1(factor);
    if constexpr (has_scales<type>()) scale = f_from_f16(v[b] + kBlock * size);
    for (int n = 0; n < count; ++n) {
      float* at = p + n * kTileKeys + b * kBlock;
      f_store(at, f_mul(f_load(at), scale));
    }
  }
}

void attend_tile(const AttendTask& t, QueryState& s, int count, std::int32_t tile, std::int32_t first, std::int32_t last) {
  alignas(64) float scores[kQueryTile * kTileKeys];
  float correction[kQueryTile];
  const std::uint8_t* blocks[kKeyBlocks] = {};
  // Blocks of the tile that some query sees. What the scores of the others hold is masked.
  const int begin = max_of(first - tile, 0) / kBlock, end = min_of(last - tile, kTileKeys - 1) / kBlock + 1;
  for_type(t.kv.k_type, [&]<KVType type>() {
    for (int b = begin; b < end; ++b) blocks[b] = t.kv.k + t.table[tile / kBlock + b] * t.kv.k_stride + t.kv_head * head_bytes<type>(t.kv.key_size);
    scores_of<type>(count, blocks, begin, end, s.q, t.kv.key_size, scores);
  });
  softmax_tile(s, count, tile, scores, correction);
  const int low = max_of(first - tile, 0), high = min_of(last + 1 - tile, kTileKeys);
  for_type(t.kv.v_type, [&]<KVType type>() {
    for (int b = begin; b < end; ++b) blocks[b] = t.kv.v + t.table[tile / kBlock + b] * t.kv.v_stride + t.kv_head * head_bytes<type>(t.kv.value_size);
    scale_weights<type>(blocks, begin, end, count, t.kv.value_size, unit(type, t.kv.v_scale), scores);
    values_of<type>(count, blocks, scores, low, high, t.kv.value_size, correction, s.acc);
  });
}

// (M, L, A) takes in a split's (m, l, acc). Taking in the first one leaves its bits as they are: exp(-inf) = 0, exp(0) = 1.
void merge_split(float* total, const float* part, std::int32_t size) {
  const float m = max_of(total[0], part[0]);
  if (m == -kInf) return;
  const float keep = exp1(total[0] - m), take = exp1(part[0] - m);
  total[0] = m;
  total[1] = total[1] * keep + part[1] * take;
  for_lanes(size, [&](std::int32_t d, int lanes) {
    const F kept = f_mul(load_lanes(total + 2 + d, lanes), f_set1(keep));
    store_lanes(total + 2 + d, f_add(kept, f_mul(load_lanes(part + 2 + d, lanes), f_set1(take))), lanes);
  });
}

void normalize(const float* total, std::int32_t size, float* out) {
  for_lanes(size, [&](std::int32_t d, int lanes) {
    store_lanes(out + d, f_div(load_lanes(total + 2 + d, lanes), f_set1(total[1])), lanes);
  });
}

void merge(const float* partial, std::int64_t stride, std::int32_t splits, std::int32_t size, float* out) {
  float total[2 + kMaxHead];
  total[0] = -kInf;
  for (std::int32_t i = 1; i < 2 + size; ++i) total[i] = 0.0f;
  for (std::int32_t i = 0; i < splits; ++i) merge_split(total, partial + i * stride, size);
  normalize(total, size, out);
}

// Queries [first_query, first_query + count) of the task, counted token-major: query = token x heads + head.
void attend_queries(const AttendTask& t, int first_query, int count) {
  QueryState s;
  float total[kQueryTile * (2 + kMaxHead)];
  const std::int32_t ks = t.kv.key_size, vs = t.kv.value_size, width = 2 + vs;
  std::int32_t first = 0x7fffffff, last = -1;
  const float key_unit = unit(t.kv.k_type, t.kv.k_scale);
  for (int n = 0; n < count; ++n) {
    const std::int32_t token = (first_query + n) / t.heads, head = (first_query + n) % t.heads;
    const float* q = t.q + token * t.q_stride + static_cast<std::int64_t>(head) * ks;
    for (std::int32_t d = 0; d < ks; ++d) s.q[n * kQueryStride + d] = q[d] * t.scale * key_unit;
    s.last[n] = t.position + token;
    s.first[n] = t.window ? max_of(0, s.last[n] + 1 - t.window) : 0;
    first = min_of(first, s.first[n]);
    last = max_of(last, s.last[n]);
    total[n * width] = -kInf;
    for (std::int32_t d = 1; d < width; ++d) total[n * width + d] = 0.0f;
  }
  for (std::int32_t split = t.split_begin; split < t.split_end; ++split) {
    for (int n = 0; n < count; ++n) {
      s.m[n] = -kInf;
      s.l[n] = 0.0f;
      for (std::int32_t d = 0; d < vs; ++d) s.acc[n * kQueryStride + d] = 0.0f;
    }
    const std::int32_t begin = max_of(split * kSplitKeys, first / kTileKeys * kTileKeys);
    const std::int32_t end = min_of((split + 1) * kSplitKeys, last + 1);
    for (std::int32_t tile = begin; tile < end; tile += kTileKeys) attend_tile(t, s, count, tile, first, last);
    for (int n = 0; n < count; ++n) {
      float part[2 + kMaxHead];
      part[0] = s.m[n];
      part[1] = s.l[n];
      for (std::int32_t d = 0; d < vs; ++d) part[2 + d] = s.acc[n * kQueryStride + d];
      merge_split(total + n * width, part, vs);
    }
  }
  for (int n = 0; n < count; ++n) {
    const std::int32_t token = (first_query + n) / t.heads, head = (first_query + n) % t.heads;
    if (t.partial) __builtin_memcpy(t.partial + static_cast<std::int64_t>(first_query + n) * width, total + n * width, sizeof(float) * static_cast<unsigned>(width));
    else normalize(total + n * width, vs, t.out + token * t.out_stride + static_cast<std::int64_t>(head) * vs);
  }
}

void attend(const AttendTask& t) {
  const int queries = t.tokens * t.heads;
  for (int i = 0; i < queries; i += kQueryTile) attend_queries(t, i, min_of(kQueryTile, queries - i));
}
