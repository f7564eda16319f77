"""Flags and structs say the same; values are parsed; what is wrong is a usage error that names the flag."""

import msgspec
import pytest
import typer

from yeoul.cli import main
from yeoul.cli.bench import parse_batches
from yeoul.cli.options import ENGINE, LOG_FORMATS, LOG_LEVELS, SAMPLING, SERVER, build, parse_size
from yeoul.config import EngineConfig
from yeoul.obs import logs
from yeoul.server.options import ServerOptions
from yeoul.types import SamplingParams

NOT_FLAGS = {
    EngineConfig: {"model", "served_model_name", "executor_factory", "clock"},
    ServerOptions: {"served_model_names"},
    SamplingParams: {
        "n",
        "logprobs",
        "prompt_logprobs",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "structured",
        "stop_token_ids",
        "include_stop_str_in_output",
        "skip_special_tokens",
    },
}


@pytest.mark.parametrize("group", [ENGINE, SERVER, SAMPLING], ids=lambda group: group.name)
def test_every_field_is_a_flag_and_the_other_way_round(group):
    flags = [flag.field for flag in group.flags]
    assert len(set(flags)) == len(flags)
    assert set(flags) == set(group.struct.__struct_fields__) - NOT_FLAGS[group.struct]


@pytest.mark.parametrize("group", [ENGINE, SERVER, SAMPLING], ids=lambda group: group.name)
def test_defaults_are_the_structs_own(group):
    own = {info.name: info.default for info in msgspec.structs.fields(group.struct)}
    for flag in group.flags:
        value = group.default(flag.field)
        assert (tuple(value) if isinstance(value, list) else value) == own[flag.field]


def test_a_group_can_have_fewer_flags_and_other_defaults():
    group = SAMPLING.without("seed", "top_k").with_defaults(max_tokens=9)
    assert len(group.flags) == len(SAMPLING.flags) - 2
    assert group.default("max_tokens") == 9 and SAMPLING.default("max_tokens") == 16


def test_log_levels_are_those_of_the_logs():
    assert LOG_LEVELS == logs.LEVELS and LOG_FORMATS == logs.FORMATS


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("123", 123), ("1k", 1024), ("1.5K", 1536), ("2M", 2 << 20), ("3 GiB", 3 << 30), ("1tb", 1 << 40)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1q", "1.2.3", "GiB", "1e9", "٣k "[1:]])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(typer.BadParameter, match="is not a size"):
        parse_size(text)


def test_batches():
    assert parse_batches("1,8, 32") == (1, 8, 32)
    for text in ("", "a", "1,,2", "0,1", "-1", "2,2"):
        with pytest.raises(typer.BadParameter):
            parse_batches(text)


def test_what_is_on_by_default_can_be_switched_off():
    option = next(flag for flag in ENGINE.flags if flag.field == "fork").parameter(ENGINE).annotation.__metadata__[0]
    assert option.default == "--fork/--no-fork"


def test_structs_are_built_from_flags():
    params = build(SamplingParams, stop=["a", "b"], max_tokens=None)
    assert params.stop == ("a", "b") and params.max_tokens is None


WRONG = [
    (["generate", "m", "p", "--top-p", "2"], "--top-p must be between 0 and 1"),
    (["generate", "m", "p", "--temperature", "nan"], "--temperature"),
    (["generate", "m", "p", "--max-tokens", "-1"], "--max-tokens must be between"),
    (["generate", "m", "p", "--max-tokens", "many"], "--max-tokens"),
    (["generate", "m", "p", "--stop", ""], "--stop must not hold empty strings"),
    (["generate", "m", "p", "--executor", "abacus"], "--executor must be one of"),
    (["generate", "m", "p", "--kv-cache-memory", "lots"], "is not a size"),
    (["generate", "m", "p", "--kv-cache-memory", "1G", "--num-kv-blocks", "9"], "exclude each other"),
    (["generate", "m", "p", "--swap-space", "1G"], "--swap-space needs --preemption-mode swap"),
    (["generate", "m", "p", "--batching", "none"], "--batching must be one of continuous"),
    (["generate", "m", "p", "--ageing-seconds", "nan"], "--ageing-seconds must be between"),
    (["generate", "m", "p", "q"], "q"),
    (["generate"], "model"),
    (["generate", "m", "p", "--log-level", "loud"], "'loud' is not one of debug"),
    (["serve", "m", "--max-num-seqs", "0"], "--max-num-seqs must be an integer between 1"),
    (["serve", "m", "--port", "65536"], "--port must be between"),
    (["serve", "m", "--host", "0.0.0.0"], "can be reached from other machines"),
    (["serve", "m", "--metrics-prefix", "a b"], "--metrics-prefix"),
    (["serve", "m", "--served-model-name", ""], "must not be empty"),
    (["serve", "m", "--frobnicate"], "--frobnicate"),
    (["bench"], "Missing command"),
    (["plan"], "model"),
    (["plan", "m", "--memory", "lots"], "is not a size"),
    (["plan", "m", "--memory", "0"], "--memory must be at least 1"),
    (["plan", "m", "--memory", "1G", "--kv-cache-memory", "1G"], "--memory and --kv-cache-memory exclude each other"),
    (["plan", "m", "--prompt-tokens", "0"], "--prompt-tokens"),
    (["plan", "m", "--output-tokens", "-1"], "--output-tokens"),
    (["plan", "m", "--max-num-seqs", "0"], "--max-num-seqs must be an integer between 1"),
    (["plan", "m", "--bandwidth", "0"], "--bandwidth must be a number above 0"),
    (["plan", "m", "--ops", "nan"], "--ops must be a number above 0"),
    (["plan", "m", "--num-threads", "2"], "--num-threads"),
    (["bench", "latency", "m", "--batch", "1,x"], "'1,x' is not a list of numbers"),
    (["bench", "latency", "m", "--batch", "65"], "--max-num-seqs is 64"),
    (["frobnicate"], "frobnicate"),
]


@pytest.mark.parametrize(
    ("args", "message"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_wrong_usage_is_one_line_and_exit_code_2(args, message, capsys):
    assert main(args) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and lines[0].startswith("error: ") and message in lines[0]
    assert len(lines) <= 2 and all(line.startswith("hint: ") for line in lines[1:])


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["serve"],
        ["chat"],
        ["generate"],
        ["pull"],
        ["plan"],
        ["bench"],
        ["bench", "latency"],
        ["bench", "throughput"],
        ["bench", "serve"],
    ],
)
def test_help_exists_everywhere(command, capsys):
    assert main([*command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert "Usage: yeoul" in out and err == ""


def test_without_a_command_there_is_help(capsys):
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out


def test_help_of_serve_names_every_flag_and_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 160)
    assert main(["serve", "--help"]) == 0
    out = capsys.readouterr().out
    for group in (ENGINE, SERVER):
        assert group.panel in out
        for flag in group.flags:
            assert "--" + flag.field.replace("_", "-") in out
    for default in ("[default: 64]", "[default: 8000]", "127.0.0.1", "the model's own context"):
        assert default in out
