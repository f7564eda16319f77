// Walks the parts of a GGUF header that are too long for Python: arrays of strings. Knows nothing of what they mean.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace yeoul {

// Offsets of the `count` strings at `start` (each: u64 length, then bytes): count + 1 entries, where string i occupies
// [result[i] + 8, result[i + 1]). Throws std::out_of_range when a string would pass the end of the buffer.
std::vector<std::uint64_t> scan_strings(const std::byte* data, std::uint64_t size, std::uint64_t start, std::uint64_t count);

}  // namespace yeoul
