"""The calls of one session in the order of their numbers, each run once. The trainer holds the lock.

A client that got no reply submits the call again with the same number and gets the first call's future. A call that
arrives before its predecessors waits for them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from concurrent.futures import Future
from typing import Any, TypeGuard

from symbiosis.errors import OutOfOrder, OutOfRange, SymbiosisError, TooManyRequests, Withdrawn
from symbiosis.finetuning.calls import ForwardBackward, LoadCheckpoint, OptimStep, SampleCall, SessionCall
from symbiosis.finetuning.config import TrainerConfig

_MIN_KNOWN = 64  # finished calls that stay known for retries


class CallQueue:
    def __init__(self, config: TrainerConfig) -> None:
        self._max_calls, self._max_tokens = config.max_waiting, config.max_waiting_tokens
        self._max_tenant_tokens = config.tenant_waiting_tokens
        self.tokens = self.completions = 0
        """Of the calls that are not finished."""
        self.pending: deque[SessionCall] = deque()
        """The head runs next and stays until `finish` or `launch_sample`."""
        self.sampling: list[SampleCall] = []
        """Calls that left the queue and wait for their completions."""
        self.ended: SymbiosisError | None = None
        """Why no call is accepted; None while the session is open."""
        self._next_number = 1
        self._early: dict[int, SessionCall] = {}
        self._known: OrderedDict[int, SessionCall] = OrderedDict()
        self._result_tokens = 0  # of the known calls
        self._in_step = False  # batches were submitted whose optim_step was not
        self._stopped = False

    def submit(self, call: SessionCall, number: int | None, *, tenant_tokens: int, free_completions: int) -> Future[Any]:
        """The future of the call, or of the known call with this number; without a number, it is the next.

        `tenant_tokens` are unfinished over all sessions of the tenant. Raises `OutOfRange`, `OutOfOrder`,
        `TooManyRequests`, `Withdrawn`, or the error that ended the session.
        """
        if number is None:
            number = self._next_number
        if type(number) is not int or number < 1:
            raise OutOfRange(f"the call's number is {number!r:.80}", field="number", expected="a whole number from 1 on")
        known = self._known.get(number) or self._early.get(number)
        if known is not None:
            if known.key != call.key:
                raise OutOfOrder(f"call {number} of this session was another one; every call needs a number of its own")
            return known.future
        if self.ended is not None:
            raise copy.copy(self.ended)  # an exception that is raised repeatedly holds the frames of every caller
        if self._stopped and not self._in_step and (_is_training_batch(call) or isinstance(call, OptimStep)):
            raise _withdrawn()
        if number < self._next_number:
            raise OutOfOrder(f"call {number} is too old: the next number is {self._next_number}")
        unfinished = len(self.pending) + len(self._early) + len(self.sampling)
        if unfinished >= self._max_calls or number >= self._next_number + self._max_calls:
            raise TooManyRequests(f"{self._max_calls} calls of this session are waiting, or call {number} is too far ahead")
        divisor = 1 if number == self._next_number else 2  # early calls leave capacity for their predecessors
        limits = ((self.tokens, self._max_tokens), (tenant_tokens, self._max_tenant_tokens))
        if any(used + call.tokens > limit // divisor for used, limit in limits):
            raise TooManyRequests("too many tokens of this session, or of its tenant, are waiting already", retry_s=0.1)
        if call.completions > free_completions:
            raise TooManyRequests(f"{call.completions} completions requested, {free_completions} allowed now: try again later")
        self.tokens += call.tokens
        self.completions += call.completions
        self._early[number] = call
        while self._next_number in self._early:
            self._append(self._early.pop(self._next_number))
        while len(self._known) > _MIN_KNOWN + self._max_calls or self._result_tokens > self._max_tokens:
            self._result_tokens -= self._known.popitem(last=False)[1].result_tokens
        return call.future

    def _append(self, call: SessionCall) -> None:
        self.pending.append(call)
        if _is_training_batch(call):
            call.starts_step, self._in_step = not self._in_step, True
        elif isinstance(call, OptimStep | LoadCheckpoint):
            self._in_step = False
        self._known[self._next_number] = call
        self._result_tokens += call.result_tokens
        self._next_number += 1

    def launch_sample(self, call: SampleCall) -> bool:
        """Take the head off the queue; it stays in `sampling` until `finish`. False if the session ended first."""
        if self.ended is not None:
            return False
        assert self.pending[0] is call, "calls run in their order"
        self.pending.popleft()
        self.sampling.append(call)
        return True

    def finish(self, call: SessionCall) -> bool:
        """Remove a call that was run. False if it was removed before: the session ended."""
        if call in self.sampling:
            self.sampling.remove(call)
        elif self.pending and self.pending[0] is call:
            self.pending.popleft()
        else:
            assert self.ended is not None, "calls finish in their order"
            return False
        self._release(call)
        return True

    def stop(self) -> None:
        """Accept no further optimizer step. Calls behind the step at the head are resolved with `Withdrawn`."""
        self._stopped = True
        kept = 1  # the head may be running
        while kept < len(self.pending) and not (_is_training_batch(call := self.pending[kept]) and call.starts_step):
            kept += 1
        dropped = [self.pending.pop() for _ in range(len(self.pending) - kept)][::-1]
        if dropped:
            self._in_step = False
        for call in dropped:
            self._release(call)
            call.resolve(_withdrawn())

    def end(self, error: SymbiosisError) -> list[SessionCall]:
        """Accept no further call. Returns the calls that the caller has to resolve; those in `sampling` continue."""
        dropped = [*self.pending, *self._early.values()]
        self.ended = self.ended or copy.copy(error)
        self.pending.clear()
        self._early.clear()
        for call in dropped:
            self._release(call)
        return dropped

    def clear_known(self) -> None:
        """Drop the results stored for retries."""
        self._known.clear()
        self._result_tokens = 0

    def _release(self, call: SessionCall) -> None:
        self.tokens -= call.tokens
        self.completions -= call.completions
        call.release()


def _withdrawn() -> Withdrawn:
    return Withdrawn("this training session was stopped before this step began")


def _is_training_batch(call: SessionCall) -> TypeGuard[ForwardBackward]:
    return isinstance(call, ForwardBackward) and call.learns
