#include "simd_avx512.h"
#define YEOUL_ISA avx512
#define YEOUL_ISA_NAME "avx512"
#include "kernels.inl"
