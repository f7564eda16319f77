"""OutputText: whole characters only, stop strings across token borders, one text whatever the split."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_models import bpe_keys, spm_keys

from yeoul.errors import RequestError
from yeoul.text.detokenizer import OutputText
from yeoul.text.tokenizer import load_tokenizer

BPE = load_tokenizer(bpe_keys(add_bos_token=False))
"""Token ids 0..255 are bytes, 257 is </s>."""
END = 257


def run(pieces, stop=(), **options):
    """Deltas of each piece (a string, bytes or a list of ids), the flush at the end, and the machine."""
    out = OutputText(BPE, stop, **options)
    deltas = [out.push(p if isinstance(p, list) else (p if isinstance(p, bytes) else p.encode())) for p in pieces]
    return deltas, out.finish(), out


class TestStopStrings:
    """S1 and S7."""

    def test_match_across_tokens_sends_only_what_stands_before(self) -> None:
        deltas, tail, out = run(["a ", "blu", "e ki", "te"], ("blue kite",))
        assert (deltas, tail, out.stopped) == (["a ", "", "", ""], "", True)
        assert out.stop_string == "blue kite"

    def test_match_that_ends_in_mid_token_drops_the_rest(self) -> None:
        deltas, tail, _ = run(["a ", "blu", "e kites fly"], ("blue kite",))
        assert "".join(deltas) + tail == "a "

    def test_false_start_is_released_in_full(self) -> None:
        deltas, tail, out = run(["a ", "blu", "e ki", "ng"], ("blue kite",))
        assert (deltas, tail, out.stopped) == (["a ", "", "", "blue king"], "", False)

    def test_held_text_is_flushed_at_the_end(self) -> None:
        deltas, tail, out = run(["a ", "blu"], ("blue kite",))
        assert (deltas, tail, out.stopped) == (["a ", ""], "blu", False)

    def test_only_the_possible_start_is_held(self) -> None:
        deltas, _, _ = run(["xxab", "ab", "abc"], ("abac",))
        assert deltas == ["xx", "ab", "ababc"]

    def test_nothing_is_held_without_stop_strings(self) -> None:
        assert run(["a", "b"])[0] == ["a", "b"]

    @pytest.mark.parametrize("pieces", [["xabcd"], ["x", "a", "b", "c", "d"], ["xab", "cd"]])
    def test_first_to_be_complete_wins(self, pieces) -> None:
        deltas, tail, out = run(pieces, ("abcd", "bc"))
        assert ("".join(deltas) + tail, out.stop_string) == ("xa", "bc")

    @pytest.mark.parametrize("pieces", [["xabc"], ["x", "a", "b", "c"], ["xab", "c"]])
    def test_longest_wins_of_those_complete_together(self, pieces) -> None:
        deltas, tail, out = run(pieces, ("bc", "abc", "c"))
        assert ("".join(deltas) + tail, out.stop_string) == ("x", "abc")

    def test_end_tokens_add_no_text_beside_stop_strings(self) -> None:
        deltas, tail, out = run(["ab", [END]], ("zzz",))
        assert ("".join(deltas) + tail, out.stopped) == ("ab", False)

    def test_after_a_match_nothing_comes(self) -> None:
        deltas, tail, out = run(["ab", "stop", "more"], ("stop",))
        assert ("".join(deltas), tail, out.held) == ("ab", "", 0)

    def test_stop_string_of_many_bytes(self) -> None:
        data = "가🙂나".encode()
        deltas, tail, out = run([data[i : i + 1] for i in range(len(data))], ("🙂",))
        assert ("".join(deltas) + tail, out.stopped) == ("가", True)


class TestCharacters:
    def test_never_half_a_character(self) -> None:
        deltas, tail, _ = run([b"\xf0\x9f", b"\x99", b"\x82!"])
        assert (deltas, tail) == (["", "", "🙂!"], "")

    def test_byte_fallback_tokens_join_to_an_emoji(self) -> None:
        tokenizer = load_tokenizer(spm_keys())
        out = OutputText(tokenizer)
        deltas = [out.push((3 + byte,)) for byte in "🙂".encode()]
        assert deltas == ["", "", "", "🙂"]

    def test_incomplete_tail_is_one_replacement_at_the_end_only(self) -> None:
        deltas, tail, _ = run([b"a\xf0\x9f"])
        assert (deltas, tail) == (["a"], "\ufffd")

    def test_broken_bytes_are_replaced_as_soon_as_they_are_known_to_be(self) -> None:
        assert run([b"\xf0\x9f", b"a"])[0] == ["", "\ufffda"]

    def test_a_stop_string_waits_behind_half_a_character(self) -> None:
        deltas, tail, _ = run([b"ab", b"\xf0\x9f"], ("abc",))
        assert (deltas, tail) == (["", ""], "ab\ufffd")

    def test_special_tokens_by_name_on_request(self) -> None:
        assert run([[97, END]], skip_special=False)[0] == ["a</s>"]
        assert run([[0xF0, 0x9F, END, 0x99, 0x82]])[0] == ["🙂"]

    def test_a_continuation_keeps_its_first_space(self) -> None:
        tokenizer = load_tokenizer(spm_keys({"\u2581x": -1.0}, add_space_prefix=True))
        token = tokenizer.vocab_size - 1
        assert OutputText(tokenizer).push([token]) == " x"
        assert tokenizer.decode([token]) == "x"

    def test_ids_outside_the_vocabulary_are_refused(self) -> None:
        with pytest.raises(RequestError):
            OutputText(BPE).push([10**6])


def reference(text: str, stop: tuple[str, ...]) -> str:
    """What the definition says, one character at a time."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


