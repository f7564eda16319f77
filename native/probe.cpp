#include "probe.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <random>
#include <stdexcept>
#include <vector>

#include "isa.h"
#include "program.h"

namespace yeoul {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::int64_t kLine = 128;             // floats of one turn of the reading loop
constexpr std::int64_t kSlice = 1 << 18;        // floats of a slice that a thread claims: 1 MiB
constexpr std::size_t kPastEnd = 64 << 10;      // prefetches run ahead

const ProbeTable& probes_for(const std::string& level) {
  kernels_for(level);  // throws if it does not run here
#if defined(__x86_64__)
  if (level == "amx") return amx::probes();
  if (level == "avx512") return avx512::probes();
  if (level == "avx2") return avx2::probes();
#elif defined(__aarch64__)
  if (level == "neon") return neon::probes();
#endif
  return generic::probes();
}

template <class Fn>
double seconds_of(const Fn& fn) {
  const auto start = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

ProbeMemory::ProbeMemory(std::size_t bytes, bool huge, Pool& pool) : mapped_(bytes + kPastEnd + kHugePage), size_(bytes) {
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  madvise(mapping_, mapped_, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
  data_ = reinterpret_cast<float*>((address + kHugePage - 1) / kHugePage * kHugePage);
  const auto floats = static_cast<std::int64_t>(size_ / 4), slices = (floats + kSlice - 1) / kSlice;
  pool.run(slices, 1, [&](std::int64_t s) { std::fill(data_ + s * kSlice, data_ + std::min(floats, (s + 1) * kSlice), 1.0f); });
}

ProbeMemory::~ProbeMemory() { munmap(mapping_, mapped_); }

double probe_read(Pool& pool, const std::string& isa, const ProbeMemory& memory, std::int64_t bytes, std::int64_t passes, bool prefetch) {
  const ProbeTable& table = probes_for(isa);
  const std::int64_t own = bytes / 4 / kLine * kLine, threads = pool.threads();
  if (own < kLine || passes < 1 || static_cast<std::size_t>(own * threads * 4) > memory.size())
    throw std::invalid_argument("the probe's memory does not hold that much for each thread");
  // One pass: any thread takes any slice. Many: each stays with its own, as they shall be in its cache.
  const std::int64_t slice = passes == 1 ? std::min(own, kSlice) : own, slices = own * threads / slice;
  std::vector<float> sums(static_cast<std::size_t>(slices));
  const double seconds = seconds_of([&] {
    pool.run(slices, 1, [&](std::int64_t s) {
      for (std::int64_t p = 0; p < passes; ++p) sums[static_cast<std::size_t>(s)] += table.read(memory.data() + s * slice, slice / kLine * kLine, prefetch);
    });
  });
  return static_cast<double>(slices * passes * (slice / kLine * kLine) * 4) / seconds;
}

double probe_peak(Pool& pool, const std::string& isa, ProbePeak which, std::int64_t rounds) {
  if (rounds < 1) throw std::invalid_argument("a probe needs at least one round");
  const ProbeTable& table = probes_for(isa);
  const auto loop = which == ProbePeak::dot ? table.dot : table.fma;
  const auto threads = static_cast<std::size_t>(pool.threads());
  std::vector<float> sums(threads);
  std::vector<double> done(threads);
  const double seconds = seconds_of([&] {
    pool.run(static_cast<std::int64_t>(threads), 1, [&](std::int64_t t) {
      done[static_cast<std::size_t>(t)] = loop(rounds, &sums[static_cast<std::size_t>(t)]);
    });
  });
  double operations = 0;
  for (double d : done) operations += d;
  return operations / seconds;
}

struct ProbeMatrix::State {
  State(Pool& pool, const std::string& isa, std::int64_t outputs, std::int64_t inputs, std::int32_t max_rows)
      : rows(max_rows), arena(packed_bytes(WeightType::q4_0, outputs, inputs) + 4096),
        program(pool, kernels_for(isa), arena_bytes(outputs, inputs, max_rows), {}) {
    weight = pack(WeightType::q4_0, outputs, inputs, random_codes(outputs, inputs).data(), arena, pool);
    const View x{0, inputs * 4, static_cast<std::int32_t>(inputs), false};
    const View q8{x.stride * max_rows, q8_stride(inputs), x.dim, false};
    const View out{q8.offset + q8.stride * max_rows, outputs * 4, static_cast<std::int32_t>(outputs), false};
    program.add(make_quantize(x, q8));
    std::vector<Segment> segments;
    segments.push_back({&weight, {}});
    program.add(make_linear(x, q8, out, std::move(segments), nullptr));
    for (std::int32_t r = 0; r < max_rows; ++r)
      for (std::int64_t i = 0; i < inputs; ++i) program.floats(x, r)[i] = static_cast<float>((r + i) % 17) - 8.0f;
  }
  static std::int64_t q8_stride(std::int64_t inputs) { return (inputs + inputs / 4 + inputs / 4 + 63) / 64 * 64; }
  static std::size_t arena_bytes(std::int64_t outputs, std::int64_t inputs, std::int64_t rows) {
    return static_cast<std::size_t>(rows * (inputs * 4 + q8_stride(inputs) + outputs * 4));
  }
  // The file's form: for 32 values a half-precision scale (0x2000: 2^-7) and 16 bytes of nibbles.
  static std::vector<std::uint8_t> random_codes(std::int64_t outputs, std::int64_t inputs) {
    std::vector<std::uint8_t> bytes(file_bytes(WeightType::q4_0, outputs, inputs));
    std::minstd_rand random(1);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = i % 18 == 0 ? 0x00 : i % 18 == 1 ? 0x20 : static_cast<std::uint8_t>(random() >> 8);
    return bytes;
  }
  std::int32_t rows;
  WeightArena arena;
  PackedWeight weight{};
  Program program;
};

ProbeMatrix::ProbeMatrix(Pool& pool, const std::string& isa, std::int64_t outputs, std::int64_t inputs, std::int32_t max_rows) {
  if (max_rows < 1) throw std::invalid_argument("a probe needs at least one row");
  state_ = std::make_unique<State>(pool, isa, outputs, inputs, max_rows);
}
ProbeMatrix::~ProbeMatrix() = default;

double ProbeMatrix::run(std::int32_t rows) {
  if (rows < 1 || rows > state_->rows) throw std::invalid_argument("the probe's matrix was not made for so many rows");
  Frame frame;
  frame.num_tokens = rows;
  state_->program.run(frame, 0, 1);
  return seconds_of([&] { state_->program.run(frame, 1, 2); });
}

std::size_t ProbeMatrix::bytes() const { return packed_bytes(WeightType::q4_0, state_->weight.rows, state_->weight.k); }

}  // namespace yeoul
