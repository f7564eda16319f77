"""Grammars: masks allow exactly what may follow, refusals explain themselves, caches and limits hold."""

import json

import numpy as np
import pytest
from text_models import bpe_keys

from yeoul.errors import EngineError, RequestError
from yeoul.text import grammar as module
from yeoul.text.grammar import GrammarCompiler
from yeoul.text.tokenizer import load_tokenizer
from yeoul.types import MAX_REGEX_BYTES, Structured, StructuredKind

BPE = load_tokenizer(bpe_keys(add_bos_token=False))
VOCAB = BPE.vocab_size + 5


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(BPE, VOCAB)


def regex(text):
    return Structured(StructuredKind.REGEX, text, "structured_outputs.regex")


def schema(**fields):
    return Structured(StructuredKind.JSON, json.dumps(fields), "response_format")


def allowed(grammar):
    mask = np.unpackbits(np.frombuffer(grammar.mask(), np.uint8), bitorder="little")
    assert len(mask) == -(-VOCAB // 32) * 32
    return set(np.flatnonzero(mask).tolist())


def test_a_mask_allows_the_tokens_that_begin_what_may_follow(compiler):
    grammar = compiler.start(regex("(abc|b)"))
    for expected in ("abc", "b"):
        found = {i for i in range(BPE.vocab_size) if not BPE.is_special(i) and BPE.token_bytes(i)}
        prefixes = {i for i in found if any(w.startswith(BPE.token_bytes(i).decode("latin-1")) for w in ("abc", "b"))}
        assert allowed(grammar) == prefixes, expected
    grammar.advance(BPE.encode("b", add_special=False))
    assert grammar.is_finished and allowed(grammar) == set(BPE.end_ids)


def test_ids_past_the_vocabulary_and_special_tokens_are_never_allowed(compiler):
    grammar = compiler.start(regex("(?s:.*)"))
    ids = allowed(grammar)
    assert max(ids) < BPE.vocab_size and not {i for i in ids if BPE.is_special(i)} - set(BPE.end_ids)


def test_a_token_outside_the_mask_ends_the_grammar(compiler):
    grammar = compiler.start(regex("[0-9]+"))
    with pytest.raises(EngineError, match="cannot go on"):
        grammar.advance(BPE.encode("x", add_special=False))


def test_copies_are_independent(compiler):
    first, second = compiler.start(regex("ab")), compiler.start(regex("ab"))
    before = second.mask()
    first.advance(BPE.encode("a", add_special=False)[:1])
    assert second.mask() == before != first.mask()


def test_json_has_bounded_whitespace(compiler):
    grammar = compiler.start(schema(type="object"))
    grammar.advance(BPE.encode("{", add_special=False))
    space = BPE.encode(" ", add_special=False)
    for _ in range(20):
        grammar.advance(space)
    assert space[0] not in allowed(grammar)


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        (regex("("), "unclosed group"),
        (schema(type="nonsense"), "nonsense"),
        (schema(**{"$ref": "http://somewhere/x"}), "does not fetch"),
        (schema(type="string", pattern="("), "unclosed group"),
        (Structured(StructuredKind.JSON, "[1"), "cannot be used"),
        (Structured(StructuredKind.GRAMMAR, "start: ("), "Expected"),
        (Structured(StructuredKind.GRAMMAR, "nothing: /a/"), "start"),
        (regex("(" * 500 + "a" + ")" * 500), "cannot be used"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_refused_in_one_line(compiler, structured, words):
    with pytest.raises(RequestError, match="cannot be used") as refusal:
        compiler.start(structured)
    assert words in refusal.value.message and "\n" not in refusal.value.message and len(refusal.value.message) < 400
    assert refusal.value.param == structured.param and refusal.value.status == 400


def test_sources_have_a_size():
    for source in ("", "a" * (MAX_REGEX_BYTES + 1)):
        with pytest.raises(RequestError, match="bytes"):
            regex(source)
    with pytest.raises(RequestError, match="bytes"):
        Structured(StructuredKind.GRAMMAR, "a" * (64 << 10) + "a")


def test_the_cache_is_capped_and_keeps_what_was_used_last(monkeypatch):
    monkeypatch.setattr(module, "CACHED_GRAMMARS", 3)
    compiler = GrammarCompiler(BPE, VOCAB)
    for text in ("a", "b", "c", "a", "d", "a"):
        compiler.start(regex(text))
    assert [one.source for one in compiler._compiled] == ["c", "d", "a"]
