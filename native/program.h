// A model lowered to a flat list of kernel calls over one arena of activations, and the state that a step works on.
// Knows shapes, memory and threads; not what a layer or a request is.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/abi.h"
#include "pool.h"
#include "sampler.h"
#include "weights.h"

namespace yeoul {

constexpr int kLogitRows = 32;  // rows of logits that exist at one time

// Zeroed anonymous memory, committed page by page as it is touched.
class Pages {
 public:
  explicit Pages(std::size_t bytes);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::uint8_t* data_;
  std::size_t size_;
};

// Columns of a value: row i begins `offset + i x stride` bytes into the arena. `gathered`: R rows instead of T.
struct View {
  std::int64_t offset;
  std::int64_t stride;
  std::int32_t dim;
  bool gathered;
};

// One sequence's part of a step.
struct StepRow {
  std::int32_t slot;
  std::int32_t begin;     // its first token in the step
  std::int32_t tokens;
  std::int32_t position;  // of its first token
};

// What is wanted of a gathered token.
enum OutputKind : std::int32_t { kOutputSample = 0, kOutputScore = 1, kOutputPool = 2 };

struct RowOutput {
  std::int32_t kind;
  std::int32_t slot;    // whose rules, or whose pooled sum
  std::int32_t target;  // of a score: the token whose log-probability is wanted
  std::int32_t mask;    // of a sample: row of `masks`, or -1
};

// All inputs and outputs of a step. Pointers stay the caller's.
struct Frame {
  std::int32_t num_tokens = 0, num_rows = 0, num_gathered = 0;
  const std::int32_t* tokens = nullptr;     // [T] token ids
  const std::int32_t* positions = nullptr;  // [T]
  const StepRow* rows = nullptr;            // [num_rows], tokens side by side in this order
  const std::int32_t* gathered = nullptr;   // [R] tokens of which something is wanted; those to pool come last
  std::int32_t num_logits = 0;              // of these, how many need logits
  const RowOutput* outputs = nullptr;       // [R]
  const SampleParams* sampling = nullptr;   // [R]
  const LogitRules* const* rules = nullptr; // [slots], null where a slot has none
  const std::uint32_t* masks = nullptr;     // [.., mask_words]
  std::int64_t mask_words = 0;
  double* pooled = nullptr;                 // [slots, hidden] sums of hidden states
  SampleResult* results = nullptr;          // [R]; null: leave the logits of all instead
  float* logits = nullptr;                  // [R, vocab]
  std::uint8_t* row_nan = nullptr;          // [num_rows] set to 1 where a key or value was not a number
};

struct Segment {
  const PackedWeight* weight;
  std::vector<float> bias;  // padded to whole panels, or empty
};

struct KVGroup {
  std::int64_t num_blocks;
  KVLayout shape;                   // without memory
  std::int32_t window;
  std::int32_t num_layers;
  const std::int32_t* tables;       // [slots, max blocks]
  std::int64_t table_stride;
};

class Program;

class Instruction {
 public:
  virtual ~Instruction() = default;
  virtual void run(Program& program, const Frame& frame) = 0;
};

// One unit of attention work: a query block of one row over some key splits, for every KV head.
struct AttendItem {
  std::int32_t row, token, tokens, split_begin, split_end;
  std::int64_t partial;  // index of the split's first partial, or -1
};

struct MergeItem {
  std::int32_t row, splits;
  std::int64_t partial;
};

struct GroupPlan {
  std::vector<AttendItem> items;
  std::vector<MergeItem> merges;
  std::int64_t partials = 0;
};

class Program {
 public:
  Program(Pool& pool, const KernelTable& kernels, std::size_t arena_bytes, std::vector<KVGroup> groups);

  void add(std::unique_ptr<Instruction> instruction) { instructions_.push_back(std::move(instruction)); }
  std::size_t size() const { return instructions_.size(); }

  // Runs instructions [first, last) on the frame. Not reentrant.
  void run(const Frame& frame, std::size_t first, std::size_t last);

