#include "isa.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace yeoul {

#if defined(__x86_64__)
namespace {

// Has the processor int8 tiles, and does the system let this process use their registers? It must be asked once.
bool amx_allowed() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl of Linux
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tiles = d >> 24 & 1, int8 = d >> 25 & 1;
  return tiles && int8 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace
#endif

std::vector<std::string> isa_levels() {
  std::vector<std::string> levels;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
    if (amx_allowed()) levels.push_back("amx");
    levels.push_back("avx512");
  }
  if (avx2) levels.push_back("avx2");
#elif defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) levels.push_back("neon");
#endif
  levels.push_back("generic");
  return levels;
}

const KernelTable& kernels_for(const std::string& level) {
  std::string known;
  for (const auto& name : isa_levels()) {
    if (name != level) {
      known += known.empty() ? name : ", " + name;
      continue;
    }
#if defined(__x86_64__)
    if (name == "amx") return amx::kernels();
    if (name == "avx512") return avx512::kernels();
    if (name == "avx2") return avx2::kernels();
#elif defined(__aarch64__)
    if (name == "neon") return neon::kernels();
#endif
    return generic::kernels();
  }
  throw std::invalid_argument("kernel level '" + level + "' does not run on this processor; it runs " + known);
}

}  // namespace yeoul
