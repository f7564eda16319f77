// kv_write, attend and merge against a softmax over all keys at once, in double, of what the cache holds.
#include <cmath>

#include "check.h"

namespace yeoul::test {
namespace {

struct Shape {
  int kv_heads, heads, key_size, value_size;  // heads: query heads of one KV head
  KVType k_type, v_type;
  int window, context, tokens;  // the last `tokens` positions of the context are queries

  int position() const { return context - tokens; }
  int first_key(int at) const { return window ? std::max(0, at + 1 - window) : 0; }
};

std::size_t element(KVType t) {
  switch (t) {
    case KVType::f32: return 4;
    case KVType::f16: case KVType::bf16: return 2;
    default: return 1;
  }
}

// Sign, exponent and fraction bits; how far the exponent is shifted; the largest number.
struct Format {
  int exponent, fraction, bias;
  double largest;
};

Format format(KVType type) {
  switch (type) {
    case KVType::f16: return {5, 10, 15, 65504.0};
    case KVType::bf16: return {8, 7, 127, 3.3895313892515355e38};
    case KVType::fp8_e4m3: return {4, 3, 7, 448.0};
    case KVType::fp8_e5m2: return {5, 2, 15, 57344.0};
    default: return {8, 23, 127, 3.4028234663852886e38};
  }
}

// A number of the type from its bits; above the largest: not a number.
double read_number(KVType type, const std::uint8_t* p) {
  const Format f = format(type);
  std::uint32_t bits = 0;
  std::memcpy(&bits, p, element(type));
  const auto exponent = static_cast<int>(bits >> f.fraction & ((1u << f.exponent) - 1));
  const auto fraction = static_cast<double>(bits & ((1u << f.fraction) - 1));
  const double one = std::ldexp(1.0, f.fraction);
  const double magnitude = exponent == 0 ? std::ldexp(fraction, 1 - f.bias - f.fraction) : std::ldexp(one + fraction, exponent - f.bias - f.fraction);
  if (magnitude > f.largest) return NAN;
  return bits >> (f.exponent + f.fraction) & 1 ? -magnitude : magnitude;
}

double limited(double x, double largest) { return std::isnan(x) ? 0.0 : std::fmax(-largest, std::fmin(largest, x)); }

// The nearest number of the type, the largest beyond its range, 0 for NaN.
double nearest(KVType type, double x) {
  const Format f = format(type);
  const double inside = limited(x, f.largest);
  const int exponent = std::max(inside == 0.0 ? 1 - f.bias : std::ilogb(inside), 1 - f.bias);
  return std::ldexp(std::nearbyint(std::ldexp(inside, f.fraction - exponent)), exponent - f.fraction);
}

// What the cache must hold of x, one of the values of `head`.
double stored(KVType type, float x, const std::vector<float>& head, float scale) {
  if (type == KVType::fp8_e4m3 || type == KVType::fp8_e5m2) return nearest(type, static_cast<double>(x / scale)) * static_cast<double>(scale);
  if (type != KVType::int8) return nearest(type, static_cast<double>(x));
  double largest = 0.0;
  for (const float other : head) largest = std::fmax(largest, std::fabs(limited(static_cast<double>(other), format(KVType::f32).largest)));
  const double step = nearest(KVType::f16, static_cast<double>(static_cast<float>(largest) / 127.0f));
  if (step == 0.0) return 0.0;
  const double inside = limited(static_cast<double>(x), format(KVType::f32).largest);
  return std::nearbyint(limited(static_cast<double>(static_cast<float>(inside) / static_cast<float>(step)), 127.0)) * step;
}

std::vector<float> head_of(const float* all, int head, int size) { return {all + head * size, all + (head + 1) * size}; }

// A cache between guard pages whose unwritten slots are NaN, or have a scale that is. Block 0 stays unwritten.
struct Cache {
  Cache(const Shape& shape, int blocks, bool high)
      : s(shape), k(static_cast<std::size_t>(blocks * s.kv_heads) * head(s.k_type, s.key_size), high),
        v(static_cast<std::size_t>(blocks * s.kv_heads) * head(s.v_type, s.value_size), high) {}

