"""Statistics of an executor for a process that imports no torch, such as `symbiosis top`."""

from __future__ import annotations

from typing import Any

from symbiosis.transport.addresses import address_scheme, not_an_address, shm_endpoint, tcp_endpoint
from symbiosis.transport.messages import Kind, Message
from symbiosis.transport.zmq_client import ZmqLink

_ENDPOINTS = {"tcp": tcp_endpoint, "shm": shm_endpoint}
_GRACE_S = 10.0


def fetch_statistics(address: str, *, token: str | None = None) -> dict[str, Any]:
    """What an executor sends to this tenant. No model is built, and no tensor is sent, so shared memory is not opened."""
    endpoint_of = _ENDPOINTS.get(address_scheme(address))
    if endpoint_of is None:
        raise not_an_address(address)
    link = ZmqLink([(address, endpoint_of(address))], token=token, hello={"name": "top"}, grace_s=_GRACE_S)
    try:
        return link.request(Message(Kind.STATS)).body
    finally:
        link.close()
