// Packed weights: a matrix in the file's own values and bit width, laid out for the kernels (kernels/layout.inl).
// Knows the encodings of GGUF tensors; not files, names or models.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>

#include "kernels/abi.h"
#include "pool.h"

namespace yeoul {

// Memory for all weights of a model: one anonymous mapping with huge pages, filled from the front.
class WeightArena {
 public:
  explicit WeightArena(std::size_t bytes);
  ~WeightArena();
  WeightArena(const WeightArena&) = delete;
  WeightArena& operator=(const WeightArena&) = delete;
  std::uint8_t* take(std::size_t bytes);  // 64-byte aligned; throws std::length_error when full
  std::size_t size() const { return size_; }

 private:
  std::uint8_t* data_;
  std::size_t size_;
  std::size_t used_ = 0;
};

struct PackedWeight {
  WeightType type;
  std::int64_t rows;  // outputs
  std::int64_t k;     // inputs
  const std::uint8_t* data;
  std::int64_t panel_stride;

  std::int64_t panels() const { return (rows + kPanel - 1) / kPanel; }
  const std::uint8_t* panel(std::int64_t p) const { return data + p * panel_stride; }
  bool quantized() const;
};

// Bytes that `pack` takes from the arena. Throws std::invalid_argument for sizes that the type cannot have.
std::size_t packed_bytes(WeightType type, std::int64_t rows, std::int64_t k);

// Bytes of the matrix in the file.
std::size_t file_bytes(WeightType type, std::int64_t rows, std::int64_t k);

PackedWeight pack(WeightType type, std::int64_t rows, std::int64_t k, const std::uint8_t* source, WeightArena& arena, Pool& pool);

// Values of one row of the matrix, as floats.
void unpack_row(const PackedWeight& weight, std::int64_t row, float* out);

float half_to_float(std::uint16_t half);

}  // namespace yeoul
