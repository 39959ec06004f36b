"""The routes. Each reads a request by its schema, asks the engine, and writes an answer; errors are mapped in `failures`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from symbiosis.errors import ContextTooLong, EngineLost, OutOfRange, UnknownAdapter
from symbiosis.server import metrics as figures
from symbiosis.server.adapter_store import AdapterStore
from symbiosis.server.auth import ApiKeys, AuthMiddleware, Caller
from symbiosis.server.engine_client import EngineClient
from symbiosis.server.generation import Generation, TextDelta
from symbiosis.server.metrics import Metrics
from symbiosis.server.openai.errors import BadRequest, body_of, response_of
from symbiosis.server.openai.responses import DONE, ChatFormatter, CompletionFormatter, ResponseFormatter, event
from symbiosis.server.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
    adapter_of,
    check_n,
)
from symbiosis.server.rate_limits import RateLimiter
from symbiosis.server.requests.body import Handler, read_json, unless_gone
from symbiosis.server.routes.adapters import AdapterRoutes
from symbiosis.server.routes.fine_tuning import FineTuningRoutes
from symbiosis.server.settings import Settings
from symbiosis.server.tokenizer import ServerTokenizer
from symbiosis.serving.engine_messages import GenerateRequest, parse_sampling

_DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it; a chat goes on until it ends
_CLIENT_LEFT = 499


class Server:
    """The handlers and what they share."""

    def __init__(self, remote: EngineClient, tokens: ServerTokenizer, settings: Settings) -> None:
        self._remote, self._tokens, self._settings = remote, tokens, settings
        self._allowances = RateLimiter(settings.requests)
        self._metrics = Metrics()
        store = None if settings.uploads is None else AdapterStore(Path(settings.uploads), settings.store)
        self._tuning = FineTuningRoutes(remote, tokens, settings, store, self._metrics)
        self._adapters = AdapterRoutes(remote, settings, store, self._tuning.check_name, self._tuning.promised)
        self._created = int(time.time())

    def app(self) -> ASGIApp:
        routes = [
            self._route("/health", self.health, "GET"),
            self._route("/metrics", self.metrics, "GET"),
            self._route("/tokenize", self.tokenize, "POST"),
            self._route("/detokenize", self.detokenize, "POST"),
            self._route("/v1/models", self.models, "GET"),
            self._route("/v1/models/{id:path}", self.model, "GET"),
            self._route("/v1/completions", self.completions, "POST"),
            self._route("/v1/chat/completions", self.chat, "POST"),
            self._route("/v1/embeddings", self.embeddings, "POST"),
            self._route("/v1/adapters", self._adapters.list, "GET"),
            self._route("/v1/adapters/{name}", self._adapters.upload, "PUT"),
            self._route("/v1/adapters/{name}", self._adapters.remove, "DELETE"),
            self._route("/v1/adapters/{name}/{file}", self._adapters.download, "GET"),
            self._route("/v1/files", self._tuning.upload, "POST"),
            self._route("/v1/files", self._tuning.files, "GET"),
            self._route("/v1/files/{id}", self._tuning.file, "GET"),
            self._route("/v1/files/{id}", self._tuning.remove_file, "DELETE"),
            self._route("/v1/files/{id}/content", self._tuning.content, "GET"),
            self._route("/v1/fine_tuning/jobs", self._tuning.create, "POST"),
            self._route("/v1/fine_tuning/jobs", self._tuning.jobs, "GET"),
            self._route("/v1/fine_tuning/jobs/{id}", self._tuning.job, "GET"),
            self._route("/v1/fine_tuning/jobs/{id}/cancel", self._tuning.cancel, "POST"),
            self._route("/v1/fine_tuning/jobs/{id}/pause", self._tuning.pause, "POST"),
            self._route("/v1/fine_tuning/jobs/{id}/resume", self._tuning.resume, "POST"),
            self._route("/v1/fine_tuning/jobs/{id}/events", self._tuning.events, "GET"),
            self._route("/v1/fine_tuning/jobs/{id}/checkpoints", self._tuning.checkpoints, "GET"),
            self._route("/v1/load_lora_adapter", self._adapters.load, "POST"),
            self._route("/v1/unload_lora_adapter", self._adapters.unload, "POST"),
            self._route("/v1/pin_lora_adapter", self._adapters.pin, "POST"),
        ]
        app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={HTTPException: _http_error})
        hosts = None if self._settings.hosts is None else frozenset(self._settings.hosts)
        return AuthMiddleware(app, ApiKeys(self._settings.keys, self._settings.admin_key), hosts)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        await self._remote.start()
        await self._tuning.open()
        yield
        await self._tuning.close()
        await self._remote.close()

    def _route(self, path: str, handler: Handler, method: str) -> Route:
        """A handler whose errors become answers, whose client may leave, and which is counted."""

        async def handled(request: Request) -> Response:
            begun, status = time.monotonic(), _CLIENT_LEFT
            request.state.patience_s = self._settings.patience_s
            try:
                response = await unless_gone(request, handler)
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
        jobs = await asyncio.to_thread(self._tuning.counts)
        return Response(self._metrics.written(found, jobs), media_type=figures.CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list((await self._models(request)).values())})

    async def model(self, request: Request) -> Response:
        id = request.path_params["id"]
        found = (await self._models(request)).get(adapter_of(id, self._settings.base))
        if found is None:
            raise _unknown(id)
        return JSONResponse({**found, "id": id})

    async def _models(self, request: Request) -> dict[str | None, dict[str, Any]]:
        """By adapter; None is the base model."""
        found = await self._remote.ask("stats")
        about = {"object": "model", "created": self._created, "owned_by": "symbiosis", "max_model_len": found["max_model_len"]}
        base = self._settings.base
        adapters = self._adapters.visible(request.state.caller, found["adapters"])
        return {None: {"id": base, "root": base, "parent": None, **about}} | {
            name: {"id": name, "root": hash, "parent": base, **about} for name, (_, hash) in sorted(adapters.items())
        }

    async def tokenize(self, request: Request) -> Response:
        wish = await read_json(request, TokenizeRequest)
        tenant = request.state.caller.tenant
        with self._allowances.request(tenant):
            if wish.prompt is not None:
                ids = await self._tokens.encode(tenant, wish.prompt, special=wish.add_special_tokens)
            else:
                messages = [message.plain() for message in wish.messages or ()]
                ids = await self._tokens.encode_chat(tenant, messages, answer=wish.add_generation_prompt)
        found = await self._remote.ask("stats")
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": found["max_model_len"]})

    async def detokenize(self, request: Request) -> Response:
        wish = await read_json(request, DetokenizeRequest)
        tenant = request.state.caller.tenant
        with self._allowances.request(tenant):
            return JSONResponse({"prompt": await self._tokens.decode(tenant, wish.tokens)})

    async def completions(self, request: Request) -> Response:
        wish, tenant = await read_json(request, CompletionRequest), request.state.caller.tenant
        check_n(len(wish.prompts), wish.n or 1)
        sampling = wish.sampling(max_tokens=wish.max_tokens or _DEFAULT_TOKENS, logprobs=wish.logprobs)
        shape = CompletionFormatter(wish.model, self._tokens.shown, with_usage=_with_usage(wish))

        async def prompts() -> list[list[int]]:
            given = wish.prompts
            return [await self._tokens.encode(tenant, each) if isinstance(each, str) else each for each in given]

        return await self._answer(request, wish, prompts, sampling, shape)

    async def chat(self, request: Request) -> Response:
        wish, tenant = await read_json(request, ChatRequest), request.state.caller.tenant
        logprobs = wish.top_logprobs or 0 if wish.logprobs else None
        sampling = wish.sampling(max_tokens=wish.max_completion_tokens or wish.max_tokens, logprobs=logprobs)
        shape = ChatFormatter(wish.model, self._tokens.shown, with_usage=_with_usage(wish))

        async def prompts() -> list[list[int]]:
            return [await self._tokens.encode_chat(tenant, [message.plain() for message in wish.messages])]

        return await self._answer(request, wish, prompts, sampling, shape)

    async def embeddings(self, request: Request) -> Response:
        raise BadRequest(
            f"{self._settings.base} writes text and does not do embeddings: serve a model made for them elsewhere",
            field="model",
            code="unsupported_model",
        )

    async def _answer(
        self,
        request: Request,
        wish: SamplingFields,
        encode: Callable[[], Awaitable[list[list[int]]]],
        sampling: dict[str, Any],
        shape: ResponseFormatter,
    ) -> Response:
        caller: Caller = request.state.caller
        adapter = adapter_of(wish.model, self._settings.base)
        if adapter == "":
            raise _unknown(wish.model)
        async with AsyncExitStack() as stack:
            stack.enter_context(self._allowances.request(caller.tenant))
            prompts = await encode()
            if not all(prompts):
                raise OutOfRange("the prompt has no tokens: expected one at least", field="prompt")
            # here: millions of tokens on their way to the engine would hold up everybody's
            if (most := max(map(len, prompts))) > self._settings.longest:
                raise ContextTooLong(f"a prompt has {most} tokens, at most {self._settings.longest} are taken. Shorten it")
            params = parse_sampling(sampling)
            requests = [
                GenerateRequest(prompt=prompt, sampling=params, adapter=adapter, tenant=caller.tenant, n=wish.n or 1)
                for prompt in prompts
            ]
            generation = Generation(
                requests,
                lambda: self._tokens.stream(
                    wish.stops, include_stop=wish.include_stop_str_in_output, skip_special=wish.skip_special_tokens
                ),
                self._metrics,
                stream=bool(wish.stream),
            )
            try:
                begun = await stack.enter_async_context(self._remote.submit(requests))
            except UnknownAdapter:
                raise _unknown(wish.model) from None
            if not wish.stream:
                pieces = [piece async for piece in generation.deltas(begun)]
                pieces.sort(key=lambda piece: piece.index)
                return JSONResponse(shape.whole(pieces, generation.usage))
            # accepted: the answer can begin, and errors from now on are events in it
            later = stack.pop_all()
        return _Stream(_events(generation.deltas(begun), generation, shape, _with_usage(wish)), later)


def _unknown(model: str) -> UnknownAdapter:
    return UnknownAdapter(f"there is no model {model!r} here: GET /v1/models lists yours")


def _with_usage(wish: SamplingFields) -> bool:
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


async def _events(
    pieces: AsyncIterator[TextDelta], generation: Generation, shape: ResponseFormatter, with_usage: bool
) -> AsyncIterator[bytes]:
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


async def _http_error(request: Request, error: Exception) -> Response:
    """What Starlette itself raises: no such route, or not by this method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = f"there is no {request.url.path}" if status == 404 else f"{request.method} is not for {request.url.path}"
    return response_of(BadRequest(what, code="not_found" if status == 404 else "method_not_allowed", status=status))
