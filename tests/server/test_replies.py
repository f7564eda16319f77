"""Replies: tool calls and reasoning, whole and in every split; what is no call is content, to the letter."""

from __future__ import annotations

import json
import random

import pytest

from yeoul.server.replies.part import split_at
from yeoul.server.replies.reader import ReplyFormats, formats_of

HERMES = ReplyFormats(tools="hermes")
LLAMA = ReplyFormats(tools="llama3_json")
THINK = ReplyFormats(tools="hermes", reasoning=True)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Seoul", "days": [1, {"a": "}"}]}}\n</tool_call>'
ARGUMENTS = '{"city": "Seoul", "days": [1, {"a": "}"}]}'


def read(formats, pieces, *, prompt="", one_call=False):
    """(reasoning, content, [(name, arguments)]) of a reply that comes in pieces."""
    reader = formats.reader(with_tools=True, one_call=one_call, prompt=prompt)
    parts = [*map(reader.push, pieces), reader.finish()]
    calls = {}
    for delta in (delta for part in parts for delta in part.calls):
        assert (delta.name is None) == (delta.index in calls), "the name comes with the first delta, once"
        name, arguments = calls.get(delta.index, (delta.name, ""))
        calls[delta.index] = (name, arguments + delta.arguments)
    assert list(calls) == list(range(len(calls)))
    return "".join(p.reasoning for p in parts), "".join(p.content for p in parts), list(calls.values())


