#include "sampler.h"

#include <algorithm>
#include <cstring>

namespace yeoul {
namespace {

constexpr float kGreedyBelow = 1e-5f;
constexpr int kBucketShift = 20;  // a bucket: weights that share sign, exponent and 3 bits of the fraction
constexpr int kBuckets = 1 << 12;

using Candidate = std::pair<float, std::int32_t>;

// Heaviest first, ties to the lowest id. By the logits: weights of different ones can round to the same float.
struct Heavier {
  const float* logits;
  bool operator()(const Candidate& a, const Candidate& b) const {
    return logits[a.second] > logits[b.second] || (logits[a.second] == logits[b.second] && a.second < b.second);
  }
};
bool earlier(const Candidate& a, const Candidate& b) { return a.second < b.second; }

std::uint32_t bucket_of(float weight) {
  std::uint32_t bits;
  std::memcpy(&bits, &weight, 4);
  return bits >> kBucketShift;
}

// ln x for x > 0: exponent and an atanh series. Own code, so that the bits do not depend on a library's version.
double log_of(double x) {
  std::uint64_t bits;
  std::memcpy(&bits, &x, 8);
  int exponent = static_cast<int>(bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffffull) | 0x3ff0000000000000ull;
  double m;
  std::memcpy(&m, &bits, 8);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    exponent += 1;
  }
  const double s = (m - 1.0) / (m + 1.0), s2 = s * s;
  double series = 0.0;
  for (int n = 23; n >= 1; n -= 2) series = series * s2 + 1.0 / n;
  return 2.0 * s * series + exponent * 0.6931471805599453;
}

// Collects the weights >= floor that can be among the `top_k` heaviest or in the heaviest `top_p` of the total: whole
// buckets from the top, so that only these few need sorting.
void gather_heaviest(std::int32_t n, float floor, std::int32_t top_k, float top_p, SampleScratch& s) {
  s.bucket_sums.assign(kBuckets, 0.0);
  s.bucket_counts.assign(kBuckets, 0);
  double total = 0.0;
  for (std::int32_t i = 0; i < n; ++i) {
    const float w = s.weights[static_cast<std::size_t>(i)];
    if (w < floor || w <= 0.0f) continue;
    s.bucket_sums[bucket_of(w)] += w;
    s.bucket_counts[bucket_of(w)] += 1;
    total += w;
  }
  const double wanted = static_cast<double>(top_p) * total * (1.0 + 1e-9);
  std::int64_t count = 0;
  double sum = 0.0;
  std::uint32_t lowest = kBuckets / 2;  // positive floats have buckets below
  // When both limits act, top_p is taken of what top_k leaves, which is reached no later than of the total.
  while (lowest > 0 && (count == 0 || (count < top_k && (top_p >= 1.0f || sum < wanted)))) {
    --lowest;
    count += s.bucket_counts[lowest];
    sum += s.bucket_sums[lowest];
  }
  s.candidates.clear();
  for (std::int32_t i = 0; i < n; ++i) {
    const float w = s.weights[static_cast<std::size_t>(i)];
    if (w >= floor && w > 0.0f && bucket_of(w) >= lowest) s.candidates.emplace_back(w, i);
  }
}

double total_of(const std::vector<Candidate>& candidates) {
  double total = 0.0;
  for (const auto& c : candidates) total += c.first;
  return total;
}

// Leaves in `candidates`, ascending by id, what min_p, top_k and top_p keep.
void filter(const float* logits, std::int32_t n, const SampleParams& p, SampleScratch& s) {
  const std::int32_t top_k = p.top_k > 0 && p.top_k < n ? p.top_k : n;
  const bool cut_k = top_k < n, cut_p = p.top_p < 1.0f;
  // The weight of the most likely token is 1, and it always stays.
  gather_heaviest(n, std::min(p.min_p, 1.0f), top_k, cut_k ? 1.0f : p.top_p, s);
  auto& c = s.candidates;
  if (!cut_k && !cut_p) return;
  double total = 0.0;
  if (!cut_k)  // top_p of everything that min_p kept, also of what is not among the gathered
    for (const double sum : s.bucket_sums) total += sum;
  std::sort(c.begin(), c.end(), Heavier{logits});
  if (cut_k) {
    c.resize(std::min(c.size(), static_cast<std::size_t>(top_k)));
    total = total_of(c);
  }
  if (cut_p) {
    double sum = 0.0;
    std::size_t keep = 0;
    while (keep < c.size() && (keep == 0 || sum < static_cast<double>(p.top_p) * total)) sum += c[keep++].first;
    c.resize(keep);
  }
  std::sort(c.begin(), c.end(), earlier);
}

std::int32_t draw(const std::vector<Candidate>& candidates, double u) {
  const double target = u * total_of(candidates);
  double sum = 0.0;
  for (const auto& c : candidates) {
    sum += c.first;
    if (sum > target) return c.second;
  }
  return candidates.back().second;
}

std::int32_t draw_unfiltered(const float* weights, std::int32_t n, double u) {
  double total = 0.0, sum = 0.0;
  for (std::int32_t i = 0; i < n; ++i) total += weights[i];
  const double target = u * total;
  std::int32_t last = 0;
  for (std::int32_t i = 0; i < n; ++i) {
    if (weights[i] <= 0.0f) continue;
    sum += weights[i];
    last = i;
    if (sum > target) break;
  }
  return last;
}

void report_logprobs(const float* logits, std::int32_t n, float max, int count, const KernelTable& kernels, SampleScratch& s, SampleResult& out) {
  s.weights.resize(static_cast<std::size_t>(n));
  const double lse = log_of(kernels.exp_sum(logits, n, max, 1.0f, s.weights.data()));
  auto logprob = [&](std::int32_t id) { return static_cast<float>(static_cast<double>(logits[id]) - max - lse); };
  out.logprob = logprob(out.token);
  if (count == 0) return;
  s.candidates.clear();
  gather_heaviest(n, 0.0f, count, 1.0f, s);
  const int found = std::min(count, n);
  if (static_cast<int>(s.candidates.size()) < found) {  // the others have weights that round to 0
    s.candidates.clear();
    for (std::int32_t i = 0; i < n; ++i) s.candidates.emplace_back(0.0f, i);
  }
  std::partial_sort(s.candidates.begin(), s.candidates.begin() + found, s.candidates.end(), Heavier{logits});
  for (int i = 0; i < count; ++i) {
    out.top_ids[i] = i < found ? s.candidates[static_cast<std::size_t>(i)].second : -1;
    out.top_logprobs[i] = i < found ? logprob(out.top_ids[i]) : 0.0f;
  }
}

const float* edit(const float* logits, std::int32_t n, std::uint32_t position, const RowEdits& edits, SampleScratch& s) {
  s.edited.resize(static_cast<std::size_t>(n));
  if (edits.rules) edits.rules->apply(logits, position, s.edited.data());
  else std::copy_n(logits, n, s.edited.begin());
  if (edits.mask) apply_mask(edits.mask, n, s.edited.data());
  return s.edited.data();
}

}  // namespace

