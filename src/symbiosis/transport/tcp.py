"""The link between hosts (or processes) over TCP. Auth tokens are required beyond loopback."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from symbiosis.errors import BadAddress, InsecureListen, Unreachable
from symbiosis.transport.zmq_client import ZmqLink
from symbiosis.transport.zmq_server import ZmqPort

_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:]+\]|[^:/\[\]\s]+):(?P<port>\d{1,5})/?")


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `tcp://HOST:PORT`. Raises `BadAddress`."""
    match = _ADDRESS.fullmatch(address)
    if not match or int(match["port"]) > 65535:
        raise BadAddress(f"{address!r} is not an address: expected tcp://HOST:PORT (0 to 65535), such as tcp://127.0.0.1:7777")
    host = "127.0.0.1" if match["host"] == "localhost" else match["host"]
    return host, int(match["port"])


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class TcpPort(ZmqPort):
    def __init__(self, address: str, *, tokens: Mapping[str, str], max_bytes: int) -> None:
        host, port = parse_address(address)
        if not tokens and not is_loopback(host):
            raise InsecureListen(
                f"{address} can be reached from other machines, and no tenant has a token: "
                "pass tokens (--token NAME=SECRET), or listen at 127.0.0.1"
            )
        super().__init__(f"tcp://{host}:{port or '*'}", tokens=tokens, max_bytes=max_bytes)
        self.address = self.endpoint


class TcpLink(ZmqLink):
    def __init__(self, address: str | Sequence[str], *, token: str | None, hello: dict[str, Any], grace_s: float) -> None:
        """Several addresses are those of executors of the same model: one replaces the other."""
        addresses = [address] if isinstance(address, str) else address
        places = [(each, _endpoint(each)) for each in addresses]
        super().__init__(places, token=token, hello=hello, grace_s=grace_s)


def _endpoint(address: str) -> str:
    host, port = parse_address(address)
    if port == 0:
        raise BadAddress(f"{address!r} has port 0: use the address that the executor's listen() returned")
    try:
        socket.getaddrinfo(host.strip("[]"), port)
    except socket.gaierror as error:
        raise Unreachable(f"there is no host {host!r} ({error.strerror}): is {address} right?") from None
    return f"tcp://{host}:{port}"
