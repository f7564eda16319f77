"""The client against a scripted server: what is measured, and every way in which a reply can go wrong."""

import asyncio

import pytest
from fake_server import DONE, END, HEAD, answer, chunk, event, serving, stream

from yeoul.errors import ConfigError
from yeoul.lab.client import MAX_EVENT_BYTES, Target, check_api_key, exchange, parse_base_url, tls_context
from yeoul.lab.meter import NO_TOKENS, summarize
from yeoul.lab.workload import Item


def ask(scripts, *prompts, **fields):
    """(records of the prompts one after the other, what the server was asked)."""

    async def main():
        async with serving(scripts) as fake:
            records = []
            for prompt in prompts:
                fake.now = 0.0
                item = Item(prompt=prompt, output_tokens=9)
                records.append(await exchange(fake.target(**fields), item, 0.0, None, fake.clock))
            return records, fake.asked

    return asyncio.run(main())


def one(script, **fields):
    ((record,), _) = ask({"p": script}, "p", **fields)
    return record


def evenly(tokens):
    return stream(*((0.1 + 0.02 * i, event(f"t{i}")) for i in range(tokens)), usage=tokens)


def test_b1_one_token_has_no_tpot_and_failures_are_counted_apart():
    refused = [(5.0, answer(500, b'{"error": {"message": "it  broke"}}'))]
    scripts = {"1": evenly(1), "2": evenly(2), "11": evenly(11), "500": refused, "none": stream(usage=0)}
    records, _ = ask(scripts, *scripts)
    summary = summarize(records)
    assert (summary.completed, summary.failed) == (3, 2)
    assert summary.errors == {"HTTP 500: it broke": 1, NO_TOKENS: 1}
    assert [record.tpot for record in records[:3]] == [None, pytest.approx(0.02), pytest.approx(0.02)]
    assert summary.tpot.count == 2 and summary.tpot.p50 == pytest.approx(0.02)
    assert summary.ttft.count == 3 and summary.ttft.p50 == summary.ttft.high == pytest.approx(0.1)
    assert summary.output_tokens == 14 and summary.e2e.high == pytest.approx(0.3)


@pytest.mark.parametrize("counted", [False, True], ids=["usage at the end", "usage in every chunk"])
def test_b3_gaps_are_per_token_and_without_ttft(counted):
    pieces = ((0.1, "a", 1), (0.14, "bcde", 5), (0.18, "    ", 9))
    record = one(stream(*((at, event(text, usage=n if counted else None)) for at, text, n in pieces), usage=9))
    assert record.completion_tokens == 9 and record.tpot == pytest.approx(0.01)
    assert record.token_gaps() == pytest.approx([0.01] * (8 if counted else 2))
    assert list(record.gaps()) == pytest.approx([0.04, 0.04])
    summary = summarize([record])
    assert summary.itl.high == pytest.approx(0.01) and summary.ttft.high == pytest.approx(0.1)


def test_pieces_without_text_are_no_deliveries():
    role = event("", chat=True)
    record = one(stream((0.1, role), (0.3, event("x", chat=True)), (0.5, event("", finish="stop")), usage=1))
    assert record.deliveries == (0.3,) and record.ttft == 0.3 and record.failure is None


def test_events_may_be_cut_anywhere():
    whole = event("ab") + event("c", finish="stop") + event(usage=3) + DONE
    record = one([(0.1, HEAD), *((0.1, chunk(whole[i : i + 1])) for i in range(len(whole))), (0.2, END)])
    assert record.failure is None and len(record.deliveries) == 2 and record.completion_tokens == 3


def test_a_server_without_done_and_usage_is_understood():
    record = one(stream((0.1, event("x")), (0.2, event("y", finish="length")), done=False))
    assert record.failure is None and record.completion_tokens is None and record.tpot is None
    assert summarize([record]).without_usage == 1