double uniform(std::uint64_t seed, std::uint32_t sequence, std::uint32_t position) {
  std::uint32_t x[4] = {position, sequence, 0, 0};
  auto k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * x[0], b = std::uint64_t{0xCD9E8D57u} * x[2];
    const std::uint32_t next[4] = {static_cast<std::uint32_t>(b >> 32) ^ x[1] ^ k0, static_cast<std::uint32_t>(b),
                                   static_cast<std::uint32_t>(a >> 32) ^ x[3] ^ k1, static_cast<std::uint32_t>(a)};
    std::memcpy(x, next, sizeof x);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<double>(std::uint64_t{x[0]} << 21 | x[1] >> 11) * 0x1p-53;
}

SampleResult sample(const float* raw, std::int32_t n, const SampleParams& p, const RowEdits& edits, const KernelTable& kernels, SampleScratch& s) {
  SampleResult out;
  float raw_max;
  if (!kernels.argmax(raw, n, &raw_max, &out.token)) {
    out.status = kSampleNan;
    return out;
  }
  const float* logits = raw;
  float max = raw_max;
  if (edits.rules || edits.mask) {
    logits = edit(raw, n, p.position, edits, s);
    if (!kernels.argmax(logits, n, &max, &out.token)) {
      out.status = kSampleNothing;
      return out;
    }
  }
  if (p.temperature >= kGreedyBelow) {
    s.weights.resize(static_cast<std::size_t>(n));
    kernels.exp_sum(logits, n, max, 1.0f / p.temperature, s.weights.data());
    const double u = uniform(p.seed, p.sequence, p.position);
    if ((p.top_k <= 0 || p.top_k >= n) && p.top_p >= 1.0f && p.min_p <= 0.0f) {
      out.token = draw_unfiltered(s.weights.data(), n, u);
    } else {
      filter(logits, n, p, s);
      out.token = draw(s.candidates, u);
    }
  }
  if (p.num_logprobs >= 0) report_logprobs(raw, n, raw_max, std::min(p.num_logprobs, kMaxTop), kernels, s, out);
  return out;
}

SampleResult score(const float* logits, std::int32_t n, std::int32_t target, int count, const KernelTable& kernels, SampleScratch& s) {
  SampleResult out;
  float max;
  if (target < 0 || target >= n || !kernels.argmax(logits, n, &max, &out.token)) {
    out.status = kSampleNan;
    return out;
  }
  out.token = target;
  report_logprobs(logits, n, max, std::clamp(count, 0, kMaxTop), kernels, s, out);
  return out;
}

}  // namespace yeoul
