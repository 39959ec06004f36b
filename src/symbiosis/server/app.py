"""The routes. Each reads a request by its schema, asks the engine, and writes an answer; errors are mapped in `failures`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from symbiosis.errors import BadAdapter, EngineLost, OutOfRange, TooLarge
from symbiosis.server import metrics as figures
from symbiosis.server.answers import DONE, ChatShape, CompletionShape, Shape, event
from symbiosis.server.failures import BadRequest, bad_request, body_of, response_of
from symbiosis.server.generation import Generation, Piece
from symbiosis.server.keys import Caller, Guard, Keys
from symbiosis.server.metrics import Metrics
from symbiosis.server.remote import Order, Remote
from symbiosis.server.schemas import (
    Chat,
    Completion,
    LoadAdapter,
    Strict,
    Tokenize,
    UnloadAdapter,
    Wishes,
    adapter_of,
    check_n,
)
from symbiosis.server.settings import Settings
from symbiosis.server.tokens import Tokens

MAX_BODY = 16 << 20
_DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it; a chat goes on until it ends
_CLIENT_LEFT = 499
_Schema = TypeVar("_Schema", bound=Strict)
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class Server:
    """The handlers and what they share."""

    def __init__(self, remote: Remote, tokens: Tokens, settings: Settings) -> None:
        self._remote, self._tokens, self._settings = remote, tokens, settings
        self._metrics = Metrics()
        self._created = int(time.time())

    def app(self) -> ASGIApp:
        routes = [
            self._route("/health", self.health, "GET"),
            self._route("/metrics", self.metrics, "GET"),
            self._route("/tokenize", self.tokenize, "POST"),
            self._route("/v1/models", self.models, "GET"),
            self._route("/v1/completions", self.completions, "POST"),
            self._route("/v1/chat/completions", self.chat, "POST"),
            self._route("/v1/load_lora_adapter", self.load_adapter, "POST"),
            self._route("/v1/unload_lora_adapter", self.unload_adapter, "POST"),
        ]
        app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={HTTPException: _http_error})
        hosts = None if self._settings.hosts is None else frozenset(self._settings.hosts)
        return Guard(app, Keys(self._settings.keys, self._settings.admin_key), hosts)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        await self._remote.start()
        yield
        await self._remote.close()

    def _route(self, path: str, handler: Handler, method: str) -> Route:
        """A handler whose errors become answers, whose client may leave, and which is counted."""

        async def handled(request: Request) -> Response:
            begun, status = time.monotonic(), _CLIENT_LEFT
            try:
                response = await _unless_gone(request, handler)
                status = response.status_code
            except ClientDisconnect:
                response = Response(status_code=_CLIENT_LEFT)
            except Exception as error:  # noqa: BLE001 - mapped, and logged if it is none of ours
                response = response_of(error)
                status = response.status_code
            finally:
                self._metrics.count_request(path, status, time.monotonic() - begun)
            return response

        return Route(path, handled, methods=[method])

    async def health(self, request: Request) -> Response:
        if not self._remote.is_alive():
            raise EngineLost("the serving engine is gone; it may be started again")
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        found = await self._remote.ask("stats") if self._remote.is_alive() else None
        return Response(self._metrics.written(found), media_type=figures.CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        found = await self._remote.ask("stats")
        about = {"object": "model", "created": self._created, "owned_by": "symbiosis", "max_model_len": found["longest"]}
        base = self._settings.base
        listed: list[dict[str, Any]] = [{"id": base, "root": base, "parent": None, **about}]
        listed += [{"id": name, "root": hash, "parent": base, **about} for name, hash in sorted(found["adapters"].items())]
        return JSONResponse({"object": "list", "data": listed})

    async def tokenize(self, request: Request) -> Response:
        wish = await _read(request, Tokenize)
        if wish.prompt is not None:
            ids = await self._tokens.encode(wish.prompt, special=wish.add_special_tokens)
        else:
            messages = [message.plain() for message in wish.messages or ()]
            ids = await self._tokens.encode_chat(messages, answer=wish.add_generation_prompt)
        found = await self._remote.ask("stats")
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": found["longest"]})

    async def completions(self, request: Request) -> Response:
        wish = await _read(request, Completion)
        check_n(len(wish.prompts), wish.n or 1)
        prompts = [await self._tokens.encode(prompt) if isinstance(prompt, str) else prompt for prompt in wish.prompts]
        sampling = wish.sampling(max_tokens=wish.max_tokens or _DEFAULT_TOKENS, logprobs=wish.logprobs)
        shape = CompletionShape(wish.model, self._tokens.shown, with_usage=_with_usage(wish))
        return await self._answer(request, wish, prompts, sampling, shape)

    async def chat(self, request: Request) -> Response:
        wish = await _read(request, Chat)
        prompt = await self._tokens.encode_chat([message.plain() for message in wish.messages])
        logprobs = wish.top_logprobs or 0 if wish.logprobs else None
        sampling = wish.sampling(max_tokens=wish.max_completion_tokens or wish.max_tokens, logprobs=logprobs)
        shape = ChatShape(wish.model, self._tokens.shown, with_usage=_with_usage(wish))
        return await self._answer(request, wish, [prompt], sampling, shape)

    async def _answer(
        self, request: Request, wish: Wishes, prompts: list[list[int]], sampling: dict[str, Any], shape: Shape
    ) -> Response:
        caller: Caller = request.state.caller
        adapter = adapter_of(wish.model, self._settings.base)
        if not all(prompts):
            raise OutOfRange("the prompt has no tokens: expected one at least", field="prompt")
        orders = [
            Order(prompt=prompt, sampling=sampling, adapter=adapter, tenant=caller.tenant, n=wish.n or 1) for prompt in prompts
        ]
        generation = Generation(
            orders,
            lambda: self._tokens.stream(
                wish.stops, include_stop=wish.include_stop_str_in_output, skip_special=wish.skip_special_tokens
            ),
            self._metrics,
            every_piece=bool(wish.stream),
        )
        async with AsyncExitStack() as stack:
            begun = await stack.enter_async_context(self._remote.begin(orders))
            if not wish.stream:
                pieces = [piece async for piece in generation.pieces(begun)]
                pieces.sort(key=lambda piece: piece.index)
                return JSONResponse(shape.whole(pieces, generation.usage))
            # accepted: the answer can begin, and errors from now on are events in it
            later = stack.pop_all()
        return _Stream(_events(generation.pieces(begun), generation, shape, _with_usage(wish)), later)

    async def load_adapter(self, request: Request) -> Response:
        wish = await _read(request, LoadAdapter)
        if wish.lora_name == self._settings.base:
            raise BadRequest(f"{wish.lora_name} is the base model's name: choose another", field="lora_name")
        folder = _confined(self._settings.adapter_root, wish.lora_path)
        await self._remote.ask("load", name=wish.lora_name, folder=str(folder), replace=wish.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{wish.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        wish = await _read(request, UnloadAdapter)
        await self._remote.ask("unload", name=wish.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{wish.lora_name}' removed successfully.")


def _with_usage(wish: Wishes) -> bool:
    return wish.stream_options is not None and wish.stream_options.include_usage


class _Stream(StreamingResponse):
    """Server-sent events; however the stream ends, what has not ended is cancelled."""

    def __init__(self, events: AsyncIterator[bytes], held: AsyncExitStack) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            with suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)


async def _events(pieces: AsyncIterator[Piece], generation: Generation, shape: Shape, with_usage: bool) -> AsyncIterator[bytes]:
    try:
        seen: set[int] = set()
        async for piece in pieces:
            if piece.index not in seen:
                seen.add(piece.index)
                for body in shape.first(piece.index):
                    yield event(body)
            yield event(shape.chunk(piece))
        if with_usage:
            yield event(shape.last(generation.usage))
    except Exception as error:  # noqa: BLE001 - the status is sent; the error can only be an event
        yield event(body_of(error))
    yield DONE


async def _read(request: Request, schema: type[_Schema]) -> _Schema:
    """The body by its schema. Only JSON: a form of some web page cannot ask for anything."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequest("the body must be JSON: send Content-Type: application/json", status=415)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise TooLarge(f"the body has more than {MAX_BODY} bytes")
    try:
        return schema.model_validate_json(bytes(body))
    except ValidationError as error:
        raise bad_request(error) from None


