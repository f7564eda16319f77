// quantize, rms_norm, rope, gated, add, scale; and the reductions over a vocabulary: argmax, exp_sum.
#include <cmath>
#include <limits>

#include "check.h"

namespace yeoul::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> normals(Random& random, int n, float factor = 1.0f) {
  std::vector<float> x;
  for (int i = 0; i < n; ++i) x.push_back(random.normal() * factor);
  return x;
}

// Nearest integer, ties to even, without the rounding mode.
int nearest(float x) {
  const float low = std::floor(x), part = x - low;
  const int whole = static_cast<int>(low);
  return part > 0.5f || (part == 0.5f && whole % 2 != 0) ? whole + 1 : whole;
}

// The quantized row that the definition asks for.
std::vector<std::uint8_t> plain_quantize(const std::vector<float>& x) {
  const std::size_t k = x.size();
  std::vector<std::uint8_t> out(k + k / 2);
  for (std::size_t g = 0; g < k / 32; ++g) {
    float amax = 0.0f;
    bool good = true;
    for (std::size_t i = 0; i < 32; ++i) {
      good &= std::isfinite(x[32 * g + i]);
      amax = std::fmax(amax, std::fabs(x[32 * g + i]));
    }
    const float inverse = good && std::isfinite(127.0f / amax) ? 127.0f / amax : 0.0f, d = good ? amax / 127.0f : kNan;
    std::int32_t sums[2] = {0, 0};
    for (std::size_t i = 0; i < 32; ++i) {
      const int q = good ? nearest(x[32 * g + i] * inverse) : 0;
      out[32 * g + i] = static_cast<std::uint8_t>(q);
      sums[i / 16] += q;
    }
    const float dsum = d * static_cast<float>(sums[0] + sums[1]);
    std::memcpy(&out[k + 4 * g], &d, 4);
    std::memcpy(&out[k + k / 8 + 4 * g], &dsum, 4);
    std::memcpy(&out[k + k / 4 + 8 * g], sums, 8);
  }
  return out;
}

void check_quantize(const KernelTable& kernels, const std::vector<float>& x, const char* what, bool high) {
  const auto expected = plain_quantize(x);
  Guarded<float> in(x, high);
  Guarded<std::uint8_t> out(expected.size(), high);
  kernels.quantize(in.data(), static_cast<std::int32_t>(x.size()), out.data());
  const std::size_t k = x.size();
  bool scales = true;
  for (std::size_t i = k; i < k + k / 4; i += 4) {  // a NaN may have any bits
    float a, b;
    std::memcpy(&a, out.data() + i, 4);
    std::memcpy(&b, &expected[i], 4);
    scales &= a == b || (std::isnan(a) && std::isnan(b));
  }
  CHECK(scales, "%s quantize %s, k %zu: scales", kernels.name, what, k);
  CHECK(same_bits(out.data(), expected.data(), k), "%s quantize %s, k %zu: values", kernels.name, what, k);
  CHECK(same_bits(out.data() + k + k / 4, &expected[k + k / 4], k / 4), "%s quantize %s, k %zu: sums", kernels.name, what, k);
}

void test_quantize(const KernelTable& kernels) {
  Random random(2);
  for (const int k : {32, 64, 96, 256, 576, 1536, 8960})
    for (const float factor : {1.0f, 1e-20f, 1e20f, 1e-36f, 3e37f}) check_quantize(kernels, normals(random, k, factor), "normals", random.coin());
  std::vector<float> ties(32, 0.0f);
  ties[0] = 127.0f;
  for (int i = 1; i < 32; ++i) ties[static_cast<std::size_t>(i)] = static_cast<float>(i - 16) + 0.5f;
  check_quantize(kernels, ties, "ties", true);
  check_quantize(kernels, std::vector<float>(64, 0.0f), "zeros", true);
  check_quantize(kernels, std::vector<float>(32, -0.0f), "negative zeros", true);
  for (const float odd : {kNan, -kNan, kInfinity, -kInfinity, 1e-44f, -1e-40f, 3.4e38f, 3.75e-37f, 3.7e-37f}) {
    for (const int at : {0, 15, 16, 31, 40}) {
      auto x = normals(random, 96, std::fabs(odd) < 1.0f ? 0.0f : 1.0f);
      x[static_cast<std::size_t>(at)] = odd;
      check_quantize(kernels, x, "odd numbers", random.coin());
    }
  }
  std::vector<float> both = normals(random, 32);
  both[3] = kInfinity, both[19] = -kInfinity;
  check_quantize(kernels, both, "two infinities", true);
}

