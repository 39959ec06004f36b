"""What the executor does with each message: check first, then queue, answer exactly once.

Everything about a call is checked here, before its rows meet anybody else's.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import torch

from symbiosis.common.cost_model import CostModel
from symbiosis.device_sharing.cpu_turns import CpuTimeShare
from symbiosis.errors import (
    BadCall,
    DirectRefused,
    HelloFirst,
    SymbiosisError,
    TooLarge,
    TooManyCalls,
    UnknownLayer,
    WeightsWithheld,
)
from symbiosis.gpu import driver
from symbiosis.models import blob_store
from symbiosis.split.executor.batch import BatchCall, Call, SlicedBatch, run_batch
from symbiosis.split.executor.calibration import time_layer
from symbiosis.split.executor.layer_program import LayerProgram, LayerProgramBackward, is_turn
from symbiosis.split.executor.layers import BaseLayer, Rows, answer_widths, check_together
from symbiosis.split.executor.memory_export import describe
from symbiosis.split.executor.policies import BatchKey, Decision, PendingCall, Policy, SessionView
from symbiosis.split.executor.sessions import Session, Sessions
from symbiosis.split.executor.streams import StreamSelector
from symbiosis.transport.base import Peer
from symbiosis.transport.messages import PROTOCOL, Kind, Message, tensor_bytes
from symbiosis.types import WITH_BIAS, BlobRef, Direction, LayerKind, LayerSpec, Limits, Manifest

PROVIDER = "provider"
_FORGET_AFTER_S = 120.0
_LOOK_AFTER_S = 10.0
_OWN_WORK_S = 0.01  # a tenant that is away for longer is not at work on this machine
_QUEUE_CALLS = 8  # longest calls that may wait in memory; more stay in the links
_CHUNK = 4 << 20  # of what is handed out piece by piece: who asks in few bytes and does not read fills no memory
_NAME = re.compile(r"[\w.@:-]{1,64}")
_MAX_ERROR = 1000
_log = logging.getLogger("symbiosis")


class Service:
    """The executor's one desk. Used by one thread, the loop's; `stats` may be read by any."""

    def __init__(
        self,
        *,
        model: str,
        name: str,
        layers: list[BaseLayer],
        manifest: Callable[[], Manifest],
        policy: Policy,
        limits: Limits,
        client_tensors: Mapping[str, torch.Tensor] | None = None,
        turns: CpuTimeShare | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.name, self.policy, self.limits = model, name, policy, limits
        self._layers = layers
        self._manifest = manifest
        self._client_tensors = client_tensors or {}
        self.turns = turns or CpuTimeShare()
        self._clock = clock
        self._costs = CostModel()
        devices = {layer.device for layer in layers}
        on_gpu = len(devices) == 1 and layers[0].device.type == "cuda"
        self._lanes = StreamSelector(layers[0].device) if on_gpu else None
        self._change_s = 0.0 if self._lanes is None else self._lanes.context_switch_s
        self._sessions = Sessions(limits.max_sessions)
        self._queue: dict[int, Call] = {}
        self._cut: SlicedBatch | None = None
        """The training batch that is computed piece by piece, if one is. Its calls stay in the queue until its end."""
        self._is_cuts_turn = False
        self._queued_bytes = 0
        self._numbers = 0
        self._batches = self._calls = self._rows = self._tokens = 0
        self._busy_s = 0.0
        never = float("-inf")
        entry = BatchKey((0,), Direction.FORWARD)
        self._guest = Session(0, "", None, never, key=entry, answered=never)  # type: ignore[arg-type]
        """The hosted engine on the same GPU, as a policy sees it: it decodes, and is not expected to call."""
        self.last_batch = clock()
        """When the last batch ended."""
        self._started = clock()
        self._key = lru_cache(maxsize=4096)(self._new_key)
        self._way = lru_cache(maxsize=4096)(lambda program: LayerProgram(program, self._layer))
        self._way_home = lru_cache(maxsize=4096)(lambda program: LayerProgramBackward(self._way(program)))
        self._enters = lru_cache(maxsize=4096)(self._is_entry)
        self._entry = {
            0,
            *(layer.spec.handle for layer in layers if layers[0].spec.paths[0].startswith(f"{layer.spec.paths[0]}.")),
        }

    # -- messages ---------------------------------------------------------------------------

    def handle(self, peer: Peer, message: Message | SymbiosisError) -> None:
        """Take one message; every one ends in exactly one answer, now or when its batch has run."""
        if isinstance(message, SymbiosisError):
            self._refuse(peer, 0, message)
            return
        try:
            if message.kind is Kind.CALL:
                self._enqueue(self._session(peer), message)
            else:
                self._answer(peer, message, self._other(peer, message))
        except SymbiosisError as error:
            self._refuse(peer, message.request, error)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            self._refuse(peer, message.request, BadCall(f"a {message.kind.name} that does not make sense: {error!r}"))
        except Exception as error:  # noqa: BLE001 - the desk stays open: only this message fails
            _log.exception("a %s from %s failed", message.kind.name, peer.tenant)
            self._refuse(peer, message.request, SymbiosisError(f"the executor failed: {type(error).__name__}"))

    def _session(self, peer: Peer) -> Session:
        if peer.state is None:
            raise HelloFirst("the executor does not know this channel (was it restarted?): say HELLO first")
        session: Session = peer.state
        session.last_seen = self._clock()
        return session

    def _other(self, peer: Peer, message: Message) -> Message:
        if message.kind is Kind.HELLO:
            return self._welcome(peer, message)
        session = self._session(peer)
        if message.kind is Kind.PING:
            return Message(Kind.PING, body={"known": session.busy and session.request == message.request})
        if message.kind is Kind.MANIFEST:
            return Message(Kind.REPLY, body=self._manifest().to_json())
        if message.kind is Kind.BLOB:
            return self._blob(message)
        if message.kind is Kind.FETCH:
            return self._fetch(message)
        if message.kind is Kind.MAP:
            return self._map(peer)
        if message.kind is Kind.CHANNEL:
            return self._channel(peer, message)
        if message.kind is Kind.STATS:
            return Message(Kind.REPLY, body=self._stats_for(peer))
        if message.kind is Kind.BYE:
            return Message(Kind.BYE)
        raise BadCall(f"a tenant does not send {message.kind.name}")

    def _welcome(self, peer: Peer, message: Message) -> Message:
        if peer.state is None:
            given = str(message.body.get("name") or "")
            tenant = peer.tenant or (given if _NAME.fullmatch(given) else "tenant")
            self._make_room(tenant, is_known=peer.tenant is not None)
            self._sessions.add(peer, tenant, self._clock())
        session: Session = peer.state
        body = {"model": self.model, "tenant": session.tenant, "protocol": PROTOCOL, "limits": self.limits.to_json()}
        return Message(
            Kind.WELCOME, body={**body, "policy": self.policy.name, "gpu": self._gpu() if peer.port.same_host else None}
        )

    def _make_room(self, tenant: str, *, is_known: bool) -> None:
        """For one more channel of a tenant, which is known by its token or just says who it is. Raises `TooManyCalls`."""
        all_of_mine = is_known and self._sessions.count(tenant) >= self.limits.max_tenant_sessions
        if not all_of_mine and len(self._sessions.open) < self.limits.max_sessions:
            return
        silent = self._sessions.expendable(tenant, own=all_of_mine)
        if silent is None:
            most = self.limits.max_tenant_sessions if all_of_mine else self.limits.max_sessions
            raise TooManyCalls(f"{most} channels are busy, and no more may be open{' of yours' * all_of_mine}: try again later")
        self._forget(silent)

    def _gpu(self) -> str | None:
        """The one GPU all layers are on, if so."""
        return None if self._lanes is None else driver.gpu_name(self._layers[0].device)

    def _map(self, peer: Peer) -> Message:
        if not self.limits.direct:
            raise DirectRefused("the provider lets no tenant map the executor's memory (--no-direct, --no-weights)")
        if not peer.port.same_host or self._gpu() is None:
            raise DirectRefused("only tenants on the executor's host and GPU can map its memory: connect at its shm:// address")
        return Message(Kind.REPLY, body=describe(self._layers, self._client_tensors))

    def _channel(self, peer: Peer, message: Message) -> Message:
        if self._gpu() is None:
            raise DirectRefused("the executor's layers are not on one GPU: there is no channel to them")
        return Message(Kind.REPLY, body=peer.port.open_channel(peer, int(message.body["bytes"]), self._layers[0].device))

    def _blob(self, message: Message) -> Message:
        manifest = self._manifest()
        ref = BlobRef(sha256=str(message.body["sha256"]), size=0)
        known = {known.sha256: known for known in (manifest.client_weights, manifest.tokenizer) if known}
        if ref.sha256 not in known:
            raise BadCall("no such blob: only the model's client part and tokenizer are handed out")
        offset = int(message.body["offset"])
        with blob_store.blob_path(known[ref.sha256]).open("rb") as file:
            file.seek(min(max(0, offset), known[ref.sha256].size))
            chunk = file.read(min(_CHUNK, self.limits.max_bytes))
        tensor = (
            torch.frombuffer(bytearray(chunk), dtype=torch.uint8)[None, :] if chunk else torch.empty(1, 0, dtype=torch.uint8)
        )
        return Message(Kind.REPLY, tensors=(tensor,), body={"bytes": len(chunk)})

    def _fetch(self, message: Message) -> Message:
        layer = self._layer(message.layers[0]) if message.layers else self._layer(WITH_BIAS - 1)
        if message.body.get("what") == "row_squares":
            return Message(Kind.REPLY, tensors=(layer.row_squares(),))
        if not self.limits.weights:
            raise WeightsWithheld(
                f"this needs the weight of {layer.spec.paths[0]} itself, and the provider hands no weights out "
                "(--no-weights): use a method that only calls layers, such as LoRA, DoRA, IA3 or prefix tuning"
            )
        weight = layer.weights.get(str(message.body.get("name")))
        if weight is None:
            raise BadCall(f"{layer.spec.paths[0]} has no weight {message.body.get('name')!r}")
        flat = weight.reshape(-1, weight.shape[-1])
        start = int(message.body["start"])
        count = max(1, min(_CHUNK, self.limits.max_bytes) // (flat.shape[1] * flat.element_size()))
        if not 0 <= start < flat.shape[0]:
            raise BadCall(f"rows from {start} on: the weight has {flat.shape[0]}")
        return Message(Kind.REPLY, tensors=(flat[start : start + count].clone(),))

    def _layer(self, reference: int) -> BaseLayer:
        handle = reference & ~WITH_BIAS
        if not 0 <= handle < len(self._layers):
            raise UnknownLayer(f"no layer {handle}: this model has layers 0 to {len(self._layers) - 1}")
        layer = self._layers[handle]
        return layer.with_bias() if reference & WITH_BIAS else layer

    # -- calls ------------------------------------------------------------------------------

    def _enqueue(self, session: Session, message: Message) -> None:
        if session.busy:
            if session.request == message.request:
                return  # sent again while it waits: it will be answered once
            raise TooManyCalls("this channel's last call has not been answered yet: one at a time")
        work: BatchCall | None = message.note
        if work is None:
            work = self._check_work(session.peer, message)
        self._numbers += 1
        launched = work.places is not None and self._lanes is not None
        rows = work.rows[0].shape[0]
        pending = PendingCall(self._numbers, session.number, work.key, rows, message.training, session.last_seen, launched)
        self._queue[pending.number] = Call(pending, session, message.request, work)
        self._queued_bytes += work.bytes
        session.busy, session.request = True, message.request

    def _check_work(self, peer: Peer, message: Message) -> BatchCall:
        """What a call asks for, if it may; noted on the message if all of it was checked for good."""
        if message.direction is Direction.ONWARD:
            layers: tuple[BaseLayer, ...] = (self._way(message.layers),)
        elif message.direction is Direction.HOMEWARD:
            layers = (self._way_home(message.layers),)
        else:
            layers = tuple(self._layer(handle) for handle in message.layers)
        rows = self._check(layers, message)
        key = self._key(message.layers, message.direction, tuple(t.shape[1] for t in rows))
        places = None
        if all(t.dtype is layers[0].takes(i) and t.device == layers[0].device for i, t in enumerate(rows)):
            widths = answer_widths(layers, message.direction)
            places = peer.port.places(peer, [(rows[0].shape[0], width) for width in widths], layers[0].dtype)
        # rows of tenants on this host lie in their channel's own memory, whether they wait here or there
        held = 0 if peer.port.same_host else sum(tensor_bytes(t) for t in rows)
        work = BatchCall(layers, key, rows, places, held)
        if all(t.is_floating_point() for t in rows):  # whoever sends integers can change them before the next time
            message.note = work
        return work

    def _new_key(self, handles: tuple[int, ...], direction: Direction, widths: tuple[int, ...]) -> BatchKey:
        handles_alone = [handle for handle in handles if not (direction.is_way and is_turn(handle))]
        specs = [self._layer(handle).spec for handle in handles_alone]
        shape = (direction, *(x for spec in specs for x in (spec.kind, spec.in_width, spec.out_width)), *widths)
        if len(specs) > 1:  # each is as dear as alone until more is known
            self._costs.set_parts(shape, [self._alone(spec, back=direction.is_back).shape for spec in specs])
        return BatchKey(handles, direction, shape)

    def _alone(self, spec: LayerSpec, *, back: bool) -> BatchKey:
        """A call of one layer by itself; there is none of a norm's gradient."""
        direction = Direction.BACKWARD if back and spec.kind is not LayerKind.NORM else Direction.FORWARD
        widths = tuple(width or 0 for width in self._layer(spec.handle).widths(direction))
        key: BatchKey = self._key((spec.handle,), direction, widths)
        return key

    def _check(self, layers: tuple[BaseLayer, ...], message: Message) -> tuple[torch.Tensor, ...]:
        # Integers decide which memory is read: take them out of the tenant's reach before looking at them.
        rows = tuple(t if t.is_floating_point() else t.clone() for t in message.tensors)
        if not layers or not rows:
            raise BadCall("a call names at least one layer and carries rows")
        count = rows[0].shape[0]
        if any(t.shape[0] != count for t in rows):
            raise BadCall(f"all tensors of a call have the same number of rows, got {[t.shape[0] for t in rows]}")
        if not 1 <= count <= self.limits.max_rows:
            raise TooLarge(f"a call carries 1 to {self.limits.max_rows} rows, got {count}: cut it into several")
        if (chosen := max((t.numel() for t in rows if not t.is_floating_point()), default=0)) > self.limits.max_choices:
            raise TooLarge(f"{count} rows choose {chosen} times: together at most {self.limits.max_choices}, cut the call")
        if message.direction.is_way:
            if message.training and message.direction is Direction.ONWARD and not cast(LayerProgram, layers[0]).saves:
                raise BadCall("a call onward that saves nothing is for inference: it has no backward")
            steps, most = len(message.layers), self.limits.max_rows
            if count * steps > most:
                raise TooLarge(f"{count} rows for {steps} steps onward: together at most {most}, cut it into several calls")
        back = answer_widths(layers, message.direction)
        size = rows[0].element_size() if rows[0].is_floating_point() else layers[0].dtype.itemsize
        if count * sum(back) * size > self.limits.max_bytes:
            raise TooLarge(f"the answer to {count} rows is beyond the {self.limits.max_bytes} bytes of a message: cut the call")
        if len(layers) == 1:
            layers[0].check(message.direction, rows)
        else:
            check_together(layers, message.direction, rows)
        return rows

    def calibrate(self) -> None:
        """Time every kind of layer with a few and with many rows, so that the policy knows costs from the first call."""
        for layer in {(layer.spec.kind, layer.spec.in_width, layer.spec.out_width): layer for layer in self._layers}.values():
            for direction in (Direction.FORWARD, Direction.BACKWARD):
                widths = layer.widths(direction)
                if layer.spec.kind in (LayerKind.EXPERTS, LayerKind.EMBEDDING):
                    continue  # what these cost depends on the numbers in their rows
                if layer.spec.kind is LayerKind.NORM and direction is Direction.BACKWARD:
                    continue
                key = self._key((layer.spec.handle,), direction, tuple(width or 0 for width in widths))
                try:
                    for rows, seconds in time_layer(layer, direction):
                        self._costs.observe(key.shape, rows, seconds)
                except Exception:  # noqa: BLE001 - it may work with other rows, or never be called
                    _log.warning("%s could not be timed %s", layer.spec.paths[0], direction.name.lower(), exc_info=True)
        if self._lanes is not None:
            torch.cuda.empty_cache()

    def _heard(self, now: float) -> Mapping[int, SessionView]:
        busy_until = self.turns.busy_until()
        if self._lanes is None or busy_until is None:  # on cores, training takes turns with it
            return self._sessions.open
        self._guest.answered = busy_until
        return {0: self._guest, **self._sessions.open}

    def _others(self, heard: Mapping[int, SessionView]) -> Mapping[int, SessionView]:
        """Without those whose calls are computed piece by piece: nobody needs to wait for them."""
        if self._cut is None:
            return heard
        cut = {call.pending.session for call in self._cut.calls}
        return {session: last for session, last in heard.items() if session not in cut}

    def is_full(self) -> bool:
        """Whether the queue holds as many bytes as it should: run batches before taking more."""
        cut = 0 if self._cut is None else sum(call.work.bytes for call in self._cut.calls)  # others need not wait for it
        return self._queued_bytes - cut >= _QUEUE_CALLS * self.limits.max_bytes

    def step(self) -> float | None:
        """Run the next batch or piece if one is due. The seconds until the next may be; 0.0 if one ran, None if never."""
        if self._cut is not None and any(call.pending.number not in self._queue for call in self._cut.calls):
            self._cut = None  # somebody left: who is still there begins anew
            self.turns.give_up()
        if not self._queue:
            return None
        if self._cut is not None and self._is_cuts_turn and self._advance(self._cut):
            self._is_cuts_turn = False
            return 0.0
        waiting = [call.pending for call in self._queue.values() if self._cut is None or not call.trains]
        now = self._clock()
        try:
            decision = self.policy.decide(waiting, self._others(self._heard(now)), self._costs, now) if waiting else Decision()
            calls = [self._queue[pending.number] for pending in decision.batch]
        except Exception as error:  # noqa: BLE001 - a policy at fault must not leave anybody waiting for ever
            _log.exception("the policy failed")
            self._fail_all(SymbiosisError(f"the executor's policy failed: {type(error).__name__}"))
            return 0.0
        if calls and self._lanes is None and self.turns.are_taken():
            training = [call for call in calls if call.trains]
            calls = [call for call in calls if not call.trains]
            if training:
                self._cut = SlicedBatch(training, self._clock())
        if calls:
            self._run(calls)
            self._is_cuts_turn = True  # one after the other: neither waits for ever
            return 0.0
        if self._cut is not None and self._advance(self._cut):
            return 0.0
        return None if decision.ask_again_at is None else max(1e-5, decision.ask_again_at - now)

    def _run(self, calls: list[Call]) -> None:
        started = self._clock()
        results = run_batch(calls) if self._lanes is None else self._lanes.run(calls, self._costs)
        ended = self._clock()
        if self._lanes is None:
            self._costs.observe(calls[0].work.key.shape, sum(call.pending.rows for call in calls), ended - started)
        self._finish(calls, results, started, ended - started)
        if self._lanes is not None:
            self._lanes.leave()

    def _advance(self, cut: SlicedBatch) -> bool:
        """Compute one more piece, if it is training's turn."""
        seconds = self.turns.begin()
        if seconds is None:
            return False
        shape, started = cut.calls[0].work.key.shape, self._clock()
        try:
            rows = cut.advance(self._costs.rows_within(shape, seconds))
        finally:
            self.turns.end()
        took = self._clock() - started
        self._costs.observe(shape, rows, took)
        cut.seconds += took
        if cut.is_done():
            self._cut = None
            self._finish(cut.calls, cut.results(), cut.begun, cut.seconds)
        return True

    def _finish(self, calls: Sequence[Call], results: list[Rows | SymbiosisError], started: float, seconds: float) -> None:
        """A batch was computed (or launched) in so many seconds: count and answer its calls."""
        for call in calls:
            self._dequeue(call.pending.number)
        self._count(calls, started, seconds)
        for call, result in zip(calls, results, strict=True):
            self._end(call, result)

    def _dequeue(self, number: int) -> Call:
        call = self._queue.pop(number)
        self._queued_bytes -= call.work.bytes
        return call

    def _end(self, call: Call, result: Rows | SymbiosisError) -> None:
        """Answer a call that has left the queue."""
        call.session.busy = False
        peer = call.session.peer
        if isinstance(result, SymbiosisError):
            self._refuse(peer, call.request, result)
            return
        try:
            if not peer.port.reply(peer, Message(Kind.REPLY, call.request, tensors=result)):
                self._forget(call.session)
        except Exception as error:  # noqa: BLE001 - the others of the batch get their answers all the same
            _log.exception("an answer to %s failed", call.session.tenant)
            if self._lanes is not None:
                self._lanes.check()  # if that raises, the loop ends, and everybody hears of it
            self._refuse(peer, call.request, SymbiosisError(f"the executor failed: {type(error).__name__}"))

    def _fail_all(self, error: SymbiosisError) -> None:
        for number in list(self._queue):
            self._end(self._dequeue(number), error)

    def _count(self, calls: Sequence[Call], started: float, seconds: float) -> None:
        key, ended = calls[0].pending.key, self._clock()
        rows = sum(call.pending.rows for call in calls)
        cost = self._costs.estimate(key.shape, rows) if self._lanes is not None else 0.0  # that was the time to launch it
        self.last_batch = ended
        self._batches += 1
        self._calls += len(calls)
        self._rows += rows
        self._busy_s += seconds
        enters = self._enters(key)
        for call in calls:
            counts = call.session.counts
            counts.ran = max(counts.ran, started)
            counts.calls += 1
            counts.rows += call.pending.rows
            counts.training_rows += call.pending.rows if call.pending.training else 0
            counts.waited_s += started - call.pending.arrived
            if enters:
                counts.tokens += call.pending.rows
                self._tokens += call.pending.rows
            self._note(call, enters, started, max(seconds, cost), ended)

    def _note(self, call: Call, enters: bool, started: float, seconds: float, ended: float) -> None:
        """What a policy knows of this session from now on."""
        session = call.session
        if enters:
            session.enter(call.pending.arrived)
        session.calls += 1
        session.spent_s += self._costs.estimate(call.pending.key.shape, call.pending.rows) + self._change_s
        session.waited_s += started - call.pending.arrived
        away = call.pending.arrived - session.answered
        own = away if 0.0 <= away <= _OWN_WORK_S and session.peer.port.same_host else 0.0
        session.key, session.rows = call.pending.key, call.pending.rows
        session.training = call.pending.training or session.key.direction.is_back
        session.ran, session.span_s = started, own + seconds
        session.last_seen = session.answered = ended

    def _is_entry(self, key: BatchKey) -> bool:
        """Whether rows enter the model with this call."""
        return not key.direction.is_back and not self._entry.isdisjoint(ref & ~WITH_BIAS for ref in key.layers)

    def _answer(self, peer: Peer, asked: Message, reply: Message) -> None:
        reply.request = asked.request
        sent = peer.port.reply(peer, reply)
        if (not sent or asked.kind is Kind.BYE) and peer.state is not None:
            self._forget(peer.state)

    def _refuse(self, peer: Peer, request: int, error: SymbiosisError) -> None:
        if peer.state is not None:
            peer.state.counts.errors += 1
        body = {"code": error.code, "message": str(error)[:_MAX_ERROR]}
        try:
            peer.port.reply(peer, Message(Kind.ERROR, request, body=body))
        except Exception:  # noqa: BLE001 - nothing more can be said to this peer
            _log.exception("an error could not be told")

    def _forget(self, session: Session) -> None:
        for number in [n for n, call in self._queue.items() if call.session is session]:
            self._dequeue(number)
        self._sessions.remove(session)

    def tidy(self) -> None:
        """Forget channels that are gone, or silent for long; one that speaks again says HELLO again."""
        now = self._clock()
        for session in self._sessions.idle(now - _LOOK_AFTER_S):
            port, old = session.peer.port, session.last_seen < now - _FORGET_AFTER_S
            if port.is_gone(session.peer) or (old and not port.keeps(session.peer)):
                self._forget(session)

    # -- figures ----------------------------------------------------------------------------

    def bytes_held(self) -> int:
        """Bytes of all weights in memory, shared ones once. The executor holds nothing else."""
        storages: dict[int, int] = {}  # by address: joined layers share a storage
        for layer in self._layers:
            module = getattr(layer, "module", None)
            tensors = [*layer.weights.values(), *(module.parameters() if module is not None else ())]
            for tensor in tensors:
                storages[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return sum(storages.values())

    def _stats_for(self, peer: Peer) -> dict[str, Any]:
        """Where tenants have tokens, each sees the totals and itself; the one named `provider` sees all."""
        figures = self.stats()
        if peer.tenant not in (None, PROVIDER):
            figures["tenants"] = {name: row for name, row in figures["tenants"].items() if name == peer.tenant}
        return figures

    def stats(self) -> dict[str, Any]:
        sessions = list(self._sessions.open.values())
        tenants: dict[str, Any] = {name: counts.as_dict() for name, counts in list(self._sessions.counts.items())}
        for figures in tenants.values():
            figures.update(sessions=0, last_seen_s=None)
        now = self._clock()
        for session in sessions:
            figures = tenants.get(session.tenant)
            if figures is None:
                continue  # came after the figures were read
            figures["sessions"] += 1
            silent = round(now - session.last_seen, 3)
            figures["last_seen_s"] = silent if figures["last_seen_s"] is None else min(silent, figures["last_seen_s"])
        return {
            "model": self.name,
            "policy": self.policy.name,
            "uptime_s": round(now - self._started, 3),
            "busy_s": round(self._busy_s, 3),
            "calls": self._calls,
            "batches": self._batches,
            "mean_batch": round(self._calls / self._batches, 4) if self._batches else 0.0,
            "mean_rows": round(self._rows / self._batches, 2) if self._batches else 0.0,
            "rows": self._rows,
            "tokens": self._tokens,
            "queued": len(self._queue),
            "sessions": len(sessions),
            "layers": len(self._layers),
            "bytes_held": self.bytes_held(),
            "graphs": self._lanes.graphs if self._lanes is not None else 0,
            "tenants": tenants,
        }