async def _unless_gone(request: Request, handler: Handler) -> Response:
    """Run a handler until it is done or the client leaves; then it is cancelled and `ClientDisconnect` raised."""
    if request.method == "GET":
        return await handler(request)
    receive, gone = request.receive, asyncio.Event()

    async def watched() -> Any:
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            read.set()
        elif message["type"] == "http.disconnect":
            gone.set()
        return message

    async def wait_gone() -> None:
        await read.wait()
        while not gone.is_set():
            if (await receive())["type"] == "http.disconnect":
                gone.set()

    read = asyncio.Event()
    request._receive = watched
    work = asyncio.ensure_future(handler(request))
    leaving = asyncio.ensure_future(wait_gone())
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        for task in (work, leaving):
            task.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)


def _confined(root: str | None, path: str) -> Path:
    """The folder that a path under the root stands for. Raises `BadAdapter`."""
    if root is None:
        raise BadAdapter("adapters are not loaded while serving: start the server with --adapter-root FOLDER")
    base = Path(root).resolve()
    folder = (base / path).resolve()
    if not folder.is_relative_to(base) or folder == base:
        raise BadAdapter("lora_path must lead to a folder inside the one given with --adapter-root")
    if not folder.is_dir():
        raise BadAdapter("lora_path: there is no such folder inside the one given with --adapter-root")
    return folder


async def _http_error(request: Request, error: Exception) -> Response:
    """What Starlette itself raises: no such route, or not by this method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = f"there is no {request.url.path}" if status == 404 else f"{request.method} is not for {request.url.path}"
    return response_of(BadRequest(what, code="not_found" if status == 404 else "method_not_allowed", status=status))
