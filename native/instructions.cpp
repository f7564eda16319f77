// The instructions of a program: each prepares kernel calls and spreads them over the pool.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "program.h"

namespace yeoul {
namespace {

class Embed final : public Instruction {
 public:
  Embed(const PackedWeight* weight, View out) : weight_(weight), out_(out) {}
  void run(Program& p, const Frame& f) override {
    p.for_rows(f.num_tokens, 8 * out_.dim, [&](std::int64_t t) { unpack_row(*weight_, f.tokens[t], p.floats(out_, t)); });
  }

 private:
  const PackedWeight* weight_;
  View out_;
};

class RmsNorm final : public Instruction {
 public:
  RmsNorm(View x, View out, std::vector<float> weight, float eps, int heads)
      : x_(x), out_(out), weight_(std::move(weight)), eps_(eps), heads_(heads) {}
  void run(Program& p, const Frame& f) override {
    const std::int32_t size = x_.dim / heads_;
    p.for_rows(p.rows(x_, f), x_.dim, [&](std::int64_t t) {
      for (int h = 0; h < heads_; ++h)
        p.kernels().rms_norm(p.floats(x_, t) + h * size, weight_.data(), eps_, size, p.floats(out_, t) + h * size);
    });
  }

 private:
  View x_, out_;
  std::vector<float> weight_;
  float eps_;
  int heads_;
};

class Quantize final : public Instruction {
 public:
  Quantize(View x, View q8) : x_(x), q8_(q8) {}
  void run(Program& p, const Frame& f) override {
    p.for_rows(p.rows(x_, f), 2 * x_.dim, [&](std::int64_t t) { p.kernels().quantize(p.floats(x_, t), x_.dim, p.bytes(q8_, t)); });
  }

 private:
  View x_, q8_;
};

// Rows of activations that one pass over the panels serves: so many that their quantized form stays in the L2 cache.
std::int64_t row_block(std::int64_t k) { return std::max<std::int64_t>(64, (std::int64_t{384} << 10) / (k + k / 2) / 16 * 16); }

// Calls fn(panel, row_begin, row_end) for all panels and rows, threads claiming panels; rows outermost.
template <class Fn>
void for_panels(Pool& pool, std::int64_t panels, std::int64_t rows, std::int64_t k, const Fn& fn) {
  const std::int64_t block = row_block(k), blocks = (rows + block - 1) / block;
  const std::int64_t grain = std::max<std::int64_t>(1, panels / (pool.threads() * 8));
  for (std::int64_t b = 0; b < blocks; ++b) {
    const auto begin = static_cast<std::int32_t>(b * block), end = static_cast<std::int32_t>(std::min(rows, (b + 1) * block));
    pool.run(panels, grain, [&](std::int64_t panel) { fn(panel, begin, end); });
  }
}

LinearTask linear_task(Program& p, const Segment& segment, const View& x, const View& q8) {
  LinearTask task{};
  task.type = segment.weight->type;
  task.k = static_cast<std::int32_t>(segment.weight->k);
  task.q8 = p.bytes(q8, 0);
  task.q8_stride = q8.stride;
  task.x = p.floats(x, 0);
  task.x_stride = x.stride / 4;
  return task;
}

const float* bias_of(const Segment& segment, std::int64_t panel) { return segment.bias.empty() ? nullptr : segment.bias.data() + panel * kPanel; }

std::int32_t columns_of(const PackedWeight& weight, std::int64_t panel) {
  return static_cast<std::int32_t>(std::min<std::int64_t>(kPanel, weight.rows - panel * kPanel));
}

class Linear final : public Instruction {
 public:
  Linear(View x, View q8, View out, std::vector<Segment> segments, const View* residual)
      : x_(x), q8_(q8), out_(out), segments_(std::move(segments)), has_residual_(residual != nullptr) {
    if (residual) residual_ = *residual;
    for (const auto& s : segments_) panels_ += s.weight->panels();
  }
  void run(Program& p, const Frame& f) override {
    for_panels(p.pool(), panels_, p.rows(out_, f), x_.dim, [&](std::int64_t panel, std::int32_t begin, std::int32_t end) {
      std::int64_t column = 0;
      std::size_t s = 0;
      for (; panel >= segments_[s].weight->panels(); ++s) {
        panel -= segments_[s].weight->panels();
        column += segments_[s].weight->rows;
      }
      LinearTask task = linear_task(p, segments_[s], x_, q8_);
      task.panel = segments_[s].weight->panel(panel);
      task.bias = bias_of(segments_[s], panel);
      task.columns = columns_of(*segments_[s].weight, panel);
      column += panel * kPanel;
      task.y = p.floats(out_, 0) + column;
      task.y_stride = out_.stride / 4;
      if (has_residual_) task.residual = p.floats(residual_, 0) + column;
      task.row_begin = begin;
      task.row_end = end;
      p.kernels().linear(task);
    });
  }

