#include "program.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <stdexcept>

namespace yeoul {
namespace {

// Bytes of one token in one head, its scale included.
std::int64_t token_bytes(KVType type, std::int32_t size) {
  const auto i = static_cast<std::size_t>(type);
  return std::int64_t{size} * kKVBytes[i] + kKVScaleBytes[i];
}

// Bytes of one block in one layer.
std::int64_t k_bytes(const KVGroup& g) { return std::int64_t{kBlock} * g.shape.kv_heads * token_bytes(g.shape.k_type, g.shape.key_size); }
std::int64_t v_bytes(const KVGroup& g) { return std::int64_t{kBlock} * g.shape.kv_heads * token_bytes(g.shape.v_type, g.shape.value_size); }
// A block's layers lie side by side: blocks in use fill huge pages one after the other.
std::int64_t block_bytes(const KVGroup& g) { return g.num_layers * (k_bytes(g) + v_bytes(g)); }

}  // namespace

Pages::Pages(std::size_t bytes) : size_(bytes > 0 ? bytes : 1) {
  void* p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::uint8_t*>(p);
#ifdef MADV_HUGEPAGE
  madvise(data_, size_, MADV_HUGEPAGE);  // a hint: kernels without huge pages refuse it
#endif
}

Pages::~Pages() { munmap(data_, size_); }

Program::Program(Pool& pool, const KernelTable& kernels, std::size_t arena_bytes, std::vector<KVGroup> groups)
    : pool_(pool), kernels_(kernels), arena_(arena_bytes), groups_(std::move(groups)), plans_(groups_.size()), planned_(groups_.size()), scratch_(kLogitRows) {
  for (const auto& g : groups_) {
    if (g.shape.key_size > 512 || g.shape.value_size > 512) throw std::invalid_argument("head sizes above 512 are not supported");
    kv_memory_.push_back(std::make_unique<Pages>(static_cast<std::size_t>(g.num_blocks * block_bytes(g))));
  }
}

KVLayout Program::layer(int g, int index) const {
  const KVGroup& group = groups_[static_cast<std::size_t>(g)];
  KVLayout layout = group.shape;
  layout.k = kv_memory_[static_cast<std::size_t>(g)]->data() + index * (k_bytes(group) + v_bytes(group));
  layout.v = layout.k + k_bytes(group);
  layout.k_stride = layout.v_stride = block_bytes(group);
  return layout;
}

std::span<std::uint8_t> Program::block(std::int64_t g, std::int64_t id) const {
  if (g < 0 || g >= static_cast<std::int64_t>(groups_.size())) throw std::out_of_range("there is no such KV group");
  const KVGroup& group = groups_[static_cast<std::size_t>(g)];
  if (id < 1 || id >= group.num_blocks) throw std::out_of_range("there is no such KV block");
  return {kv_memory_[static_cast<std::size_t>(g)]->data() + id * block_bytes(group), static_cast<std::size_t>(block_bytes(group))};
}

void Program::copy_block(std::int64_t g, std::int64_t source, std::int64_t target) {
  const auto from = block(g, source);
  std::copy_n(from.data(), from.size(), block(g, target).data());
}

void Program::run(const Frame& frame, std::size_t first, std::size_t last) {
  std::fill(planned_.begin(), planned_.end(), false);
  last = std::min(last, instructions_.size());
  if (nanoseconds_.empty()) {
    for (std::size_t i = first; i < last; ++i) instructions_[i]->run(*this, frame);
    return;
  }
  auto before = std::chrono::steady_clock::now();
  for (std::size_t i = first; i < last; ++i) {
    instructions_[i]->run(*this, frame);
    const auto now = std::chrono::steady_clock::now();
    nanoseconds_[i] = std::chrono::duration_cast<std::chrono::nanoseconds>(now - before).count();
    before = now;
  }
}

std::vector<std::uint8_t> Program::read(const View& view, std::int64_t rows, std::int64_t row_bytes) const {
  const auto end = rows > 0 ? view.offset + (rows - 1) * view.stride + row_bytes : 0;
  if (rows < 0 || row_bytes < 0 || view.offset < 0 || view.stride < 0 || end > static_cast<std::int64_t>(arena_.size()))
    throw std::out_of_range("the view lies outside the arena");
  std::vector<std::uint8_t> out(static_cast<std::size_t>(rows * row_bytes));
  for (std::int64_t i = 0; i < rows; ++i) std::copy_n(arena_.data() + view.offset + i * view.stride, row_bytes, out.begin() + i * row_bytes);
  return out;
}

float* Program::partials(std::size_t floats) {
  if (partials_.size() < floats) partials_.resize(floats);
  return partials_.data();
}

float* Program::logit_rows(std::size_t floats) {
  if (logits_.size() < floats) logits_.resize(floats);
  return logits_.data();
}

const GroupPlan& Program::attention_plan(int g, int heads, const Frame& frame) {
  const auto index = static_cast<std::size_t>(g);
  if (!planned_[index]) plan_attention(plans_[index], g, heads, frame);
  planned_[index] = true;
  return plans_[index];
}

// Prefill rows become query blocks that walk their splits one after the other; a single token with several splits
// becomes one item per split, so that a long context is shared by all threads. Both reduce in the same order.
void Program::plan_attention(GroupPlan& plan, int g, int heads, const Frame& frame) {
  const std::int32_t window = group(g).window;
  plan.items.clear();
  plan.merges.clear();
  plan.partials = 0;
  const std::int32_t block = std::max(1, kMaxQueries / heads);
  for (std::int32_t r = 0; r < frame.num_rows; ++r) {
    const StepRow& row = frame.rows[r];
    for (std::int32_t token = 0; token < row.tokens; token += block) {
      const std::int32_t count = std::min(block, row.tokens - token);
      const std::int32_t first = window ? std::max(0, row.position + token + 1 - window) : 0;
      const std::int32_t begin = first / kSplitKeys, end = (row.position + token + count - 1) / kSplitKeys + 1;
      if (row.tokens > 1 || end - begin == 1) {
        plan.items.push_back({r, token, count, begin, end, -1});
        continue;
      }
      plan.merges.push_back({r, end - begin, plan.partials});
      for (std::int32_t split = begin; split < end; ++split) plan.items.push_back({r, 0, 1, split, split + 1, plan.partials++});
    }
  }
}

}  // namespace yeoul
