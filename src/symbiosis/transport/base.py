"""The contract of links: how layer calls reach the executor and how replies return.

A `Port` is the executor's end. The executor's one loop drains it and sends exactly one reply to each message. A `Link` is a
tenant's end: `request` returns the reply or raises. The same tests run over every link (tests/transport/contract).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from symbiosis.errors import DirectRefused, SymbiosisError
from symbiosis.transport.messages import Message

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(eq=False, slots=True)
class Peer:
    """The other end of one channel, as the executor sees it."""

    port: Port
    routing_id: bytes
    tenant: str | None
    """Authenticated by the auth token; None where the port requires none."""
    session: Any = None
    """Owned by the executor: the session of this peer, None before HELLO."""
    port_state: Any = field(default=None, repr=False)
    """Owned by the port, such as the peer's shared memory."""


class Port(ABC):
    """The executor's end of one kind of link."""

    address: str
    same_host: bool = False
    """True if all peers are processes of this user on this host."""

    @abstractmethod
    def waitable(self) -> Any:
        """What a poller waits on: a ZeroMQ socket or a file descriptor."""

    @abstractmethod
    def drain(self, limit: int) -> Iterable[tuple[Peer, Message | SymbiosisError]]:
        """At most `limit` received messages. A broken message yields the error to reply with."""

    @abstractmethod
    def reply(self, peer: Peer, message: Message) -> bool:
        """Send a reply. False if the peer is gone or does not read: forget it.

        The tensors may be views of a batch that several peers share, so the peer gets copies.
        """

    def has_channel(self, peer: Peer) -> bool:
        """Whether the peer holds a GPU channel. A second HELLO cannot restore it, so silence does not end the session."""
        return False

    def needs_polling(self) -> bool:
        """Whether calls may arrive that the waitable does not signal: `poll` for them."""
        return False

    def poll(self) -> Iterable[tuple[Peer, Message | SymbiosisError]]:
        """Received calls that the waitable does not signal."""
        return ()

    def reply_buffers(self, peer: Peer, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> tuple[Tensor, ...] | None:
        """Buffers in which a reply to this peer can be computed in place, or None."""
        return None

    def open_channel(self, peer: Peer, size: int, device: torch.device) -> dict[str, Any]:
        """Open a GPU channel of at least `size` bytes for a call and its reply. Returns how the tenant opens it."""
        raise DirectRefused("only tenants on the executor's host can have a channel on its GPU: connect at its shm:// address")

    @abstractmethod
    def forget(self, peer: Peer) -> None:
        """Free what this port holds for a peer."""

    def is_gone(self, peer: Peer) -> bool:
        """Whether a silent peer is known to be gone."""
        return False

    @abstractmethod
    def close(self) -> None: ...


def flatten_rows(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Each tensor as a matrix of rows."""
    return tuple([tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors])


def unflatten_rows(rows: tuple[Tensor, ...], leading: torch.Size) -> tuple[Tensor, ...]:
    """Matrices of rows with the leading dimensions restored. Not views to autograd: adapters add to results in place."""
    import torch  # on first use: see `messages`

    return tuple([torch.ops.aten._unsafe_view(each, (*leading, each.shape[-1])) for each in rows])


@dataclass(slots=True)
class Traffic:
    """What a link has carried since it was opened."""

    round_trips: int = 0
    """Waits for replies. Calls that are in flight together are one."""
    messages: int = 0
    """Messages with a reply."""
    sent_bytes: int = 0
    received_bytes: int = 0

    def add(self, *, round_trips: int = 0, messages: int = 0, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        self.round_trips += round_trips
        self.messages += messages
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes


class Link(ABC):
    """A tenant's end. Thread-safe; each request returns its reply or raises."""

    max_in_flight: int = 1
    """Calls that this link carries at the same time for one thread."""

    def traffic(self) -> Traffic:
        """Zero where nothing is encoded, as within a process."""
        return Traffic()

    @abstractmethod
    def request(self, message: Message) -> Message:
        """Send and wait. Raises the executor's error reply, or `ExecutorLost`."""

    def call(self, message: Message, widths: list[int]) -> tuple[Tensor, ...]:
        """The reply tensors of a CALL, one of each width in `widths`. The message is consumed.

        All tensors of the message share the leading dimensions of the first; the replies get them too.
        """
        leading = message.tensors[0].shape[:-1]
        message.tensors = flatten_rows(message.tensors)
        return unflatten_rows(self.request(message).tensors, leading)

    def call_all(self, messages: Sequence[Message], widths: list[int]) -> list[tuple[Tensor, ...]]:
        """The reply tensors of independent calls, in order. Up to `max_in_flight` of them are on their way together.

        Plain reference: one `call` after the other, as here.
        """
        return [self.call(message, widths) for message in messages]

    def use_gpu(self, device: torch.device, executor_device: torch.device) -> None:
        """Keep calls from `device` on the GPU, if this link can. `executor_device` is the executor's GPU, perhaps the same."""
        return

    @abstractmethod
    def close(self) -> None: ...

    def model_class(self) -> Any:
        """The model's class if both ends share a process, else None."""
        return None

    def client_tensors(self) -> Any:
        """The client part's tensors if both ends share a process, else None."""
        return None

    def base_tensors(self) -> Any:
        """The base layers' weights by (handle, name) if both ends share a process, else None."""
        return None