CASES = [
    (HERMES, "Hello, world.", ("", "Hello, world.", [])),
    (HERMES, CALL, ("", "", [("weather", ARGUMENTS)])),
    (HERMES, f"I look.\n{CALL}\n{CALL}", ("", "I look.\n", [("weather", ARGUMENTS)] * 2)),
    (HERMES, f"{CALL} and so", ("", "and so", [("weather", ARGUMENTS)])),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", "", [("f", '{"a": 1}')])),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
    (HERMES, '<tool_call>{"name": "f", "parameters": {"é": "\\""}}', ("", "", [("f", '{"é": "\\""}')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1', ("", "", [("f", '{"a": [1')])),
    (HERMES, '<tool_call>{"na', ("", '<tool_call>{"na', [])),
    (HERMES, "<tool_call>f(x)</tool_call>", ("", "<tool_call>f(x)</tool_call>", [])),
    (HERMES, '<tool_call>{"a": 1}</tool_call>', ("", '<tool_call>{"a": 1}</tool_call>', [])),
    (HERMES, '<tool_call>{"name": "f", "arguments": "x"}</tool_call>b',
     ("", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>b', [])),
    (HERMES, "a < b <tool_cal", ("", "a < b <tool_cal", [])),
    (HERMES, "<tool_call>}", ("", "<tool_call>}", [])),
    (HERMES, "<tool_call>]]", ("", "<tool_call>]]", [])),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', ("", "", [("f", '{"a": 1}')])),
    (LLAMA, ' {"type": "function", "name": "f", "parameters": {}}', ("", "", [("f", "{}")])),
    (LLAMA, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}',
     ("", "", [("f", "{}"), ("g", '{"b": 2}')])),
    (LLAMA, '{"answer": 5}', ("", '{"answer": 5}', [])),
    (LLAMA, '{"answer": "' + "x" * 1100 + '"} and more', ("", '{"answer": "' + "x" * 1100 + '"} and more', [])),
    (LLAMA, 'See {"name": "f", "parameters": {}}', ("", 'See {"name": "f", "parameters": {}}', [])),
    (LLAMA, '{"name": "f", "parameters": {}} done', ("", "done", [("f", "{}")])),
    (LLAMA, "  \n", ("", "  \n", [])),
    (THINK, f"<think>\nhm\n</think>\n\nSo.\n{CALL}", ("hm", "So.\n", [("weather", ARGUMENTS)])),
    (THINK, "\n<think>a </thin k> b</think>c", ("a </thin k> b", "c", [])),
    (THINK, "<think>never ends", ("never ends", "", [])),
    (THINK, "<think></think>\n\nyes", ("", "yes", [])),
    (THINK, "no <think>x</think>", ("", "no <think>x</think>", [])),
    (THINK, "<thin", ("", "<thin", [])),
]  # fmt: skip


@pytest.mark.parametrize(("formats", "text", "expected"), CASES, ids=[text[:40] for _, text, _ in CASES])
def test_replies_in_every_split(formats, text, expected):
    assert read(formats, [text]) == expected
    assert read(formats, text) == expected, "character by character"
    chance = random.Random(text)
    for _ in range(30):
        cuts = sorted(chance.sample(range(len(text) + 1), min(4, len(text))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(formats, pieces) == expected, pieces


def test_arguments_are_told_while_they_come():
    reader = HERMES.reader(with_tools=True, one_call=False, prompt="")
    assert reader.push('<tool_call>{"name": "f", "arguments": ').calls == []
    told = [delta for piece in ('{"a"', ": 1", ', "b": 2}', "}</tool_call>") for delta in reader.push(piece).calls]
    assert [(delta.name, delta.arguments) for delta in told] == [("f", '{"a"'), (None, ": 1"), (None, ', "b": 2}')]


def test_a_reply_may_begin_inside_the_reasoning():
    for prompt, expected in (
        ("...<think>\n", ("hm", "yes", [])),
        ("...<think>\n\n</think>\n\n", ("", "hm</think>yes", [])),
    ):
        assert read(THINK, "hm</think>yes", prompt=prompt) == expected
        assert read(THINK, ["hm</think>yes"], prompt=prompt) == expected
    for pieces in (["<think>hm</think>yes"], "\n<think>\nhm\n</think>yes"):
        assert read(THINK, pieces, prompt="<think>") == ("hm", "yes", []), "models may repeat it"


def test_one_call_only():
    assert read(HERMES, [CALL + CALL], one_call=True)[2] == [("weather", ARGUMENTS)]


def test_random_objects_come_through_exactly():
    chance = random.Random(5)

    def value(depth):
        kinds = ["text", "number", "list", "object"] if depth else ["text", "number"]
        match chance.choice(kinds):
            case "text":
                return "".join(chance.choices('"\\{}[]<>/tool_call é\n', k=chance.randrange(9)))
            case "number":
                return chance.randrange(100)
            case "list":
                return [value(depth - 1) for _ in range(chance.randrange(3))]
        return {f"k{i}": value(depth - 1) for i in range(chance.randrange(3))}

    for _ in range(300):
        arguments = json.dumps({"x": value(3)}, ensure_ascii=chance.random() < 0.5)
        text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        assert read(HERMES, text) == ("", "", [("f", arguments)])


def test_split_at_holds_back_what_may_begin_the_tag():
    assert split_at("ab<t>c", "<t>") == ("ab", "<t>", "c")
    assert split_at("ab<t", "<t>") == ("ab", "", "<t")
    assert split_at("ab<x", "<t>") == ("ab<x", "", "")
    assert split_at("", "<t>") == ("", "", "")


@pytest.mark.parametrize(
    ("template", "tools", "reasoning", "shows"),
    [
        (None, None, False, False),
        ("{{ messages }}", None, False, False),
        ("{% if tools %}{{ tools }}<tool_call>{% endif %}", "hermes", False, True),
        ("{% if tools %}ipython {\"name\": x, \"parameters\": y}{% endif %}", "llama3_json", False, True),
        ("{% if tools %}{{ tools }}{% endif %}", None, False, True),
        ("{{ x.split('</think>') }}", None, True, False),
    ],
)  # fmt: skip
def test_formats_by_the_templates_words(template, tools, reasoning, shows):
    assert formats_of(template) == ReplyFormats(tools, reasoning, shows)
    assert formats_of(template, tool_call_parser="none", reasoning_parser="none") == ReplyFormats(None, False, shows)
    forced = formats_of(template, tool_call_parser="hermes", reasoning_parser="think")
    assert forced == ReplyFormats("hermes", True, shows)