  // Bytes of one head in a block: its values, then the f16 scales of int8.
  static std::size_t head(KVType type, int size) { return kBlock * (static_cast<std::size_t>(size) * element(type) + (type == KVType::int8 ? 2 : 0)); }

  KVLayout layout() {
    const auto heads = static_cast<std::size_t>(s.kv_heads);
    return {k.data(), v.data(), s.k_type, s.v_type, s.kv_heads, s.key_size, s.value_size, static_cast<std::int64_t>(heads * head(s.k_type, s.key_size)),
            static_cast<std::int64_t>(heads * head(s.v_type, s.value_size)), k_scale, v_scale};
  }
  double key(int block, int h, int slot, int d) { return read(k.data(), s.k_type, s.key_size, block * s.kv_heads + h, slot, d * kBlock + slot, k_scale); }
  double value(int block, int h, int slot, int d) { return read(v.data(), s.v_type, s.value_size, block * s.kv_heads + h, slot, slot * s.value_size + d, v_scale); }
  double read(const std::uint8_t* all, KVType type, int size, int index, int slot, int at, float scale) const {
    const std::uint8_t* p = all + static_cast<std::size_t>(index) * head(type, size);
    if (type == KVType::int8) return static_cast<double>(static_cast<std::int8_t>(p[at])) * read_number(KVType::f16, p + kBlock * size + 2 * slot);
    const double number = read_number(type, p + static_cast<std::size_t>(at) * element(type));
    return element(type) == 1 ? number * static_cast<double>(scale) : number;
  }

  Shape s;
  float k_scale = s.k_type == KVType::fp8_e4m3 ? 0.02f : 1.0f, v_scale = s.v_type == KVType::fp8_e4m3 ? 0.03f : 1.0f;
  Guarded<std::uint8_t> k, v;
};

std::vector<float> normals(Random& random, int n) {
  std::vector<float> x;
  for (int i = 0; i < n; ++i) x.push_back(random.normal());
  return x;
}

std::vector<std::int32_t> shuffled_table(Random& random, int blocks) {
  std::vector<std::int32_t> table;
  for (int b = 0; b < blocks; ++b) table.push_back(b + 1);
  for (int b = blocks - 1; b > 0; --b) std::swap(table[static_cast<std::size_t>(b)], table[static_cast<std::size_t>(random.below(b + 1))]);
  return table;
}

void fill(Cache& cache, const KernelTable& kernels, const std::vector<std::int32_t>& table, std::uint64_t seed, bool high) {
  Random random(seed);
  const Shape& s = cache.s;
  for (int p = 0; p < s.context; ++p) {
    Guarded<float> k(normals(random, s.kv_heads * s.key_size), high), v(normals(random, s.kv_heads * s.value_size), high);
    const int block = table[static_cast<std::size_t>(p / kBlock)], slot = p % kBlock;
    CHECK(kernels.kv_write(cache.layout(), block, slot, k.data(), v.data()), "%s kv_write of sound numbers", kernels.name);
    bool equal = true;
    for (int h = 0; h < s.kv_heads; ++h) {
      const auto keys = head_of(k.data(), h, s.key_size), values = head_of(v.data(), h, s.value_size);
      for (int d = 0; d < s.key_size; ++d) equal &= cache.key(block, h, slot, d) == stored(s.k_type, keys[static_cast<std::size_t>(d)], keys, cache.k_scale);
      for (int d = 0; d < s.value_size; ++d) equal &= cache.value(block, h, slot, d) == stored(s.v_type, values[static_cast<std::size_t>(d)], values, cache.v_scale);
    }
    CHECK(equal, "%s kv_write at position %d, heads of %d and %d", kernels.name, p, s.key_size, s.value_size);
  }
}

// One shape on one level: the queries, the table and the cache.
class Run {
 public:
  Run(const KernelTable& kernels, const Shape& s, std::uint64_t seed)
      : kernels_(kernels), s_(s), random_(seed), blocks_((s.context + kBlock - 1) / kBlock), high_(random_.coin()),
        cache_(s, blocks_ + 1, high_), table_(shuffled_table(random_, blocks_), true), width_(s.kv_heads * s.heads),
        q_(normals(random_, s.tokens * width_ * s.key_size), high_), scale_(1.0f / std::sqrt(static_cast<float>(s.key_size))) {
    fill(cache_, kernels, {table_.data(), table_.data() + table_.size()}, seed + 1, high_);
    for (int b = 0; b < s.first_key(s.position()) / kBlock; ++b) table_[static_cast<std::size_t>(b)] = 0;  // as the scheduler frees them
  }

