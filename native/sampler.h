// Draws one token from one row of logits: a pure function of (logits, parameters, seed, sequence, position).
// Knows nothing of requests, batches or threads. docs/dev/ARCHITECTURE.md states the definition that it follows.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/abi.h"

namespace yeoul {

constexpr int kMaxTop = 20;  // alternatives that can be reported

struct SampleParams {
  float temperature, top_p, min_p;
  std::int32_t top_k;
  std::uint64_t seed;
  std::uint32_t sequence, position;
  std::int32_t num_logprobs;  // -1: none
};

enum SampleStatus : std::int32_t { kSampleOk = 0, kSampleNan = 1 };

struct SampleResult {
  std::int32_t token = 0;
  std::int32_t status = kSampleOk;
  float logprob = 0.0f;
  std::int32_t top_ids[kMaxTop] = {};
  float top_logprobs[kMaxTop] = {};
};

// Memory that one sampling at a time works in; keeps its capacity.
struct SampleScratch {
  std::vector<float> weights;
  std::vector<std::pair<float, std::int32_t>> candidates;
  std::vector<double> bucket_sums;
  std::vector<std::int32_t> bucket_counts;
};

// A uniform number in [0, 1): Philox4x32-10 (Salmon et al., 2011), key = seed, counter = (position, sequence, 0, 0).
double uniform(std::uint64_t seed, std::uint32_t sequence, std::uint32_t position);

SampleResult sample(const float* logits, std::int32_t n, const SampleParams& params, const KernelTable& kernels, SampleScratch& scratch);

}  // namespace yeoul
