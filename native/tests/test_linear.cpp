// linear and pack, for every weight type: values decoded one by one from the file's bytes, products summed in double.
#include <cmath>
#include <optional>

#include "check.h"
#include "weights.h"

namespace yeoul::test {
namespace {

const std::vector<WeightType> kFloats = {WeightType::f32, WeightType::f16, WeightType::bf16};
const std::vector<WeightType> kSimple = {WeightType::q4_0, WeightType::q4_1, WeightType::q5_0, WeightType::q5_1, WeightType::q8_0};
const std::vector<WeightType> kSuper = {WeightType::q4_k, WeightType::q5_k, WeightType::q6_k};

bool is_float(WeightType t) { return t == WeightType::f32 || t == WeightType::f16 || t == WeightType::bf16; }
bool is_super(WeightType t) { return t == WeightType::q4_k || t == WeightType::q5_k || t == WeightType::q6_k; }
int granule(WeightType t) { return is_float(t) ? 1 : is_super(t) ? 256 : 32; }

std::uint16_t u16(const std::uint8_t* p) { return static_cast<std::uint16_t>(p[0] | p[1] << 8); }

double half(const std::uint8_t* p) {
  const int bits = u16(p), exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

float bits_to_float(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Value n of a block of a simple type.
double simple_value(WeightType t, const std::uint8_t* b, int n) {
  const int index = n % 16, high_half = n / 16;
  auto nibble = [&](const std::uint8_t* p) { return high_half ? p[index] >> 4 : p[index] & 15; };
  auto fifth = [&](const std::uint8_t* p) { return (p[n / 8] >> n % 8 & 1) * 16; };
  switch (t) {
    case WeightType::q4_0: return half(b) * (nibble(b + 2) - 8);
    case WeightType::q4_1: return half(b) * nibble(b + 4) + half(b + 2);
    case WeightType::q5_0: return half(b) * (nibble(b + 6) + fifth(b + 2) - 16);
    case WeightType::q5_1: return half(b) * (nibble(b + 8) + fifth(b + 4)) + half(b + 2);
    default: return half(b) * static_cast<std::int8_t>(b[2 + n]);
  }
}

// Value n of a block of 256.
double super_value(WeightType t, const std::uint8_t* b, int n) {
  if (t == WeightType::q6_k) {
    const int part = n / 128, run = n % 128 / 32, i = n % 32;
    const std::uint8_t low = b[64 * part + 32 * (run % 2) + i], high = b[128 + 32 * part + i];
    const int code = (run < 2 ? low & 15 : low >> 4) + ((high >> 2 * run) & 3) * 16;
    return half(b + 208) * static_cast<std::int8_t>(b[192 + n / 16]) * (code - 32);
  }
  const int j = n / 32, i = n % 32;
  const std::uint8_t* s = b + 4;
  const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) + (s[j - 4] >> 6) * 16;
  const int min = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) + (s[j] >> 6) * 16;
  const bool five = t == WeightType::q5_k;
  const std::uint8_t low = b[(five ? 48 : 16) + 32 * (j / 2) + i];
  const int code = (j % 2 ? low >> 4 : low & 15) + (five ? (b[16 + i] >> j & 1) * 16 : 0);
  return half(b) * scale * code - half(b + 2) * min;
}

double value(WeightType t, const std::uint8_t* row, int n) {
  if (t == WeightType::f32) return bits_to_float(static_cast<std::uint32_t>(u16(row + 4 * n)) | static_cast<std::uint32_t>(u16(row + 4 * n + 2)) << 16);
  if (t == WeightType::f16) return half(row + 2 * n);
  if (t == WeightType::bf16) return bits_to_float(static_cast<std::uint32_t>(u16(row + 2 * n)) << 16);
  const auto block = static_cast<int>(file_bytes(t, 1, granule(t)));
  const std::uint8_t* b = row + n / granule(t) * block;
  return is_super(t) ? super_value(t, b, n % 256) : simple_value(t, b, n % 32);
}

std::uint16_t random_half(Random& random) {  // magnitude 2^-8 to 2^-4
  const int exponent = random.between(7, 10), fraction = random.below(1024), sign = random.below(2);
  return static_cast<std::uint16_t>(exponent << 10 | fraction | sign << 15);
}

void put(std::uint8_t* p, std::uint16_t bits) { std::memcpy(p, &bits, 2); }

// Random bytes in which the floating-point fields are finite.
std::vector<std::uint8_t> random_file(Random& random, WeightType t, int rows, int k) {
  std::vector<std::uint8_t> bytes(file_bytes(t, rows, k));
  for (auto& b : bytes) b = static_cast<std::uint8_t>(random.next());
  const std::size_t block = file_bytes(t, 1, granule(t));
  for (std::size_t at = 0; at < bytes.size(); at += block) {
    std::uint8_t* p = bytes.data() + at;
    if (t == WeightType::f32) {
      const float x = random.normal() * 0.1f;
      std::memcpy(p, &x, 4);
    } else if (t == WeightType::bf16) {
      const float x = random.normal() * 0.1f;
      std::uint32_t bits;
      std::memcpy(&bits, &x, 4);
      put(p, static_cast<std::uint16_t>(bits >> 16));
    } else if (t == WeightType::q6_k) {
      put(p + 208, random_half(random));
    } else {
      put(p, random_half(random));
      if (t == WeightType::q4_1 || t == WeightType::q5_1 || is_super(t)) put(p + 2, random_half(random));
    }
  }
  return bytes;
}

struct Matrix {
  WeightType type;
  int rows, k;
  std::vector<std::uint8_t> panel;
  std::vector<double> values;  // [rows, k]
};

Matrix random_matrix(Random& random, WeightType t, int rows, int k, Pool& pool) {
  const auto file = random_file(random, t, rows, k);
  WeightArena arena(packed_bytes(t, rows, k));
  const PackedWeight packed = pack(t, rows, k, file.data(), arena, pool);
  Matrix m{t, rows, k, {packed.panel(0), packed.panel(0) + packed.panel_stride}, {}};
  const std::size_t row_bytes = file_bytes(t, 1, k);
  std::vector<float> unpacked(static_cast<std::size_t>(k));
  for (int r = 0; r < rows; ++r) {
    unpack_row(packed, r, unpacked.data());
    double wrong = 0.0;
    for (int i = 0; i < k; ++i) {
      m.values.push_back(value(t, file.data() + static_cast<std::size_t>(r) * row_bytes, i));
      // Products are exact in double; the float has at most two roundings of numbers below 2^-4 x 64 x 64.
      const double error = std::fabs(unpacked[static_cast<std::size_t>(i)] - m.values.back());
      wrong = std::fmax(wrong, error);
    }
    CHECK(wrong <= (is_float(t) ? 0.0 : 5e-5), "type %d row %d of %d x %d differs by %g", static_cast<int>(t), r, rows, k, wrong);
  }
  return m;
}

struct Case {
  Matrix gate;
  std::optional<Matrix> up;
  int rows, columns, k;
  Act act = Act::silu;
  bool high, bias, up_bias, residual;
};

// Activations as the kernel reads them, and their exact values.
struct Inputs {
  std::vector<float> x;            // [rows, k]
  std::vector<std::uint8_t> q8;    // rows of k + k / 2 bytes
  std::vector<double> x_values, q8_values;
};

Inputs random_inputs(Random& random, int rows, int k) {
  Inputs in;
  for (int i = 0; i < rows * k; ++i) in.x.push_back(random.normal());
  in.x_values.assign(in.x.begin(), in.x.end());
  if (k % 32) return in;
  in.q8.resize(static_cast<std::size_t>(rows * (k + k / 2)));
  for (int r = 0; r < rows; ++r) {
    std::uint8_t* out = in.q8.data() + static_cast<std::size_t>(r) * static_cast<std::size_t>(k + k / 2);
    for (int g = 0; g < k / 32; ++g) {
      const float d = static_cast<float>(random.unit() * 0.05);
      std::int32_t sums[2] = {0, 0};
      for (int i = 0; i < 32; ++i) {
        const int q = random.between(-127, 127);
        out[32 * g + i] = static_cast<std::uint8_t>(q);
        sums[i / 16] += q;
        in.q8_values.push_back(static_cast<double>(d) * q);
      }
      const float dsum = d * static_cast<float>(sums[0] + sums[1]);
      std::memcpy(out + k + 4 * g, &d, 4);
      std::memcpy(out + k + k / 8 + 4 * g, &dsum, 4);
      std::memcpy(out + k + k / 4 + 8 * g, sums, 8);
    }
  }
  return in;
}

// The sum of products, and of their magnitudes.
std::pair<double, double> product(const Matrix& m, const Inputs& in, int row, int column) {
  const double* x = (is_float(m.type) ? in.x_values : in.q8_values).data() + static_cast<std::ptrdiff_t>(row) * m.k;
  const double* w = m.values.data() + static_cast<std::ptrdiff_t>(column) * m.k;
  double sum = 0.0, magnitude = 0.0;
  for (int i = 0; i < m.k; ++i) {
    sum += w[i] * x[i];
    magnitude += std::fabs(w[i] * x[i]);
  }
  return {sum, magnitude};
}

double activation(Act act, double x) {
  if (act == Act::silu) return x / (1.0 + std::exp(-x));
  return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}

struct Expected {
  std::vector<double> y, tolerance;
};

Expected expect(const Case& c, const Inputs& in, const std::vector<float>& bias, const std::vector<float>& up_bias, const std::vector<float>& residual) {
  Expected e;
  constexpr double kError = 1.5e-6;
  for (int r = 0; r < c.rows; ++r) {
    for (int col = 0; col < c.columns; ++col) {
      const auto at = static_cast<std::size_t>(col);
      auto [y, tolerance] = product(c.gate, in, r, col);
      tolerance *= kError;
      if (c.bias) y += static_cast<double>(bias[at]);
      if (c.up) {
        auto [u, up_magnitude] = product(*c.up, in, r, col);
        if (c.up_bias) u += static_cast<double>(up_bias[at]);
        const double a = activation(c.act, y);
        tolerance = 1.2 * tolerance * std::fabs(u) + std::fabs(a) * kError * up_magnitude + 2e-6 * std::fabs(a * u);
        y = a * u;
      }
      if (c.residual) y += static_cast<double>(residual[static_cast<std::size_t>(r * c.columns + col)]);
      e.y.push_back(y);
      e.tolerance.push_back(tolerance + 2e-6 * std::fabs(y) + 1e-6);
    }
  }
  return e;
}

// Runs a case on one level, all rows at once and then row by row, and compares.
void run(const KernelTable& kernels, const Case& c, const Inputs& in, const std::vector<float>& bias, const std::vector<float>& up_bias,
         const std::vector<float>& residual, const Expected& expected) {
  const int stride = c.columns + 3;
  Guarded<std::uint8_t> panel(c.gate.panel, c.high), up_panel(c.up ? c.up->panel : std::vector<std::uint8_t>(), c.high);
  Guarded<float> x(in.x, c.high), b(bias, c.high), ub(up_bias, c.high);
  Guarded<std::uint8_t> q8(in.q8, c.high);
  const auto length = static_cast<std::size_t>((c.rows - 1) * stride + c.columns);
  Guarded<float> y(length, c.high), each(length, c.high), before(length, c.high);
  for (int r = 0; r < c.rows; ++r)
    for (int col = 0; col < c.columns; ++col) before[static_cast<std::size_t>(r * stride + col)] = residual[static_cast<std::size_t>(r * c.columns + col)];
  LinearTask task{};
  task.type = c.gate.type;
  task.panel = panel.data();
  if (c.up) {
    task.up_type = c.up->type;
    task.up_panel = up_panel.data();
  }
  task.k = c.k;
  task.q8 = in.q8.empty() ? nullptr : q8.data();
  task.q8_stride = c.k + c.k / 2;
  task.x = x.data();
  task.x_stride = c.k;
  task.bias = c.bias ? b.data() : nullptr;
  task.up_bias = c.up_bias ? ub.data() : nullptr;
  task.columns = c.columns;
  task.act = c.act;
  task.y_stride = stride;
  auto go = [&](Guarded<float>& out, int begin, int end, bool in_place) {
    task.y = out.data();
    task.residual = !c.residual ? nullptr : in_place ? out.data() : before.data();
    task.row_begin = begin;
    task.row_end = end;
    kernels.linear(task);
  };
  go(y, 0, c.rows, false);
  if (c.residual) std::memcpy(each.data(), before.data(), length * sizeof(float));  // the sum in its residual's place
  for (int r = 0; r < c.rows; ++r) go(each, r, r + 1, true);
  CHECK(same_bits(y.data(), each.data(), length * sizeof(float)), "%s type %d/%d: %d rows x k %d x %d columns: alone and together differ", kernels.name,
        static_cast<int>(c.gate.type), c.up ? static_cast<int>(c.up->type) : -1, c.rows, c.k, c.columns);
  double worst = 0.0;
  bool untouched = true;
  for (int r = 0; r < c.rows; ++r) {
    for (int col = 0; col < stride && static_cast<std::size_t>(r * stride + col) < length; ++col) {
      const float got = y[static_cast<std::size_t>(r * stride + col)];
      const auto at = static_cast<std::size_t>(r * c.columns + col);
      if (col < c.columns) worst = std::fmax(worst, std::isnan(got) ? INFINITY : std::fabs(got - expected.y[at]) / expected.tolerance[at]);
      else untouched &= std::isnan(got);
    }
  }
  CHECK(worst <= 1.0, "%s type %d/%d: %d rows x k %d x %d columns, bias %d residual %d: error is %g of what is allowed", kernels.name,
        static_cast<int>(c.gate.type), c.up ? static_cast<int>(c.up->type) : -1, c.rows, c.k, c.columns, c.bias, c.residual, worst);
  CHECK(untouched, "%s type %d: columns past %d were written", kernels.name, static_cast<int>(c.gate.type), c.columns);
  digests().add(kernels.name, y.data(), length * sizeof(float));
}

void test_case(Random& random, WeightType type, std::optional<WeightType> up_type, int rows, int k, int columns, Pool& pool) {
  Case c{random_matrix(random, type, columns, k, pool), {}, rows, columns, k, random.coin() ? Act::silu : Act::gelu_tanh,
         random.coin(), random.coin(), false, false};
  if (up_type) c.up = random_matrix(random, *up_type, columns, k, pool);
  c.up_bias = c.up && random.coin();
  c.residual = random.coin();
  const Inputs in = random_inputs(random, rows, k);
  std::vector<float> bias, up_bias, residual;
  for (int i = 0; i < kPanel; ++i) bias.push_back(i < columns ? random.normal() : NAN), up_bias.push_back(i < columns ? random.normal() : NAN);
  for (int i = 0; i < rows * columns; ++i) residual.push_back(random.normal());
  const Expected expected = expect(c, in, bias, up_bias, residual);
  for (const auto* kernels : levels()) run(*kernels, c, in, bias, up_bias, residual, expected);
}

int random_k(Random& random, int unit, bool quick) {
  const int most = (quick ? 1024 : 8192) / unit;
  return unit * (random.below(4) ? random.between(1, std::min(most, 40)) : random.between(1, most));
}

// Random sizes are drawn one statement each: the order of arguments is the compiler's.
void test_type(Random& random, WeightType type, bool quick, Pool& pool) {
  const int unit = granule(type);
  for (int rows = 1; rows <= (quick ? 17 : 33); ++rows) {
    const int columns = random.between(1, 16);
    test_case(random, type, {}, rows, unit == 1 ? 37 : std::max(unit, 64), columns, pool);
  }
  for (int columns = 1; columns <= 16; ++columns) {
    const int rows = random.between(1, 9);
    test_case(random, type, {}, rows, unit == 1 ? columns : unit, columns, pool);
  }
  for (int i = 0; i < (quick ? 3 : 10); ++i) {
    const int rows = random.between(1, 12), columns = random.between(1, 16), k = random_k(random, unit, quick);
    test_case(random, type, {}, rows, k, columns, pool);
  }
  test_case(random, type, {}, 2, quick ? 1024 : 8192, 16, pool);
  // So many rows that a level may take another way, over inner sizes that it may cut into chunks.
  for (const int rows : quick ? std::vector<int>{39} : std::vector<int>{23, 24, 25, 33, 48, 121, 255, 256, 257, 300}) {
    const int columns = random.between(1, 16), k = is_super(type) ? 256 * random.between(3, 6) : 32 * random.between(30, 70);
    test_case(random, type, {}, rows, k, columns, pool);
  }
  // Gated: any two types whose inputs come in the same form, and a float beside a quantized one.
  std::vector<WeightType> others = is_float(type) ? kFloats : kSimple;
  if (!is_float(type)) others.insert(others.end(), kSuper.begin(), kSuper.end());
  others.push_back(is_float(type) ? WeightType::q8_0 : WeightType::f16);
  for (const WeightType up : others) {
    const int rows = random.between(1, 11), columns = random.between(1, 16);
    const int k = random_k(random, std::max(granule(type), granule(up)), true);
    test_case(random, type, up, rows, k, columns, pool);
  }
}

void test_refusals(Pool& pool) {
  auto refused = [](auto call) {
    try {
      call();
    } catch (const std::logic_error&) {
      return true;
    }
    return false;
  };
  const auto most = std::int64_t{1} << 31;
  CHECK(refused([] { packed_bytes(WeightType::q4_0, 1, 33); }), "33 columns");
  CHECK(refused([] { packed_bytes(WeightType::q4_k, 1, 128); }), "128 columns");
  CHECK(refused([] { packed_bytes(WeightType::f32, 0, 4); }), "no rows");
  CHECK(refused([] { packed_bytes(static_cast<WeightType>(11), 1, 256); }), "unknown type");
  CHECK(refused([&] { packed_bytes(WeightType::f32, most, most - 1); }), "sizes that overflow");
  CHECK(refused([&] { file_bytes(WeightType::f32, 1, most); }), "a width that overflows");
  CHECK(refused([&] {
          const std::vector<std::uint8_t> file(file_bytes(WeightType::f32, 1 << 17, 16));
          WeightArena arena(64);
          pack(WeightType::f32, 1 << 17, 16, file.data(), arena, pool);
        }),
        "an arena that is full");
}

}  // namespace

void test_linear(bool quick) {
  Pool pool(1);
  Random random(1);
  for (const auto* types : {&kFloats, &kSimple, &kSuper})
    for (const WeightType type : *types) test_type(random, type, quick, pool);
  test_refusals(pool);
}

}  // namespace yeoul::test