SMALL = st.text(alphabet="abé🙂", max_size=12)


@settings(max_examples=400, deadline=None)
@given(
    data=st.one_of(SMALL.map(str.encode), st.binary(max_size=16)),
    stop=st.lists(st.text(alphabet="abé🙂\ufffd", min_size=1, max_size=4), max_size=3).map(tuple),
    cuts=st.lists(st.integers(0, 40), max_size=10),
)
def test_every_split_gives_the_same_text(data, stop, cuts) -> None:
    borders = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(borders)]
    deltas, tail, out = run(pieces, stop)
    text = data.decode("utf-8", "replace")
    expected = reference(text, stop)
    assert "".join(deltas) + tail == expected
    assert out.stopped == any(s in text for s in stop)
    if not stop:
        assert "".join(deltas) + tail == BPE.decode(data)


def test_cost_does_not_grow_with_what_came_before() -> None:
    """Work is counted, not timed: what is kept between pushes stays below the longest stop string."""
    out = OutputText(BPE, ("aaab", "xyz"))
    for _ in range(5000):
        out.push(b"aaa")
        assert out.held <= 3


class TestUnmatchedAndIncluded:
    """P7, and include_stop_str_in_output."""

    def test_what_the_first_tokens_complete_is_in_no_stop_string(self) -> None:
        deltas, tail, out = run(["a", "b", "a", "b"], ("ab",), num_unmatched=2)
        assert (deltas, tail, out.stop_string) == (["a", "b", "", ""], "", "ab")
        deltas, tail, out = run(["a", "b", "c"], ("ab",), num_unmatched=1)
        assert "".join(deltas) + tail == "abc" and not out.stopped

    def test_the_count_is_of_tokens_not_of_calls(self) -> None:
        for pieces in (["abab"], ["a", "bab"], ["ab", "a", "b"]):
            deltas, tail, out = run(pieces, ("b",), num_unmatched=2)
            assert "".join(deltas) + tail == "aba" and out.stopped

    def test_half_a_character_of_the_first_tokens_counts_with_the_token_that_completes_it(self) -> None:
        deltas, tail, out = run([b"\xc3", b"\xa9"], ("é",), num_unmatched=1)
        assert "".join(deltas) + tail == "" and out.stopped

    def test_the_stop_string_is_shown_and_what_follows_it_is_not(self) -> None:
        deltas, tail, out = run(["x", "abc"], ("ab",), include_stop=True)
        assert "".join(deltas) + tail == "xab" and out.stop_string == "ab"
