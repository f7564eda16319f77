#include "gguf_scan.h"

#include <cstring>
#include <stdexcept>

namespace yeoul {

std::vector<std::uint64_t> scan_strings(const std::byte* data, std::uint64_t size, std::uint64_t start, std::uint64_t count) {
  if (start > size || count > (size - start) / 8) throw std::out_of_range("more strings than the file can hold");
  std::vector<std::uint64_t> offsets(count + 1);
  std::uint64_t at = start;
  for (std::uint64_t i = 0; i < count; ++i) {
    offsets[i] = at;
    if (size - at < 8) throw std::out_of_range("string length past the end of the file");
    std::uint64_t length;
    std::memcpy(&length, data + at, 8);
    at += 8;
    if (length > size - at) throw std::out_of_range("string past the end of the file");
    at += length;
  }
  offsets[count] = at;
  return offsets;
}

}  // namespace yeoul