  void check() {
    const auto size = static_cast<std::size_t>(s_.tokens * width_ * s_.value_size);
    Guarded<float> together(size, high_), alone(size, high_), merged(size, high_);
    for (int h = 0; h < s_.kv_heads; ++h) {
      attend(h, 0, s_.tokens, together, nullptr, s_.first_key(s_.position()) / kSplitKeys, (s_.context - 1) / kSplitKeys + 1);
      for (int t = 0; t < s_.tokens; ++t) {
        const int at = s_.position() + t, begin = s_.first_key(at) / kSplitKeys, end = at / kSplitKeys + 1;
        attend(h, t, 1, alone, nullptr, begin, end);
        by_parts(h, t, merged, begin, end);
      }
    }
    CHECK(same_bits(together.data(), alone.data(), size * 4), "%s: prefill and decode differ", about().c_str());
    CHECK(same_bits(alone.data(), merged.data(), size * 4), "%s: one pass and merged splits differ", about().c_str());
    double worst = 0.0;
    for (int t = 0; t < s_.tokens; ++t)
      for (int h = 0; h < width_; ++h) worst = std::fmax(worst, error(together, t, h));
    CHECK(worst < 1e-5, "%s: error %g", about().c_str(), worst);
    digests().add(kernels_.name, together.data(), size * 4);
  }

 private:
  std::string about() const {
    return text("%s attention, %d x %d heads of %d/%d, types %d/%d, window %d, %d tokens of %d", kernels_.name, s_.kv_heads, s_.heads, s_.key_size,
                s_.value_size, static_cast<int>(s_.k_type), static_cast<int>(s_.v_type), s_.window, s_.tokens, s_.context);
  }

  void attend(int kv_head, int token, int tokens, Guarded<float>& out, float* partial, int begin, int end) {
    AttendTask task{};
    task.kv = cache_.layout();
    task.table = table_.data();
    task.q = q_.data() + (token * width_ + kv_head * s_.heads) * s_.key_size;
    task.q_stride = width_ * s_.key_size;
    task.out = out.data() + (token * width_ + kv_head * s_.heads) * s_.value_size;
    task.out_stride = width_ * s_.value_size;
    task.partial = partial;
    task.scale = scale_;
    task.kv_head = kv_head;
    task.heads = s_.heads;
    task.tokens = tokens;
    task.position = s_.position() + token;
    task.window = s_.window;
    task.split_begin = begin;
    task.split_end = end;
    kernels_.attend(task);
  }

  void by_parts(int kv_head, int token, Guarded<float>& out, int begin, int end) {
    const int width = 2 + s_.value_size, stride = s_.heads * width;
    Guarded<float> parts(static_cast<std::size_t>((end - begin) * stride), high_);
    for (int split = begin; split < end; ++split) attend(kv_head, token, 1, out, parts.data() + (split - begin) * stride, split, split + 1);
    for (int h = 0; h < s_.heads; ++h)
      kernels_.merge(parts.data() + h * width, stride, end - begin, s_.value_size, out.data() + (token * width_ + kv_head * s_.heads + h) * s_.value_size);
  }

