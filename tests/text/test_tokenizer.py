"""Tokenizers: ids equal to the published tokenizers', BOS once, special tokens only where asked for, clear refusals."""

import functools
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_models import DEFAULT_MODEL, USER_DEFINED, bpe_keys, keys, read_data, spm_keys, tokenizer_of

from yeoul.errors import ModelFileError, RequestError, UnsupportedModelError
from yeoul.text.tokenizer import MAX_TEXT_BYTES, load_tokenizer

small = functools.cache(lambda make: load_tokenizer(make()))
IDS = read_data("ids.json")
ORACLES = [
    (DEFAULT_MODEL, DEFAULT_MODEL),
    ("gemma3-270m", "gemma3-270m"),
    ("qwen2.5-coder-0.5b", "qwen2.5-coder-0.5b"),
    ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"),
]


@pytest.mark.parametrize(("model", "column"), ORACLES)
def test_ids_equal_the_published_tokenizers(model: str, column: str) -> None:
    """T3. Oracles: Hugging Face's pipelines as published, which read special tokens; SentencePiece, which does not."""
    tokenizer = tokenizer_of(model)
    parse = not model.startswith("gemma")
    got = {case["text"]: tokenizer.encode(case["text"], add_special=False, parse_special=parse) for case in IDS}
    assert got == {case["text"]: case[column] for case in IDS}


@pytest.mark.parametrize("model", [DEFAULT_MODEL, "gemma3-270m"])
def test_decoding_gives_the_text_back(model: str) -> None:
    tokenizer = tokenizer_of(model)
    texts = [case["text"] for case in IDS]
    written = {text: text.replace("\u2581", " ") if model.startswith("gemma") else text for text in texts}
    assert {text: tokenizer.decode(tokenizer.encode(text)) for text in texts} == written


def test_end_tokens_and_flags_of_the_default_model() -> None:
    tokenizer = tokenizer_of(DEFAULT_MODEL)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (49152, 1, 2)
    assert tokenizer.end_ids == {0, 2}
    assert not tokenizer.adds_bos
    assert tokenizer.is_special(2) and not tokenizer.is_special(19556)


def test_gemma_ends_a_turn_and_begins_with_bos() -> None:
    tokenizer = tokenizer_of("gemma3-270m")
    assert tokenizer.end_ids == {1, 106}
    assert tokenizer.encode("x") == [2, 236781]
    assert tokenizer.encode_chat("<start_of_turn>user\nhi<end_of_turn>\n") == [2, 105, 2364, 107, 2202, 106, 107]


def test_qwen_normalizes_to_nfc() -> None:
    tokenizer = tokenizer_of("qwen2.5-coder-0.5b")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


class TestBeginningOfSequence:
    """T1: once, whoever writes it."""

    @pytest.fixture(params=["bpe", "spm"])
    def tokenizer(self, request):
        return load_tokenizer(bpe_keys() if request.param == "bpe" else spm_keys())

    def test_raw_text_gets_one(self, tokenizer) -> None:
        assert tokenizer.encode("x")[0] == tokenizer.bos_id
        assert tokenizer.encode("x").count(tokenizer.bos_id) == 1
        assert tokenizer.encode("") == [tokenizer.bos_id]

    def test_literal_name_in_raw_text_stays_text(self, tokenizer) -> None:
        ids = tokenizer.encode("<s>x")
        assert ids.count(tokenizer.bos_id) == 1
        assert tokenizer.decode(ids) == "<s>x"

    def test_special_tokens_that_were_parsed_are_not_doubled(self, tokenizer) -> None:
        assert tokenizer.encode("<s>x", parse_special=True).count(tokenizer.bos_id) == 1

    @pytest.mark.parametrize("rendered", ["<s>hi</s>", "hi</s>"])
    def test_chat_has_one_whether_the_template_wrote_it_or_not(self, tokenizer, rendered) -> None:
        ids = tokenizer.encode_chat(rendered)
        assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == 1
        assert ids[-1] == tokenizer.eos_id

    def test_chat_keeps_out_bos_where_the_file_says_so(self) -> None:
        tokenizer = load_tokenizer(bpe_keys(add_bos_token=False))
        assert tokenizer.bos_id not in tokenizer.encode_chat("hi")

    def test_eos_is_added_where_the_file_says_so_but_never_before_a_reply(self) -> None:
        tokenizer = load_tokenizer(bpe_keys(add_eos_token=True))
        assert tokenizer.encode("x")[-1] == tokenizer.eos_id
        assert tokenizer.encode("x</s>", parse_special=True).count(tokenizer.eos_id) == 1
        assert tokenizer.encode("x", add_special=False)[-1] != tokenizer.eos_id
        assert tokenizer.encode_chat("x")[-1] != tokenizer.eos_id

    @pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", True), ("gpt-2", False)])
    def test_default_where_the_file_does_not_say(self, pre, expected) -> None:
        assert load_tokenizer(bpe_keys(pre=pre, add_bos_token=None)).adds_bos is expected
        assert load_tokenizer(spm_keys()).adds_bos


