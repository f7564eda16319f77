#include "simd_avx2.h"
#define YEOUL_ISA avx2
#define YEOUL_ISA_NAME "avx2"
#include "kernels.inl"
