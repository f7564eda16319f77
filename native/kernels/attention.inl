// KV write and paged attention. One reduction serves decode, verification and prefill: keys in tiles of 64 and splits
// of 512, both aligned to absolute positions, with an online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022)
// inside a split and the splits merged in ascending order. A masked key contributes exactly zero.

constexpr float kHalfMax = 65504.0f;
constexpr int kKeyBlocks = kTileKeys / kBlock;

template <KVType type>
constexpr int kv_bytes() { return type == KVType::f16 ? 2 : 4; }
template <KVType type>
inline F load_kv(const std::uint8_t* p) {
  if constexpr (type == KVType::f16) return f_from_f16(p);
  else return f_load(reinterpret_cast<const float*>(p));
}

// The value as the cache holds it: NaN as 0, beyond the range as the largest. So a cached V is finite and 0 x V is 0.
inline F storable(F x, KVType type) {
  const F clean = f_if_eq(x, x, x, f_zero());
  const float largest = type == KVType::f16 ? kHalfMax : kLargest;
  return f_max(f_min(clean, f_set1(largest)), f_set1(-largest));
}

template <KVType type>
bool write_kv(const KVLayout& kv, std::int32_t block, std::int32_t offset, const float* source, bool key) {
  const std::int32_t size = key ? kv.key_size : kv.value_size;
  std::uint8_t* target = (key ? kv.k : kv.v) + static_cast<std::int64_t>(block) * kv.kv_heads * size * kBlock * kv_bytes<type>();
  bool good = true;
  for (std::int32_t h = 0; h < kv.kv_heads; ++h, source += size, target += size * kBlock * kv_bytes<type>()) {
    for_lanes(size, [&](std::int32_t i, int lanes) {
      const F x = load_lanes(source + i, lanes);
      good &= !f_any_nan(x);
      alignas(64) std::uint8_t packed[64];
      if constexpr (type == KVType::f16) f_to_f16(packed, storable(x, type));
      else f_store(reinterpret_cast<float*>(packed), storable(x, type));
      for (int lane = 0; lane < lanes; ++lane) {  // keys lie transposed: 16 tokens side by side
        const std::int64_t at = key ? (i + lane) * kBlock + offset : offset * size + i + lane;
        __builtin_memcpy(target + at * kv_bytes<type>(), packed + lane * kv_bytes<type>(), kv_bytes<type>());
      }
    });
  }
  return good;
}

bool kv_write(const KVLayout& kv, std::int32_t block, std::int32_t offset, const float* k, const float* v) {
  auto write = [&](KVType type, const float* source, bool key) {
    return type == KVType::f16 ? write_kv<KVType::f16>(kv, block, offset, source, key)
                               : write_kv<KVType::f32>(kv, block, offset, source, key);
  };
  const bool good_k = write(kv.k_type, k, true);
  return write(kv.v_type, v, false) && good_k;
}

// scores[q][16 lanes] = q . k of the 16 keys of one block, the dims added in ascending order.
template <KVType type, int queries>
inline void block_scores(const std::uint8_t* k, const float* q, std::int32_t size, float* scores) {
  F sum[queries];
  for (int n = 0; n < queries; ++n) sum[n] = f_zero();
  for (std::int32_t d = 0; d < size; ++d) {
    const F keys = load_kv<type>(k + d * kBlock * kv_bytes<type>());
    for (int n = 0; n < queries; ++n) sum[n] = f_fma(keys, f_set1(q[n * size + d]), sum[n]);
  }
  for (int n = 0; n < queries; ++n) f_store(scores + n * kTileKeys, sum[n]);
}

// acc[q][dim lanes] = acc x correction + sum over the tile's keys [low, high) of p x v, keys in ascending order.
template <KVType type, int queries>
inline void tile_values(const std::uint8_t* const* v, const float* p, int low, int high, std::int32_t size,
                        const float* correction, float* acc) {
  for_lanes(size, [&](std::int32_t d, int lanes) {
    F sum[queries];
    for (int n = 0; n < queries; ++n) sum[n] = f_mul(load_lanes(acc + n * size + d, lanes), f_set1(correction[n]));
    for (int j = low; j < high; ++j) {
      const std::uint8_t* at = v[j / kBlock] + (static_cast<std::int64_t>(j % kBlock) * size + d) * kv_bytes<type>();
      F value;
      if (lanes == 16) {
        value = load_kv<type>(at);
      } else {  // a head size that is no multiple of 16: never read past the row
        alignas(64) std::uint8_t row[64] = {};
        __builtin_memcpy(row, at, static_cast<unsigned>(lanes * kv_bytes<type>()));
        value = load_kv<type>(row);
      }
      for (int n = 0; n < queries; ++n) sum[n] = f_fma(value, f_set1(p[n * kTileKeys + j]), sum[n]);
    }
    for (int n = 0; n < queries; ++n) store_lanes(acc + n * size + d, sum[n], lanes);
  });
}

