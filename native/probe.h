// What this machine can do at most: read rates and arithmetic peaks, to hold kernels against. Knows no model.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/probe_abi.h"
#include "pool.h"
#include "weights.h"

namespace yeoul {

// Memory to read from, on pages of 4 KiB or (where the system grants them) 2 MiB, written once by the pool's threads.
class ProbeMemory {
 public:
  ProbeMemory(std::size_t bytes, bool huge, Pool& pool);
  ~ProbeMemory();
  ProbeMemory(const ProbeMemory&) = delete;
  ProbeMemory& operator=(const ProbeMemory&) = delete;
  const float* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  void* mapping_;
  std::size_t mapped_, size_;
  float* data_;
};

// Bytes per second of the pool's threads together, each `passes` times over `bytes` of its own (rounded to lines), in
// slices so small that no thread waits long for another. Throws std::invalid_argument if they do not fit the memory.
double probe_read(Pool& pool, const std::string& isa, const ProbeMemory& memory, std::int64_t bytes, std::int64_t passes, bool prefetch);

enum class ProbePeak { dot, fma };
// Operations per second of the pool's threads together.
double probe_peak(Pool& pool, const std::string& isa, ProbePeak which, std::int64_t rounds);

// A 4-bit matrix (q4_0) of random values, multiplied with rows of int8 activations by the engine's own kernels.
class ProbeMatrix {
 public:
  ProbeMatrix(Pool& pool, const std::string& isa, std::int64_t outputs, std::int64_t inputs, std::int32_t max_rows);
  ~ProbeMatrix();
  double run(std::int32_t rows);  // seconds of one product
  std::size_t bytes() const;      // of the packed matrix

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace yeoul
