// uniform and sample against plain versions: Philox written from its definition, softmax and filters in double.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "check.h"
#include "sampler.h"

namespace yeoul::test {
namespace {

using Words = std::array<std::uint32_t, 4>;

Words philox(std::uint32_t key0, std::uint32_t key1, Words c) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t first = 0xD2511F53ull * c[0], second = 0xCD9E8D57ull * c[2];
    c = {static_cast<std::uint32_t>(second >> 32) ^ c[1] ^ key0, static_cast<std::uint32_t>(second),
         static_cast<std::uint32_t>(first >> 32) ^ c[3] ^ key1, static_cast<std::uint32_t>(first)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

void test_uniform() {
  // Known answers of the generator's authors.
  CHECK((philox(0, 0, {0, 0, 0, 0}) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}), "zeros");
  CHECK((philox(~0u, ~0u, {~0u, ~0u, ~0u, ~0u}) == Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}), "ones");
  CHECK((philox(0xa4093822, 0x299f31d0, {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}) == Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}), "pi");
  Random random(10);
  for (int i = 0; i < 1000; ++i) {
    const std::uint64_t seed = i == 0 ? 0 : random.next();
    const auto sequence = static_cast<std::uint32_t>(i == 0 ? 0 : random.next()), position = static_cast<std::uint32_t>(i == 0 ? 0 : random.next());
    const Words x = philox(static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32), {position, sequence, 0, 0});
    const double expected = (static_cast<double>(x[0]) * 2097152.0 + static_cast<double>(x[1] / 2048)) / 9007199254740992.0;
    const double u = uniform(seed, sequence, position);
    CHECK(u == expected && u >= 0.0 && u < 1.0, "uniform: %.17g, not %.17g", u, expected);
  }
}

// The token by the definition, all in double. The shifts move what is compared: a token may differ only at a border.
std::int32_t plain_token(const std::vector<float>& logits, const SampleParams& p, double u, double shift_p, double shift_min) {
  const int n = static_cast<int>(logits.size());
  const double max = *std::max_element(logits.begin(), logits.end());
  if (p.temperature < 1e-5f) return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  std::vector<double> w;
  for (const float x : logits) w.push_back(std::exp((static_cast<double>(x) - max) / static_cast<double>(p.temperature)));
  std::vector<int> ids;
  for (int i = 0; i < n; ++i)
    if (w[static_cast<std::size_t>(i)] >= std::fmin(1.0, static_cast<double>(p.min_p) * (1.0 + shift_min)) && w[static_cast<std::size_t>(i)] > 0.0) ids.push_back(i);
  std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return w[static_cast<std::size_t>(a)] > w[static_cast<std::size_t>(b)]; });
  if (p.top_k > 0 && p.top_k < static_cast<int>(ids.size())) ids.resize(static_cast<std::size_t>(p.top_k));
  auto sum_of = [&](const std::vector<int>& of) { return std::accumulate(of.begin(), of.end(), 0.0, [&](double s, int i) { return s + w[static_cast<std::size_t>(i)]; }); };
  if (p.top_p < 1.0f) {
    const double wanted = static_cast<double>(p.top_p) * (1.0 + shift_p) * sum_of(ids);
    double sum = 0.0;
    std::size_t keep = 0;
    while (keep < ids.size() && (keep == 0 || sum < wanted)) sum += w[static_cast<std::size_t>(ids[keep++])];
    ids.resize(keep);
  }
  std::sort(ids.begin(), ids.end());
  const double target = u * sum_of(ids);
  double sum = 0.0;
  for (const int i : ids)
    if ((sum += w[static_cast<std::size_t>(i)]) > target) return i;
  return ids.back();
}

bool at_a_border(const std::vector<float>& logits, const SampleParams& p, double u, std::int32_t token) {
  for (const double du : {-2e-6, 0.0, 2e-6})
    for (const double dp : {-2e-6, 0.0, 2e-6})
      for (const double dm : {-1e-5, 0.0, 1e-5})
        if (plain_token(logits, p, std::fmin(std::fmax(u + du, 0.0), 1.0), dp, dm) == token) return true;
  return false;
}

void check_logprobs(const KernelTable& kernels, const std::vector<float>& logits, const SampleResult& got, int count) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - max);
  auto logprob = [&](std::int32_t id) { return static_cast<double>(logits[static_cast<std::size_t>(id)]) - max - std::log(sum); };
  auto close = [&](float a, std::int32_t id) { return std::fabs(static_cast<double>(a) - logprob(id)) < 2e-6 * (1.0 + std::fabs(logprob(id))); };
  CHECK(close(got.logprob, got.token), "%s logprob %g, not %g", kernels.name, static_cast<double>(got.logprob), logprob(got.token));
  std::vector<std::int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)]; });
  for (int i = 0; i < count; ++i) {
    const std::int32_t id = i < static_cast<int>(ids.size()) ? ids[static_cast<std::size_t>(i)] : -1;
    CHECK(got.top_ids[i] == id && (id < 0 || close(got.top_logprobs[i], id)), "%s top %d of %d: token %d, not %d", kernels.name, i, count, got.top_ids[i], id);
  }
}

std::vector<float> random_logits(Random& random, int n) {
  const float spread = random.pick<float>({0.01f, 1.0f, 4.0f, 60.0f});
  const bool coarse = random.coin();
  std::vector<float> x;
  for (int i = 0; i < n; ++i) {
    const float value = random.normal() * spread;
    x.push_back(coarse ? std::nearbyint(value * 4.0f) / 4.0f : value);  // ties
  }
  return x;
}

