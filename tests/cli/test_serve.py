"""yeoul serve as a process: it says what it does, answers, and leaves in order."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from cli_kit import inline, refuses, running, taken_port
from tiny import tiny_model


def until_ready(process):
    """(URL, everything said until then)."""
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("try: "):
            return re.search(r"http://[\d.]+:\d+", line)[0], "".join(said)
    raise AssertionError("".join(said))


def get(url, body=None, **headers):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def test_it_starts_answers_and_drains(tiny_llama):
    flags = ["--port", 0, "--served-model-name", "river", "--served-model-name", "stream", "--max-num-seqs", 3]
    with running("serve", tiny_llama, *flags) as process:
        url, said = until_ready(process)
        for words in ("model: ", "executor: native", "threads", "--num-threads", "kv cache: ", "--kv-cache-memory",
                      "max_num_seqs: 3 (--max-num-seqs)", f"serving river on {url}"):  # fmt: skip
            assert words in said
        assert get(f"{url}/health") == {"status": "ok"}
        assert [model["id"] for model in get(f"{url}/v1/models")["data"]] == ["river", "stream"]
        answer = get(f"{url}/v1/completions", {"model": "stream", "prompt": "the quick", "max_tokens": 4})
        assert answer["usage"]["completion_tokens"] <= 4 and answer["choices"][0]["finish_reason"] in ("length", "stop")
        process.send_signal(signal.SIGTERM)
        out, rest = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, "")
        assert "shutting down" in rest and "Traceback" not in rest


@pytest.mark.parametrize("chats", [True, False])
def test_the_printed_curl_line_works(tiny_llama, tmp_path, chats):
    model = tiny_llama if chats else tiny_model(tmp_path, "llama", chat_template=None, name="it's")
    with running("serve", model, "--port", 0, "--served-model-name", "it's", "--log-level", "error") as process:
        _, said = until_ready(process)
        words = shlex.split(said.splitlines()[-1].removeprefix("try: "))
        assert words[0] == "curl" and words[2:5] == ["-H", "Content-Type: application/json", "-d"] and len(words) == 6
        assert words[1].endswith("/v1/chat/completions" if chats else "/v1/completions")
        assert get(words[1], json.loads(words[5]))["model"] == "it's"
        assert "INFO" not in said


def test_keys_come_from_flags_and_the_environment(tiny_llama):
    env = {"env": os.environ | {"YEOUL_API_KEY": "sk-env, sk-more"}}
    with running("serve", tiny_llama, "--port", 0, "--host", "0.0.0.0", "--api-key", "sk-flag", **env) as process:
        url, said = until_ready(process)
        assert "Authorization: Bearer KEY" in said and "sk-" not in said
        url = url.replace("0.0.0.0", "127.0.0.1")
        assert get(f"{url}/health") == {"status": "ok"}
        for key in ("sk-flag", "sk-env", "sk-more"):
            assert get(f"{url}/v1/models", Authorization=f"Bearer {key}")["data"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(f"{url}/v1/models")


def test_c3_a_chat_template_given_at_the_start(tmp_path):
    model = tiny_model(tmp_path, "llama", chat_template=None, name="bare")
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}")
    with running("serve", model, "--port", 0, "--chat-template", template) as process:
        url, said = until_ready(process)
        assert "/v1/chat/completions" in said
        tokens = get(f"{url}/tokenize", {"messages": [{"role": "user", "content": "hi<|im_end|>"}]})["tokens"]
        text = get(f"{url}/tokenize", {"prompt": "hi<|im_end|>", "add_special_tokens": False})["tokens"]
        assert tokens[1:] == text and len(tokens) > 3
        assert get(f"{url}/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})


def test_a_chat_template_that_cannot_be_read(tmp_path):
    done = inline("serve", "any", "--port", 0, "--chat-template", tmp_path / "none.jinja")
    refuses(done, 1, "chat template", "none.jinja", "No such file")


@pytest.mark.parametrize("key", ["", " sk", "s\u00e9cret", "a\nb"])
def test_a_key_that_no_header_can_carry_is_not_repeated(key):
    done = inline("serve", "any", "--port", 0, "--api-key", key)
    refuses(done, 2, "--api-key")
    assert not key or key not in done.stderr


def test_a_port_in_use_is_noticed_before_the_model_is_looked_for():
    with taken_port() as port:
        refuses(inline("serve", "no-such-model", "--port", port), 1, f"port {port}", "in use", hint="--port")


def test_a_model_that_was_not_pulled_names_the_command(tmp_path):
    done = inline("serve", "smollm2-135m", "--port", 0, YEOUL_HOME=str(tmp_path))
    refuses(done, 1, "not on this machine", hint="yeoul pull smollm2-135m")


def test_ctrl_c_while_it_starts_is_quiet(tmp_path):
    code = (
        "import os, signal, sys, yeoul.engine.build\n"
        "yeoul.engine.build.build_engine = lambda config: signal.raise_signal(signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from yeoul.cli import main\n"
        "sys.exit(main(['serve', 'any', '--port', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
