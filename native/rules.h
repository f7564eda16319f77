// What stands between logits and sampling for one sequence: penalties, bias, bans. Knows the sequence's tokens; nothing of
// requests, text or batches. yeoul/exec/reference_rules.py is the definition that it follows, bit for bit.
#pragma once
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace yeoul {

struct LogitEdits {
  double repetition = 1.0, frequency = 0.0, presence = 0.0;
  std::vector<std::pair<std::int32_t, double>> bias;
  std::vector<std::int32_t> end_ids;  // banned below position first_end
  std::int64_t first_end = 0;
  std::vector<std::vector<std::int32_t>> bad_words;
  std::vector<std::int32_t> allowed;
  bool only_allowed = false;
};

class LogitRules {
 public:
  // `prompt` and `output`: the tokens known so far. Throws std::invalid_argument for an id outside [0, vocab).
  LogitRules(std::int32_t vocab, LogitEdits edits, const std::vector<std::int32_t>& prompt, const std::vector<std::int32_t>& output);

  std::int32_t vocab() const { return vocab_; }

  // The next token of the sequence.
  void append(std::int32_t token);

  // Writes to `out` the logits to sample from for the token at `position`. `logits` and `out` have `vocab` values.
  void apply(const float* logits, std::int64_t position, float* out) const;

 private:
  void check(std::int32_t token) const;
  void penalize(float* out) const;
  void ban(std::int64_t position, float* out) const;

  std::int32_t vocab_;
  LogitEdits edits_;
  std::unordered_map<std::int32_t, std::int32_t> counts_;  // every token of the sequence, with how often it was generated
  std::vector<std::uint32_t> allowed_;                     // mask; empty: all
  std::vector<std::int32_t> output_;                       // in order; only kept where there are bad words
};

// Bans every token whose bit in `mask` (32 to a word, lowest bit first) is not set.
void apply_mask(const std::uint32_t* mask, std::int32_t vocab, float* out);

}  // namespace yeoul
