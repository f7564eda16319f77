"""yeoul chat over pipes and in the hands of somebody who types."""

import signal

import pytest
from cli_kit import inline, refuses, running, yeoul
from tiny import tiny_model

from yeoul import LLM
from yeoul.cli import chat
from yeoul.cli.session import open_engine
from yeoul.config import EngineConfig
from yeoul.text.template import load_template
from yeoul.types import SamplingParams

GREEDY = ["--temperature", 0, "--max-tokens", 8, "--ignore-eos"]


def test_one_reply_for_each_line_and_the_conversation_is_kept(tiny_llama):
    alone = inline("chat", tiny_llama, *GREEDY, stdin="hello\n")
    again = inline("chat", tiny_llama, *GREEDY, stdin="hello\nhello\n")
    reset = inline("chat", tiny_llama, *GREEDY, stdin="hello\n\n/reset\nhello\n/quit\nnever read\n")
    assert (alone.returncode, alone.stderr) == (0, "")
    assert again.stdout.startswith(alone.stdout) and again.stdout != alone.stdout * 2
    assert reset.stdout == alone.stdout * 2


def test_the_default_model_says_what_llm_chat_says():
    done = yeoul("chat", "smollm2-135m", "--temperature", 0, "--max-tokens", 12, stdin="Who are you?\n")
    with LLM("smollm2-135m") as llm:
        messages = [{"role": "user", "content": "Who are you?"}]
        (reply,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=12))[0].outputs
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == reply.text + "\n" and len(reply.text) > 10


def test_a_system_prompt_changes_the_prompt(tiny_llama):
    plain = inline("chat", tiny_llama, *GREEDY, stdin="hello\n")
    told = inline("chat", tiny_llama, *GREEDY, "--system", "the stream runs over the stones", stdin="hello\n")
    assert told.returncode == 0 and told.stdout != plain.stdout


def test_a_model_without_a_template_is_one_line(tmp_path):
    model = tiny_model(tmp_path, "llama", chat_template=None)
    refuses(inline("chat", model, stdin="hello\n"), 1, "no chat template", hint="yeoul generate")


def test_a_conversation_over_the_context_ends_a_pipe_with_one_line(tiny_llama):
    done = inline("chat", tiny_llama, "--max-model-len", 48, stdin="hello " * 60 + "\n")
    refuses(done, 1, "at most 48", hint="--max-model-len")


def test_ctrl_c_ends_a_pipe_with_130(tiny_llama):
    with running("chat", tiny_llama, "--executor", "reference", "--ignore-eos", stdin=-1) as process:
        process.stdin.write("hello\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
        assert (process.returncode, said) == (130, "")


@pytest.fixture
def conversation(tiny_llama):
    with open_engine(EngineConfig(model=str(tiny_llama), max_num_seqs=1, max_model_len=64)) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        yield chat.Conversation(engine, load_template(engine.metadata), params, None)


def type_in(monkeypatch, *lines):
    """Somebody types these lines; an exception is raised where a line would be."""
    typed = iter([*lines, EOFError()])

    def read(prompt):
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)


def test_whoever_types_can_go_on_after_errors_and_ctrl_c(conversation, monkeypatch, capsys):
    type_in(monkeypatch, "hello", "hello " * 60, KeyboardInterrupt(), "/reset", "hello")
    chat._talk(conversation)
    out, err = capsys.readouterr()
    first, second, *rest = out.splitlines()
    assert first == second and first and rest == [""]
    assert err.count("error: ") == 1 and err.count("hint: ") == 1 and err.count("/quit") == 2


def test_quit_leaves_at_once(conversation, monkeypatch, capsys):
    type_in(monkeypatch, "/quit", "hello")
    chat._talk(conversation)
    assert capsys.readouterr().out == ""
