// What the test program is made of: checks that count and print, random numbers, memory between guard pages, digests.
// Knows nothing of what is tested.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "isa.h"

namespace yeoul::test {

struct Tally {
  long passed = 0, failed = 0;
};
Tally& tally();

// The test that runs, for the message of a crash.
void begin(const char* name);
void fail(const char* file, int line, const char* condition, const std::string& about);

[[gnu::format(printf, 1, 2)]] std::string text(const char* format, ...);

// CHECK(condition, printf arguments that say of which case)
#define CHECK(condition, ...)                                                                       \
  do {                                                                                              \
    if (condition) ++::yeoul::test::tally().passed;                                                 \
    else ::yeoul::test::fail(__FILE__, __LINE__, #condition, ::yeoul::test::text(__VA_ARGS__));     \
  } while (0)

// SplitMix64 (Steele, Lea and Flood, 2014): the same numbers on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  int below(int n) { return static_cast<int>(next() % static_cast<std::uint64_t>(n)); }
  int between(int low, int high) { return low + below(high - low + 1); }
  bool coin() { return below(2) == 1; }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  float normal() {  // nearly: the sum of 12 uniform numbers
    double sum = -6.0;
    for (int i = 0; i < 12; ++i) sum += unit();
    return static_cast<float>(sum);
  }
  template <class T>
  T pick(const std::vector<T>& from) { return from[static_cast<std::size_t>(below(static_cast<int>(from.size())))]; }

 private:
  std::uint64_t state_;
};

// Memory that ends at an inaccessible page (`high`) or begins after one, filled with ones: NaN as f16 and f32. What lies
// between the other end and its page is watched for writes.
class GuardedBytes {
 public:
  GuardedBytes(std::size_t bytes, bool high) : bytes_(bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    inner_ = (bytes + page - 1) / page * page;
    mapped_ = inner_ + 2 * page;
    void* p = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) std::abort();
    base_ = static_cast<std::uint8_t*>(p);
    begin_ = base_ + page;
    if (inner_ > 0 && mprotect(begin_, inner_, PROT_READ | PROT_WRITE) != 0) std::abort();
    std::memset(begin_, 0xa5, inner_);
    data_ = high ? begin_ + inner_ - bytes : begin_;
    std::memset(data_, 0xff, bytes);
  }
  ~GuardedBytes() {
    bool clean = true;
    for (const std::uint8_t* p = begin_; p < begin_ + inner_; ++p) clean &= (p >= data_ && p < data_ + bytes_) || *p == 0xa5;
    CHECK(clean, "bytes beside a buffer were written");
    munmap(base_, mapped_);
  }
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;
  std::uint8_t* bytes() { return data_; }

 private:
  std::uint8_t *base_, *begin_, *data_;
  std::size_t bytes_, inner_, mapped_;
};

template <class T>
class Guarded : public GuardedBytes {
 public:
  Guarded(std::size_t n, bool high) : GuardedBytes(n * sizeof(T), high), size_(n) {}
  Guarded(const std::vector<T>& values, bool high) : Guarded(values.size(), high) {
    if (!values.empty()) std::memcpy(bytes(), values.data(), values.size() * sizeof(T));
  }
  T* data() { return reinterpret_cast<T*>(bytes()); }
  T& operator[](std::size_t i) { return data()[i]; }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
};

inline bool same_bits(const void* a, const void* b, std::size_t bytes) { return std::memcmp(a, b, bytes) == 0; }

// All results of a level, hashed in order: levels with a fused multiply-add must agree to the bit.
class Digests {
 public:
  void add(const char* level, const void* data, std::size_t bytes) {
    auto [at, fresh] = hashes_.try_emplace(level, 0xcbf29ce484222325ull);
    const auto* p = static_cast<const std::uint8_t*>(data);
    for (std::size_t i = 0; i < bytes; ++i) at->second = (at->second ^ p[i]) * 0x100000001b3ull;
  }
  void compare_and_print() const;

 private:
  std::map<std::string, std::uint64_t> hashes_;
};
Digests& digests();

// The kernels of every level that runs here.
std::vector<const KernelTable*> levels();

void test_linear(bool quick);
void test_rows(bool quick);
void test_vocabulary(bool quick);
void test_kv_write(bool quick);
void test_attention(bool quick);
void test_pool(bool quick);
void test_sampler(bool quick);

}  // namespace yeoul::test
