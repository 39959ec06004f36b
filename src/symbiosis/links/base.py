"""The contract of links: how layer calls get from a tenant to the executor and back.

A `Port` is the executor's end: it is drained by the executor's one loop, and
answers each message exactly once. A `Link` is a tenant's end: `request` gives
the answer or raises. The same tests run over every link (tests/contract).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from symbiosis.errors import SymbiosisError
from symbiosis.messages import Message


@dataclass(eq=False, slots=True)
class Peer:
    """The other end of one channel, as the executor sees it."""

    port: Port
    key: bytes
    tenant: str | None
    """Who this is, as proved by its token; None where no token is asked for."""
    state: Any = None
    """The executor's own note about this peer."""
    link_state: Any = field(default=None, repr=False)
    """The port's own note about this peer, such as its shared memory."""


class Port(ABC):
    """The executor's end of a kind of link."""

    address: str

    @abstractmethod
    def waitable(self) -> Any:
        """What a poller waits on: a ZeroMQ socket or a file descriptor."""

    @abstractmethod
    def drain(self, limit: int) -> Iterable[tuple[Peer, Message | SymbiosisError]]:
        """Messages that have arrived, at most `limit`; broken ones come as the error to answer with."""

    @abstractmethod
    def reply(self, peer: Peer, message: Message) -> bool:
        """Send an answer. False if the peer is gone or does not read: forget it.

        Its rows may be views of a batch that others share: the peer gets a copy.
        """

    @abstractmethod
    def forget(self, peer: Peer) -> None:
        """Free what this port holds for a peer."""

    def is_gone(self, peer: Peer) -> bool:
        """Whether a peer that has been silent for a while is known to be gone."""
        return False

    @abstractmethod
    def close(self) -> None: ...


class Link(ABC):
    """A tenant's end. Safe to use from several threads; each request is answered or raises."""

    @abstractmethod
    def request(self, message: Message) -> Message:
        """Send and wait. Raises the error the executor answered with, or `ExecutorLost`."""

    @abstractmethod
    def close(self) -> None: ...

    def model_class(self) -> Any:
        """The model's class itself where both ends are one process, else None."""
        return None

    def client_tensors(self) -> Any:
        """The client part's tensors where both ends are one process, else None."""
        return None