  // Largest difference of one head's output from the plain softmax.
  double error(Guarded<float>& out, int token, int head) {
    const int at = s_.position() + token, first = s_.first_key(at), kv_head = head / s_.heads;
    std::vector<double> weights, sums(static_cast<std::size_t>(s_.value_size));
    double largest = -INFINITY, total = 0.0;
    for (int p = first; p <= at; ++p) {
      double score = 0.0;
      for (int d = 0; d < s_.key_size; ++d)
        score += static_cast<double>(q_[static_cast<std::size_t>((token * width_ + head) * s_.key_size + d)]) * cache_.key(table_[static_cast<std::size_t>(p / kBlock)], kv_head, p % kBlock, d);
      weights.push_back(score * static_cast<double>(scale_));
      largest = std::fmax(largest, weights.back());
    }
    for (int p = first; p <= at; ++p) {
      const double weight = std::exp(weights[static_cast<std::size_t>(p - first)] - largest);
      total += weight;
      for (int d = 0; d < s_.value_size; ++d) sums[static_cast<std::size_t>(d)] += weight * cache_.value(table_[static_cast<std::size_t>(p / kBlock)], kv_head, p % kBlock, d);
    }
    double worst = 0.0;
    for (int d = 0; d < s_.value_size; ++d) {
      const float got = out[static_cast<std::size_t>((token * width_ + head) * s_.value_size + d)];
      worst = std::isnan(got) ? INFINITY : std::fmax(worst, std::fabs(got - sums[static_cast<std::size_t>(d)] / total));
    }
    return worst;
  }

