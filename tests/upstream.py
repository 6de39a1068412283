"""A stand-in for a server of OpenAI's protocol, such as vLLM: it says what it was asked, in the protocol's own shapes."""

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from serving import wait_for

WORDS = ["I", " am", " the", " adapter"]


@dataclass
class Upstream:
    """What it has been asked, and whether it goes on: a stream stops before its last word while the gate is closed."""

    url: str = ""
    asked: list[tuple[dict, dict]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)

    async def opened(self, request) -> bool:
        while not self.gate.is_set():
            if await request.is_disconnected():
                self.left.set()
                return False
            await asyncio.sleep(0.005)
        return True

    async def answer(self, request):
        body = await request.json()
        self.asked.append((body, dict(request.headers)))
        if body["model"] == "missing":
            message = {"message": "no such model", "type": "NotFoundError", "param": None, "code": 404}
            return JSONResponse({"error": message}, 404)
        if body["model"] == "broken":
            return PlainTextResponse("a trace of secrets", 500)
        if body.get("stream"):
            return StreamingResponse(self.events(request, body["model"]), media_type="text/event-stream")
        if not await self.opened(request):
            return None
        said = {"role": "assistant", "content": "".join(WORDS)}
        choice = {"index": 0, "message": said, "finish_reason": "stop", "text": said["content"]}
        usage = {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}
        return JSONResponse({"id": "x", "object": "chat.completion", "created": 1, "model": body["model"],
                             "choices": [choice], "usage": usage})  # fmt: skip

    async def events(self, request, model):
        for place, word in enumerate(WORDS):
            try:
                if place == len(WORDS) - 1:
                    await self.opened(request)
            except asyncio.CancelledError:
                self.left.set()
                raise
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": [choice]}
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"


@contextmanager
def upstream():
    """One that runs on this machine, with its gate open."""
    found = Upstream()
    found.gate.set()
    paths = ("/v1/chat/completions", "/v1/completions")
    app = Starlette(routes=[Route(path, found.answer, methods=["POST"]) for path in paths])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    found.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        found.gate.set()
        server.should_exit = True
        thread.join(20)