@pytest.mark.parametrize("make", [bpe_keys, spm_keys])
def test_user_defined_tokens_always_match_control_tokens_only_when_asked(make) -> None:
    tokenizer = load_tokenizer(make())
    names = tokenizer._vocabulary.tokens
    tool, end = names.index("<tool>"), names.index("</s>")
    text = "a<tool></s>b"
    assert tool in tokenizer.encode(text) and end not in tokenizer.encode(text)
    assert end in tokenizer.encode(text, parse_special=True)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode(text, parse_special=True, add_special=False)
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.decode(ids, skip_special=False) == text


@pytest.mark.parametrize("make", [bpe_keys, spm_keys])
@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_round_trips(make, text) -> None:
    """Except that SentencePiece writes a space as U+2581, and so reads that character as one."""
    tokenizer = small(make)
    ids = tokenizer.encode(text)
    expected = text.replace("\u2581", " ") if make is spm_keys else text
    assert tokenizer.decode(ids) == expected
    assert b"".join(map(tokenizer.token_bytes, ids)) == expected.encode()


def test_the_longest_literal_wins() -> None:
    metadata = bpe_keys()
    metadata["tokenizer.ggml.tokens"][65] = "<tool>s"
    metadata["tokenizer.ggml.token_type"][65] = USER_DEFINED
    assert load_tokenizer(metadata).encode("<tool>s", add_special=False) == [65]


def test_bytes_of_every_byte_token() -> None:
    for make, first in ((bpe_keys, 0), (spm_keys, 3)):
        tokenizer = load_tokenizer(make())
        assert b"".join(tokenizer.token_bytes(first + byte) for byte in range(256)) == bytes(range(256))


def test_special_tokens_are_empty_or_their_names() -> None:
    tokenizer = load_tokenizer(bpe_keys())
    assert tokenizer.token_bytes(tokenizer.eos_id) == b""
    assert tokenizer.token_bytes(tokenizer.eos_id, skip_special=False) == b"</s>"
    assert tokenizer.token_text(tokenizer.eos_id) == "</s>"
    assert tokenizer.token_text(0xE9) == "\ufffd"


@pytest.mark.parametrize("token_id", [-1, 260, 2**40])
def test_ids_outside_the_vocabulary_are_refused(token_id) -> None:
    with pytest.raises(RequestError, match=str(token_id)):
        load_tokenizer(bpe_keys()).decode([65, token_id])


def test_texts_that_cannot_be_encoded_are_refused() -> None:
    tokenizer = load_tokenizer(bpe_keys())
    with pytest.raises(RequestError, match="surrogate at character 1"):
        tokenizer.encode("a\ud83d")
    with pytest.raises(RequestError, match=str(MAX_TEXT_BYTES)):
        tokenizer.encode("x" * (MAX_TEXT_BYTES + 1))


