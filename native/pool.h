// A pool of threads for the loops of a step. The caller is one of the threads. Knows nothing of what it runs.
//
// Threads claim chunks of a loop from one counter, so one that the operating system takes off a core delays the loop by
// at most the chunk it holds: the caller waits for chunks, never for threads.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace yeoul {

class Pool {
 public:
  // `threads` in all, the caller included; at least 1.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // fn(i) for every i in [0, n), `grain` consecutive ones at a time on one thread. Returns when all are done; if calls
  // threw, the first of their exceptions then goes to the caller. One caller at a time.
  template <class Fn>
  void run(std::int64_t n, std::int64_t grain, const Fn& fn) {
    if (workers_.empty() || n <= grain) {
      for (std::int64_t i = 0; i < n; ++i) fn(i);
      return;
    }
    run_chunks(n, grain, [](const void* f, std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) (*static_cast<const Fn*>(f))(i);
    }, &fn);
  }

 private:
  using Call = void (*)(const void*, std::int64_t, std::int64_t);

  void run_chunks(std::int64_t n, std::int64_t grain, Call call, const void* fn);
  bool claim_and_run(std::uint64_t ticket);
  void keep_exception() noexcept;
  void work();
  void stop() noexcept;
  std::uint64_t wait_for_loop(std::uint32_t last);

  // Loop number (high 32 bits) and next chunk (low 32 bits). A chunk is claimed by compare-and-swap on the whole word,
  // which succeeds only while the loop it was read from is still the current one; the fields below belong to that loop.
  // They are written with release and read with acquire order: who sees a new loop's field also sees that the old
  // ticket is closed, so that its compare-and-swap fails.
  alignas(64) std::atomic<std::uint64_t> ticket_{0};
  std::atomic<std::uint32_t> chunks_{0};
  std::atomic<std::int64_t> n_{0}, grain_{1};
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> fn_{nullptr};
  alignas(64) std::atomic<std::uint32_t> done_{0};
  alignas(64) std::atomic<std::uint32_t> sleepers_{0};
  std::atomic<std::uint32_t> signal_{0};
  std::atomic<bool> stop_{false}, threw_{false};
  std::exception_ptr exception_;  // written by who sets `threw_` first
  std::vector<std::thread> workers_;
};

}  // namespace yeoul
