"""POST /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from symbiosis.server.engines.engine import Engine
from symbiosis.server.openai.schemas import DetokenizeRequest, TokenizeRequest
from symbiosis.server.request_gate import RequestGate
from symbiosis.server.requests.body import read_json
from symbiosis.server.tokenizer import ServerTokenizer


class TokenizationRoutes:
    def __init__(self, engine: Engine, tokenizer: ServerTokenizer, gate: RequestGate) -> None:
        self._engine, self._tokenizer, self._gate = engine, tokenizer, gate

    async def tokenize(self, request: Request) -> Response:
        body, tenant = await read_json(request, TokenizeRequest), request.state.caller.tenant
        async with self._gate.limit(tenant):
            if body.prompt is not None:
                ids = await self._tokenizer.encode(tenant, body.prompt, special=body.add_special_tokens)
            else:
                messages = [message.to_dict() for message in body.messages or ()]
                ids = await self._tokenizer.encode_chat(tenant, messages, add_generation_prompt=body.add_generation_prompt)
        stats = await self._engine.ask("stats")
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": stats["max_model_len"]})

    async def detokenize(self, request: Request) -> Response:
        body, tenant = await read_json(request, DetokenizeRequest), request.state.caller.tenant
        async with self._gate.limit(tenant):
            return JSONResponse({"prompt": await self._tokenizer.decode(tenant, body.tokens)})
