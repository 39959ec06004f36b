"""The link between hosts (or processes) over TCP. Auth tokens are required beyond loopback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from symbiosis.errors import InsecureListen
from symbiosis.transport.addresses import is_loopback, parse_tcp_address, tcp_endpoint
from symbiosis.transport.base import flatten_rows, unflatten_rows
from symbiosis.transport.messages import Message
from symbiosis.transport.wire_format import WireFormat
from symbiosis.transport.zmq_client import ZmqLink
from symbiosis.transport.zmq_server import ZmqPort

_MAX_IN_FLIGHT = 4  # calls between two hosts: one is sent while another is computed and a third one is received


class TcpPort(ZmqPort):
    def __init__(self, address: str, *, tokens: Mapping[str, str], max_bytes: int) -> None:
        host, port = parse_tcp_address(address)
        if not tokens and not is_loopback(host):
            raise InsecureListen(
                f"{address} can be reached from other machines, and no tenant has a token: "
                "pass tokens (--token NAME=SECRET), or listen at 127.0.0.1"
            )
        super().__init__(f"tcp://{host}:{port or '*'}", tokens=tokens, max_bytes=max_bytes)
        self.address = self.endpoint


class TcpLink(ZmqLink):
    def __init__(
        self,
        address: str | Sequence[str],
        *,
        token: str | None,
        hello: dict[str, Any],
        grace_s: float,
        wire: WireFormat = WireFormat.EXACT,
    ) -> None:
        """Several addresses are those of executors of the same model: one replaces the other."""
        addresses = [address] if isinstance(address, str) else address
        places = [(each, tcp_endpoint(each)) for each in addresses]
        self.wire = wire
        if not all(is_loopback(parse_tcp_address(each)[0]) for each in addresses):
            self.max_in_flight = _MAX_IN_FLIGHT
        super().__init__(places, token=token, hello=hello, grace_s=grace_s)

    def call(self, message: Message, widths: list[int]) -> tuple[Tensor, ...]:
        return self.call_all([message], widths)[0]

    def call_all(self, messages: Sequence[Message], widths: list[int]) -> list[tuple[Tensor, ...]]:
        first = messages[0].tensors[0]
        leadings = [message.tensors[0].shape[:-1] for message in messages]
        for message in messages:
            message.tensors = tuple([self.wire.round(each) for each in flatten_rows(message.tensors)])
        replies = [reply.tensors for reply in self.request_all(messages)]
        if first.is_floating_point() and self.wire is not WireFormat.EXACT:
            replies = [tuple([each.to(first.dtype) for each in reply]) for reply in replies]
        return [unflatten_rows(reply, leading) for reply, leading in zip(replies, leadings, strict=True)]
