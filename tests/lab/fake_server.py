"""A server whose every byte and moment is scripted. It moves the clock that the client reads: nothing is timed."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager, contextmanager

from yeoul.lab.client import Target


def event(*texts, usage=None, finish=None, chat=False, **extra):
    """One server-sent event; with no text it has no choices."""
    pieces = [{"delta": {"content": t}} if chat else {"text": t} for t in texts]
    body = {"choices": [{"index": 0, "finish_reason": finish} | piece for piece in pieces]} | extra
    if usage is not None:
        body["usage"] = {"prompt_tokens": 7, "completion_tokens": usage, "total_tokens": 7 + usage}
    return b"data: " + json.dumps(body).encode() + b"\r\n\r\n"


DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data):
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def answer(status, body):
    return f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def stream(*timed, usage=None, done=True):
    """A script: (seconds, event) pairs as a chunked reply; the usage event and the end come with the last one."""
    script = [(timed[0][0] if timed else 0.0, HEAD)] + [(at, chunk(data)) for at, data in timed]
    tail = (chunk(event(usage=usage)) if usage is not None else b"") + (chunk(DONE) if done else b"") + END
    return [*script, (script[-1][0], tail)]


class FakeServer:
    """Answers a prompt by its script; keeps what it was asked."""

    def __init__(self, scripts, port=0):
        self.scripts = scripts
        self.now = 0.0
        self.asked = []
        self.open = set()
        self.port = port

    def clock(self):
        return self.now

    def target(self, **fields):
        return Target(**{"host": "127.0.0.1", "port": self.port, "tls": False, "path": "/v1", "model": "m"} | fields)

    async def handle(self, reader, writer):
        self.open.add(task := asyncio.current_task())
        try:
            await self.reply(reader, writer)
        except (ConnectionError, EOFError):
            pass  # the client has seen enough
        finally:
            writer.close()
            self.open.discard(task)

    async def reply(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(line[15:]) for line in head.splitlines() if line.lower().startswith("content-length:"))
        body = json.loads(await reader.readexactly(length))
        self.asked.append((head, body))
        prompt = body.get("prompt") or body["messages"][0]["content"]
        script = self.scripts(prompt) if callable(self.scripts) else self.scripts[prompt]
        if script is None:
            await reader.read()  # silence, until the client leaves
            return
        for at, data in script:
            self.now = at
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.002)  # the client, on this same loop, reads first


@asynccontextmanager
async def serving(scripts):
    """On the caller's event loop."""
    fake = FakeServer(scripts)
    server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()
        while fake.open:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)  # transports close in the loop's next round


@contextmanager
def serving_beside(scripts):
    """On a thread of its own, for clients that have a loop of their own."""
    started, fake = threading.Event(), FakeServer(scripts)
    loop = asyncio.new_event_loop()

    async def main():
        async with serving(scripts) as inner:
            fake.port, fake.asked, fake.stop = inner.port, inner.asked, asyncio.Event()
            started.set()
            await fake.stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    started.wait()
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(fake.stop.set)
        thread.join()
        loop.close()
