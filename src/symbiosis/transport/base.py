"""The contract of links: how layer calls get from a tenant to the executor and back.

A `Port` is the executor's end: it is drained by the executor's one loop, and
answers each message exactly once. A `Link` is a tenant's end: `request` gives
the answer or raises. The same tests run over every link (tests/contract).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from symbiosis.errors import DirectRefused, SymbiosisError
from symbiosis.transport.messages import Message


@dataclass(eq=False, slots=True)
class Peer:
    """The other end of one channel, as the executor sees it."""

    port: Port
    key: bytes
    tenant: str | None
    """Who this is, as proved by its token; None where no token is asked for."""
    session: Any = None
    """The executor's own note about this peer."""
    port_state: Any = field(default=None, repr=False)
    """The port's own note about this peer, such as its shared memory."""


class Port(ABC):
    """The executor's end of a kind of link."""

    address: str
    same_host: bool = False
    """Whether its peers are on this host for certain, and of this user."""

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

    def has_channel(self, peer: Peer) -> bool:
        """Whether a peer cannot simply say HELLO again, so that it is not forgotten for being silent."""
        return False

    def needs_polling(self) -> bool:
        """Whether calls may arrive that the waitable does not tell of: `poll` for them."""
        return False

    def poll(self) -> Iterable[tuple[Peer, Message | SymbiosisError]]:
        """Calls that have arrived and that the waitable does not tell of."""
        return ()

    def reply_buffers(self, peer: Peer, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> tuple[Tensor, ...] | None:
        """Where the tensors of an answer to this peer may be computed in place; None if nowhere."""
        return None

    def open_channel(self, peer: Peer, size: int, device: torch.device) -> dict[str, Any]:
        """A way for calls that stays on the GPU, each with its answer of up to so many bytes."""
        raise DirectRefused("only tenants on the executor's host can have a channel on its GPU: connect at its shm:// address")

    @abstractmethod
    def forget(self, peer: Peer) -> None:
        """Free what this port holds for a peer."""

    def is_gone(self, peer: Peer) -> bool:
        """Whether a peer that has been silent for a while is known to be gone."""
        return False

    @abstractmethod
    def close(self) -> None: ...


def flatten_rows(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """2-D, whatever shape their rows are in."""
    return tuple([tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors])


def unflatten_rows(rows: tuple[Tensor, ...], ahead: torch.Size) -> tuple[Tensor, ...]:
    """Rows in a shape. Not views to autograd: adapters add to results in place."""
    return tuple([torch.ops.aten._unsafe_view(each, (*ahead, each.shape[-1])) for each in rows])


class Link(ABC):
    """A tenant's end. Safe to use from several threads; each request is answered or raises."""

    @abstractmethod
    def request(self, message: Message) -> Message:
        """Send and wait. Raises the error the executor answered with, or `ExecutorLost`."""

    def call(self, message: Message, widths: list[int]) -> tuple[Tensor, ...]:
        """The tensors that answer a CALL, as many and as wide as `widths` says.

        Its tensors have a row wherever their first has one, in whatever shape; so have the answers. The message is used up.
        """
        ahead = message.tensors[0].shape[:-1]
        message.tensors = flatten_rows(message.tensors)
        return unflatten_rows(self.request(message).tensors, ahead)

    def use_gpu(self, device: torch.device, theirs: torch.device) -> None:
        """The tenant is on a GPU and sees the executor's, perhaps the same: keep calls there, if this link can."""
        return

    @abstractmethod
    def close(self) -> None: ...

    def model_class(self) -> Any:
        """The model's class itself where both ends are one process, else None."""
        return None

    def client_tensors(self) -> Any:
        """The client part's tensors where both ends are one process, else None."""
        return None

    def base_tensors(self) -> Any:
        """The base layers' weights by (handle, name) where both ends are one process, else None."""
        return None
