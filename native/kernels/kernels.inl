// All kernels, written once over a simd_*.h and compiled once per instruction set with YEOUL_ISA naming the namespace.
// Everything but kernels() has internal linkage, and no standard library code is used: a function that the linker
// merged with another file's copy could run instructions that this processor lacks.
//
// The numerics contract (docs/dev/ARCHITECTURE.md): what a row gets depends on that row only. Sums over k go in
// ascending groups whatever the number of rows; one polynomial per function; no contraction but explicit f_fma.
#include "abi.h"
#include "probe_abi.h"

namespace yeoul::YEOUL_ISA {
namespace {

constexpr float kInf = __builtin_inff(), kLargest = 3.402823466e38f;

template <class T>
constexpr T min_of(T a, T b) { return a < b ? a : b; }
template <class T>
constexpr T max_of(T a, T b) { return a > b ? a : b; }

#include "math.inl"
#include "rows.inl"
#include "linear.inl"
#include "attention.inl"
#include "probe.inl"

}  // namespace

const KernelTable& kernels() {
  static constexpr KernelTable table{YEOUL_ISA_NAME, quantize, rms_norm, rope,  gated, add,    scale,
                                     linear,         kv_write, attend,   merge, argmax, exp_sum};
  return table;
}

const ProbeTable& probes() {
#ifdef YEOUL_AMX
  static constexpr ProbeTable table{probe_read, probe_tiles, probe_fma};
#else
  static constexpr ProbeTable table{probe_read, probe_dot, probe_fma};
#endif
  return table;
}

}  // namespace yeoul::YEOUL_ISA
