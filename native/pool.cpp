#include "pool.h"

#include <chrono>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace yeoul {
namespace {

constexpr std::uint32_t kClosed = 0xffffffffu;       // no chunk of this loop can be claimed
constexpr auto kSpin = std::chrono::microseconds(50);  // longer than the gaps inside a step, shorter than those between

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::uint32_t loop_of(std::uint64_t ticket) { return static_cast<std::uint32_t>(ticket >> 32); }
std::uint32_t chunk_of(std::uint64_t ticket) { return static_cast<std::uint32_t>(ticket); }

}  // namespace

Pool::Pool(int threads) {
  ticket_.store(kClosed);
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (...) {  // the system gives no more threads
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() noexcept {
  stop_.store(true);
  signal_.fetch_add(1);
  signal_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run_chunks(std::int64_t n, std::int64_t grain, Call call, const void* fn) {
  const std::uint64_t next = ((ticket_.load(std::memory_order_relaxed) >> 32) + 1) & 0xffffffffu;
  // The last loop is used up: no claim can succeed until the new ticket opens, so its fields can change.
  ticket_.store(next << 32 | kClosed, std::memory_order_seq_cst);
  const auto chunks = static_cast<std::uint32_t>((n + grain - 1) / grain);
  n_.store(n, std::memory_order_release);
  grain_.store(grain, std::memory_order_release);
  call_.store(call, std::memory_order_release);
  fn_.store(fn, std::memory_order_release);
  chunks_.store(chunks, std::memory_order_release);
  done_.store(0, std::memory_order_release);
  ticket_.store(next << 32, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) {
    signal_.fetch_add(1, std::memory_order_seq_cst);
    signal_.notify_all();
  }
  while (claim_and_run(ticket_.load(std::memory_order_acquire))) {
  }
  for (int spins = 0; done_.load(std::memory_order_acquire) != chunks; ++spins) {
    if (spins < 2000) relax();
    else std::this_thread::yield();  // a worker that holds a chunk may be waiting for this core
  }
  if (threw_.load(std::memory_order_acquire)) {
    threw_.store(false, std::memory_order_relaxed);
    std::rethrow_exception(std::exchange(exception_, nullptr));
  }
}

void Pool::keep_exception() noexcept {
  if (!threw_.exchange(true, std::memory_order_acq_rel)) exception_ = std::current_exception();
}

// Runs one chunk of the ticket's loop; false when none is left.
bool Pool::claim_and_run(std::uint64_t ticket) {
  while (true) {
    if (chunk_of(ticket) == kClosed) return false;
    const std::uint32_t chunks = chunks_.load(std::memory_order_acquire);
    const std::int64_t n = n_.load(std::memory_order_acquire), grain = grain_.load(std::memory_order_acquire);
    const Call call = call_.load(std::memory_order_acquire);
    const void* fn = fn_.load(std::memory_order_acquire);
    if (chunk_of(ticket) >= chunks) return false;
    const std::uint32_t loop = loop_of(ticket);
    if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      const std::int64_t begin = chunk_of(ticket) * grain;
      try {
        call(fn, begin, begin + grain < n ? begin + grain : n);
      } catch (...) {
        keep_exception();
      }
      done_.fetch_add(1, std::memory_order_release);
      return true;
    }
    if (loop_of(ticket) != loop) return false;
  }
}

// Spins a while, then sleeps, until there is a loop after `last`; returns its ticket.
std::uint64_t Pool::wait_for_loop(std::uint32_t last) {
  const auto until = std::chrono::steady_clock::now() + kSpin;
  auto open = [&](std::uint64_t t) { return loop_of(t) != last && chunk_of(t) != kClosed; };
  for (int i = 0;; ++i) {
    const std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if (open(ticket) || stop_.load(std::memory_order_relaxed)) return ticket;
    relax();
    if (i % 64 == 63 && std::chrono::steady_clock::now() > until) break;
  }
  while (true) {
    const std::uint32_t signal = signal_.load(std::memory_order_seq_cst);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const std::uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
    const bool ready = open(ticket) || stop_.load(std::memory_order_seq_cst);
    if (!ready) signal_.wait(signal, std::memory_order_seq_cst);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    if (ready) return ticket;
  }
}

void Pool::work() {
  std::uint32_t last = 0;
  while (true) {
    const std::uint64_t ticket = wait_for_loop(last);
    if (stop_.load(std::memory_order_relaxed)) return;
    last = loop_of(ticket);
    while (claim_and_run(ticket_.load(std::memory_order_acquire))) {
    }
  }
}

}  // namespace yeoul