void test_rms_norm(const KernelTable& kernels) {
  Random random(3);
  for (int n = 1; n < 3000; n = n < 70 ? n + 1 : n * 2 - 7) {
    const auto x = normals(random, n, 3.0f), weight = normals(random, n);
    const bool high = random.coin();
    Guarded<float> in(x, high), w(weight, high), out(x.size(), high);
    kernels.rms_norm(in.data(), w.data(), 1e-5f, n, out.data());
    double squares = 0.0, worst = 0.0;
    for (const float a : x) squares += static_cast<double>(a) * a;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double expected = x[i] / std::sqrt(squares / n + 1e-5f) * weight[i];
      worst = std::fmax(worst, std::fabs(out[i] - expected) / std::fabs(expected));
    }
    CHECK(worst < 2e-6, "%s rms_norm of %d: relative error %g", kernels.name, n, worst);
    digests().add(kernels.name, out.data(), x.size() * 4);
  }
}

void test_rope(const KernelTable& kernels) {
  Random random(4);
  for (const int head_size : {2, 16, 40, 64, 80, 128, 256}) {
    for (const bool interleaved : {false, true}) {
      const int half = random.coin() ? head_size / 2 : random.between(1, head_size / 2), heads = random.between(1, 5);
      const auto x = normals(random, heads * head_size);
      std::vector<float> table;
      for (int i = 0; i < half; ++i) table.push_back(random.normal());
      for (int i = 0; i < half; ++i) table.push_back(random.normal());
      Guarded<float> in(x, true), angles(table, true), out(x.size(), true);
      kernels.rope(in.data(), heads, head_size, angles.data(), half, interleaved, out.data());
      auto expected = std::vector<double>(x.begin(), x.end());
      for (int h = 0; h < heads; ++h) {
        for (int i = 0; i < half; ++i) {
          const auto base = static_cast<std::size_t>(h * head_size), cosine = static_cast<std::size_t>(i), sine = static_cast<std::size_t>(half + i);
          const auto a = base + static_cast<std::size_t>(interleaved ? 2 * i : i), b = base + static_cast<std::size_t>(interleaved ? 2 * i + 1 : half + i);
          expected[a] = static_cast<double>(x[a]) * table[cosine] - static_cast<double>(x[b]) * table[sine];
          expected[b] = static_cast<double>(x[b]) * table[cosine] + static_cast<double>(x[a]) * table[sine];
        }
      }
      double worst = 0.0;
      for (std::size_t i = 0; i < x.size(); ++i) worst = std::fmax(worst, std::fabs(out[i] - expected[i]));
      CHECK(worst < 2e-6, "%s rope of %d heads of %d, %d pairs, interleaved %d: error %g", kernels.name, heads, head_size, half, interleaved, worst);
      digests().add(kernels.name, out.data(), x.size() * 4);
    }
  }
}

