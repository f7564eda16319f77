"""bad_word_ids: which token sequences stand for a word."""

import pytest
from text_models import bpe_keys, spm_keys

from yeoul.errors import RequestError
from yeoul.text.bad_words import bad_word_ids
from yeoul.text.tokenizer import load_tokenizer

TOKENIZERS = [load_tokenizer(bpe_keys(add_bos_token=False)), load_tokenizer(spm_keys())]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_word_is_banned_as_it_is_and_after_a_space(tokenizer):
    found = bad_word_ids(tokenizer, ["ab"])
    assert [tokenizer.decode(ids).lstrip() for ids in found] == ["ab"] * len(found)
    assert tuple(tokenizer.encode("ab", add_special=False)) in found
    assert tuple(tokenizer.encode(" ab", add_special=False)) in found


def test_sequences_are_unique_and_without_special_tokens():
    tokenizer = TOKENIZERS[0]
    assert bad_word_ids(tokenizer, []) == ()
    assert bad_word_ids(tokenizer, ["ab", "ab", " ab"]) == bad_word_ids(tokenizer, ["ab"])
    ids = {i for word in bad_word_ids(tokenizer, ["</s>"]) for i in word}
    assert not {i for i in ids if tokenizer.is_special(i)}


def test_what_is_not_unicode_is_refused():
    with pytest.raises(RequestError, match="surrogate"):
        bad_word_ids(TOKENIZERS[0], ["\ud800"])
