"""yeoul generate as users run it: streams, JSON, stdin, Ctrl-C, pipes, and everything that can be wrong."""

import json
import signal
import subprocess
import sys

import pytest
from cli_kit import LONG, YEOUL, cut, inline, refuses, running, yeoul
from tiny import K_SIZES, tiny_model


def test_the_default_model_completes():
    done = yeoul("generate", "smollm2-135m", "The capital of France is", "--max-tokens", 8)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(" Paris") and done.stdout.endswith("\n")


def test_json_argument_and_stdin_agree(tiny_llama):
    flags = ["--max-tokens", 12, "--ignore-eos", "--json"]
    by_argument = inline("generate", tiny_llama, "the quick brown", *flags)
    by_stdin = yeoul("generate", tiny_llama, *flags, stdin="the quick brown\n")
    by_dash = inline("generate", tiny_llama, "-", *flags, stdin="the quick brown")
    first, second, third = (json.loads(run.stdout.splitlines()[-1]) for run in (by_argument, by_stdin, by_dash))
    assert list(first) == [
        "model", "text", "finish_reason", "prompt_tokens", "completion_tokens", "ttft", "tokens_per_second"
    ]  # fmt: skip
    assert first["model"] == str(tiny_llama) and first["finish_reason"] == "length"
    assert first["completion_tokens"] == 12 and first["prompt_tokens"] > 3
    assert 0 < first["ttft"] < 10 and first["tokens_per_second"] > 0
    assert {run["text"] for run in (first, second, third)} == {first["text"]} and first["text"]
    plain = inline("generate", tiny_llama, "the quick brown", *flags[:-1])
    assert plain.stdout.removesuffix("\n") == first["text"].removesuffix("\n")


def test_one_token_has_no_speed(tiny_llama):
    done = inline("generate", tiny_llama, "the", "--max-tokens", 1, "--json")
    reply = json.loads(done.stdout)
    assert reply["tokens_per_second"] is None and reply["completion_tokens"] == 1


def test_sampling_flags_reach_the_engine(tiny_llama):
    def text(*flags):
        return json.loads(inline("generate", tiny_llama, "the", "--json", *LONG[:1], 40, *LONG[2:], *flags).stdout)[
            "text"
        ]

    hot = ["--temperature", 2, "--seed"]
    assert text(*hot, 1) == text(*hot, 1) != text(*hot, 2)
    assert text(*hot, 2, "--top-k", 1) == text()
    whole = text()
    stop = whole[10:13]
    assert text("--stop", stop) == whole[: whole.index(stop)]


def test_the_engine_flags_reach_the_engine(tiny_llama, tmp_path):
    log = tmp_path / "steps.jsonl"
    flags = ["--max-model-len", 64, "--num-threads", 1, "--kv-cache-dtype", "f32", "--executor", "reference"]
    done = inline("generate", tiny_llama, "the", *LONG, *flags, "--step-log", log, "--json", "--log-level", "info")
    assert "max_model_len: 64" in done.stderr and "executor: reference" in done.stderr
    assert json.loads(done.stdout)["completion_tokens"] < 64
    header = json.loads(log.read_text().splitlines()[0])
    assert header["config"]["kv_cache_dtype"] == "f32" and header["config"]["num_threads"] == 1


def test_it_streams_and_ctrl_c_ends_it_with_130(tiny_llama):
    with running("generate", tiny_llama, "the", *LONG, "--executor", "reference") as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=20)
        assert (process.returncode, said) == (130, "")
        assert (first + rest).endswith("\n") and len(rest) < 600


def test_a_reader_that_leaves_is_quiet(tiny_llama):
    with running("generate", tiny_llama, "the", *LONG) as process:
        process.stdout.read(1)
        process.stdout.close()
        process.stdout = None
        _, said = process.communicate(timeout=20)
        assert (process.returncode, said) == (141, "")


def test_no_space_left_for_the_output(tiny_llama):
    with open("/dev/full", "w") as full:
        command = [*YEOUL, "generate", str(tiny_llama), "the", "--max-tokens", "4"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr == "error: the output: No space left on device\n"


def test_a_terminal_without_a_prompt_is_wrong_usage(monkeypatch, capsys, tiny_llama):
    from yeoul.cli import main

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert main(["generate", str(tiny_llama)]) == 2
    assert "there is no prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "prompt", "words", "hint"),
    [
        ([], b"", ["prompt on stdin is empty"], "argument"),
        ([], b"a\xff", ["not valid UTF-8"], "0xff"),
        (["--max-model-len", 16], b"a " * 40, ["at most 16"], "--max-model-len"),
        (["--max-model-len", 99999], b"a", ["max_model_len is 99999"], "--max-model-len 1024 or less"),
        (["--kv-cache-memory", "1k"], b"a", ["too small"], "--kv-cache-memory"),
        (["--step-log", "/nonexistent/log"], b"a", ["/nonexistent/log", "No such file"], None),
    ],
    ids=["empty", "utf-8", "too long", "context", "memory", "log"],
)
def test_what_a_model_cannot_do_is_one_line(tiny_llama, flags, prompt, words, hint):
    refuses(inline("generate", tiny_llama, *flags, stdin=prompt), 1, *words, hint=hint)


def test_files_that_are_no_models_are_one_line(tiny_llama, tmp_path):
    text = tmp_path / "text.gguf"
    text.write_text("hello")
    strange = tiny_model(tmp_path, "llama", layers=1, chat_template=None)
    strange.write_bytes(strange.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0bloom", 1))
    cases = [
        ("/nonexistent.gguf", ["no such file"]),
        (tmp_path, ["directory"]),
        ("no-such-model", ["unknown model"]),
        (text, ["not a GGUF file"]),
        (cut(tiny_llama, tmp_path / "cut.gguf", 5000), ["more than the file can hold"]),
        (strange, ["architecture 'bloom' is not supported"]),
    ]
    for model, words in cases:
        refuses(inline("generate", model, "x"), 1, *words, hint="")


def test_an_unsupported_tensor_type_is_one_line(tmp_path):
    model = tiny_model(tmp_path, "llama", **K_SIZES | {"weight_type": "TQ1_0", "layers": 1})
    refuses(inline("generate", model, "x"), 1, "TQ1_0")


def test_a_model_that_was_not_pulled_names_the_command(tmp_path):
    done = inline("generate", "smollm2-135m", "x", YEOUL_HOME=str(tmp_path))
    refuses(done, 1, "not on this machine", hint="yeoul pull smollm2-135m")


def test_generate_imports_no_server_and_version_nothing_heavy():
    code = (
        "import sys; from yeoul.cli import main; main(sys.argv[1:])\n"
        "print(sorted(m for m in ('fastapi', 'uvicorn', 'rich', 'numpy', 'tokenizers', 'asyncio') if m in sys.modules))"
    )

    def imported(*args):
        command = [sys.executable, "-c", code, *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()[-1]

    assert imported("--version") == "[]"
    loaded = imported("generate", "smollm2-135m", "x", "--max-tokens", "1")
    assert "numpy" in loaded and "fastapi" not in loaded and "uvicorn" not in loaded and "rich" not in loaded
