// Draws one token from one row of logits: a pure function of (logits, edits, parameters, seed, sequence, position).
// Knows nothing of requests, batches or threads. docs/dev/ARCHITECTURE.md states the definition that it follows.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/abi.h"
#include "rules.h"

namespace yeoul {

constexpr int kMaxTop = 20;  // alternatives that can be reported

struct SampleParams {
  float temperature, top_p, min_p;
  std::int32_t top_k;
  std::uint64_t seed;
  std::uint32_t sequence, position;
  std::int32_t num_logprobs;  // -1: none
};

// What stands between a row's logits and the draw; both may be null.
struct RowEdits {
  const LogitRules* rules = nullptr;
  const std::uint32_t* mask = nullptr;  // of what the grammar allows; see apply_mask
};

// Nothing: the logits are sound, but the edits ban every token.
enum SampleStatus : std::int32_t { kSampleOk = 0, kSampleNan = 1, kSampleNothing = 3 };

struct SampleResult {
  std::int32_t token = 0;
  std::int32_t status = kSampleOk;
  float logprob = 0.0f;
  std::int32_t top_ids[kMaxTop] = {};
  float top_logprobs[kMaxTop] = {};
};

// Memory that one sampling at a time works in; keeps its capacity.
struct SampleScratch {
  std::vector<float> weights, edited;
  std::vector<std::pair<float, std::int32_t>> candidates;
  std::vector<double> bucket_sums;
  std::vector<std::int32_t> bucket_counts;
};

// A uniform number in [0, 1): Philox4x32-10 (Salmon et al., 2011), key = seed, counter = (position, sequence, 0, 0).
double uniform(std::uint64_t seed, std::uint32_t sequence, std::uint32_t position);

// Log-probabilities are those of `logits`, before any edit.
SampleResult sample(const float* logits, std::int32_t n, const SampleParams& params, const RowEdits& edits, const KernelTable& kernels, SampleScratch& scratch);

// Log-probability of `target` and of the `count` most likely tokens.
SampleResult score(const float* logits, std::int32_t n, std::int32_t target, int count, const KernelTable& kernels, SampleScratch& scratch);

}  // namespace yeoul