void test_elementwise(const KernelTable& kernels) {
  Random random(5);
  for (const int n : {1, 2, 7, 15, 16, 17, 31, 33, 40, 100, 1536, 8961}) {
    const bool high = random.coin();
    const auto a = normals(random, n, 4.0f), b = normals(random, n);
    Guarded<float> x(a, high), y(b, high), out(a.size(), high);
    kernels.add(x.data(), y.data(), n, out.data());
    bool exact = true;
    for (std::size_t i = 0; i < a.size(); ++i) exact &= out[i] == a[i] + b[i];
    CHECK(exact, "%s add of %d", kernels.name, n);
    kernels.scale(x.data(), 25.298f, n, out.data());
    for (std::size_t i = 0; i < a.size(); ++i) exact &= out[i] == a[i] * 25.298f;
    CHECK(exact, "%s scale of %d", kernels.name, n);
    for (const Act act : {Act::silu, Act::gelu_tanh}) {
      kernels.gated(x.data(), y.data(), n, act, out.data());
      double worst = 0.0;
      for (std::size_t i = 0; i < a.size(); ++i) {
        const double g = a[i], value = act == Act::silu ? g / (1 + std::exp(-g)) : g / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
        worst = std::fmax(worst, std::fabs(out[i] - value * b[i]) / (std::fabs(value * b[i]) + 1e-20));
      }
      // The exponent carries the rounding of its argument, which grows with it.
      CHECK(worst < (act == Act::silu ? 3e-6 : 3e-5), "%s gated of %d, act %d: relative error %g", kernels.name, n, static_cast<int>(act), worst);
      digests().add(kernels.name, out.data(), a.size() * 4);
    }
  }
}

void test_activation_limits(const KernelTable& kernels) {
  const std::vector<float> far = {0.0f, -0.0f, 90.0f, 1e30f, -90.0f, -1e4f, kNan, kInfinity};
  Guarded<float> x(far, true), one(std::vector<float>(far.size(), 1.0f), true), out(far.size(), true);
  for (const Act act : {Act::silu, Act::gelu_tanh}) {
    kernels.gated(x.data(), one.data(), static_cast<std::int32_t>(far.size()), act, out.data());
    CHECK(out[0] == 0.0f && out[1] == 0.0f && out[2] == 90.0f && out[3] == 1e30f && out[7] == kInfinity, "%s act %d at large numbers", kernels.name, static_cast<int>(act));
    CHECK(std::fabs(out[4]) < 1e-30f && std::fabs(out[5]) < 1e-30f, "%s act %d at very negative numbers", kernels.name, static_cast<int>(act));
    CHECK(std::isnan(out[6]), "%s act %d of NaN", kernels.name, static_cast<int>(act));
  }
}

void check_argmax(const KernelTable& kernels, const std::vector<float>& x, bool high) {
  std::int32_t best = -1, index = -1;
  bool good = true;
  for (std::size_t i = 0; i < x.size(); ++i) {
    good &= !std::isnan(x[i]) && x[i] != kInfinity;
    if (best < 0 || x[i] > x[static_cast<std::size_t>(best)]) best = static_cast<std::int32_t>(i);
  }
  good &= x[static_cast<std::size_t>(best)] != -kInfinity;
  Guarded<float> in(x, high);
  float value = 0.0f;
  const bool got = kernels.argmax(in.data(), static_cast<std::int32_t>(x.size()), &value, &index);
  CHECK(got == good, "%s argmax of %zu: soundness", kernels.name, x.size());
  if (good) CHECK(index == best && value == x[static_cast<std::size_t>(best)], "%s argmax of %zu: %d, not %d", kernels.name, x.size(), index, best);
}

void test_argmax(const KernelTable& kernels, bool quick) {
  Random random(6);
  for (int n = 1; n <= 40; ++n) {
    for (int i = 0; i < 20; ++i) {
      std::vector<float> x;
      for (int j = 0; j < n; ++j) x.push_back(static_cast<float>(random.between(-3, 3)));  // many ties
      if (i % 4 == 1) x[static_cast<std::size_t>(random.below(n))] = -kInfinity;
      if (i % 4 == 2) x[static_cast<std::size_t>(random.below(n))] = random.coin() ? kNan : kInfinity;
      check_argmax(kernels, x, random.coin());
    }
    check_argmax(kernels, std::vector<float>(static_cast<std::size_t>(n), -kInfinity), true);
    check_argmax(kernels, std::vector<float>(static_cast<std::size_t>(n), -3.4e38f), true);
  }
  auto large = normals(random, quick ? 5003 : 151936);
  check_argmax(kernels, large, true);
  large[large.size() - 1] = 50.0f;
  check_argmax(kernels, large, true);
  large[77] = 50.0f;
  check_argmax(kernels, large, false);
  large[large.size() - 2] = kNan;
  check_argmax(kernels, large, true);
  check_argmax(kernels, {0.0f, -0.0f}, true);
}