 private:
  View x_, q8_, out_, residual_{};
  std::vector<Segment> segments_;
  bool has_residual_;
  std::int64_t panels_ = 0;
};

class GatedLinear final : public Instruction {
 public:
  GatedLinear(View x, View q8, View out, Segment gate, Segment up, Act act)
      : x_(x), q8_(q8), out_(out), gate_(std::move(gate)), up_(std::move(up)), act_(act) {}
  void run(Program& p, const Frame& f) override {
    for_panels(p.pool(), gate_.weight->panels(), p.rows(out_, f), x_.dim, [&](std::int64_t panel, std::int32_t begin, std::int32_t end) {
      LinearTask task = linear_task(p, gate_, x_, q8_);
      task.panel = gate_.weight->panel(panel);
      task.up_panel = up_.weight->panel(panel);
      task.up_type = up_.weight->type;
      task.bias = bias_of(gate_, panel);
      task.up_bias = bias_of(up_, panel);
      task.columns = columns_of(*gate_.weight, panel);
      task.act = act_;
      task.y = p.floats(out_, 0) + panel * kPanel;
      task.y_stride = out_.stride / 4;
      task.row_begin = begin;
      task.row_end = end;
      p.kernels().linear(task);
    });
  }

 private:
  View x_, q8_, out_;
  Segment gate_, up_;
  Act act_;
};

class Rope final : public Instruction {
 public:
  Rope(View x, View out, int head_size, const float* table, int half, bool interleaved)
      : x_(x), out_(out), head_size_(head_size), table_(table), half_(half), interleaved_(interleaved) {}
  void run(Program& p, const Frame& f) override {
    p.for_rows(f.num_tokens, 2 * x_.dim, [&](std::int64_t t) {
      const float* cos_sin = table_ + static_cast<std::int64_t>(f.positions[t]) * 2 * half_;
      p.kernels().rope(p.floats(x_, t), x_.dim / head_size_, head_size_, cos_sin, half_, interleaved_, p.floats(out_, t));
    });
  }

 private:
  View x_, out_;
  int head_size_;
  const float* table_;
  int half_;
  bool interleaved_;
};

class Attention final : public Instruction {
 public:
  Attention(View q, View k, View v, View out, int group, int layer, float scale, float k_scale, float v_scale)
      : q_(q), k_(k), v_(v), out_(out), group_(group), layer_(layer), scale_(scale), k_scale_(k_scale), v_scale_(v_scale) {}

  void run(Program& p, const Frame& f) override {
    KVLayout kv = p.layer(group_, layer_);
    kv.k_scale = k_scale_;
    kv.v_scale = v_scale_;
    write(p, f, kv);
    attend(p, f, kv);
  }

 private:
  const std::int32_t* table(const Program& p, const StepRow& row) const {
    return p.group(group_).tables + row.slot * p.group(group_).table_stride;
  }

  void write(Program& p, const Frame& f, const KVLayout& kv) {
    for (std::int32_t r = 0; r < f.num_rows; ++r) {
      const StepRow& row = f.rows[r];
      const std::int32_t* blocks = table(p, row);
      p.for_rows(row.tokens, 8 * (k_.dim + v_.dim), [&](std::int64_t t) {
        const auto position = row.position + static_cast<std::int32_t>(t);
        if (!p.kernels().kv_write(kv, blocks[position / kBlock], position % kBlock, p.floats(k_, row.begin + t), p.floats(v_, row.begin + t)))
          std::atomic_ref(f.row_nan[r]).store(1, std::memory_order_relaxed);
      });
    }
  }

