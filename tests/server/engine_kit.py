"""The HTTP application over a real engine on a tiny model, called in process; for end-to-end tests of fields."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from yeoul.config import EngineConfig
from yeoul.engine.build import build_engine
from yeoul.engine.inproc import InprocClient
from yeoul.server.app import create_app
from yeoul.server.options import ServerOptions
from yeoul.server.text_service import TextService
from yeoul.text.chat import ChatEncoder
from yeoul.text.template import load_template


class EngineKit:
    """`complete`, `chat` and `post` return the parsed body of a 200; `refused` the error object of a 400."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.engine = build_engine(EngineConfig(model=str(model), **{"num_threads": 1, "seed": 1, **options}))
        self.tokenizer = self.engine.tokenizer
        self.client = InprocClient(self.engine)
        max_model_len = self.client.info.max_model_len
        template, grammars = load_template(self.engine.metadata), self.engine.grammars
        chat = None if template is None else ChatEncoder(self.tokenizer, template)
        self.text = TextService(self.tokenizer, chat, max_model_len=max_model_len, grammars=grammars)
        self.app = create_app(self.client, self.text, ServerOptions(port=0))

    def request(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.together([(path, body)])[0]

    def together(self, calls: list[tuple[str, dict[str, Any]]]) -> list[httpx.Response]:
        """Several calls at once."""
        return asyncio.run(self._together(calls))

    async def _together(self, calls: list[tuple[str, dict[str, Any]]]) -> list[httpx.Response]:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as http:
            return await asyncio.gather(*(http.post(path, json=body) for path, body in calls))

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.request(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, **body: Any) -> dict[str, Any]:
        """The first choice, and the usage under `usage`."""
        body = {"prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True, "max_tokens": 12, **body}
        answer = self.post("/v1/completions", **body)
        return {**answer["choices"][0], "usage": answer["usage"]}

    def chat(self, **body: Any) -> dict[str, Any]:
        """The first choice."""
        messages = [{"role": "user", "content": "hello there"}]
        body = {"messages": messages, "temperature": 0, "ignore_eos": True, "max_tokens": 12, **body}
        return self.post("/v1/chat/completions", **body)["choices"][0]

    def refused(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.request(path, body)
        assert response.status_code == 400, response.text
        return response.json()["error"]

    def close(self) -> None:
        asyncio.run(self.client.close())
        self.text.close()
