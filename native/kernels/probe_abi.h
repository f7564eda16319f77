// The loops of the probe, as kernels/abi.h for the kernels: included by files with different flags, so no code here.
#pragma once
#include <cstdint>

namespace yeoul {

// One instruction set's loops. They return a value that depends on all they did.
struct ProbeTable {
  float (*read)(const float* data, std::int64_t floats, bool prefetch);  // a multiple of 128 floats
  double (*dot)(std::int64_t rounds, float* out);   // int8 x int8 products; returns operations, adds and multiplies
  double (*fma)(std::int64_t rounds, float* out);   // float32 multiply-adds; returns operations
};

namespace generic { const ProbeTable& probes(); }
namespace avx2 { const ProbeTable& probes(); }
namespace avx512 { const ProbeTable& probes(); }
namespace amx { const ProbeTable& probes(); }
namespace neon { const ProbeTable& probes(); }

}  // namespace yeoul
