// The pool: every index exactly once, in any size of loop, at any pace; exceptions come back.
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "pool.h"

namespace yeoul::test {
namespace {

// Counts the calls for each index without atomics: two threads on one index are a data race that a sanitizer reports.
bool each_once(Pool& pool, std::int64_t n, std::int64_t grain) {
  std::vector<int> calls(static_cast<std::size_t>(n), 0);
  pool.run(n, grain, [&](std::int64_t i) { ++calls[static_cast<std::size_t>(i)]; });
  for (const int c : calls)
    if (c != 1) return false;
  return true;
}

void test_grains(Pool& pool) {
  for (std::int64_t n = 0; n < 40; ++n)
    for (const std::int64_t grain : {1, 2, 3, 7, 16, 39, 40, 1000}) CHECK(each_once(pool, n, grain), "%d threads: %ld by %ld", pool.threads(), static_cast<long>(n), static_cast<long>(grain));
  CHECK(each_once(pool, 100000, 1), "%d threads: many chunks", pool.threads());
}

// What one loop writes the next one reads, without a pause between: a late worker must not run with the next loop's work.
void test_tiny_loops(Pool& pool, int loops) {
  constexpr std::int64_t kWidth = 24;
  std::vector<std::int64_t> values(kWidth, 0);
  Random random(9);
  for (int loop = 0; loop < loops; ++loop) {
    const std::int64_t n = random.between(1, kWidth), grain = random.between(1, 4);
    pool.run(n, grain, [&values, loop](std::int64_t i) { values[static_cast<std::size_t>(i)] += loop + i; });
    for (std::int64_t i = n; i < kWidth; ++i) values[static_cast<std::size_t>(i)] += loop + i;
  }
  bool right = true;
  for (std::int64_t i = 0; i < kWidth; ++i) right &= values[static_cast<std::size_t>(i)] == static_cast<std::int64_t>(loops) * (loops - 1) / 2 + loops * i;
  CHECK(right, "%d threads: sums after %d loops", pool.threads(), loops);
}

// Pauses around the time that workers spin before they sleep.
void test_pauses(Pool& pool, int loops) {
  for (int i = 0; i < loops; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(i % 16 * 12));
    CHECK(each_once(pool, 9, 1), "%d threads after a pause", pool.threads());
  }
}

void test_exceptions(Pool& pool) {
  for (int i = 0; i < 50; ++i) {
    std::atomic<int> ran{0};
    std::string message;
    try {
      pool.run(64, 1, [&](std::int64_t at) {
        ++ran;
        if (at % 8 == i % 8) throw std::runtime_error("thrown in a loop");
      });
    } catch (const std::runtime_error& error) {
      message = error.what();
    }
    CHECK(message == "thrown in a loop", "%d threads: an exception is lost", pool.threads());
    CHECK(pool.threads() == 1 || ran == 64, "%d threads: %d of 64 ran", pool.threads(), ran.load());
    CHECK(each_once(pool, 64, 2), "%d threads: the loop after an exception", pool.threads());
  }
}

}  // namespace

void test_pool(bool quick) {
  for (int threads = 1; threads <= 4; ++threads) {
    Pool pool(threads);
    CHECK(pool.threads() == threads, "%d", threads);
    test_grains(pool);
    test_tiny_loops(pool, quick ? 500 : 5000);
    test_pauses(pool, quick ? 20 : 200);
    test_exceptions(pool);
  }
  for (int i = 0; i < 30; ++i) {  // end while workers start, spin or sleep
    Pool pool(3);
    if (i % 3) CHECK(each_once(pool, 10, 1), "a short life");
    if (i % 3 == 2) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace yeoul::test
