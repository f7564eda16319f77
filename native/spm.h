// SentencePiece-style encoding by scores (Kudo and Richardson, 2018; Sennrich et al., 2016). Knows token bytes, scores
// and kinds; beginning-of-sequence tokens and where a text comes from are the caller's.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace yeoul {

// The kinds of tokens, with the numbers that GGUF gives them.
enum class TokenKind : std::int32_t { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };

// Finds tokens that stand in a text literally: the longest one at a position. A trie in a hash table.
class LiteralMatcher {
 public:
  LiteralMatcher() { starts_.fill(false); }

  void add(std::string_view text, std::int32_t id);

  struct Match {
    std::int32_t id = -1;  // -1: none
    std::uint32_t length = 0;
  };
  Match longest(std::string_view text, std::size_t at) const;

 private:
  static std::uint64_t edge(std::uint32_t node, unsigned char byte) { return std::uint64_t{node} << 8 | byte; }

  std::vector<std::int32_t> ids_{-1};  // of the token that ends at a node; -1: none
  std::unordered_map<std::uint64_t, std::uint32_t> edges_;
  std::array<bool, 256> starts_;
};

// Immutable once built: any number of threads may encode at the same time.
class SpmEncoder {
 public:
  // `scores` and `kinds` have one entry for each token. Spaces inside tokens count as U+2581. Throws
  // std::invalid_argument when the sizes differ, a score is not a number, or a text could come out that has no token
  // (neither all 256 byte tokens nor a valid `unknown_id`; -1 for none).
  SpmEncoder(const std::vector<std::string>& tokens, const std::vector<float>& scores,
             const std::vector<std::int32_t>& kinds, std::int32_t unknown_id);
  SpmEncoder(const SpmEncoder&) = delete;
  SpmEncoder& operator=(const SpmEncoder&) = delete;

  // Ids of `text`, in time O(n log n). Any bytes are allowed; what is not UTF-8 is taken byte by byte. User-defined
  // tokens are matched everywhere, control tokens with `parse_control`. `space_prefix` puts a space before the text and
  // before what follows a control token. Throws std::length_error above `max_text` bytes.
  std::vector<std::int32_t> encode(std::string_view text, bool parse_control, bool space_prefix) const;

  static constexpr std::size_t max_text = std::size_t{1} << 26;

 private:
  class Merger;

  void index(std::string_view text, std::int32_t id);
  std::int32_t find(std::string_view text) const;  // -1: not a token that merging may build
  void check_complete(std::size_t byte_tokens) const;
  void encode_span(std::string_view span, bool space_prefix, std::vector<std::int32_t>& out) const;
  void emit_fallback(std::string_view bytes, std::vector<std::int32_t>& out) const;

  std::string text_;                    // all indexed tokens, one after the other
  std::vector<std::uint32_t> offsets_;  // of token i: offsets_[i], offsets_[i + 1]
  std::vector<std::int32_t> table_;     // open addressing, a power of two; -1: empty
  std::vector<float> scores_;
  std::vector<bool> unused_;
  std::array<std::int32_t, 256> bytes_;
  std::int32_t unknown_id_;
  bool has_bytes_ = false;
  LiteralMatcher user_defined_, control_;
};

}  // namespace yeoul
