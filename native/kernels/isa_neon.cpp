#include "simd_neon.h"
#define YEOUL_ISA neon
#define YEOUL_ISA_NAME "neon"
#include "kernels.inl"