  void attend(Program& p, const Frame& f, const KVLayout& kv) {
    const std::int32_t heads = q_.dim / kv.key_size / kv.kv_heads;
    const GroupPlan& plan = p.attention_plan(group_, heads, f);
    const std::int64_t width = 2 + kv.value_size, per_partial = width * heads;
    float* partials = p.partials(static_cast<std::size_t>(plan.partials * kv.kv_heads * per_partial));
    const auto items = static_cast<std::int64_t>(plan.items.size());
    p.pool().run(items * kv.kv_heads, 1, [&](std::int64_t i) {
      const AttendItem& item = plan.items[static_cast<std::size_t>(i / kv.kv_heads)];
      const StepRow& row = f.rows[item.row];
      AttendTask task{};
      task.kv = kv;
      task.kv_head = static_cast<std::int32_t>(i % kv.kv_heads);
      task.table = table(p, row);
      task.q = p.floats(q_, row.begin + item.token) + task.kv_head * heads * kv.key_size;
      task.q_stride = q_.stride / 4;
      task.out = p.floats(out_, row.begin + item.token) + task.kv_head * heads * kv.value_size;
      task.out_stride = out_.stride / 4;
      task.partial = item.partial < 0 ? nullptr : partials + (item.partial * kv.kv_heads + task.kv_head) * per_partial;
      task.scale = scale_;
      task.heads = heads;
      task.tokens = item.tokens;
      task.position = row.position + item.token;
      task.window = p.group(group_).window;
      task.split_begin = item.split_begin;
      task.split_end = item.split_end;
      p.kernels().attend(task);
    });
    const auto merges = static_cast<std::int64_t>(plan.merges.size());
    p.for_rows(merges * kv.kv_heads * heads, 8 * width, [&](std::int64_t i) {
      const MergeItem& item = plan.merges[static_cast<std::size_t>(i / (kv.kv_heads * heads))];
      const std::int64_t head = i % (kv.kv_heads * heads);
      const float* first = partials + (item.partial * kv.kv_heads + head / heads) * per_partial + head % heads * width;
      float* out = p.floats(out_, f.rows[item.row].begin) + head * kv.value_size;
      p.kernels().merge(first, kv.kv_heads * per_partial, item.splits, kv.value_size, out);
    });
  }

  View q_, k_, v_, out_;
  int group_, layer_;
  float scale_, k_scale_, v_scale_;
};

class Gated final : public Instruction {
 public:
  Gated(View x, View out, Act act) : x_(x), out_(out), act_(act) {}
  void run(Program& p, const Frame& f) override {
    p.for_rows(p.rows(x_, f), 8 * x_.dim, [&](std::int64_t t) {
      const float* x = p.floats(x_, t);
      p.kernels().gated(x, x + out_.dim, out_.dim, act_, p.floats(out_, t));
    });
  }

 private:
  View x_, out_;
  Act act_;
};

class Add final : public Instruction {
 public:
  Add(View a, View b, View out) : a_(a), b_(b), out_(out) {}
  void run(Program& p, const Frame& f) override {
    p.for_rows(p.rows(a_, f), a_.dim, [&](std::int64_t t) { p.kernels().add(p.floats(a_, t), p.floats(b_, t), a_.dim, p.floats(out_, t)); });
  }

 private:
  View a_, b_, out_;
};

class Scale final : public Instruction {
 public:
  Scale(View x, View out, float factor) : x_(x), out_(out), factor_(factor) {}
  void run(Program& p, const Frame& f) override {
    p.for_rows(p.rows(x_, f), x_.dim, [&](std::int64_t t) { p.kernels().scale(p.floats(x_, t), factor_, x_.dim, p.floats(out_, t)); });
  }

 private:
  View x_, out_;
  float factor_;
};

class Gather final : public Instruction {
 public:
  Gather(View x, View out) : x_(x), out_(out) {}
  void run(Program& p, const Frame& f) override {
    for (std::int32_t i = 0; i < f.num_gathered; ++i)
      std::memcpy(p.floats(out_, i), p.floats(x_, f.gathered[i]), static_cast<std::size_t>(x_.dim) * sizeof(float));
  }

 private:
  View x_, out_;
};

// Logits in tiles of rows, each reduced (sampled, scored) before the next is computed: never more than kLogitRows x
// vocabulary. Rows to pool need no logits: their inputs are added to their slots' sums.
class Logits final : public Instruction {
 public:
  Logits(View x, View q8, const PackedWeight* weight) : x_(x), q8_(q8), segment_{weight, {}} {}

