// 16 lanes as arrays: plain C++ for any processor. See simd_avx512.h for what each function means.
// A multiply-add rounds twice here, since a fused one would be a library call on processors without it.
#pragma once
#include <cstdint>

namespace {

constexpr int kRowTile = 4;
constexpr int kQueryTile = 4;
constexpr int kSums = 4;
constexpr bool kSignedW8 = false;

struct F { float v[16]; };
struct I { std::int32_t v[16]; };
struct U8 { std::uint8_t v[64]; };

template <class Out, class Fn>
inline Out each(Fn fn) {
  Out out;
  for (int i = 0; i < 16; ++i) out.v[i] = fn(i);
  return out;
}
inline F f_zero() { return each<F>([](int) { return 0.0f; }); }
inline F f_set1(float x) { return each<F>([=](int) { return x; }); }
inline F f_load(const float* p) { return each<F>([=](int i) { return p[i]; }); }
inline F f_load_n(const float* p, int n) { return each<F>([=](int i) { return i < n ? p[i] : 0.0f; }); }
inline void f_store(float* p, const F& a) { for (int i = 0; i < 16; ++i) p[i] = a.v[i]; }
inline void f_store_n(float* p, const F& a, int n) { for (int i = 0; i < n; ++i) p[i] = a.v[i]; }
inline F f_add(const F& a, const F& b) { return each<F>([&](int i) { return a.v[i] + b.v[i]; }); }
inline F f_sub(const F& a, const F& b) { return each<F>([&](int i) { return a.v[i] - b.v[i]; }); }
inline F f_mul(const F& a, const F& b) { return each<F>([&](int i) { return a.v[i] * b.v[i]; }); }
inline F f_div(const F& a, const F& b) { return each<F>([&](int i) { return a.v[i] / b.v[i]; }); }
inline F f_fma(const F& a, const F& b, const F& c) { return each<F>([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline F f_max(const F& a, const F& b) { return each<F>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F f_min(const F& a, const F& b) { return each<F>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline F f_abs(const F& a) { return each<F>([&](int i) { return __builtin_fabsf(a.v[i]); }); }
inline float f_sqrt1(float x) { return __builtin_sqrtf(x); }
inline F f_if_ge(const F& x, const F& bound, const F& a, const F& b) { return each<F>([&](int i) { return x.v[i] >= bound.v[i] ? a.v[i] : b.v[i]; }); }
inline F f_if_eq(const F& x, const F& y, const F& a, const F& b) { return each<F>([&](int i) { return x.v[i] == y.v[i] ? a.v[i] : b.v[i]; }); }
inline std::uint32_t f_mask_eq(const F& x, const F& y) {
  std::uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<std::uint32_t>(x.v[i] == y.v[i]) << i;
  return mask;
}
inline bool f_any_nan(const F& a) {
  bool any = false;
  for (int i = 0; i < 16; ++i) any |= a.v[i] != a.v[i];
  return any;
}
inline F f_lanes(const F& a, int low, int high, const F& b) { return each<F>([&](int i) { return i >= low && i < high ? a.v[i] : b.v[i]; }); }

inline float float_of_bits(std::uint32_t bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
inline std::uint32_t bits_of_float(float x) { std::uint32_t bits; __builtin_memcpy(&bits, &x, 4); return bits; }
inline float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest < 0x0400u) {  // subnormal: an integer times 2^-24
    const float magnitude = static_cast<float>(rest) * 5.9604644775390625e-8f;
    return sign ? -magnitude : magnitude;
  }
  return float_of_bits(sign | ((rest << 13) + 0x38000000u));
}
inline std::uint16_t float_to_half(float x) {  // to nearest, ties to even
  const std::uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (rest >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);
  if (rest < 0x38800000u) {  // subnormal: adding 0.5 aligns the last kept bit with the float's last bit
    return static_cast<std::uint16_t>(sign | (bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000u));
  }
  return static_cast<std::uint16_t>(sign | ((rest + 0xfffu + (rest >> 13 & 1u) - 0x38000000u) >> 13));
}
inline std::uint16_t load_u16(const std::uint8_t* p) { std::uint16_t x; __builtin_memcpy(&x, p, 2); return x; }
inline F f_from_f16(const std::uint8_t* p) { return each<F>([=](int i) { return half_to_float(load_u16(p + 2 * i)); }); }
inline void f_to_f16(std::uint8_t* p, const F& a) {
  for (int i = 0; i < 16; ++i) {
    const std::uint16_t h = float_to_half(a.v[i]);
    __builtin_memcpy(p + 2 * i, &h, 2);
  }
}
inline F f_from_bf16(const std::uint8_t* p) { return each<F>([=](int i) { return float_of_bits(static_cast<std::uint32_t>(load_u16(p + 2 * i)) << 16); }); }
constexpr float kE4M3Unit = 256.0f;
inline F f_from_e5m2(const std::uint8_t* p) { return each<F>([=](int i) { return half_to_float(static_cast<std::uint16_t>(p[i] << 8)); }); }
inline F f_from_e4m3(const std::uint8_t* p) {
  return each<F>([=](int i) { return half_to_float(static_cast<std::uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7)); });
}
inline float f_sum(const F& a) {
  float s[8];
  for (int i = 0; i < 8; ++i) s[i] = a.v[i] + a.v[i + 8];
  for (int width = 4; width; width /= 2)
    for (int i = 0; i < width; ++i) s[i] = s[i] + s[i + width];
  return s[0];
}
inline float f_largest(const F& a) {
  float m = a.v[0];
  for (int i = 1; i < 16; ++i) m = a.v[i] > m ? a.v[i] : m;
  return m;
}

inline I i_zero() { return each<I>([](int) { return 0; }); }
inline I i_set1(std::int32_t x) { return each<I>([=](int) { return x; }); }
// Adding 1.5 x 2^23 leaves the nearest integer (ties to even) in the low bits, for |x| < 2^22.
inline I i_round(const F& a) {
  return each<I>([&](int i) {
    volatile float shifted = a.v[i] + 12582912.0f;
    return static_cast<std::int32_t>(bits_of_float(shifted)) - 0x4b400000;
  });
}
inline F i_float(const I& a) { return each<F>([&](int i) { return static_cast<float>(a.v[i]); }); }
inline std::int32_t i_sum(const I& a) {
  std::int32_t s = 0;
  for (int i = 0; i < 16; ++i) s += a.v[i];
  return s;
}
inline void i_store_s8(std::int8_t* p, const I& a) { for (int i = 0; i < 16; ++i) p[i] = static_cast<std::int8_t>(a.v[i]); }
inline I i_from_u8(const std::uint8_t* p) { return each<I>([=](int i) { return p[i]; }); }
inline I i_from_s8(const std::uint8_t* p) { return each<I>([=](int i) { return static_cast<std::int8_t>(p[i]); }); }
inline F f_scale_exponent(const F& a, const I& n) {
  return each<F>([&](int i) { return float_of_bits(bits_of_float(a.v[i]) + (static_cast<std::uint32_t>(n.v[i]) << 23)); });
}

template <class Fn>
inline U8 each_byte(Fn fn) {
  U8 out;
  for (int i = 0; i < 64; ++i) out.v[i] = static_cast<std::uint8_t>(fn(i));
  return out;
}
inline U8 u_load(const std::uint8_t* p) { return each_byte([=](int i) { return p[i]; }); }
inline U8 u_low(const U8& a) { return each_byte([&](int i) { return a.v[i] & 15; }); }
inline U8 u_high(const U8& a) { return each_byte([&](int i) { return a.v[i] >> 4; }); }
inline U8 u_add_bit4(const U8& a, const std::uint8_t* plane) { return each_byte([&](int i) { return a.v[i] + (plane[i / 8] >> (i % 8) & 1) * 16; }); }
template <int shift>
inline U8 u_add_bits45(const U8& a, const U8& b) { return each_byte([&](int i) { return a.v[i] + (b.v[i] >> shift & 3) * 16; }); }
inline I dot4(const I& acc, const U8& w, const std::int8_t* a) {
  return each<I>([&](int i) {
    return acc.v[i] + w.v[4 * i] * a[0] + w.v[4 * i + 1] * a[1] + w.v[4 * i + 2] * a[2] + w.v[4 * i + 3] * a[3];
  });
}
inline I dot4_w8(const I& acc, const U8& w, const std::int8_t* a) { return dot4(acc, w, a); }

}  // namespace
