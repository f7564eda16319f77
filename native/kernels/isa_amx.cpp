#include "simd_avx512.h"
#define YEOUL_ISA amx
#define YEOUL_ISA_NAME "amx"
#define YEOUL_AMX
#include "kernels.inl"
