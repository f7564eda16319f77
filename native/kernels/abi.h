// What crosses between the program and the kernels: plain structs and one table of functions per instruction set.
// Included by translation units built with different flags, so it must define no code: no inline functions, no
// templates, no standard headers beyond the integer types.
#pragma once
#include <cstdint>

namespace yeoul {

constexpr int kPanel = 16;      // outputs of a weight panel
constexpr int kGroup = 32;      // values that share an activation scale
constexpr int kBlock = 16;      // tokens of a KV block: one vector of keys
constexpr int kTileKeys = 64;   // keys of one online-softmax update
constexpr int kSplitKeys = 512; // keys of one partial result; tiles and splits are aligned to absolute positions
constexpr int kMaxQueries = 12; // (token, head) pairs that share one pass over the keys

// How a packed weight stores its values. The numbers are GGUF's tensor types.
enum class WeightType : std::int32_t {
  f32 = 0, f16 = 1, q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q4_k = 12, q5_k = 13, q6_k = 14, bf16 = 30,
};

enum class Act : std::int32_t { silu = 0, gelu_tanh = 1 };
enum class KVType : std::int32_t { f16 = 0, f32 = 1, bf16 = 2, int8 = 3, fp8_e4m3 = 4, fp8_e5m2 = 5 };
// By KVType: bytes of a value, and of a token's scale in one head (f16: value = code x scale). The scales of a block's
// 16 tokens follow the head's values, so whatever moves a block moves them.
constexpr int kKVBytes[] = {2, 4, 2, 1, 1, 1};
constexpr int kKVScaleBytes[] = {0, 0, 0, 2, 0, 0};

// An activation row quantized to int8 per 32 values lies in memory as
//   q [k] int8 | d [k/32] float | dsum [k/32] float = d x sum of the group's q | isum [k/16] int32 = sums of q.
// `k` is a multiple of 32.

// A panel of 16 outputs over rows [row_begin, row_end): y = x W^T (+ bias) (+ residual), or act(gate) x up.
struct LinearTask {
  WeightType type;
  WeightType up_type;
  const std::uint8_t* panel;     // packed panel (native/weights.h)
  const std::uint8_t* up_panel;  // the second panel of a gated pair, else null
  std::int32_t k;
  const std::uint8_t* q8;        // quantized rows (null for float weights)
  std::int64_t q8_stride;        // bytes
  const float* x;                // float rows (null for quantized weights)
  std::int64_t x_stride;         // floats
  const float* bias;             // 16 values or null
  const float* up_bias;
  const float* residual;         // or null; same stride as y
  float* y;
  std::int64_t y_stride;         // floats
  std::int32_t columns;          // 1..16: outputs of this panel that exist
  Act act;
  std::int32_t row_begin, row_end;
};

struct KVLayout {
  std::uint8_t* k;            // block 0: [kv head]([key_size][16] of k_type, [16] scales)
  std::uint8_t* v;            // block 0: [kv head]([16][value_size] of v_type, [16] scales)
  KVType k_type, v_type;
  std::int32_t kv_heads, key_size, value_size;
  std::int64_t k_stride, v_stride;  // bytes from a block to the next
  float k_scale, v_scale;           // static, of the fp8 types only: value = code x scale
};

// One query block: `tokens` consecutive tokens of one sequence x `heads` query heads of one KV head, over the key
// splits [split_begin, split_end). Without `partial` the merged, normalized result goes to `out`; with it, the
// split's (m, l, acc[value_size]) of each head is left there for `merge`.
struct AttendTask {
  KVLayout kv;
  const std::int32_t* table;  // the sequence's block ids
  const float* q;             // first token, first head
  std::int64_t q_stride;      // floats between tokens
  float* out;
  std::int64_t out_stride;
  float* partial;
  float scale;
  std::int32_t kv_head, heads, tokens;
  std::int32_t position;      // of the first token
  std::int32_t window;        // 0: none
  std::int32_t split_begin, split_end;
};

struct KernelTable {
  const char* name;
  void (*quantize)(const float* x, std::int32_t k, std::uint8_t* out);
  void (*rms_norm)(const float* x, const float* weight, float eps, std::int32_t n, float* out);
  // pairs (2i, 2i+1) if interleaved, else (i, i + half); cos_sin: [half] cosines, [half] sines
  void (*rope)(const float* x, std::int32_t heads, std::int32_t head_size, const float* cos_sin, std::int32_t half,
               bool interleaved, float* out);
  void (*gated)(const float* gate, const float* up, std::int32_t n, Act act, float* out);
  void (*add)(const float* a, const float* b, std::int32_t n, float* out);
  void (*scale)(const float* x, float factor, std::int32_t n, float* out);
  void (*linear)(const LinearTask& task);
  // Returns false if a value was not a number (stored as 0). Values outside the type's range are stored as its largest.
  bool (*kv_write)(const KVLayout& kv, std::int32_t block, std::int32_t offset, const float* k, const float* v);
  void (*attend)(const AttendTask& task);
  // `splits` partials of one head, ascending, each 2 + value_size floats, `stride` floats apart
  void (*merge)(const float* partial, std::int64_t stride, std::int32_t splits, std::int32_t value_size, float* out);
  // Highest value and its lowest index; returns false if a value is NaN or +inf, or all are -inf.
  bool (*argmax)(const float* x, std::int32_t n, float* value, std::int32_t* index);
  // out[i] = exp((x[i] - max) x factor); returns their sum, added in fixed partitions. `out` may be null.
  double (*exp_sum)(const float* x, std::int32_t n, float max, float factor, float* out);
};

namespace generic { const KernelTable& kernels(); }
namespace avx2 { const KernelTable& kernels(); }
namespace avx512 { const KernelTable& kernels(); }
namespace amx { const KernelTable& kernels(); }  // avx512 with int8 tiles: equal bits
namespace neon { const KernelTable& kernels(); }

}  // namespace yeoul
