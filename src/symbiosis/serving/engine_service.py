"""The engine's operations for other processes. A lost peer's requests are cancelled."""

from __future__ import annotations

from functools import partial

from symbiosis.errors import BadMessage
from symbiosis.serving import engine_messages as messages
from symbiosis.serving.block_exchange.exchange import BlockExchange
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.engine_loop import EngineLoop
from symbiosis.serving.engine_messages import int_field, text_field
from symbiosis.serving.rpc_server import RpcServer
from symbiosis.transport.engine_ipc import Body, EngineAddress, EngineListener, TokenPort

_MAX_PATH = 4096


class EngineService:
    """Owns the engine's loop and its RPC server, which other services of the process share. Peers connect to `address`."""

    operations = ("hello", "submit", "cancel", "load", "unload", "pin", "stats")

    def __init__(self, core: EngineCore, listener: EngineListener, model: str | None = None) -> None:
        """`model`: the fingerprint of the model, for an engine that exchanges blocks with others; None: it does not."""
        self._listener = listener
        self._token_port = TokenPort(listener)
        self.rpc = RpcServer(listener, self._is_stepping)
        self.engine_loop = EngineLoop(core, self.rpc.publish, self._publish_tokens)
        self._exchange: BlockExchange | None = None
        if model is not None and core.block_memory is not None and core.block_fetches is not None:
            block_manager, call = core.scheduler.block_manager, self.engine_loop.call
            self._exchange = BlockExchange(listener, model, block_manager, core.block_memory, core.block_fetches, call)
        self.rpc.add_handler(self)
        self.address: EngineAddress = listener.address

    def is_alive(self) -> bool:
        return self.rpc.is_alive() and self.engine_loop.is_alive()

    def handle(self, id: str, body: Body) -> None:
        op, loop = body.get("op"), self.engine_loop
        peer, _, own = id.partition(":")
        if op == "submit":
            if not own.isdecimal() or int(own) > messages.MAX_ID:
                raise BadMessage(f"the id of request {own!r}: expected a decimal number up to {messages.MAX_ID}")
            request = messages.decode_request(id, body, messages.stream_number(int(peer), int(own)))
            if request.source is not None:
                if self._exchange is None:
                    raise BadMessage("source: this engine fetches no blocks: expected none")
                self._listener.check_source(request.source)
            self._token_port.add(self.rpc.key_of(id))
            loop.submit(request)
        elif op == "cancel":
            completion = body.get("number")
            loop.cancel(id, None if completion is None else int_field(completion, "number"))
        elif op == "load":
            folder = text_field(body, "folder", _MAX_PATH)
            loop.load(id, text_field(body, "name"), folder, replace=body.get("replace") is True)
        elif op == "unload":
            loop.unload(id, text_field(body, "name"))
        elif op == "pin":
            loop.pin(id, text_field(body, "name"), body.get("pinned") is True)
        elif op == "stats":
            loop.stats(id)
        else:
            loop.call(partial(self._token_port.greet, self.rpc.key_of(id)))

    def drop_peer(self, peer: str) -> None:
        self._token_port.remove(self.rpc.key_of(peer))
        self.engine_loop.cancel_all(f"{peer}:")

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.finish(requests_left=self.engine_loop.end_requests() > 0)
        self.engine_loop.close()
        if self._exchange is not None:
            self._exchange.close()
        self._token_port.close()

    def _is_stepping(self) -> bool:
        return self.engine_loop.is_alive()

    def _publish_tokens(self, values: list[int]) -> None:
        """On the stepping thread."""
        if lost := self._token_port.send(messages.encode_tokens(values)):
            self.rpc.drop(lost)
