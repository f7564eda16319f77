// The packed layout of weights: one panel holds 16 outputs (rows of the matrix). Included inside a namespace by the
// packer and by every kernel file, so that both read one description.
//
// Quantized panel, for each group of 32 inputs in ascending order:
//   scales     simple types   16 x f16 scale [, 16 x f16 min]
//              q4_k, q5_k     (before every 8th group: 16 x f16 d, 16 x f16 dmin) 16 x u8 scale, 16 x u8 min
//              q6_k           (before every 8th group: 16 x f16 d) 2 x 16 x s8 scale, of inputs 0-15 and 16-31
//   codes      4 bits         4 x 64 bytes; byte (q, r, i): low nibble input 8q + i of output r, high nibble 8q + 4 + i
//              5 bits         the nibbles, then 8 x 64 bits: bit 4 r + i of word j is the high bit of input 4 j + i
//              6 bits         the nibbles, then 2 x 64 bytes: bits 2f, 2f + 1 of byte 4 r + i of vector h are the high
//                             bits of input 4 (4 h + f) + i
//              8 bits         8 x 64 bytes: byte 4 r + i of vector j is 128 + the value of input 4 j + i
//   value = scale x (code - offset), or scale x code + min (q4_k, q5_k: d x scale x code - dmin x min)
// Float panel: for each input, 16 values of the file's own type.

constexpr int code_bits(WeightType t) {
  switch (t) {
    case WeightType::q4_0: case WeightType::q4_1: case WeightType::q4_k: return 4;
    case WeightType::q5_0: case WeightType::q5_1: case WeightType::q5_k: return 5;
    case WeightType::q6_k: return 6;
    case WeightType::q8_0: return 8;
    default: return 0;  // float
  }
}
constexpr int code_offset(WeightType t) {
  return t == WeightType::q4_0 ? 8 : t == WeightType::q5_0 ? 16 : t == WeightType::q6_k ? 32 : t == WeightType::q8_0 ? 128 : 0;
}
constexpr bool has_min(WeightType t) { return code_bits(t) != 0 && code_offset(t) == 0; }
constexpr bool is_k_quant(WeightType t) { return t == WeightType::q4_k || t == WeightType::q5_k || t == WeightType::q6_k; }
constexpr int float_bytes(WeightType t) { return t == WeightType::f32 ? 4 : 2; }
constexpr int code_bytes(WeightType t) { return code_bits(t) * 64; }
constexpr int super_bytes(WeightType t) { return !is_k_quant(t) ? 0 : has_min(t) ? 64 : 32; }
constexpr int scale_bytes(WeightType t) { return is_k_quant(t) || !has_min(t) ? 32 : 64; }
constexpr std::int64_t panel_bytes(WeightType t, std::int64_t k) {
  if (code_bits(t) == 0) return k * kPanel * float_bytes(t);
  return k / 32 * (scale_bytes(t) + code_bytes(t)) + k / 256 * super_bytes(t);
}
