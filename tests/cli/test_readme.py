"""What README.md shows works: every command line, request, flag and program in it, against the default model."""

import contextlib
import json
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from cli_kit import running
from typer.main import get_command

from yeoul.cli.app import app

TEXT = (Path(__file__).parents[2] / "README.md").read_text()
URL = "http://127.0.0.1:8000"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def lines(program):
    """Command lines of all sh blocks that start with `program`, as words."""
    joined = "\n".join(blocks("sh")).replace("\\\n", "")
    return [shlex.split(line, comments=True) for line in joined.splitlines() if line.startswith(program)]


def all_flags(command):
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*(all_flags(child) for child in getattr(command, "commands", {}).values()))


@pytest.fixture(scope="module")
def url():
    with running("serve", "smollm2-135m", "--port", 0) as process:
        for line in process.stderr:
            if line.startswith("try: "):
                yield re.search(r"http://[\d.]+:\d+", line)[0]
                return
        raise AssertionError("it did not start")


def test_every_flag_exists():
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert len(named) > 10 and named <= all_flags(get_command(app)) | {"--help"}


def test_every_command_line_is_understood():
    shown = lines("yeoul ") + lines("echo ")
    assert len(shown) >= 6
    for words in shown:
        command, rest = get_command(app), words[words.index("yeoul") + 1 :]
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_context("yeoul", rest)


def test_every_make_target_exists():
    targets = {words[1] for words in lines("make ")}
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert targets >= {"serve", "test", "check"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@pytest.mark.parametrize("words", lines("curl "), ids=lambda words: words[-1][:40])
def test_every_request_is_answered(words, url):
    address = next(word for word in words if word.startswith(URL))
    body = json.loads(words[words.index("-d") + 1]) | {"max_tokens": 8}
    request = urllib.request.Request(
        address.replace(URL, url), json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with contextlib.closing(urllib.request.urlopen(request, timeout=30)) as answer:
        text = answer.read().decode()
    assert "[DONE]" in text if body.get("stream") else json.loads(text)["choices"]


def test_the_programs_run(url):
    client, offline = blocks("python")
    for program, expected in ((client.replace(URL, url), "river"), (offline, "Paris")):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and expected in done.stdout, done
