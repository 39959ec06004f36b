"""The queue of validated calls, and the batches in which they run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from symbiosis.common.cost_model import CostModel
from symbiosis.device_sharing.cpu_time_share import CpuTimeShare
from symbiosis.errors import SymbiosisError, TooManyCalls
from symbiosis.split.executor.batch import BatchCall, Call, SlicedBatch, run_batch
from symbiosis.split.executor.call_validation import CallValidator
from symbiosis.split.executor.layers import BaseLayer, Rows
from symbiosis.split.executor.policies import Decision, Policy
from symbiosis.split.executor.sessions import BatchKey, PendingCall, Session, SessionTable
from symbiosis.split.executor.statistics import Statistics
from symbiosis.split.executor.streams import StreamSelector
from symbiosis.transport.base import Peer
from symbiosis.transport.messages import Kind, Message
from symbiosis.types import Direction, Limits

_MAX_QUEUED_CALLS = 8  # of the largest size; more calls wait in the links
_MAX_ERROR_CHARS = 1000
_log = logging.getLogger("symbiosis")


class Batcher:
    """Runs queued calls in the batches that the policy chooses, and replies to each exactly once. Used by one thread."""

    def __init__(
        self,
        layers: Sequence[BaseLayer],
        policy: Policy,
        limits: Limits,
        sessions: SessionTable,
        device_share: CpuTimeShare,
        clock: Callable[[], float],
    ) -> None:
        self.policy, self._sessions, self._device_share, self._clock = policy, sessions, device_share, clock
        self._max_queued_bytes = _MAX_QUEUED_CALLS * limits.max_bytes
        self.costs, self.statistics = CostModel(), Statistics(layers, clock)
        self.validator = CallValidator(layers, limits, self.costs)
        is_on_one_gpu = len({layer.device for layer in layers}) == 1 and layers[0].device.type == "cuda"
        is_on_one_gpu = is_on_one_gpu and all(layer.is_local for layer in layers)
        self.streams = StreamSelector(layers[0].device) if is_on_one_gpu else None
        self._switch_s = 0.0 if self.streams is None else self.streams.context_switch_s
        self.queue: dict[int, Call] = {}
        self.queued_bytes = 0
        self.last_batch = clock()  # its end
        self._last_number = 0
        self._sliced: SlicedBatch | None = None  # of training; its calls stay in the queue until its end
        self._slice_is_next = False
        # The hosted engine on the same GPU, as a policy sees it: a session that decodes and never calls.
        never, entry = float("-inf"), BatchKey((0,), Direction.FORWARD)
        self._engine_session = Session(0, "", None, never, key=entry, replied=never)  # type: ignore[arg-type]

    def enqueue(self, session: Session, message: Message) -> None:
        """Queue a CALL. Raises `SymbiosisError` if it is not valid, or if another call of the session is queued."""
        if session.is_busy:
            if session.request == message.request:
                return  # sent again while queued: one reply
            raise TooManyCalls("the last call of this channel has no reply yet: send one call at a time")
        work: BatchCall | None = message.receiver_state
        if work is None:
            work = self.validator.validate(session.peer, message)
        self._last_number = number = self._last_number + 1
        is_async = work.places is not None and self.streams is not None
        rows = work.rows[0].shape[0]
        pending = PendingCall(number, session.number, work.key, rows, message.training, session.last_seen, is_async)
        self.queue[number] = Call(pending, session, message.request, work)
        self.queued_bytes += work.bytes
        session.is_busy, session.request = True, message.request

    def is_full(self) -> bool:
        """Whether batches must run before the queue takes more bytes."""
        # A sliced batch runs for long: its bytes do not block other calls.
        sliced = 0 if self._sliced is None else sum(call.work.bytes for call in self._sliced.calls)
        return self.queued_bytes - sliced >= self._max_queued_bytes

    def close_session(self, session: Session) -> None:
        """Drop a session and its queued call."""
        for number in [n for n, call in self.queue.items() if call.session is session]:
            self._dequeue(number)
        self._sessions.remove(session)

    def step(self) -> float | None:
        """Run the next batch or slice if one is due. Returns 0.0 if one ran, else the seconds until one may be due.

        None: not before a message arrives or a time slice is available.
        """
        if self._sliced is not None and any(call.pending.number not in self.queue for call in self._sliced.calls):
            self._sliced = None  # a session was closed: the other calls start again
            self._device_share.cancel_slice()
        if not self.queue:
            return None
        if self._sliced is not None and self._slice_is_next and self._run_slice(self._sliced):
            self._slice_is_next = False
            return 0.0
        waiting = [call.pending for call in self.queue.values() if self._sliced is None or not call.is_training]
        now = self._clock()
        try:
            decision = self.policy.decide(waiting, self._visible_sessions(), self.costs, now) if waiting else Decision()
            calls = [self.queue[pending.number] for pending in decision.batch]
        except Exception as error:  # noqa: BLE001 - a faulty policy must not leave calls without a reply
            _log.exception("the policy failed")
            failure = SymbiosisError(f"the executor's policy failed: {type(error).__name__}")
            for number in list(self.queue):
                self._reply(self._dequeue(number), failure)
            return 0.0
        if calls and self.streams is None and self._device_share.is_contended():
            training = [call for call in calls if call.is_training]
            calls = [call for call in calls if not call.is_training]
            if training:
                self._sliced = SlicedBatch(training, self._clock())
        if calls:
            self._run(calls)
            self._slice_is_next = True  # alternate: neither starves
            return 0.0
        if self._sliced is not None and self._run_slice(self._sliced):
            return 0.0
        return None if decision.next_decision_at is None else max(1e-5, decision.next_decision_at - now)

    def _visible_sessions(self) -> Mapping[int, Session]:
        """The sessions for which a policy may hold calls back."""
        sessions: Mapping[int, Session] = self._sessions.open
        # On a CPU the engine and training share time slices instead.
        if self.streams is not None and (busy_until := self._device_share.busy_until()) is not None:
            self._engine_session.replied = busy_until
            sessions = {0: self._engine_session, **sessions}
        if self._sliced is not None:
            sliced = {call.pending.session for call in self._sliced.calls}
            sessions = {number: session for number, session in sessions.items() if number not in sliced}
        return sessions

    def _run(self, calls: list[Call]) -> None:
        started = self._clock()
        if self.streams is None:
            results = run_batch(calls)
            seconds = self._clock() - started
            self.costs.observe(calls[0].work.key.shape, sum(call.pending.rows for call in calls), seconds)
            self._finish(calls, results, started, seconds)
        else:
            results = self.streams.run(calls, self.costs)
            self._finish(calls, results, started, self._clock() - started)
            self.streams.leave()

    def _run_slice(self, batch: SlicedBatch) -> bool:
        """Run one more slice, if the device share allows one now."""
        max_s = self._device_share.begin_slice()
        if max_s is None:
            return False
        shape, started = batch.calls[0].work.key.shape, self._clock()
        try:
            rows = batch.run_slice(self.costs.rows_within(shape, max_s))
        finally:
            self._device_share.end_slice()
        seconds = self._clock() - started
        self.costs.observe(shape, rows, seconds)
        batch.seconds += seconds
        if batch.is_done():
            self._sliced = None
            self._finish(batch.calls, batch.results(), batch.started, batch.seconds)
        return True

    def _finish(self, calls: Sequence[Call], results: list[Rows | SymbiosisError], started: float, seconds: float) -> None:
        """A batch has run (or was launched) in this time: record it, and reply to its calls."""
        for call in calls:
            self._dequeue(call.pending.number)
        key, ended = calls[0].pending.key, self._clock()
        rows = sum(call.pending.rows for call in calls)
        is_entry = self.statistics.is_entry(key.layers, key.direction)
        self.statistics.record_batch(len(calls), rows, seconds, is_entry=is_entry)
        self.last_batch = ended
        # On a GPU `seconds` is the time of the launch.
        batch_s = seconds if self.streams is None else max(seconds, self.costs.estimate(key.shape, rows))
        for call in calls:
            cost_s = self.costs.estimate(key.shape, call.pending.rows) + self._switch_s
            call.session.record(call.pending, is_entry=is_entry, started=started, ended=ended, batch_s=batch_s, cost_s=cost_s)
        for call, result in zip(calls, results, strict=True):
            self._reply(call, result)

    def _dequeue(self, number: int) -> Call:
        call = self.queue.pop(number)
        self.queued_bytes -= call.work.bytes
        return call

    def _reply(self, call: Call, result: Rows | SymbiosisError) -> None:
        """Reply to a call that has left the queue."""
        call.session.is_busy = False
        peer = call.session.peer
        if isinstance(result, SymbiosisError):
            send_error(peer, call.request, result)
            return
        try:
            if not peer.port.reply(peer, Message(Kind.REPLY, call.request, tensors=result)):
                self.close_session(call.session)
        except Exception as error:  # noqa: BLE001 - the other calls of the batch get their replies
            _log.exception("a reply to %s failed", call.session.tenant)
            if self.streams is not None:
                self.streams.check()  # raises if the GPU's context is broken: the loop ends and closes all links
            send_error(peer, call.request, SymbiosisError(f"the executor failed: {type(error).__name__}"))


def send_error(peer: Peer, request: int, error: SymbiosisError) -> None:
    """Reply to a request with an error."""
    if peer.session is not None:
        peer.session.totals.errors += 1
    body = {"code": error.code, "message": str(error)[:_MAX_ERROR_CHARS]}
    try:
        peer.port.reply(peer, Message(Kind.ERROR, request, body=body))
    except Exception:  # noqa: BLE001 - this peer cannot be reached
        _log.exception("an error could not be sent")
