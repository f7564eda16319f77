#include "spm.h"

#include <cmath>
#include <functional>
#include <queue>
#include <stdexcept>
#include <utility>

namespace yeoul {
namespace {

constexpr std::string_view kSpace = "\xe2\x96\x81";  // U+2581, what SentencePiece writes for a space

std::string escape_spaces(std::string_view text) {
  std::string out;
  out.reserve(text.size() + text.size() / 2);
  for (char c : text) {
    if (c == ' ') {
      out += kSpace;
    } else {
      out += c;
    }
  }
  return out;
}

// Bytes of the UTF-8 character at `at`; 1 for a byte that starts none.
std::uint32_t character_size(std::string_view text, std::size_t at) {
  const auto lead = static_cast<unsigned char>(text[at]);
  const std::uint32_t size = lead < 0x80 ? 1 : lead < 0xC2 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 1;
  if (size > text.size() - at) return 1;
  for (std::uint32_t i = 1; i < size; ++i) {
    if ((static_cast<unsigned char>(text[at + i]) & 0xC0) != 0x80) return 1;
  }
  return size;
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

// The byte that "<0xAB>" stands for; -1 when the token is not written like that.
int byte_value(std::string_view token) {
  if (token.size() != 6 || token.substr(0, 3) != "<0x" || token[5] != '>') return -1;
  const int high = hex_digit(token[3]), low = hex_digit(token[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

}  // namespace

void LiteralMatcher::add(std::string_view text, std::int32_t id) {
  if (text.empty()) return;
  starts_[static_cast<unsigned char>(text[0])] = true;
  std::uint32_t node = 0;
  for (char c : text) {
    const auto [it, added] =
        edges_.try_emplace(edge(node, static_cast<unsigned char>(c)), static_cast<std::uint32_t>(ids_.size()));
    if (added) ids_.push_back(-1);
    node = it->second;
  }
  if (ids_[node] < 0) ids_[node] = id;
}

LiteralMatcher::Match LiteralMatcher::longest(std::string_view text, std::size_t at) const {
  Match best;
  if (!starts_[static_cast<unsigned char>(text[at])]) return best;
  std::uint32_t node = 0;
  for (std::size_t i = at; i < text.size(); ++i) {
    const auto it = edges_.find(edge(node, static_cast<unsigned char>(text[i])));
    if (it == edges_.end()) break;
    node = it->second;
    if (ids_[node] >= 0) best = {ids_[node], static_cast<std::uint32_t>(i + 1 - at)};
  }
  return best;
}

// Merges the characters of one segment, best score first, and writes the ids.
class SpmEncoder::Merger {
 public:
  Merger(const SpmEncoder& encoder, std::string_view text) : encoder_(encoder), text_(text) {}

  void run(std::vector<std::int32_t>& out) {
    split();
    for (std::size_t i = 1; i < symbols_.size(); ++i) propose(static_cast<std::int32_t>(i) - 1, static_cast<std::int32_t>(i));
    while (!candidates_.empty()) {
      const Candidate best = candidates_.top();
      candidates_.pop();
      apply(best);
    }
    for (std::int32_t i = 0; i >= 0; i = symbols_[i].next) {
      emit(text_.substr(symbols_[i].start, symbols_[i].size), out);
    }
  }

 private:
  struct Symbol {
    std::uint32_t start, size;  // size 0: merged into its left neighbour
    std::int32_t previous, next;
  };
  struct Candidate {
    float score;
    std::int32_t left, right;
    std::uint32_t size;
    // The queue's top is the best score; among equals the leftmost.
    bool operator<(const Candidate& other) const {
      return score < other.score || (score == other.score && left > other.left);
    }
  };

  void split() {
    for (std::size_t at = 0; at < text_.size();) {
      const std::uint32_t size = character_size(text_, at);
      const auto i = static_cast<std::int32_t>(symbols_.size());
      symbols_.push_back({static_cast<std::uint32_t>(at), size, i - 1, i + 1});
      at += size;
    }
    symbols_.back().next = -1;
  }

  void propose(std::int32_t left, std::int32_t right) {
    const std::uint32_t size = symbols_[left].size + symbols_[right].size;
    const std::string_view piece = text_.substr(symbols_[left].start, size);
    const std::int32_t id = encoder_.find(piece);
    if (id < 0) return;
    candidates_.push({encoder_.scores_[id], left, right, size});
    if (encoder_.unused_[id]) parts_.try_emplace(piece, symbols_[left].size);
  }

  void apply(const Candidate& merge) {
    Symbol& left = symbols_[merge.left];
    Symbol& right = symbols_[merge.right];
    const bool stale = left.size == 0 || right.size == 0 || left.size + right.size != merge.size;
    if (stale) return;
    left.size = merge.size;
    right.size = 0;
    left.next = right.next;
    if (right.next >= 0) symbols_[right.next].previous = merge.left;
    if (left.previous >= 0) propose(left.previous, merge.left);
    if (left.next >= 0) propose(merge.left, left.next);
  }

  // A token marked unused may be a step on the way to a longer one, but is taken apart again in the result.
  void emit(std::string_view piece, std::vector<std::int32_t>& out) const {
    std::vector<std::string_view> stack{piece};
    while (!stack.empty()) {
      const std::string_view top = stack.back();
      stack.pop_back();
      const std::int32_t id = encoder_.find(top);
      const auto part = id >= 0 && encoder_.unused_[id] ? parts_.find(top) : parts_.end();
      if (part != parts_.end()) {
        stack.push_back(top.substr(part->second));
        stack.push_back(top.substr(0, part->second));
      } else if (id >= 0) {
        out.push_back(id);
      } else {
        encoder_.emit_fallback(top, out);
      }
    }
  }

  const SpmEncoder& encoder_;
  std::string_view text_;
  std::vector<Symbol> symbols_;
  std::priority_queue<Candidate> candidates_;
  std::unordered_map<std::string_view, std::uint32_t> parts_;  // unused token -> size of its left part
};

namespace {

// Calls `between` with the parts of `text` that no literal covers and writes the literals' ids, in order.
template <typename Between>
void cut(std::string_view text, const LiteralMatcher& literals, Between between, std::vector<std::int32_t>& out) {
  std::size_t start = 0;
  for (std::size_t at = 0; at < text.size();) {
    const LiteralMatcher::Match match = literals.longest(text, at);
    if (match.id < 0) {
      at += character_size(text, at);
      continue;
    }
    if (at > start) between(text.substr(start, at - start));
    out.push_back(match.id);
    at += match.length;
    start = at;
  }
  if (start < text.size()) between(text.substr(start));
}

}  // namespace

SpmEncoder::SpmEncoder(const std::vector<std::string>& tokens, const std::vector<float>& scores,
                       const std::vector<std::int32_t>& kinds, std::int32_t unknown_id)
    : scores_(scores), unused_(tokens.size(), false), unknown_id_(unknown_id) {
  const std::size_t count = tokens.size();
  if (scores.size() != count || kinds.size() != count) throw std::invalid_argument("one score and one type per token");
  if (count >= std::size_t{1} << 30) throw std::invalid_argument("too many tokens");
  bytes_.fill(-1);
  std::size_t slots = 16, byte_tokens = 0;
  while (slots < count * 2) slots *= 2;
  table_.assign(slots, -1);
  offsets_.assign(1, 0);
  offsets_.reserve(count + 1);
  for (std::size_t i = 0; i < count; ++i) {
    if (std::isnan(scores[i])) throw std::invalid_argument("a score is not a number");
    const auto id = static_cast<std::int32_t>(i);
    const auto kind = static_cast<TokenKind>(kinds[i]);
    const std::string text = escape_spaces(tokens[i]);
    text_ += text;
    if (text_.size() >= std::size_t{1} << 31) throw std::invalid_argument("the tokens are too long");
    offsets_.push_back(static_cast<std::uint32_t>(text_.size()));
    unused_[i] = kind == TokenKind::unused;
    if (kind == TokenKind::byte) {
      const int value = byte_value(tokens[i]);
      if (value >= 0 && bytes_[value] < 0) ++byte_tokens, bytes_[value] = id;
    } else if (kind == TokenKind::user_defined) {
      user_defined_.add(text, id);
    } else if (kind == TokenKind::control || kind == TokenKind::unknown) {
      control_.add(text, id);
    } else if (!text.empty()) {
      index(text, id);
    }
  }
  has_bytes_ = byte_tokens == 256;
  if (unknown_id >= static_cast<std::int64_t>(count)) throw std::invalid_argument("the unknown token is not in the vocabulary");
  check_complete(byte_tokens);
}

void SpmEncoder::check_complete(std::size_t byte_tokens) const {
  if (!has_bytes_ && unknown_id_ < 0) {
    throw std::invalid_argument("there are " + std::to_string(byte_tokens) +
                                " of 256 byte tokens and no unknown token, so some texts have no encoding");
  }
}

void SpmEncoder::index(std::string_view text, std::int32_t id) {
  std::size_t slot = std::hash<std::string_view>{}(text) & (table_.size() - 1);
  while (table_[slot] >= 0) {
    const std::int32_t other = table_[slot];
    if (std::string_view(text_).substr(offsets_[other], offsets_[other + 1] - offsets_[other]) == text) return;
    slot = (slot + 1) & (table_.size() - 1);
  }
  table_[slot] = id;
}

std::int32_t SpmEncoder::find(std::string_view text) const {
  std::size_t slot = std::hash<std::string_view>{}(text) & (table_.size() - 1);
  while (table_[slot] >= 0) {
    const std::int32_t id = table_[slot];
    if (std::string_view(text_).substr(offsets_[id], offsets_[id + 1] - offsets_[id]) == text) return id;
    slot = (slot + 1) & (table_.size() - 1);
  }
  return -1;
}

void SpmEncoder::emit_fallback(std::string_view bytes, std::vector<std::int32_t>& out) const {
  if (has_bytes_) {
    for (char c : bytes) out.push_back(bytes_[static_cast<unsigned char>(c)]);
  } else if (out.empty() || out.back() != unknown_id_) {
    out.push_back(unknown_id_);  // a run of unknown characters is one token
  }
}

std::vector<std::int32_t> SpmEncoder::encode(std::string_view raw, bool parse_control, bool space_prefix) const {
  if (raw.size() > max_text) throw std::length_error("text is too long");
  const std::string text = escape_spaces(raw);
  std::vector<std::int32_t> out;
  if (!parse_control) {
    encode_span(text, space_prefix, out);
    return out;
  }
  cut(text, control_, [&](std::string_view span) { encode_span(span, space_prefix, out); }, out);
  return out;
}

void SpmEncoder::encode_span(std::string_view span, bool space_prefix, std::vector<std::int32_t>& out) const {
  if (span.empty()) return;
  std::string prefixed;
  if (space_prefix) {
    prefixed.reserve(kSpace.size() + span.size());
    prefixed.append(kSpace).append(span);
    span = prefixed;
  }
  cut(span, user_defined_, [&](std::string_view segment) { Merger(*this, segment).run(out); }, out);
}

}  // namespace yeoul
