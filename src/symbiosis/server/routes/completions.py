"""POST /v1/completions and /v1/chat/completions, streamed or not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from symbiosis.errors import ContextTooLong, OutOfRange, UnknownAdapter
from symbiosis.server.auth import Caller
from symbiosis.server.engines.engine import Engine
from symbiosis.server.generation import Generation
from symbiosis.server.metrics.counts import Metrics
from symbiosis.server.model_names import ModelNames
from symbiosis.server.openai.errors import BadRequest, unknown_model
from symbiosis.server.openai.responses import ChatFormatter, CompletionFormatter, EventStream, ResponseFormatter, stream_events
from symbiosis.server.openai.schemas import ChatRequest, CompletionRequest, SamplingFields, check_n
from symbiosis.server.request_gate import RequestGate
from symbiosis.server.requests.body import read_json
from symbiosis.server.settings import Settings
from symbiosis.server.tokenizer import ServerTokenizer
from symbiosis.serving.engine_messages import GenerateRequest, parse_sampling

_DEFAULT_MAX_TOKENS = 16  # of a completion, as in OpenAI's API; a chat has no default


class CompletionRoutes:
    def __init__(
        self, engine: Engine, tokenizer: ServerTokenizer, settings: Settings, gate: RequestGate, metrics: Metrics
    ) -> None:
        self._engine, self._tokenizer, self._settings = engine, tokenizer, settings
        self._gate, self._metrics, self._defaults = gate, metrics, settings.default_sampling
        self._names = ModelNames(settings.base, settings.hub_id, settings.models)

    async def complete(self, request: Request) -> Response:
        body, tenant = await read_json(request, CompletionRequest), request.state.caller.tenant
        check_n(len(body.prompts), body.n or 1)
        sampling = body.sampling(self._defaults, max_tokens=body.max_tokens or _DEFAULT_MAX_TOKENS, logprobs=body.logprobs)
        formatter = CompletionFormatter(body.model, self._tokenizer.token_text, include_usage=body.include_usage)

        async def encode() -> list[list[int]]:
            return [
                await self._tokenizer.encode(tenant, prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts
            ]

        return await self._generate(request, body, encode, sampling, formatter)

    async def chat(self, request: Request) -> Response:
        body, tenant = await read_json(request, ChatRequest), request.state.caller.tenant
        logprobs = body.top_logprobs or 0 if body.logprobs else None
        sampling = body.sampling(self._defaults, max_tokens=body.max_completion_tokens or body.max_tokens, logprobs=logprobs)
        formatter = ChatFormatter(body.model, self._tokenizer.token_text, include_usage=body.include_usage)

        async def encode() -> list[list[int]]:
            messages = [message.to_dict() for message in body.messages]
            settings = {"reasoning_effort": body.reasoning_effort, "verbosity": body.verbosity}
            variables = {name: value for name, value in settings.items() if value is not None}
            return [await self._tokenizer.encode_chat(tenant, messages, variables=variables)]

        return await self._generate(request, body, encode, sampling, formatter)

    async def embed(self, request: Request) -> Response:
        message = f"{self._settings.base} does not support embeddings: use an embedding model elsewhere"
        raise BadRequest(message, field="model", code="unsupported_model")

    async def _generate(
        self,
        request: Request,
        body: SamplingFields,
        encode: Callable[[], Awaitable[list[list[int]]]],
        sampling: dict[str, Any],
        formatter: ResponseFormatter,
    ) -> Response:
        caller: Caller = request.state.caller
        adapter = self._names.parse(body.model)
        if adapter == "":
            raise unknown_model(body.model)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._gate.limit(caller.tenant))
            prompts = await encode()
            if not all(prompts):
                raise OutOfRange("the prompt has no tokens: expected at least one", field="prompt")
            # Checked before the IPC: millions of tokens would delay the requests of all tenants.
            if (most := max(map(len, prompts))) > self._settings.max_model_len:
                raise ContextTooLong(f"a prompt has {most} tokens, at most {self._settings.max_model_len} allowed. Shorten it")
            params = parse_sampling(sampling)
            requests = [
                GenerateRequest(prompt=prompt, sampling=params, adapter=adapter, tenant=caller.tenant, n=body.n or 1)
                for prompt in prompts
            ]
            generation = Generation(
                requests,
                lambda: self._tokenizer.make_stream(
                    body.stops,
                    include_stop=body.include_stop_str_in_output is True,
                    skip_special=body.skip_special_tokens is not False,
                ),
                self._metrics,
                stream=bool(body.stream),
            )
            try:
                active = await stack.enter_async_context(self._engine.submit(requests))
            except UnknownAdapter:
                raise unknown_model(body.model) from None
            if not body.stream:
                deltas = [delta async for batch in generation.deltas(active) for delta in batch]
                deltas.sort(key=lambda delta: delta.index)
                return JSONResponse(formatter.full_body(deltas, generation.usage))
            # The request is accepted: the stream begins, and later errors are events of it.
            resources = stack.pop_all()
        events = stream_events(generation.deltas(active), generation, formatter, body.include_usage, resources)
        return EventStream(events, resources)