template <KVType type, int queries = kQueryTile>
void scores_of(int count, const std::uint8_t* k, const float* q, std::int32_t size, float* scores) {
  if (count == queries) block_scores<type, queries>(k, q, size, scores);
  else if constexpr (queries > 1) scores_of<type, queries - 1>(count, k, q, size, scores);
}

template <KVType type, int queries = kQueryTile>
void values_of(int count, const std::uint8_t* const* v, const float* p, int low, int high, std::int32_t size,
               const float* correction, float* acc) {
  if (count == queries) tile_values<type, queries>(v, p, low, high, size, correction, acc);
  else if constexpr (queries > 1) values_of<type, queries - 1>(count, v, p, low, high, size, correction, acc);
}

constexpr int kMaxHead = 512;  // largest key or value size (checked when the program is built)

struct QueryState {
  float q[kQueryTile * kMaxHead];    // scaled
  float acc[kQueryTile * kMaxHead];  // of the current split
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

template <KVType k_type, KVType v_type>
void attend_tile(const AttendTask& t, QueryState& s, int count, std::int32_t tile, std::int32_t first, std::int32_t last) {
  alignas(64) float scores[kQueryTile * kTileKeys];
  float correction[kQueryTile];
  const std::uint8_t* v[kKeyBlocks] = {};
  for (int b = 0; b < kKeyBlocks; ++b) {
    const std::int32_t base = tile + b * kBlock;
    if (base > last || base + kBlock <= first) {  // seen by no query: the mask covers what is stored here
      for (int n = 0; n < count; ++n) f_store(scores + n * kTileKeys + b * kBlock, f_zero());
      continue;
    }
    const std::int64_t head = static_cast<std::int64_t>(t.table[base / kBlock]) * t.kv.kv_heads + t.kv_head;
    v[b] = t.kv.v + head * t.kv.value_size * kBlock * kv_bytes<v_type>();
    const std::uint8_t* k = t.kv.k + head * t.kv.key_size * kBlock * kv_bytes<k_type>();
    scores_of<k_type>(count, k, s.q, t.kv.key_size, scores + b * kBlock);
  }
  softmax_tile(s, count, tile, scores, correction);
  values_of<v_type>(count, v, scores, max_of(first - tile, 0), min_of(last + 1 - tile, kTileKeys), t.kv.value_size, correction, s.acc);
}

void run_attend_tile(const AttendTask& t, QueryState& s, int count, std::int32_t tile, std::int32_t first, std::int32_t last) {
  const bool k16 = t.kv.k_type == KVType::f16, v16 = t.kv.v_type == KVType::f16;
  if (k16 && v16) return attend_tile<KVType::f16, KVType::f16>(t, s, count, tile, first, last);
  if (k16) return attend_tile<KVType::f16, KVType::f32>(t, s, count, tile, first, last);
  if (v16) return attend_tile<KVType::f32, KVType::f16>(t, s, count, tile, first, last);
  return attend_tile<KVType::f32, KVType::f32>(t, s, count, tile, first, last);
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
  for (int n = 0; n < count; ++n) {
    const std::int32_t token = (first_query + n) / t.heads, head = (first_query + n) % t.heads;
    const float* q = t.q + token * t.q_stride + static_cast<std::int64_t>(head) * ks;
    for (std::int32_t d = 0; d < ks; ++d) s.q[n * ks + d] = q[d] * t.scale;
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
      for (std::int32_t d = 0; d < vs; ++d) s.acc[n * vs + d] = 0.0f;
    }
    const std::int32_t begin = max_of(split * kSplitKeys, first / kTileKeys * kTileKeys);
    const std::int32_t end = min_of((split + 1) * kSplitKeys, last + 1);
    for (std::int32_t tile = begin; tile < end; tile += kTileKeys) run_attend_tile(t, s, count, tile, first, last);
    for (int n = 0; n < count; ++n) {
      float part[2 + kMaxHead];
      part[0] = s.m[n];
      part[1] = s.l[n];
      for (std::int32_t d = 0; d < vs; ++d) part[2 + d] = s.acc[n * vs + d];
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
