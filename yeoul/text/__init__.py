"""Text on both sides of a model: tokenizers, chat templates, incremental detokenizing with stop strings.

Owns the way from characters to token ids and back; must not know requests, scheduling, weights or HTTP.
"""