void test_exp_sum(const KernelTable& kernels, bool quick) {
  Random random(7);
  std::vector<int> sizes = {1023, 1024, 1025, 2048, 5000, quick ? 10007 : 151936};
  for (int n = 1; n <= 40; ++n) sizes.push_back(n);
  for (const int n : sizes) {
    auto x = normals(random, n, 5.0f);
    if (n > 4) x[1] = -kInfinity, x[3] = -1e30f;
    float max = -kInfinity;
    for (const float a : x) max = std::fmax(max, a);
    const float factor = random.pick<float>({1.0f, 0.7f, 10.0f, 1e-3f});
    Guarded<float> in(x, random.coin()), out(x.size(), random.coin());
    const double sum = kernels.exp_sum(in.data(), n, max, factor, out.data());
    CHECK(sum == kernels.exp_sum(in.data(), n, max, factor, nullptr), "%s exp_sum of %d without output", kernels.name, n);
    double expected = 0.0, worst = 0.0;
    bool exact = true;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const float argument = (x[i] - max) * factor;  // rounded as the kernel does
      const double e = argument < -87.0f ? 0.0 : std::exp(static_cast<double>(argument));
      expected += e;
      worst = std::fmax(worst, e == 0.0 ? static_cast<double>(out[i]) : std::fabs(out[i] - e) / e);
      exact &= argument != 0.0f || out[i] == 1.0f;
    }
    CHECK(worst < 0x1p-22, "%s exp of %d: relative error %g", kernels.name, n, worst);
    CHECK(exact, "%s exp(0) is not 1", kernels.name);
    CHECK(std::fabs(sum - expected) < 1e-6 * expected, "%s exp_sum of %d: %.9g, not %.9g", kernels.name, n, sum, expected);
    digests().add(kernels.name, out.data(), x.size() * 4);
    digests().add(kernels.name, &sum, sizeof sum);
  }
}

// Every float in a range of arguments, as far as steps allow: no bad seam between powers of two.
void test_exp_everywhere(const KernelTable& kernels, bool quick) {
  const int n = quick ? 20000 : 400000;
  std::vector<float> x;
  for (int i = 0; i < n; ++i) x.push_back(-87.5f * static_cast<float>(i) / static_cast<float>(n));
  Guarded<float> in(x, true), out(x.size(), true);
  kernels.exp_sum(in.data(), n, 0.0f, 1.0f, out.data());
  double worst = 0.0;
  bool falls = true;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double e = x[i] < -87.0f ? 0.0 : std::exp(static_cast<double>(x[i]));
    worst = std::fmax(worst, e == 0.0 ? static_cast<double>(out[i]) : std::fabs(out[i] - e) / e);
    falls &= i == 0 || out[i] <= out[i - 1];
  }
  CHECK(worst < 0x1p-22, "%s exp: relative error %g", kernels.name, worst);
  CHECK(falls, "%s exp is not monotonic", kernels.name);
}

}  // namespace

void test_rows(bool) {
  for (const auto* kernels : levels()) {
    test_quantize(*kernels);
    test_rms_norm(*kernels);
    test_rope(*kernels);
    test_elementwise(*kernels);
    test_activation_limits(*kernels);
  }
}

void test_vocabulary(bool quick) {
  for (const auto* kernels : levels()) {
    test_argmax(*kernels, quick);
    test_exp_sum(*kernels, quick);
    test_exp_everywhere(*kernels, quick);
  }
}

}  // namespace yeoul::test
