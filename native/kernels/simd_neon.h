// 16 lanes as four quarters of 4: Armv8.2 with dot product. See simd_avx512.h for what each function means.
#pragma once
#include <arm_neon.h>

#include <cstdint>

namespace {

constexpr int kRowTile = 4;
constexpr int kQueryTile = 4;
constexpr int kSums = 4;
constexpr bool kSignedW8 = true;

struct F { float32x4_t q[4]; };
struct I { int32x4_t q[4]; };
struct U8 { uint8x16_t q[4]; };

template <class Out, class Fn>
inline Out each(Fn fn) { return {{fn(0), fn(1), fn(2), fn(3)}}; }

inline F f_set1(float x) { return each<F>([=](int) { return vdupq_n_f32(x); }); }
inline F f_zero() { return f_set1(0.0f); }
inline F f_load(const float* p) { return each<F>([=](int i) { return vld1q_f32(p + 4 * i); }); }
inline void f_store(float* p, const F& a) { for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.q[i]); }
inline F f_load_n(const float* p, int n) {
  float full[16] = {};
  for (int i = 0; i < n; ++i) full[i] = p[i];
  return f_load(full);
}
inline void f_store_n(float* p, const F& a, int n) {
  float full[16];
  f_store(full, a);
  for (int i = 0; i < n; ++i) p[i] = full[i];
}
inline F f_add(const F& a, const F& b) { return each<F>([&](int i) { return vaddq_f32(a.q[i], b.q[i]); }); }
inline F f_sub(const F& a, const F& b) { return each<F>([&](int i) { return vsubq_f32(a.q[i], b.q[i]); }); }
inline F f_mul(const F& a, const F& b) { return each<F>([&](int i) { return vmulq_f32(a.q[i], b.q[i]); }); }
inline F f_div(const F& a, const F& b) { return each<F>([&](int i) { return vdivq_f32(a.q[i], b.q[i]); }); }
inline F f_fma(const F& a, const F& b, const F& c) { return each<F>([&](int i) { return vfmaq_f32(c.q[i], a.q[i], b.q[i]); }); }
inline F f_max(const F& a, const F& b) { return each<F>([&](int i) { return vmaxq_f32(a.q[i], b.q[i]); }); }
inline F f_min(const F& a, const F& b) { return each<F>([&](int i) { return vminq_f32(a.q[i], b.q[i]); }); }
inline F f_abs(const F& a) { return each<F>([&](int i) { return vabsq_f32(a.q[i]); }); }
inline float f_sqrt1(float x) { return vget_lane_f32(vsqrt_f32(vdup_n_f32(x)), 0); }
inline F f_if_ge(const F& x, const F& bound, const F& a, const F& b) {
  return each<F>([&](int i) { return vbslq_f32(vcgeq_f32(x.q[i], bound.q[i]), a.q[i], b.q[i]); });
}
inline F f_if_eq(const F& x, const F& y, const F& a, const F& b) {
  return each<F>([&](int i) { return vbslq_f32(vceqq_f32(x.q[i], y.q[i]), a.q[i], b.q[i]); });
}
inline int32x4_t lane_index(int quarter) {
  const std::int32_t first[4] = {0, 1, 2, 3};
  return vaddq_s32(vld1q_s32(first), vdupq_n_s32(4 * quarter));
}
inline std::uint32_t f_mask_eq(const F& x, const F& y) {
  std::uint32_t mask = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t bit = vshlq_u32(vdupq_n_u32(1), lane_index(i));
    mask |= vaddvq_u32(vandq_u32(vceqq_f32(x.q[i], y.q[i]), bit));
  }
  return mask;
}
inline bool f_any_nan(const F& a) {
  uint32x4_t good = vceqq_f32(a.q[0], a.q[0]);
  for (int i = 1; i < 4; ++i) good = vandq_u32(good, vceqq_f32(a.q[i], a.q[i]));
  return vminvq_u32(good) == 0;
}
inline F f_lanes(const F& a, int low, int high, const F& b) {
  return each<F>([&](int i) {
    const int32x4_t lane = lane_index(i);
    return vbslq_f32(vandq_u32(vcgeq_s32(lane, vdupq_n_s32(low)), vcltq_s32(lane, vdupq_n_s32(high))), a.q[i], b.q[i]);
  });
}
inline F f_from_f16(const std::uint8_t* p) {
  return each<F>([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))); });
}
inline void f_to_f16(std::uint8_t* p, const F& a) {
  for (int i = 0; i < 4; ++i) vst1_u8(p + 8 * i, vreinterpret_u8_f16(vcvt_f16_f32(a.q[i])));
}
inline F f_from_bf16(const std::uint8_t* p) {
  return each<F>([=](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p + 8 * i)), 16)); });
}
constexpr float kE4M3Unit = 256.0f;
inline F halves_of(uint16x8_t low, uint16x8_t high) {
  const float16x8_t a = vreinterpretq_f16_u16(low), b = vreinterpretq_f16_u16(high);
  return {{vcvt_f32_f16(vget_low_f16(a)), vcvt_f32_f16(vget_high_f16(a)), vcvt_f32_f16(vget_low_f16(b)), vcvt_f32_f16(vget_high_f16(b))}};
}
inline F f_from_e5m2(const std::uint8_t* p) { return halves_of(vshll_n_u8(vld1_u8(p), 8), vshll_n_u8(vld1_u8(p + 8), 8)); }
inline uint16x8_t e4m3_words(const std::uint8_t* p) {
  const int16x8_t wide = vshlq_n_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(p))), 7);
  return vandq_u16(vreinterpretq_u16_s16(wide), vdupq_n_u16(0xbfff));
}
inline F f_from_e4m3(const std::uint8_t* p) { return halves_of(e4m3_words(p), e4m3_words(p + 8)); }
inline float f_sum(const F& a) {
  const float32x4_t q = vaddq_f32(vaddq_f32(a.q[0], a.q[2]), vaddq_f32(a.q[1], a.q[3]));
  const float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
  return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
inline float f_largest(const F& a) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.q[0], a.q[1]), vmaxq_f32(a.q[2], a.q[3]))); }

