// 16 lanes as two halves of 8: AVX2 with FMA and F16C. See simd_avx512.h for what each function means.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int kRowTile = 4;
constexpr int kQueryTile = 6;
constexpr int kSums = 6;
constexpr bool kSignedW8 = true;

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct U8 { __m256i a, b; };

inline F f_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F f_set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256i lane_mask(int n) {  // lanes below n
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline F f_load_n(const float* p, int n) { return {_mm256_maskload_ps(p, lane_mask(n)), _mm256_maskload_ps(p + 8, lane_mask(n - 8))}; }
inline void f_store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline void f_store_n(float* p, F x, int n) { _mm256_maskstore_ps(p, lane_mask(n), x.a); _mm256_maskstore_ps(p + 8, lane_mask(n - 8), x.b); }
inline F f_add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F f_sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F f_mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F f_div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F f_fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F f_max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F f_min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F f_abs(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline float f_sqrt1(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }
inline F f_if_ge(F x, F bound, F y, F z) {
  return {_mm256_blendv_ps(z.a, y.a, _mm256_cmp_ps(x.a, bound.a, _CMP_GE_OQ)), _mm256_blendv_ps(z.b, y.b, _mm256_cmp_ps(x.b, bound.b, _CMP_GE_OQ))};
}
inline F f_if_eq(F x, F w, F y, F z) {
  return {_mm256_blendv_ps(z.a, y.a, _mm256_cmp_ps(x.a, w.a, _CMP_EQ_OQ)), _mm256_blendv_ps(z.b, y.b, _mm256_cmp_ps(x.b, w.b, _CMP_EQ_OQ))};
}
inline std::uint32_t f_mask_eq(F x, F y) {
  return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ))) |
         static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ))) << 8;
}
inline bool f_any_nan(F x) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))) != 0;
}
inline F f_lanes(F x, int low, int high, F other) {
  const __m256 a = _mm256_castsi256_ps(_mm256_andnot_si256(lane_mask(low), lane_mask(high)));
  const __m256 b = _mm256_castsi256_ps(_mm256_andnot_si256(lane_mask(low - 8), lane_mask(high - 8)));
  return {_mm256_blendv_ps(other.a, x.a, a), _mm256_blendv_ps(other.b, x.b, b)};
}
inline F f_from_f16(const std::uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
inline void f_to_f16(std::uint8_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline __m256 bf16_half(const std::uint8_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
inline F f_from_bf16(const std::uint8_t* p) { return {bf16_half(p), bf16_half(p + 16)}; }
constexpr float kE4M3Unit = 256.0f;
inline F halves_of(__m256i words) { return {_mm256_cvtph_ps(_mm256_castsi256_si128(words)), _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1))}; }
inline F f_from_e5m2(const std::uint8_t* p) {
  return halves_of(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 8));
}
inline F f_from_e4m3(const std::uint8_t* p) {
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 7);
  return halves_of(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0xbfff))));
}
inline float f_sum(F x) {
  const __m256 h = _mm256_add_ps(x.a, x.b);
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
inline float f_largest(F x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}

inline I i_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I i_set1(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I i_round(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F i_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline std::int32_t i_sum(I x) {
  const __m256i h = _mm256_add_epi32(x.a, x.b);
  const __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  const __m128i d = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(d, _mm_shuffle_epi32(d, 0xb1)));
}
inline void i_store_s8(std::int8_t* p, I x) {
  const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
inline I i_from_u8(const std::uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline I i_from_s8(const std::uint8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline __m256 scale_exponent(__m256 x, __m256i n) { return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(n, 23))); }
inline F f_scale_exponent(F x, I n) { return {scale_exponent(x.a, n.a), scale_exponent(x.b, n.b)}; }

inline U8 u_load(const std::uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
inline U8 u_low(U8 x) { return {_mm256_and_si256(x.a, _mm256_set1_epi8(0x0f)), _mm256_and_si256(x.b, _mm256_set1_epi8(0x0f))}; }
inline U8 u_high(U8 x) {
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), _mm256_set1_epi8(0x0f)), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), _mm256_set1_epi8(0x0f))};
}
inline __m256i bit4_half(const std::uint8_t* plane) {  // 16 in every byte whose bit is set
  std::int32_t bits;
  __builtin_memcpy(&bits, plane, 4);
  const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
  return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit), _mm256_set1_epi8(16));
}
inline U8 u_add_bit4(U8 x, const std::uint8_t* plane) { return {_mm256_or_si256(x.a, bit4_half(plane)), _mm256_or_si256(x.b, bit4_half(plane + 4))}; }
template <int shift>
inline __m256i bits45(__m256i s) {
  if constexpr (shift < 4) s = _mm256_slli_epi16(s, 4 - shift);
  if constexpr (shift > 4) s = _mm256_srli_epi16(s, shift - 4);
  return _mm256_and_si256(s, _mm256_set1_epi8(0x30));
}
template <int shift>
inline U8 u_add_bits45(U8 x, U8 y) { return {_mm256_or_si256(x.a, bits45<shift>(y.a)), _mm256_or_si256(x.b, bits45<shift>(y.b))}; }
inline __m256i broadcast4(const std::int8_t* a) {
  std::int32_t x;
  __builtin_memcpy(&x, a, 4);
  return _mm256_set1_epi32(x);
}
// Codes of at most 6 bits: a pair of products is at most 2 x 63 x 127, far from saturation.
inline I dot4(I acc, U8 w, const std::int8_t* a) {
  const __m256i x = broadcast4(a), one = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_maddubs_epi16(w.a, x), one)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_maddubs_epi16(w.b, x), one))};
}
// 8-bit codes would saturate as unsigned: |code - 128| x (activation with the code's sign) is at most 2 x 128 x 127 < 2^15.
inline __m256i dot4_w8_half(__m256i acc, __m256i w, __m256i x) {
  const __m256i s = _mm256_xor_si256(w, _mm256_set1_epi8(static_cast<char>(0x80)));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_sign_epi8(s, s), _mm256_sign_epi8(x, s));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline I dot4_w8(I acc, U8 w, const std::int8_t* a) {
  const __m256i x = broadcast4(a);
  return {dot4_w8_half(acc.a, w.a, x), dot4_w8_half(acc.b, w.b, x)};
}

}  // namespace