void test_draws(const KernelTable& kernels, bool quick) {
  Random random(11);
  SampleScratch scratch;
  int borders = 0, draws = 0;
  for (const float temperature : {0.0f, 9e-6f, 1.1e-5f, 0.2f, 1.0f, 3.0f, 1e6f}) {
    for (const int top_k : {0, 1, 3, 40, 100000}) {
      for (const float top_p : {0.0f, 0.3f, 0.9f, 1.0f}) {
        for (const float min_p : {0.0f, 0.05f, 1.0f}) {
          if (min_p == 1.0f && temperature > 10.0f) continue;  // what weighs as much as the largest depends on rounding
          for (int i = 0; i < (quick ? 1 : 6); ++i, ++draws) {
            const auto logits = random_logits(random, random.pick<int>({1, 5, 16, 33, 500, 1500}));
            const SampleParams p{temperature, top_p, min_p, top_k, random.next(), static_cast<std::uint32_t>(random.below(8)), static_cast<std::uint32_t>(random.below(5000)), random.between(-1, kMaxTop)};
            Guarded<float> row(logits, true);
            const SampleResult got = sample(row.data(), static_cast<std::int32_t>(logits.size()), p, {}, kernels, scratch);
            CHECK(got.status == kSampleOk, "%s status", kernels.name);
            const double u = uniform(p.seed, p.sequence, p.position);
            if (plain_token(logits, p, u, 0.0, 0.0) != got.token) {
              ++borders;
              CHECK(at_a_border(logits, p, u, got.token), "%s temperature %g top_k %d top_p %g min_p %g of %zu: token %d, not %d", kernels.name, static_cast<double>(temperature),
                    top_k, static_cast<double>(top_p), static_cast<double>(min_p), logits.size(), got.token, plain_token(logits, p, u, 0.0, 0.0));
            }
            if (p.num_logprobs >= 0) check_logprobs(kernels, logits, got, p.num_logprobs);
          }
        }
      }
    }
  }
  CHECK(borders <= draws / 50, "%s: %d of %d draws at a border", kernels.name, borders, draws);
}

void test_broken_rows(const KernelTable& kernels) {
  SampleScratch scratch;
  for (const float temperature : {0.0f, 1.0f}) {
    const SampleParams p{temperature, 0.9f, 0.0f, 5, 1, 0, 0, 3};
    const std::vector<std::vector<float>> broken = {{0.0f, NAN, 1.0f}, {INFINITY, 0.0f}, {-INFINITY, -INFINITY}, {NAN}};
    for (const auto& row : broken) CHECK(sample(row.data(), static_cast<std::int32_t>(row.size()), p, {}, kernels, scratch).status == kSampleNan, "%s: a broken row", kernels.name);
    for (std::uint32_t position = 0; position < 50; ++position) {
      SampleParams at = p;
      at.position = position;
      const std::vector<float> masked = {-INFINITY, 0.0f, -INFINITY, 0.0f};
      const auto got = sample(masked.data(), 4, at, {}, kernels, scratch);
      CHECK(got.status == kSampleOk && got.token % 2 == 1, "%s drew a masked token", kernels.name);
    }
  }
}

// Edits change what is drawn and nothing that is reported; a score is the target's log-probability.
void test_edits(const KernelTable& kernels) {
  Random random(12);
  SampleScratch scratch;
  for (int i = 0; i < 40; ++i) {
    const auto logits = random_logits(random, random.pick<int>({33, 64, 500}));
    const auto n = static_cast<std::int32_t>(logits.size());
    Guarded<float> row(logits, true);
    const std::int32_t only = random.below(n), banned = (only + 1) % n;
    const SampleParams p{random.coin() ? 0.0f : 1.0f, 1.0f, 0.0f, 0, random.next(), 0, 7, kMaxTop};
    LogitEdits edits;
    edits.bias = {{only, 1000.0}, {banned, 2000.0}};
    edits.end_ids = {banned};
    edits.first_end = 8;
    const LogitRules rules(n, edits, {}, {});
    const SampleResult forced = sample(row.data(), n, p, {&rules, nullptr}, kernels, scratch);
    CHECK(forced.status == kSampleOk && forced.token == only, "%s drew %d, not %d", kernels.name, forced.token, only);
    check_logprobs(kernels, logits, forced, kMaxTop);
    std::vector<std::uint32_t> mask(static_cast<std::size_t>(n + 31) / 32);
    const SampleResult none = sample(row.data(), n, p, {nullptr, mask.data()}, kernels, scratch);
    CHECK(none.status == kSampleNothing, "%s: an empty mask has status %d", kernels.name, none.status);
    mask[static_cast<std::size_t>(only / 32)] = 1u << (only % 32);
    CHECK(sample(row.data(), n, p, {nullptr, mask.data()}, kernels, scratch).token == only, "%s left the mask", kernels.name);
    const SampleResult scored = score(row.data(), n, only, 3, kernels, scratch);
    CHECK(scored.token == only && scored.status == kSampleOk, "%s scored %d", kernels.name, scored.token);
    check_logprobs(kernels, logits, scored, 3);
    CHECK(score(row.data(), n, n, 0, kernels, scratch).status == kSampleNan, "%s: a target outside", kernels.name);
  }
}

}  // namespace

void test_sampler(bool quick) {
  test_uniform();
  for (const auto* kernels : levels()) {
    test_draws(*kernels, quick);
    test_broken_rows(*kernels);
    test_edits(*kernels);
  }
}

}  // namespace yeoul::test