BAD = {
    "cut": ([(0.1, HEAD), (0.2, chunk(event("x")))], "cut short"),
    "no end": (stream((0.1, event("x")), done=False), "cut short"),
    "not HTTP": ([(0.1, b"SSH-2.0-OpenSSH\r\n")], "not HTTP"),
    "nothing": ([], "cut short"),
    "not JSON": (stream((0.1, b"data: {oops}\n\n")), "no completion chunk"),
    "other JSON": (stream((0.1, b'data: {"choices": 5}\n\n')), "no completion chunk"),
    "error event": (stream((0.1, event("x", error={"message": "out of\nmemory"}))), "stream: out of memory"),
    "long event": (stream((0.1, b"data: " + b"x" * (MAX_EVENT_BYTES + 1))), "too long"),
    "404": ([(0.1, answer(404, b"<html>not here</html>"))], "HTTP 404: <html>not here</html>"),
    "204": ([(0.1, answer(204, b""))], "HTTP 204"),
    "long error": ([(0.1, answer(400, b"y" * 500_000))], "HTTP 400: yyy"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_goes_wrong_is_one_short_line(name):
    script, words = BAD[name]
    record = one(script)
    assert words in record.failure and len(record.failure) < 300 and "\n" not in record.failure


def test_a_server_that_is_not_there_and_one_that_hangs():
    async def refused():
        async with serving({}) as fake:
            target = fake.target()
        await asyncio.sleep(0)
        return await exchange(target, Item(prompt="p", output_tokens=1), 0.0, None)

    assert "no connection" in asyncio.run(refused()).failure

    assert one(None, timeout=0.05).failure == "timed out"


def test_tls_is_spoken_where_the_url_says_so():
    """A server without it sees a handshake, never the request; and plain text is never sent by mistake."""

    async def main():
        async with serving({}) as fake:
            target = fake.target(tls=True, timeout=0.2)
            with pytest.raises(ValueError, match="TLS"):
                await exchange(target, Item(prompt="p", output_tokens=1), 0.0, None)
            return await exchange(target, Item(prompt="p", output_tokens=1), 0.0, tls_context(target)), fake.asked

    record, asked = asyncio.run(main())
    assert record.failure == "timed out" and asked == []


STANDARD = {"model", "prompt", "messages", "max_tokens", "temperature", "stream", "stream_options"}


def test_only_standard_fields_but_one_that_can_be_left_out():
    _, ((head, body),) = ask({"p": evenly(1)}, "p", api_key="k")
    assert head.startswith("POST /v1/completions HTTP/1.1\r\n") and "Authorization: Bearer k\r\n" in head
    assert body.keys() - STANDARD == {"ignore_eos"} and (body["max_tokens"], body["stream"]) == (9, True)
    _, ((head, body),) = ask({"p": evenly(1)}, "p", endpoint="chat", ignore_eos=False, path="/api")
    assert head.startswith("POST /api/chat/completions HTTP/1.1\r\n") and "Authorization" not in head
    assert body.keys() <= STANDARD and body["messages"] == [{"role": "user", "content": "p"}]


def test_urls_are_parsed():
    assert parse_base_url("http://127.0.0.1:8000") == ("127.0.0.1", 8000, False, "/v1")
    assert parse_base_url("https://example.org/api/v2/") == ("example.org", 443, True, "/api/v2")
    assert parse_base_url("http://[::1]:80/v1") == ("::1", 80, False, "/v1")
    target = Target(host="::1", port=80, tls=False, path="/v1", model="m")
    assert b"\r\nHost: [::1]:80\r\n" in target.request(Item(prompt="p", output_tokens=1))


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "ftp://x", "http://", "http://x:port", "http://x:99999", "http://x/v1?a=b", "http://u:p@x",
     "http://x/\r\nEvil: 1", "http://x/a b", "http://[x"],
)  # fmt: skip
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="is no URL"):
        parse_base_url(url)


def test_keys_fit_a_header():
    assert check_api_key(" abc\n") == "abc"
    for key in ("", " \n", "a\nb", "é"):
        with pytest.raises(ConfigError):
            check_api_key(key)