inline I i_set1(std::int32_t x) { return each<I>([=](int) { return vdupq_n_s32(x); }); }
inline I i_zero() { return i_set1(0); }
inline I i_round(const F& a) { return each<I>([&](int i) { return vcvtnq_s32_f32(a.q[i]); }); }
inline F i_float(const I& a) { return each<F>([&](int i) { return vcvtq_f32_s32(a.q[i]); }); }
inline std::int32_t i_sum(const I& a) { return vaddvq_s32(vaddq_s32(vaddq_s32(a.q[0], a.q[1]), vaddq_s32(a.q[2], a.q[3]))); }
inline void i_store_s8(std::int8_t* p, const I& a) {
  const int16x8_t low = vcombine_s16(vmovn_s32(a.q[0]), vmovn_s32(a.q[1])), high = vcombine_s16(vmovn_s32(a.q[2]), vmovn_s32(a.q[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
inline I i_from_u8(const std::uint8_t* p) {
  const uint8x16_t x = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(x)), high = vmovl_u8(vget_high_u8(x));
  return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low))),
           vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)))}};
}
inline I i_from_s8(const std::uint8_t* p) {
  const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(p));
  const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_s8(vget_high_s8(x));
  return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)), vmovl_s16(vget_high_s16(high))}};
}
inline F f_scale_exponent(const F& a, const I& n) {
  return each<F>([&](int i) { return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a.q[i]), vshlq_n_s32(n.q[i], 23))); });
}

inline U8 u_load(const std::uint8_t* p) { return each<U8>([=](int i) { return vld1q_u8(p + 16 * i); }); }
inline U8 u_low(const U8& a) { return each<U8>([&](int i) { return vandq_u8(a.q[i], vdupq_n_u8(15)); }); }
inline U8 u_high(const U8& a) { return each<U8>([&](int i) { return vshrq_n_u8(a.q[i], 4); }); }
inline U8 u_add_bit4(const U8& a, const std::uint8_t* plane) {
  const std::uint8_t bit_of_lane[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t bit = vld1q_u8(bit_of_lane);
  return each<U8>([&](int i) {
    const uint8x16_t spread = vcombine_u8(vdup_n_u8(plane[2 * i]), vdup_n_u8(plane[2 * i + 1]));
    return vorrq_u8(a.q[i], vandq_u8(vtstq_u8(spread, bit), vdupq_n_u8(16)));
  });
}
template <int shift>
inline U8 u_add_bits45(const U8& a, const U8& b) {
  return each<U8>([&](int i) {
    uint8x16_t s = b.q[i];
    if constexpr (shift < 4) s = vshlq_n_u8(s, 4 - shift);
    if constexpr (shift > 4) s = vshrq_n_u8(s, shift - 4);
    return vorrq_u8(a.q[i], vandq_u8(s, vdupq_n_u8(0x30)));
  });
}
inline int8x16_t broadcast4(const std::int8_t* a) {
  std::int32_t x;
  __builtin_memcpy(&x, a, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(x));
}
inline I dot4(const I& acc, const U8& w, const std::int8_t* a) {  // codes of at most 6 bits are also signed bytes
  const int8x16_t x = broadcast4(a);
  return each<I>([&](int i) { return vdotq_s32(acc.q[i], vreinterpretq_s8_u8(w.q[i]), x); });
}
inline I dot4_w8(const I& acc, const U8& w, const std::int8_t* a) {
  const int8x16_t x = broadcast4(a);
  return each<I>([&](int i) { return vdotq_s32(acc.q[i], vreinterpretq_s8_u8(veorq_u8(w.q[i], vdupq_n_u8(0x80))), x); });
}

}  // namespace
