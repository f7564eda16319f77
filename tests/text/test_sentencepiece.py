"""The native SentencePiece-style encoder, against SentencePiece itself on small trained vocabularies."""

import random
import threading
import time

import pytest
from text_models import keys, read_data, spm_keys

from yeoul._native import SpmEncoder
from yeoul.text.tokenizer import load_tokenizer

CASES = [case["text"] for case in read_data("ids.json")]
VOCABULARIES = read_data("sentencepiece.json")


def trained(vocabulary):
    """As a GGUF file would hold it; with byte fallback, without, with a space before the text, without."""
    return load_tokenizer(
        keys(
            model="llama",
            tokens=vocabulary["tokens"],
            scores=vocabulary["scores"],
            token_type=vocabulary["kinds"],
            unknown_token_id=vocabulary["kinds"].index(2),
            add_space_prefix=vocabulary["space_prefix"],
        )
    )


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_ids_equal_sentencepiece(vocabulary) -> None:
    tokenizer = trained(vocabulary)
    assert [tokenizer.encode(text, add_special=False) for text in CASES] == vocabulary["ids"]


@pytest.mark.parametrize("vocabulary", [v for v in VOCABULARIES if 6 in v["kinds"]])
def test_texts_equal_sentencepiece(vocabulary) -> None:
    tokenizer = trained(vocabulary)
    assert [tokenizer.decode(ids) for ids in vocabulary["ids"]] == vocabulary["decoded"]


def test_unused_tokens_are_taken_apart() -> None:
    metadata = spm_keys({"a": -9.0, "b": -9.0, "ab": -1.0, "abb": -2.0})
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.token_type"][tokens.index("ab")] = 5
    tokenizer = load_tokenizer(metadata)
    assert [tokens[i] for i in tokenizer.encode("abab", add_special=False)] == ["a", "b", "a", "b"]
    assert [tokens[i] for i in tokenizer.encode("abb", add_special=False)] == ["abb"]


def test_ties_go_to_the_leftmost_pair() -> None:
    metadata = spm_keys({"a": -9.0, "aa": -1.0})
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = load_tokenizer(metadata).encode("aaaaa", add_special=False)
    assert [tokens[i] for i in ids] == ["aa", "aa", "a"]


def test_best_score_merges_first() -> None:
    metadata = spm_keys({"a": -9.0, "b": -9.0, "c": -9.0, "ab": -2.0, "bc": -1.0})
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in load_tokenizer(metadata).encode("abc", add_special=False)] == ["a", "bc"]


class TestSpacePrefix:
    def tokenizer(self, space_prefix: bool):
        return load_tokenizer(spm_keys({"x": -2.0, "\u2581x": -0.5}, add_space_prefix=space_prefix))

    def names(self, tokenizer, ids):
        return [tokenizer._vocabulary.tokens[i] for i in ids]

    def test_goes_before_a_text_and_after_control_tokens(self) -> None:
        tokenizer = self.tokenizer(True)
        ids = tokenizer.encode("x</s>x<tool>x", add_special=False, parse_special=True)
        assert self.names(tokenizer, ids) == ["\u2581x", "</s>", "\u2581x", "<tool>", "x"]
        assert tokenizer.encode("", add_special=False) == []

    def test_is_taken_back_by_decoding_once(self) -> None:
        tokenizer = self.tokenizer(True)
        for text in ("x", " x", "  x", ""):
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_is_left_out_where_the_file_says_so(self) -> None:
        tokenizer = self.tokenizer(False)
        assert self.names(tokenizer, tokenizer.encode("x x", add_special=False)) == ["x", "\u2581x"]
        assert tokenizer.decode(tokenizer.encode(" x")) == " x"


def test_longest_user_defined_token_wins() -> None:
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "\n", "\n\n", "\n\n\n", "  "]
    encoder = SpmEncoder(tokens, [0.0] * len(tokens), [2] + [6] * 256 + [4] * 4, 0)
    assert [tokens[i] for i in encoder.encode(b"\n\n\n\n\n", False, False)] == ["\n\n\n", "\n\n"]
    assert [tokens[i] for i in encoder.encode(b"    ", False, False)] == ["  ", "  "]


def test_invalid_utf8_falls_back_to_bytes() -> None:
    encoder = SpmEncoder([f"<0x{b:02X}>" for b in range(256)], [0.0] * 256, [6] * 256, -1)
    rng = random.Random(1)
    cases = [bytes(rng.randrange(256) for _ in range(rng.randrange(1, 40))) for _ in range(500)]
    for data in [b"\xf0\x9f", b"\xff\xfe", b"\x80", b"\xe2\x96", *cases]:
        assert bytes(encoder.encode(data, True, False)) == data.replace(b" ", b"\xe2\x96\x81")


def test_a_vocabulary_that_cannot_write_every_text_is_refused() -> None:
    with pytest.raises(ValueError, match="0 of 256 byte tokens"):
        SpmEncoder(["a"], [0.0], [1], -1)
    with pytest.raises(ValueError):
        SpmEncoder(["a"], [0.0, 1.0], [1], 0)
    with pytest.raises(ValueError):
        SpmEncoder(["a"], [0.0], [1], 1)


def test_long_texts_take_linear_time_and_length_is_limited() -> None:
    encoder = SpmEncoder(["<unk>", "a", "aa", "aaaa", "b"], [0.0, -3.0, -2.0, -1.0, -3.0], [2, 1, 1, 1, 1], 0)
    assert len(encoder.encode(b"a" * 400_000, False, False)) == 100_000
    with pytest.raises(ValueError):
        encoder.encode(b"a" * ((1 << 26) + 1), False, False)


def test_other_threads_run_while_encoding() -> None:
    """The GIL is released: a thread that sleeps for a millisecond at a time wakes up many times during one call."""
    encoder = SpmEncoder(["<unk>", "a", "aa", "aaaa", "b"], [0.0, -3.0, -2.0, -1.0, -3.0], [2, 1, 1, 1, 1], 0)
    wakes, done = 0, threading.Event()

    def tick() -> None:
        nonlocal wakes
        while not done.is_set():
            time.sleep(0.0005)
            wakes += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before = wakes
    encoder.encode(b"ab" * 1_000_000, False, False)
    during = wakes - before
    done.set()
    thread.join()
    assert during >= 3
