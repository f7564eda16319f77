#include "simd_generic.h"
#define YEOUL_ISA generic
#define YEOUL_ISA_NAME "generic"
#include "kernels.inl"
