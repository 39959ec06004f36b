"""Dispatches messages: calls go to the batcher, everything else gets its reply at once."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from symbiosis.device_sharing.cpu_time_share import CpuTimeShare
from symbiosis.errors import BadCall, DirectRefused, HelloFirst, SymbiosisError, TooManyCalls, UnknownLayer, WeightsWithheld
from symbiosis.gpu import driver
from symbiosis.models import blob_store
from symbiosis.split.executor.batcher import Batcher, send_error
from symbiosis.split.executor.calibration import calibrate
from symbiosis.split.executor.layers import BaseLayer
from symbiosis.split.executor.memory_export import export_tensors
from symbiosis.split.executor.policies import Policy
from symbiosis.split.executor.sessions import Session, SessionTable
from symbiosis.transport.base import Peer
from symbiosis.transport.messages import DTYPE_NAMES, PROTOCOL, Kind, Message
from symbiosis.types import Limits, Manifest

_PROVIDER = "provider"  # the tenant that sees the statistics of all
_FORGET_AFTER_S = 120.0
_LOOK_AFTER_S = 10.0
_CHUNK_BYTES = 4 << 20  # of one reply: bounds the memory of a tenant that sends requests and reads no replies
_MAX_COLLECTING = 1024
_NAME = re.compile(r"[\w.@:-]{1,64}")
_log = logging.getLogger("symbiosis")


class Service:
    """Handles all messages of the executor. Used by one thread, the loop's; `stats` is callable from any."""

    def __init__(
        self,
        *,
        model: str,
        name: str,
        layers: Sequence[BaseLayer],
        manifest: Callable[[], Manifest],
        policy: Policy,
        limits: Limits,
        client_tensors: Mapping[str, torch.Tensor] | None = None,
        device_share: CpuTimeShare | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._name, self._limits, self._layers = model, name, limits, layers
        self._manifest, self._client_tensors, self._clock = manifest, client_tensors or {}, clock
        self.device_share = device_share or CpuTimeShare()
        self._sessions = SessionTable(limits.max_sessions)
        self.batcher = Batcher(layers, policy, limits, self._sessions, self.device_share, clock)
        self.collect: Callable[[Callable[[dict[str, Any] | SymbiosisError], None]], None] | None = None
        """Passes the statistics of the whole process, which include those of `stats`, to its argument, on any thread."""
        self.on_collected: Callable[[], None] = lambda: None
        """Called on any thread when `send_collected` has something to do."""
        self._collecting = 0
        self._collected: deque[tuple[Peer, int, dict[str, Any] | SymbiosisError]] = deque()
        self._gpu = layers[0].device if self.batcher.streams is not None else None
        self._handlers: dict[Kind, Callable[[Session, Message], Message]] = {
            Kind.PING: self._ping,
            Kind.MANIFEST: lambda session, message: Message(Kind.REPLY, body=self._manifest().to_json()),
            Kind.BLOB: self._read_blob,
            Kind.FETCH: self._fetch_weight,
            Kind.MAP: self._map_memory,
            Kind.CHANNEL: self._open_channel,
            Kind.STATS: lambda session, message: Message(Kind.REPLY, body=self._visible(self.stats(), session.peer.tenant)),
            Kind.BYE: lambda session, message: Message(Kind.BYE),
        }

    def calibrate(self) -> None:
        """Time every shape of layer, so that the policy has estimates from the first call on."""
        calibrate(self._layers, self.batcher.validator, self.batcher.costs)

    def handle(self, peer: Peer, message: Message | SymbiosisError) -> None:
        """Take one message. Each gets exactly one reply, now or when its batch has run."""
        if isinstance(message, SymbiosisError):
            send_error(peer, 0, message)
            return
        try:
            if message.kind is Kind.CALL:
                self.batcher.enqueue(self._session_of(peer), message)
            elif message.kind is Kind.STATS and self.collect is not None:
                self._session_of(peer)
                self._start_collecting(peer, message.request)
            else:
                self._reply(peer, message)
        except SymbiosisError as error:
            send_error(peer, message.request, error)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            send_error(peer, message.request, BadCall(f"malformed {message.kind.name} message: {error!r}"))
        except Exception as error:  # noqa: BLE001 - only this message fails
            _log.exception("a %s from %s failed", message.kind.name, peer.tenant)
            send_error(peer, message.request, SymbiosisError(f"the executor failed: {type(error).__name__}"))

    def _session_of(self, peer: Peer) -> Session:
        if peer.session is None:
            raise HelloFirst("the executor has no session for this channel (was it restarted?): send HELLO first")
        session: Session = peer.session
        session.last_seen = self._clock()
        return session

    def _reply(self, peer: Peer, message: Message) -> None:
        if message.kind is Kind.HELLO:
            reply = self._welcome(peer, message)
        else:
            session = self._session_of(peer)
            if message.kind not in self._handlers:
                raise BadCall(f"a tenant does not send {message.kind.name}")
            reply = self._handlers[message.kind](session, message)
        reply.request = message.request
        self._send(peer, reply, is_last=message.kind is Kind.BYE)

    def _send(self, peer: Peer, reply: Message, *, is_last: bool = False) -> None:
        was_sent = peer.port.reply(peer, reply)
        if (not was_sent or is_last) and peer.session is not None:
            self.batcher.close_session(peer.session)

    def _welcome(self, peer: Peer, message: Message) -> Message:
        if peer.session is None:
            name = str(message.body.get("name") or "")
            tenant = peer.tenant or (name if _NAME.fullmatch(name) else "tenant")
            self._admit(tenant, is_authenticated=peer.tenant is not None)
            self._sessions.add(peer, tenant, self._clock())
        body = {
            "model": self._model,
            "tenant": peer.session.tenant,
            "protocol": PROTOCOL,
            "dtypes": DTYPE_NAMES,
            "limits": self._limits.to_json(),
            "policy": self.batcher.policy.name,
            "gpu": driver.gpu_name(self._gpu) if self._gpu is not None and peer.port.same_host else None,
        }
        return Message(Kind.WELCOME, body=body)

    def _admit(self, tenant: str, *, is_authenticated: bool) -> None:
        """Evict an idle session if there is no capacity for one more. Raises `TooManyCalls` if none can be evicted."""
        sessions = self._sessions.open.values()
        own = is_authenticated and sum(s.tenant == tenant for s in sessions) >= self._limits.max_tenant_sessions
        if not own and len(sessions) < self._limits.max_sessions:
            return
        evicted = self._sessions.find_evictable(tenant, own=own)
        if evicted is None:
            quota = self._limits.max_tenant_sessions if own else self._limits.max_sessions
            raise TooManyCalls(f"session quota exceeded: {quota} open{' of this tenant' * own}, all busy: try again later")
        self.batcher.close_session(evicted)

    def tidy(self) -> None:
        """Close sessions of lost peers, and those that were silent for long. A live client reconnects with HELLO."""
        now = self._clock()
        for session in self._sessions.find_idle(now - _LOOK_AFTER_S):
            port, is_old = session.peer.port, session.last_seen < now - _FORGET_AFTER_S
            if port.is_gone(session.peer) or (is_old and not port.has_channel(session.peer)):
                self.batcher.close_session(session)

    def _ping(self, session: Session, message: Message) -> Message:
        return Message(Kind.PING, body={"known": session.is_busy and session.request == message.request})

    def _map_memory(self, session: Session, message: Message) -> Message:
        if not self._limits.direct:
            raise DirectRefused("the provider does not allow tenants to map its memory (--no-direct, --no-weights)")
        if not session.peer.port.same_host or self._gpu is None:
            raise DirectRefused("only tenants on the executor's host and GPU can map its memory: connect at its shm:// address")
        return Message(Kind.REPLY, body=export_tensors(self._layers, self._client_tensors))

    def _open_channel(self, session: Session, message: Message) -> Message:
        if self._gpu is None:
            raise DirectRefused("the executor's layers are not on one GPU: there is no channel to them")
        peer = session.peer
        return Message(Kind.REPLY, body=peer.port.open_channel(peer, int(message.body["bytes"]), self._gpu))

    def _read_blob(self, session: Session, message: Message) -> Message:
        manifest, sha256 = self._manifest(), str(message.body["sha256"])
        blob = next((ref for ref in (manifest.client_weights, manifest.tokenizer) if ref and ref.sha256 == sha256), None)
        if blob is None:
            raise BadCall("unknown blob: expected the model's client part or its tokenizer")
        offset = int(message.body["offset"])
        with blob_store.blob_path(blob).open("rb") as file:
            file.seek(min(max(0, offset), blob.size))
            chunk = file.read(min(_CHUNK_BYTES, self._limits.max_bytes))
        tensor = torch.frombuffer(bytearray(chunk), dtype=torch.uint8) if chunk else torch.empty(0, dtype=torch.uint8)
        return Message(Kind.REPLY, tensors=(tensor[None, :],), body={"bytes": len(chunk)})

    def _fetch_weight(self, session: Session, message: Message) -> Message:
        if not message.layers:
            raise UnknownLayer("a FETCH names one layer, got none")
        layer = self.batcher.validator.layer(message.layers[0])
        if message.body.get("what") == "row_squares":
            return Message(Kind.REPLY, tensors=(layer.row_squares(),))
        if not self._limits.weights:
            raise WeightsWithheld(
                f"this needs the weight of {layer.spec.paths[0]}, and the provider withholds weights (--no-weights): "
                "use a method that only calls layers, such as LoRA, DoRA, IA3 or prefix tuning"
            )
        weight = layer.weight(str(message.body.get("name")))
        if weight is None:
            raise BadCall(f"{layer.spec.paths[0]} has no weight {message.body.get('name')!r}")
        flat = weight.reshape(-1, weight.shape[-1])
        start = int(message.body["start"])
        count = max(1, min(_CHUNK_BYTES, self._limits.max_bytes) // (flat.shape[1] * flat.element_size()))
        if not 0 <= start < flat.shape[0]:
            raise BadCall(f"start={start}: the weight has rows 0 to {flat.shape[0] - 1}")
        return Message(Kind.REPLY, tensors=(flat[start : start + count].clone(),))

    def _start_collecting(self, peer: Peer, request: int) -> None:
        """The reply follows in `send_collected`: layer calls do not wait for other parts of the process."""
        assert self.collect is not None
        if self._collecting >= _MAX_COLLECTING:
            raise TooManyCalls(f"{self._collecting} requests for statistics are pending: try again later")
        self._collecting += 1

        def deliver(result: dict[str, Any] | SymbiosisError) -> None:
            self._collected.append((peer, request, result))
            self.on_collected()

        self.collect(deliver)

    def send_collected(self) -> None:
        """Reply with statistics that have been collected."""
        while self._collected:
            peer, request, result = self._collected.popleft()
            self._collecting -= 1
            if isinstance(result, SymbiosisError):
                send_error(peer, request, result)
                continue
            try:
                self._send(peer, Message(Kind.REPLY, request, body=self._visible(result, peer.tenant)))
            except Exception:  # noqa: BLE001 - only this peer gets no reply
                _log.exception("statistics could not be sent to %s", peer.tenant)

    def _visible(self, stats: dict[str, Any], tenant: str | None) -> dict[str, Any]:
        """With auth tokens, a tenant sees the executor's totals and its own row. The tenant `provider` sees all.

        Without them, what needs a key over HTTP stays hidden here.
        """
        if tenant is None:
            return self.stats() if (stats.get("http") or {}).get("has_keys") else stats
        if tenant == _PROVIDER:
            return stats
        return {**self.stats(), "tenants": {name: row for name, row in stats["tenants"].items() if name == tenant}}

    def stats(self) -> dict[str, Any]:
        """Of the executor alone."""
        return {
            "model": self._name,
            "policy": self.batcher.policy.name,
            **self.batcher.statistics.to_json(),
            "queued": len(self.batcher.queue),
            "sessions": len(self._sessions.open),
            "graphs": self.batcher.streams.graphs if self.batcher.streams is not None else 0,
            "tenants": self._sessions.to_json(self._clock()),
        }
