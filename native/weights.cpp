#include "weights.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <string>

namespace yeoul {
namespace {

#include "kernels/layout.inl"

constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t align_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

int block_values(WeightType t) { return code_bits(t) == 0 ? 1 : is_k_quant(t) ? 256 : 32; }

std::size_t block_bytes(WeightType t) {
  switch (t) {
    case WeightType::f32: return 4;
    case WeightType::f16: case WeightType::bf16: return 2;
    case WeightType::q4_0: return 18;
    case WeightType::q4_1: return 20;
    case WeightType::q5_0: return 22;
    case WeightType::q5_1: return 24;
    case WeightType::q8_0: return 34;
    case WeightType::q4_k: return 144;
    case WeightType::q5_k: return 176;
    case WeightType::q6_k: return 210;
  }
  throw std::invalid_argument("unknown weight type");
}

void check_shape(WeightType type, std::int64_t rows, std::int64_t k) {
  constexpr std::int64_t limit = std::int64_t{1} << 31;
  constexpr std::int64_t values = std::int64_t{1} << 48;  // so that no size below overflows
  block_bytes(type);  // throws for a type that does not exist
  if (rows < 1 || k < 1 || rows > limit || k >= limit || k % block_values(type) || rows > values / k)
    throw std::invalid_argument("a matrix of " + std::to_string(rows) + " x " + std::to_string(k) + " cannot have this type");
}

// One group of 32 inputs of one output, as the file states it.
struct Group {
  std::uint8_t code[32];
  std::uint16_t scale, min;      // simple types: f16
  std::uint16_t d, dmin;         // K-quants: f16
  std::uint8_t sub[2];           // q4_k, q5_k: scale, min; q6_k: two signed scales
};

std::uint16_t read_u16(const std::uint8_t* p) {
  std::uint16_t x;
  std::memcpy(&x, p, 2);
  return x;
}

// 6-bit scale and min of sub-block j of q4_k and q5_k, from their 12 bytes.
void read_sub_scale(const std::uint8_t* s, int j, std::uint8_t* out) {
  if (j < 4) {
    out[0] = s[j] & 63;
    out[1] = s[j + 4] & 63;
  } else {
    out[0] = static_cast<std::uint8_t>((s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
    out[1] = static_cast<std::uint8_t>((s[j + 4] >> 4) | (s[j] >> 6) << 4);
  }
}

// Low nibbles hold inputs 0-15, high nibbles 16-31; bit i of `high` is input i's fifth bit.
void read_nibbles(const std::uint8_t* nibbles, std::uint32_t high, std::uint8_t* code) {
  for (int i = 0; i < 16; ++i) {
    code[i] = static_cast<std::uint8_t>((nibbles[i] & 15) | (high >> i & 1) << 4);
    code[i + 16] = static_cast<std::uint8_t>((nibbles[i] >> 4) | (high >> (i + 16) & 1) << 4);
  }
}

void read_simple(WeightType type, const std::uint8_t* block, Group& g) {
  g.scale = read_u16(block);
  block += 2;
  if (has_min(type)) {
    g.min = read_u16(block);
    block += 2;
  }
  if (type == WeightType::q8_0) {
    for (int i = 0; i < 32; ++i) g.code[i] = static_cast<std::uint8_t>(block[i] ^ 0x80);
    return;
  }
  std::uint32_t high = 0;
  if (code_bits(type) == 5) {
    std::memcpy(&high, block, 4);
    block += 4;
  }
  read_nibbles(block, high, g.code);
}

void read_q45_k(WeightType type, const std::uint8_t* block, int j, Group& g) {
  g.d = read_u16(block);
  g.dmin = read_u16(block + 2);
  read_sub_scale(block + 4, j, g.sub);
  const bool five = type == WeightType::q5_k;
  const std::uint8_t* high = block + 16;
  const std::uint8_t* low = block + (five ? 48 : 16) + 32 * (j / 2);
  for (int i = 0; i < 32; ++i) {
    const int nibble = j % 2 ? low[i] >> 4 : low[i] & 15;
    g.code[i] = static_cast<std::uint8_t>(nibble | (five ? (high[i] >> j & 1) << 4 : 0));
  }
}

void read_q6_k(const std::uint8_t* block, int j, Group& g) {
  const std::uint8_t* low = block + 64 * (j / 4) + 32 * (j % 2);
  const std::uint8_t* high = block + 128 + 32 * (j / 4);
  for (int i = 0; i < 32; ++i) {
    const int nibble = j % 4 < 2 ? low[i] & 15 : low[i] >> 4;
    g.code[i] = static_cast<std::uint8_t>(nibble | (high[i] >> (2 * (j % 4)) & 3) << 4);
  }
  g.sub[0] = block[192 + 2 * j];
  g.sub[1] = block[192 + 2 * j + 1];
  g.d = read_u16(block + 208);
}

void read_group(WeightType type, const std::uint8_t* row, std::int64_t group, Group& g) {
  if (!is_k_quant(type)) return read_simple(type, row + group * static_cast<std::int64_t>(block_bytes(type)), g);
  const std::uint8_t* block = row + group / 8 * static_cast<std::int64_t>(block_bytes(type));
  if (type == WeightType::q6_k) return read_q6_k(block, static_cast<int>(group % 8), g);
  read_q45_k(type, block, static_cast<int>(group % 8), g);
}

void put_u16(std::uint8_t* p, int lane, std::uint16_t x) { std::memcpy(p + 2 * lane, &x, 2); }

// Writes the codes of output r into a group's code area (zeroed before).
void put_codes(WeightType type, std::uint8_t* p, int r, const std::uint8_t* code) {
  for (int n = 0; n < 32; ++n) {
    const int j = n / 4, i = n % 4, lane = 4 * r + i, c = code[n];
    if (code_bits(type) == 8) {
      p[64 * j + lane] = static_cast<std::uint8_t>(c);
      continue;
    }
    p[64 * (j / 2) + lane] |= static_cast<std::uint8_t>((c & 15) << 4 * (j % 2));
    if (code_bits(type) == 5) p[256 + 8 * j + lane / 8] |= static_cast<std::uint8_t>((c >> 4 & 1) << lane % 8);
    if (code_bits(type) == 6) p[256 + 64 * (j / 4) + lane] |= static_cast<std::uint8_t>((c >> 4) << 2 * (j % 4));
  }
}

int get_code(WeightType type, const std::uint8_t* p, int r, int n) {
  const int j = n / 4, lane = 4 * r + n % 4;
  if (code_bits(type) == 8) return p[64 * j + lane];
  int c = p[64 * (j / 2) + lane] >> 4 * (j % 2) & 15;
  if (code_bits(type) == 5) c |= (p[256 + 8 * j + lane / 8] >> lane % 8 & 1) << 4;
  if (code_bits(type) == 6) c |= (p[256 + 64 * (j / 4) + lane] >> 2 * (j % 4) & 3) << 4;
  return c;
}

// One group of a panel: writes output r and returns nothing; `p` is the group's scales, `super` the K-quant header.
void put_group(WeightType type, std::uint8_t* super, std::uint8_t* p, int r, const Group& g) {
  if (!is_k_quant(type)) {
    put_u16(p, r, g.scale);
    if (has_min(type)) put_u16(p + 32, r, g.min);
  } else {
    put_u16(super, r, g.d);
    if (has_min(type)) put_u16(super + 32, r, g.dmin);
    p[r] = g.sub[0];
    p[16 + r] = g.sub[1];
  }
  put_codes(type, p + scale_bytes(type), r, g.code);
}

void pack_panel(WeightType type, std::int64_t k, const std::uint8_t* source, std::int64_t row_bytes, int rows, std::uint8_t* out) {
  if (code_bits(type) == 0) {
    const int size = float_bytes(type);
    for (std::int64_t i = 0; i < k; ++i)
      for (int r = 0; r < rows; ++r) std::memcpy(out + (i * kPanel + r) * size, source + r * row_bytes + i * size, static_cast<std::size_t>(size));
    return;
  }
  std::uint8_t* super = out;
  for (std::int64_t group = 0; group < k / 32; ++group) {
    if (is_k_quant(type) && group % 8 == 0) {
      super = out;
      out += super_bytes(type);
    }
    for (int r = 0; r < rows; ++r) {
      Group g{};
      read_group(type, source + r * row_bytes, group, g);
      put_group(type, super, out, r, g);
    }
    out += scale_bytes(type) + code_bytes(type);
  }
}

float bf16_to_float(std::uint16_t x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

float half_at(const std::uint8_t* p, int lane) { return half_to_float(read_u16(p + 2 * lane)); }

void unpack_group(WeightType type, const std::uint8_t* super, const std::uint8_t* p, int r, float* out) {
  float scale[2], min = 0.0f;
  if (!is_k_quant(type)) {
    scale[0] = scale[1] = half_at(p, r);
    if (has_min(type)) min = half_at(p + 32, r);
  } else if (has_min(type)) {
    scale[0] = scale[1] = half_at(super, r) * static_cast<float>(p[r]);
    min = -(half_at(super + 32, r) * static_cast<float>(p[16 + r]));
  } else {
    for (int h = 0; h < 2; ++h) scale[h] = half_at(super, r) * static_cast<float>(static_cast<std::int8_t>(p[16 * h + r]));
  }
  for (int n = 0; n < 32; ++n) {
    const float product = scale[n / 16] * static_cast<float>(get_code(type, p + scale_bytes(type), r, n) - code_offset(type));
    out[n] = has_min(type) ? product + min : product;
  }
}

}  // namespace

float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
  std::uint32_t bits;
  if (rest >= 0x7c00u) {
    bits = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
  } else if (rest < 0x0400u) {
    const float magnitude = static_cast<float>(rest) * 5.9604644775390625e-8f;
    return sign ? -magnitude : magnitude;
  } else {
    bits = sign | ((rest << 13) + 0x38000000u);
  }
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

WeightArena::WeightArena(std::size_t bytes) : size_(align_up(bytes + kHugePage, kHugePage)) {
  void* p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::uint8_t*>(p);
  used_ = align_up(reinterpret_cast<std::uintptr_t>(p), kHugePage) - reinterpret_cast<std::uintptr_t>(p);
#ifdef MADV_HUGEPAGE
  madvise(data_, size_, MADV_HUGEPAGE);  // a hint: kernels without huge pages refuse it
#endif
}

WeightArena::~WeightArena() { munmap(data_, size_); }

std::uint8_t* WeightArena::take(std::size_t bytes) {
  const std::size_t aligned = align_up(bytes, 64);
  if (aligned > size_ - used_) throw std::length_error("weight arena is full");
  used_ += aligned;
  return data_ + used_ - aligned;
}

bool PackedWeight::quantized() const { return code_bits(type) != 0; }

std::size_t packed_bytes(WeightType type, std::int64_t rows, std::int64_t k) {
  check_shape(type, rows, k);
  return align_up(static_cast<std::size_t>((rows + kPanel - 1) / kPanel * panel_bytes(type, k)), 64);
}

std::size_t file_bytes(WeightType type, std::int64_t rows, std::int64_t k) {
  check_shape(type, rows, k);
  return static_cast<std::size_t>(rows * (k / block_values(type))) * block_bytes(type);
}

PackedWeight pack(WeightType type, std::int64_t rows, std::int64_t k, const std::uint8_t* source, WeightArena& arena, Pool& pool) {
  std::uint8_t* data = arena.take(packed_bytes(type, rows, k));  // zero pages: missing outputs of the last panel are 0
  const PackedWeight weight{type, rows, k, data, panel_bytes(type, k)};
  const std::int64_t row_bytes = static_cast<std::int64_t>(file_bytes(type, 1, k));
  pool.run(weight.panels(), 1, [&](std::int64_t p) {
    const int count = static_cast<int>(rows - p * kPanel < kPanel ? rows - p * kPanel : kPanel);
    pack_panel(type, k, source + p * kPanel * row_bytes, row_bytes, count, data + p * weight.panel_stride);
  });
  return weight;
}

void unpack_row(const PackedWeight& weight, std::int64_t row, float* out) {
  const std::uint8_t* p = weight.panel(row / kPanel);
  const int r = static_cast<int>(row % kPanel);
  const WeightType type = weight.type;
  if (!weight.quantized()) {
    for (std::int64_t i = 0; i < weight.k; ++i) {
      const std::uint8_t* at = p + (i * kPanel + r) * float_bytes(type);
      if (type == WeightType::f32) std::memcpy(out + i, at, 4);
      else out[i] = type == WeightType::f16 ? half_to_float(read_u16(at)) : bf16_to_float(read_u16(at));
    }
    return;
  }
  const std::uint8_t* super = p;
  for (std::int64_t group = 0; group < weight.k / 32; ++group, out += 32) {
    if (is_k_quant(type) && group % 8 == 0) {
      super = p;
      p += super_bytes(type);
    }
    unpack_group(type, super, p, r, out);
    p += scale_bytes(type) + code_bytes(type);
  }
}

}  // namespace yeoul
