// 16 lanes of float and int32, 64 bytes of weight codes: AVX-512 F/BW/DQ/VL with VNNI.
// All simd_*.h define the same names with the same lane order, so kernels are written once.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int kRowTile = 8;       // rows that share one unpacked weight group
constexpr int kQueryTile = 12;    // queries that share one pass over the keys
constexpr int kSums = 24;         // vectors that are summed side by side in attention: what the registers hold
constexpr bool kSignedW8 = false; // does dot4_w8 treat codes as code - 128?

struct F { __m512 v; };
struct I { __m512i v; };
struct U8 { __m512i v; };

inline F f_zero() { return {_mm512_setzero_ps()}; }
inline F f_set1(float x) { return {_mm512_set1_ps(x)}; }
inline F f_load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F f_load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p)}; }
inline void f_store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline void f_store_n(float* p, F a, int n) { _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), a.v); }
inline F f_add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F f_sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F f_mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F f_div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F f_fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F f_max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F f_min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F f_abs(F a) { return {_mm512_abs_ps(a.v)}; }
inline float f_sqrt1(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }
// Lanes of a where a >= bound, else of b (false for NaN).
inline F f_if_ge(F x, F bound, F a, F b) { return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_GE_OQ), b.v, a.v)}; }
inline F f_if_eq(F x, F y, F a, F b) { return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_EQ_OQ), b.v, a.v)}; }
inline std::uint32_t f_mask_eq(F x, F y) { return _mm512_cmp_ps_mask(x.v, y.v, _CMP_EQ_OQ); }
inline bool f_any_nan(F a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }
// Lanes [low, high) of a, the others of b.
inline F f_lanes(F a, int low, int high, F b) {
  const std::uint32_t below = high >= 16 ? 0xffffu : high <= 0 ? 0u : (1u << high) - 1;
  const std::uint32_t from = low <= 0 ? 0xffffu : low >= 16 ? 0u : 0xffffu << low;
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(below & from), b.v, a.v)};
}
inline F f_from_f16(const std::uint8_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline void f_to_f16(std::uint8_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F f_from_bf16(const std::uint8_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
}
// fp8 codes are f16 numbers with fewer bits: e5m2 the upper byte of one, e4m3 one 2^8 too small (kE4M3Unit).
constexpr float kE4M3Unit = 256.0f;
inline F f_from_e5m2(const std::uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 8))};
}
inline F f_from_e4m3(const std::uint8_t* p) {
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 7);
  return {_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0xbfff))))};
}
// Lanes i and i + 8, then 4, 2, 1: the order of every horizontal sum on every instruction set.
inline float f_sum(F a) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
inline float f_largest(F a) { return _mm512_reduce_max_ps(a.v); }

inline I i_zero() { return {_mm512_setzero_si512()}; }
inline I i_set1(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I i_round(F a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest, ties to even
inline F i_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline std::int32_t i_sum(I a) { return _mm512_reduce_add_epi32(a.v); }
inline void i_store_s8(std::int8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v)); }
inline I i_from_u8(const std::uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline I i_from_s8(const std::uint8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline F f_scale_exponent(F a, I n) { return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(n.v, 23)))}; }

inline U8 u_load(const std::uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline U8 u_low(U8 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(0x0f))}; }
inline U8 u_high(U8 a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(0x0f))}; }
// a + 16 where the bit of the lane is set in the 64-bit plane.
inline U8 u_add_bit4(U8 a, const std::uint8_t* plane) {
  std::uint64_t bits;
  __builtin_memcpy(&bits, plane, 8);
  return {_mm512_mask_add_epi8(a.v, bits, a.v, _mm512_set1_epi8(16))};
}
// a + 16 x (two bits of b at bit `shift`, an even number).
template <int shift>
inline U8 u_add_bits45(U8 a, U8 b) {
  __m512i s = b.v;
  if constexpr (shift < 4) s = _mm512_slli_epi16(s, 4 - shift);
  if constexpr (shift > 4) s = _mm512_srli_epi16(s, shift - 4);
  return {_mm512_or_si512(a.v, _mm512_and_si512(s, _mm512_set1_epi8(0x30)))};
}
// acc[lane] += sum of 4 products: codes 4 lane .. 4 lane + 3 with the same 4 activations for every lane.
inline I dot4(I acc, U8 w, const std::int8_t* a) {
  std::int32_t x;
  __builtin_memcpy(&x, a, 4);
  return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(x))};
}
inline I dot4_w8(I acc, U8 w, const std::int8_t* a) { return dot4(acc, w, a); }

}  // namespace
