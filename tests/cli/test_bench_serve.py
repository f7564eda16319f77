"""yeoul bench serve against a scripted server: the whole command, and what it refuses."""

import json
import sys
from pathlib import Path

import pytest
from cli_kit import inline, refuses, taken_port

sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))
from fake_server import answer, event, serving_beside, stream


def three_tokens(prompt):
    return stream(*((0.0, event(text)) for text in "abc"), usage=3)


def bench(fake, *args):
    url = f"http://127.0.0.1:{fake.port}"
    return inline("bench", "serve", "--base-url", url, "--model", "m", "--requests", 6, *args)


@pytest.mark.parametrize("pace", [["--users", 3], ["--rate", 500, "--arrivals", "burst", "--burst", 4]], ids=str)
def test_the_table_and_the_json_say_the_same(pace):
    with serving_beside(three_tokens) as fake:
        done = bench(fake, *pace, "--input-tokens", "2-4", "--slo", "ttft=60,tpot=60", "--json")
    assert done.returncode == 0, done
    assert done.stderr.splitlines()[-1] == "bench serve: 6 of 6 requests"
    *table, last = done.stdout.splitlines()
    report = json.loads(last)
    summary, client = report["summary"], report["client"]
    assert (summary["completed"], summary["failed"], summary["output_tokens"]) == (6, 0, 18)
    assert summary["goodput"] == summary["requests_per_second"] > 0 and summary["ttft"]["count"] == 6
    assert client["cpu_seconds"] > 0 and client["deliveries"] == summary["tbt"]["count"] + 6
    assert report["workload"]["input_tokens"] == "2-4" and report["slo"]["ttft"] == 60
    text = "\n".join(table)
    assert all(word in text for word in ("6 of 6 requests", "TTFT", "TPOT", "TBT", "ITL", "E2E", "goodput", "client"))
    assert len(fake.asked) == 7 and all(2 <= len(body["prompt"].split()) <= 4 for _, body in fake.asked)


def test_prompts_keys_and_endpoint_reach_the_server_and_the_key_stays_out_of_the_report(tmp_path):
    (tmp_path / "prompts").write_text("same\n")
    (tmp_path / "key").write_text("secret\n")
    files = ["--prompts", tmp_path / "prompts", "--api-key-file", tmp_path / "key"]
    with serving_beside(three_tokens) as fake:
        done = bench(fake, *files, "--endpoint", "chat", "--no-ignore-eos", "--json")
    assert done.returncode == 0 and "secret" not in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["target"]["api_key"] == "given"
    for head, body in fake.asked:
        assert "/v1/chat/completions" in head and "Bearer secret" in head and "ignore_eos" not in body
        assert body["messages"][0]["content"] == "same"


def test_failures_are_counted_apart_by_what_they_say():
    count = iter(range(100))

    def scripts(prompt):
        return three_tokens(prompt) if next(count) < 3 else [(0.0, answer(503, b'{"error": {"message": "busy"}}'))]

    with serving_beside(scripts) as fake:
        done = bench(fake, "--json")
    summary = json.loads(done.stdout.splitlines()[-1])["summary"]
    assert (summary["completed"], summary["failed"], summary["errors"]) == (2, 4, {"HTTP 503: busy": 4})
    assert summary["ttft"]["count"] == 2 and "failed, 4 times: HTTP 503: busy" in done.stdout


def test_a_server_that_cannot_answer_is_one_line():
    refusal = b'{"error": {"message": "unknown field ignore_eos"}}'
    with serving_beside(lambda prompt: [(0.0, answer(400, refusal))]) as fake:
        refuses(bench(fake), 1, "does not serve this: HTTP 400: unknown field", hint="--no-ignore-eos")
    with taken_port() as port:
        pass
    refuses(inline("bench", "serve", "--base-url", f"http://127.0.0.1:{port}", "--model", "m"), 1, "no connection")


WRONG = [
    (["--rate", "1", "--users", "2"], "--rate and --users exclude each other"),
    (["--arrivals", "never"], "--arrivals must be one of"),
    (["--endpoint", "responses"], "'responses' is not one of"),
    (["--slo", "fast"], "'fast' is no list of bounds"),
    (["--input-tokens", "0"], "'0' is no number of tokens"),
    (["--requests", "0"], "--requests must be between"),
    (["--base-url", "ftp://x"], "'ftp://x' is no URL"),
]


@pytest.mark.parametrize(("args", "words"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_wrong_usage_is_one_line_and_exit_code_2(args, words):
    base = [] if "--base-url" in args else ["--base-url", "http://127.0.0.1:9"]
    refuses(inline("bench", "serve", *base, "--model", "m", *args), 2, words)