  // Measure every instruction of the runs from now on, or stop: the clock is read once between two instructions.
  void time(bool on) { nanoseconds_.assign(on ? instructions_.size() : 0, 0); }
  // Of each instruction in the last run that was measured.
  const std::vector<std::int64_t>& nanoseconds() const { return nanoseconds_; }

  // The first `row_bytes` of rows [0, rows) of a view as the last run left them. Throws std::out_of_range past the arena.
  std::vector<std::uint8_t> read(const View& view, std::int64_t rows, std::int64_t row_bytes) const;

  Pool& pool() { return pool_; }
  const KernelTable& kernels() const { return kernels_; }
  float* floats(const View& view, std::int64_t row) { return reinterpret_cast<float*>(bytes(view, row)); }
  std::uint8_t* bytes(const View& view, std::int64_t row) { return arena_.data() + view.offset + row * view.stride; }
  std::int64_t rows(const View& view, const Frame& frame) const { return view.gathered ? frame.num_gathered : frame.num_tokens; }

  const KVGroup& group(int g) const { return groups_[static_cast<std::size_t>(g)]; }
  KVLayout layer(int g, int index) const;
  // One block as it lies: for each layer of the group its keys, then its values. Throws std::out_of_range for a block
  // that does not exist or is null, and so does copy_block.
  std::span<std::uint8_t> block(std::int64_t g, std::int64_t id) const;
  void copy_block(std::int64_t g, std::int64_t source, std::int64_t target);
  // The attention work of this step for a group with `heads` query heads per KV head: made once, used by all its layers.
  const GroupPlan& attention_plan(int g, int heads, const Frame& frame);
  float* partials(std::size_t floats);
  float* logit_rows(std::size_t floats);
  SampleScratch& scratch(int i) { return scratch_[static_cast<std::size_t>(i)]; }

  // fn(row) for every row, in parallel when there is work for it: `cost` is about the number of values a row touches.
  template <class Fn>
  void for_rows(std::int64_t rows, std::int64_t cost, const Fn& fn) {
    const std::int64_t grain = 16384 / (cost + 1) + 1;
    pool_.run(rows, grain, fn);
  }

 private:
  void plan_attention(GroupPlan& plan, int g, int heads, const Frame& frame);

  Pool& pool_;
  const KernelTable& kernels_;
  Pages arena_;
  std::vector<KVGroup> groups_;
  std::vector<std::unique_ptr<Pages>> kv_memory_;  // one per group
  std::vector<GroupPlan> plans_;
  std::vector<bool> planned_;
  std::vector<float> partials_, logits_;
  std::vector<SampleScratch> scratch_;
  std::vector<std::unique_ptr<Instruction>> instructions_;
  std::vector<std::int64_t> nanoseconds_;  // empty: not measuring
};

std::unique_ptr<Instruction> make_embed(const PackedWeight* weight, View out);
std::unique_ptr<Instruction> make_rms_norm(View x, View out, std::vector<float> weight, float eps, int heads);
std::unique_ptr<Instruction> make_quantize(View x, View q8);
// `x` and `q8`: the same input as floats and quantized; each is used by the segments that need it.
std::unique_ptr<Instruction> make_linear(View x, View q8, View out, std::vector<Segment> segments, const View* residual);
std::unique_ptr<Instruction> make_gated_linear(View x, View q8, View out, Segment gate, Segment up, Act act);
// `table`: [positions, 2 x half] cosines then sines.
std::unique_ptr<Instruction> make_rope(View x, View out, int head_size, const float* table, int half, bool interleaved);
// `k_scale`, `v_scale`: static, of the fp8 cache types.
std::unique_ptr<Instruction> make_attention(View q, View k, View v, View out, int group, int layer, float scale, float k_scale, float v_scale);
std::unique_ptr<Instruction> make_gated(View x, View out, Act act);
std::unique_ptr<Instruction> make_add(View a, View b, View out);
std::unique_ptr<Instruction> make_scale(View x, View out, float factor);
std::unique_ptr<Instruction> make_gather(View x, View out);
std::unique_ptr<Instruction> make_logits(View x, View q8, const PackedWeight* weight);

}  // namespace yeoul