  void run(Program& p, const Frame& f) override {
    const std::int64_t vocab = segment_.weight->rows;
    const std::int32_t rows = f.results ? f.num_logits : f.num_gathered;
    // Rows of an odd number of cache lines, for the same reason as in yeoul/exec/layout.py.
    const std::int64_t stride = f.results ? ((vocab + 15) / 16 | 1) * 16 : vocab;
    for (std::int32_t begin = 0; begin < rows; begin += kLogitRows) {
      const std::int32_t count = std::min(kLogitRows, rows - begin);
      float* logits = f.results ? p.logit_rows(static_cast<std::size_t>(stride * kLogitRows)) : f.logits + begin * vocab;
      compute(p, begin, count, logits, stride);
      if (!f.results) continue;
      p.pool().run(count, 1, [&](std::int64_t i) {
        f.results[begin + i] = reduce(p, f, begin + static_cast<std::int32_t>(i), logits + i * stride, p.scratch(static_cast<int>(i)));
      });
    }
    if (f.results) pool(p, f);
  }

 private:
  SampleResult reduce(Program& p, const Frame& f, std::int32_t row, const float* logits, SampleScratch& scratch) const {
    const auto vocab = static_cast<std::int32_t>(segment_.weight->rows);
    const RowOutput& output = f.outputs[row];
    if (output.kind == kOutputScore) return score(logits, vocab, output.target, f.sampling[row].num_logprobs, p.kernels(), scratch);
    const RowEdits edits{f.rules[output.slot], output.mask < 0 ? nullptr : f.masks + output.mask * f.mask_words};
    return sample(logits, vocab, f.sampling[row], edits, p.kernels(), scratch);
  }

  // One row after the other, in double: a sum does not depend on how its tokens were spread over steps.
  void pool(Program& p, const Frame& f) const {
    for (std::int32_t row = f.num_logits; row < f.num_gathered; ++row) {
      const float* x = p.floats(x_, row);
      double* sum = f.pooled + static_cast<std::int64_t>(f.outputs[row].slot) * x_.dim;
      for (std::int32_t i = 0; i < x_.dim; ++i) sum[i] += x[i];
    }
  }

  void compute(Program& p, std::int32_t begin, std::int32_t count, float* logits, std::int64_t stride) {
    const PackedWeight& weight = *segment_.weight;
    for_panels(p.pool(), weight.panels(), count, weight.k, [&](std::int64_t panel, std::int32_t row_begin, std::int32_t row_end) {
      LinearTask task = linear_task(p, segment_, x_, q8_);
      task.q8 += begin * task.q8_stride;
      task.x += begin * task.x_stride;
      task.panel = weight.panel(panel);
      task.columns = columns_of(weight, panel);
      task.y = logits + panel * kPanel;
      task.y_stride = stride;
      task.row_begin = row_begin;
      task.row_end = row_end;
      p.kernels().linear(task);
    });
  }

  View x_, q8_;
  Segment segment_;
};

}  // namespace

std::unique_ptr<Instruction> make_embed(const PackedWeight* weight, View out) { return std::make_unique<Embed>(weight, out); }
std::unique_ptr<Instruction> make_rms_norm(View x, View out, std::vector<float> weight, float eps, int heads) {
  return std::make_unique<RmsNorm>(x, out, std::move(weight), eps, heads);
}
std::unique_ptr<Instruction> make_quantize(View x, View q8) { return std::make_unique<Quantize>(x, q8); }
std::unique_ptr<Instruction> make_linear(View x, View q8, View out, std::vector<Segment> segments, const View* residual) {
  return std::make_unique<Linear>(x, q8, out, std::move(segments), residual);
}
std::unique_ptr<Instruction> make_gated_linear(View x, View q8, View out, Segment gate, Segment up, Act act) {
  return std::make_unique<GatedLinear>(x, q8, out, std::move(gate), std::move(up), act);
}
std::unique_ptr<Instruction> make_rope(View x, View out, int head_size, const float* table, int half, bool interleaved) {
  return std::make_unique<Rope>(x, out, head_size, table, half, interleaved);
}
std::unique_ptr<Instruction> make_attention(View q, View k, View v, View out, int group, int layer, float scale, float k_scale, float v_scale) {
  return std::make_unique<Attention>(q, k, v, out, group, layer, scale, k_scale, v_scale);
}
std::unique_ptr<Instruction> make_gated(View x, View out, Act act) { return std::make_unique<Gated>(x, out, act); }
std::unique_ptr<Instruction> make_add(View a, View b, View out) { return std::make_unique<Add>(a, b, out); }
std::unique_ptr<Instruction> make_scale(View x, View out, float factor) { return std::make_unique<Scale>(x, out, factor); }
std::unique_ptr<Instruction> make_gather(View x, View out) { return std::make_unique<Gather>(x, out); }
std::unique_ptr<Instruction> make_logits(View x, View q8, const PackedWeight* weight) { return std::make_unique<Logits>(x, q8, weight); }

}  // namespace yeoul