class TestSplits:
    """Merging never crosses a split, so a merge that would shows where the splits are."""

    @staticmethod
    def pieces(pre: str, merges: list[str], text: str) -> list[str]:
        tokenizer = load_tokenizer(bpe_keys(merges, pre=pre, add_bos_token=False))
        return [tokenizer.token_bytes(token_id).decode() for token_id in tokenizer.encode(text)]

    @pytest.mark.parametrize(
        ("pre", "expected"),
        [
            ("smollm", ["1", "2", "3", "4"]),
            ("qwen2", ["1", "2", "3", "4"]),
            ("llama-bpe", ["12", "3", "4"]),
            ("gpt-2", ["12", "34"]),
            ("default", ["12", "3", "4"]),
        ],
    )
    def test_digits(self, pre, expected) -> None:
        assert self.pieces(pre, ["1 2", "3 4"], "1234") == expected

    @pytest.mark.parametrize(("pre", "expected"), [("gpt-2", "'"), ("qwen2", "'S"), ("llama-bpe", "'S")])
    def test_contractions_in_capitals(self, pre, expected) -> None:
        assert self.pieces(pre, ["' S"], "IT'S")[2] == expected

    @pytest.mark.parametrize(("pre", "expected"), [("gpt-2", [".", "\n"]), ("qwen2", [".\n"]), ("smollm", [".", "\n"])])
    def test_newline_after_punctuation(self, pre, expected) -> None:
        assert self.pieces(pre, [". Ċ"], ".\n") == expected

    def test_default_keeps_punctuation_apart_from_the_space_before_it(self) -> None:
        assert self.pieces("default", ["Ġ ."], " .") == [" ", "."]
        assert self.pieces("gpt-2", ["Ġ ."], " .") == [" ."]

    def test_llama_takes_a_whole_token_whatever_merging_gives(self) -> None:
        """With these merges `abc` is out of reach: b and c join first, then a and bc never do."""
        merges = ["b c", "a b", "ab c"]
        assert self.pieces("llama-bpe", merges, "abc") == ["abc"]
        assert self.pieces("gpt-2", merges, "abc") == ["a", "bc"]


def test_unknown_pre_tokenizer_is_an_error_that_names_it() -> None:
    with pytest.raises(UnsupportedModelError, match="'tekken'"):
        load_tokenizer(bpe_keys(pre="tekken"))


def test_missing_pre_tokenizer_is_a_warning(caplog) -> None:
    with caplog.at_level(logging.WARNING, "yeoul"):
        load_tokenizer(bpe_keys(pre=None))
    assert "does not name its pre-tokenizer" in caplog.text


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        bpe_keys(tokens=None),
        bpe_keys(tokens=[]),
        bpe_keys(tokens="abc"),
        bpe_keys(tokens=[1, 2]),
        bpe_keys(merges=None),
        bpe_keys(merges=["ab"]),
        bpe_keys(merges=["a b c"]),
        bpe_keys(merges=["a \u0e01"]),
        bpe_keys(token_type=[1, 2]),
        bpe_keys(token_type=[7] * 260),
        bpe_keys(token_type=["x"] * 260),
        bpe_keys(bos_token_id=260),
        bpe_keys(eos_token_id=-1),
        bpe_keys(eos_token_id=True),
        bpe_keys(add_bos_token=1),
        spm_keys(scores=None),
        spm_keys(scores=[0.0]),
        spm_keys(scores=[float("nan")] * 261),
        spm_keys(unknown_token_id=2**31),
        spm_keys(add_space_prefix="yes"),
    ],
)
def test_damaged_descriptions_are_model_file_errors(metadata) -> None:
    with pytest.raises(ModelFileError) as caught:
        load_tokenizer(metadata)
    assert "\n" not in str(caught.value)


def test_unknown_kind_of_tokenizer_is_unsupported() -> None:
    with pytest.raises(UnsupportedModelError, match="'t5'"):
        load_tokenizer(keys(model="t5"))


def test_end_ids_come_from_the_file_and_from_known_names() -> None:
    tokenizer = load_tokenizer(bpe_keys(eot_token_id=65, eom_token_id=66))
    named = tokenizer._vocabulary.tokens.index("<|im_end|>")
    assert tokenizer.end_ids == {tokenizer.eos_id, 65, 66, named}
