#include "rules.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace yeoul {
namespace {

constexpr float kBanned = -std::numeric_limits<float>::infinity();

}  // namespace

LogitRules::LogitRules(std::int32_t vocab, LogitEdits edits, const std::vector<std::int32_t>& prompt, const std::vector<std::int32_t>& output)
    : vocab_(vocab), edits_(std::move(edits)) {
  for (const auto& [token, value] : edits_.bias) check(token);
  for (const std::int32_t token : edits_.end_ids) check(token);
  if (edits_.only_allowed) allowed_.resize(static_cast<std::size_t>(vocab_ + 31) / 32);
  for (const std::int32_t token : edits_.allowed) {
    check(token);
    if (edits_.only_allowed) allowed_[static_cast<std::size_t>(token / 32)] |= 1u << (token % 32);
  }
  for (const auto& word : edits_.bad_words) {
    if (word.empty()) throw std::invalid_argument("a bad word has no tokens");
    for (const std::int32_t token : word) check(token);
  }
  for (const std::int32_t token : prompt) {
    check(token);
    counts_.try_emplace(token, 0);
  }
  for (const std::int32_t token : output) append(token);
}

void LogitRules::append(std::int32_t token) {
  check(token);
  ++counts_[token];
  if (!edits_.bad_words.empty()) output_.push_back(token);
}

void LogitRules::apply(const float* logits, std::int64_t position, float* out) const {
  std::memcpy(out, logits, static_cast<std::size_t>(vocab_) * sizeof(float));
  penalize(out);
  for (const auto& [token, value] : edits_.bias) out[token] = static_cast<float>(static_cast<double>(out[token]) + value);
  ban(position, out);
}

void LogitRules::check(std::int32_t token) const {
  if (token < 0 || token >= vocab_) throw std::invalid_argument("a token id of a sampling rule is outside the vocabulary");
}

void LogitRules::penalize(float* out) const {
  const bool repeats = edits_.repetition != 1.0, counts = edits_.frequency != 0.0 || edits_.presence != 0.0;
  if (!repeats && !counts) return;
  // Each token is edited by itself: the order in which the map gives them does not show.
  for (const auto& [token, count] : counts_) {
    if (repeats) {
      const double value = out[token];
      out[token] = static_cast<float>(value > 0.0 ? value / edits_.repetition : value * edits_.repetition);
    }
    if (count > 0 && counts) out[token] = static_cast<float>(static_cast<double>(out[token]) - (edits_.presence + edits_.frequency * count));
  }
}

void LogitRules::ban(std::int64_t position, float* out) const {
  if (position < edits_.first_end)
    for (const std::int32_t token : edits_.end_ids) out[token] = kBanned;
  for (const auto& word : edits_.bad_words) {
    const auto before = word.size() - 1;
    if (before > output_.size() || !std::equal(word.begin(), word.end() - 1, output_.end() - static_cast<std::ptrdiff_t>(before))) continue;
    out[word.back()] = kBanned;
  }
  if (!allowed_.empty()) apply_mask(allowed_.data(), vocab_, out);
}

void apply_mask(const std::uint32_t* mask, std::int32_t vocab, float* out) {
  for (std::int32_t i = 0; i < vocab; ++i)
    if (!(mask[i / 32] >> (i % 32) & 1u)) out[i] = kBanned;
}

}  // namespace yeoul