  const KernelTable& kernels_;
  Shape s_;
  Random random_;
  int blocks_;
  bool high_;
  Cache cache_;
  Guarded<std::int32_t> table_;
  int width_;
  Guarded<float> q_;
  float scale_;
};

void check(const Shape& s, Random& random) {
  const std::uint64_t seed = random.next();
  for (const auto* kernels : levels()) Run(*kernels, s, seed).check();
}

const std::vector<KVType> kTypes = {KVType::f16, KVType::f32, KVType::bf16, KVType::int8, KVType::fp8_e4m3, KVType::fp8_e5m2};

void test_pairs(Random& random) {
  for (const KVType k : kTypes)
    for (const KVType v : kTypes)
      for (const int size : {24, 64}) check({2, random.between(1, 5), size, 40, k, v, random.coin() ? 0 : 33, random.between(60, 140), random.between(1, 20)}, random);
}


void test_borders(Random& random, bool quick) {
  const std::vector<int> contexts = quick ? std::vector<int>{1, 17, 63, 64, 65, 513} : std::vector<int>{1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 511, 512, 513, 575, 577, 1023, 1024, 1025, 1500};
  for (const int context : contexts)
    for (const int window : {0, 1, 16, 33, 512, 513})
      check({random.between(1, 2), random.between(1, 5), 16, 24, random.pick(kTypes), random.pick(kTypes), window, context, std::min(context, random.between(1, 5))}, random);
}

void test_sizes(Random& random, bool quick) {
  for (const int size : {1, 2, 8, 15, 16, 17, 32, 40, 64, 80, 96, 128, 160, 256, 512}) {
    if (quick && size > 96) continue;
    for (const int heads : {1, 2, 3, 4, 7, 8, 12, 16}) {
      if (quick && random.below(3)) continue;
      const int value_size = random.coin() ? size : random.between(1, size), context = random.between(1, size > 100 ? 90 : 150);
      check({random.between(1, 2), heads, size, value_size, random.pick(kTypes), random.pick(kTypes), random.coin() ? 0 : random.between(1, 200), context, std::min(context, random.between(1, 3))}, random);
    }
  }
}

// Long prefills, so that queries of one pass see different tiles and splits.
void test_prefill(Random& random, bool quick) {
  for (int i = 0; i < (quick ? 2 : 12); ++i) {
    const int tokens = random.between(60, quick ? 90 : 200), context = tokens + random.pick<int>({0, 3, 400, 470});
    check({1, random.between(1, 4), random.pick<int>({16, 20, 32}), random.pick<int>({16, 24}), random.pick(kTypes), random.pick(kTypes), random.coin() ? 0 : random.between(1, 300), context, tokens}, random);
  }
}

// Large and equal scores: the running maximum moves, or never does.
void test_extreme_scores(const KernelTable& kernels) {
  const Shape s{1, 1, 16, 16, KVType::f32, KVType::f32, 0, 700, 1};
  for (const float factor : {0.0f, 30.0f, -30.0f, 1e4f}) {
    Cache cache(s, 45, true);
    std::vector<std::int32_t> table;
    for (int b = 0; b < 44; ++b) table.push_back(b + 1);
    Guarded<float> q(16, true), out(16, true);
    std::vector<float> k(16), v(16);
    for (std::size_t d = 0; d < 16; ++d) q[d] = d == 0 ? 1.0f : 0.0f;
    for (int p = 0; p < s.context; ++p) {
      k[0] = factor * static_cast<float>(p) / static_cast<float>(s.context);
      v.assign(16, static_cast<float>(p));
      kernels.kv_write(cache.layout(), table[static_cast<std::size_t>(p / kBlock)], p % kBlock, k.data(), v.data());
    }
    AttendTask task{};
    task.kv = cache.layout();
    task.table = table.data();
    task.q = q.data();
    task.out = out.data();
    task.scale = 1.0f;
    task.heads = task.tokens = 1;
    task.position = s.context - 1;
    task.split_end = 2;
    kernels.attend(task);
    double total = 0.0, sum = 0.0;
    for (int p = 0; p < s.context; ++p) {
      const double reference = factor > 0.0f ? s.context - 1 : 0, weight = std::exp(static_cast<double>(factor) * (p - reference) / s.context);
      total += weight;
      sum += weight * p;
    }
    CHECK(std::fabs(out[0] - sum / total) < 1e-4 * (1.0 + sum / total), "%s scores up to %g: %g, not %g", kernels.name, static_cast<double>(factor), static_cast<double>(out[0]), sum / total);
  }
}

}  // namespace

void test_kv_write(bool) {
  for (const auto* kernels : levels()) {
    for (const KVType type : kTypes) {
      const Shape s{2, 1, 24, 17, type, type, 0, 16, 1};
      Cache cache(s, 2, true);
      const std::vector<float> odd = {NAN, INFINITY, -INFINITY, 1e6f, -1e6f, 65504.0f, 65519.9f, 65520.0f, 1e-8f, 5.96e-8f, 2.98e-8f, 2.99e-8f, -6.1e-5f, 6.09e-5f, 0.0f, -0.0f, 2049.0f, 2051.0f, 1e30f, 3.4e38f,
                                      448.0f, 449.0f, 17.0f, 19.0f, 1.0625f, 1.1875f, 0.0009765625f, 0.00098f, -0.0029296875f, 1.52587890625e-05f, 7.62939453125e-06f, 7.7e-06f, 57345.0f, 1.125f, 1.375f};
      for (std::size_t i = 0; i < odd.size(); ++i) {
        std::vector<float> k(48, 1.0f), v(34, 1.0f);
        k[i % 48] = odd[i];
        v[(i + 17) % 34] = odd[i];
        const bool good = kernels->kv_write(cache.layout(), 1, static_cast<int>(i) % 16, k.data(), v.data());
        CHECK(good == !std::isnan(odd[i]), "%s kv_write reports %g", kernels->name, static_cast<double>(odd[i]));
        const int slot = static_cast<int>(i) % 16, at = static_cast<int>(i % 48), value_at = static_cast<int>((i + 17) % 34);
        const double key = stored(type, odd[i], head_of(k.data(), at / 24, 24), cache.k_scale), value = stored(type, odd[i], head_of(v.data(), value_at / 17, 17), cache.v_scale);
        CHECK(cache.key(1, at / 24, slot, at % 24) == key, "%s kv_write of the key %g, type %d", kernels->name, static_cast<double>(odd[i]), static_cast<int>(type));
        CHECK(cache.value(1, value_at / 17, slot, value_at % 17) == value, "%s kv_write of the value %g, type %d", kernels->name, static_cast<double>(odd[i]), static_cast<int>(type));
      }
      CHECK(std::isnan(cache.key(0, 0, 0, 0)) && std::isnan(cache.value(0, 1, 15, 16)), "%s kv_write touched another block", kernels->name);
    }
    test_extreme_scores(*kernels);
  }
}

void test_attention(bool quick) {
  Random random(8);
  test_pairs(random);
  test_borders(random, quick);
  test_sizes(random, quick);
  test_prefill(random, quick);
}

}  // namespace yeoul::test
