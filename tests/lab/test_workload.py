"""The same seed asks the same things; lengths, files and arrivals are what was said."""

import itertools
import statistics
from random import Random

import pytest

from yeoul.errors import ConfigError
from yeoul.lab.workload import Lengths, Workload, arrival_times, file_items, parse_lengths

ONE = Lengths(1, 1)


def test_one_seed_decides_everything_and_a_rate_leaves_the_prompts_alone():
    first, again = (Workload(requests=20, input_tokens="5-9", output_tokens="1-99", rate=2, seed=3) for _ in range(2))
    assert first.items() == again.items() and first.arrival_times() == again.arrival_times()
    assert first.items() == Workload(requests=20, input_tokens="5-9", output_tokens="1-99", seed=3).items()
    other = Workload(requests=20, input_tokens="5-9", output_tokens="1-99", rate=2, seed=4)
    assert first.items() != other.items() and first.arrival_times() != other.arrival_times()


def test_lengths_are_within_the_range_and_reach_its_ends():
    items = Workload(requests=300, input_tokens="3-5", output_tokens="7-8").items()
    assert len(items) == 301
    assert {len(item.prompt.split()) for item in items} == {3, 4, 5}
    assert {item.output_tokens for item in items} == {7, 8}


@pytest.mark.parametrize("text", ["", "0", "-1", "5-4", "1-", "a", "1.5", "9999999", "٣"])
def test_what_is_no_length_is_refused(text):
    with pytest.raises(ConfigError, match="number of tokens"):
        parse_lengths(text)


def test_lengths_are_parsed_and_shown():
    assert parse_lengths("128") == Lengths(128, 128) and parse_lengths(" 64-256 ") == Lengths(64, 256)
    assert str(Lengths(1, 2)) == "1-2" and str(ONE) == "1"


def test_poisson_arrivals_have_the_rate_and_the_variance_of_one():
    times = arrival_times("poisson", 10.0, 4000, 8, Random(1))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0.0 and min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(0.1, rel=0.1)


def test_constant_and_burst_arrivals():
    assert arrival_times("constant", 4.0, 3, 8, Random(1)) == [0.0, 0.25, 0.5]
    assert arrival_times("burst", 2.0, 5, 2, Random(1)) == [0.0, 0.0, 1.0, 1.0, 2.0]
    assert Workload().arrival_times() is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"rate": 1.0, "users": 2}, "exclude"), ({"arrivals": "never"}, "arrivals must be one of"),
     ({"rate": 0.0}, "rate must be"), ({"rate": float("nan")}, "rate must be"), ({"users": 0}, "users must be"),
     ({"requests": 0}, "requests must be"), ({"burst": 0}, "burst must be"),
     ({"input_tokens": "x"}, "'x' is no number")],
    ids=str,
)  # fmt: skip
def test_options_out_of_range_are_named(fields, words):
    with pytest.raises(ConfigError, match=words):
        Workload(**fields)


def test_prompts_from_a_file_are_shuffled_by_the_seed_and_repeated(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\r\nthree  3\n")
    prompts = [item.prompt for item in file_items(file, 7, ONE, Random(0))]
    assert sorted(prompts[:3]) == ["one", "three  3", "two"] and prompts[3:6] == prompts[:3]
    orders = {tuple(item.prompt for item in file_items(file, 3, ONE, Random(seed))) for seed in range(20)}
    assert len(orders) > 1


def test_json_lines_may_say_their_own_length(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\nb", "output_tokens": 9}\n{"prompt": "c"}\n')
    assert {(item.prompt, item.output_tokens) for item in file_items(file, 2, ONE, Random(0))} == {
        ("a\nb", 9),
        ("c", 1),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "has no prompts"), ("nonsense", "line 1"), ("[]", "line 1"), ('{"prompt": ""}', "line 1"),
     ('{"prompt": "a"}\n{"prompt": 5}', "line 2"), ('{"prompt": "a", "max": 5}', "line 1"),
     ('{"prompt": "a", "output_tokens": 0}', "output_tokens in line 1"),
     ('{"prompt": "a", "output_tokens": true}', "output_tokens in line 1")],
)  # fmt: skip
def test_bad_files_are_one_line_that_names_the_place(tmp_path, text, words):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        file_items(file, 2, ONE, Random(0))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        file_items(tmp_path / "none", 1, ONE, Random(0))
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        file_items(tmp_path / "latin", 1, ONE, Random(0))
