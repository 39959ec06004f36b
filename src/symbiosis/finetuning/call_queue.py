"""The calls of one session, in the order of their numbers, each taken once. A pure object; the host has the lock.

A client that got no answer asks again with the same number and gets the answer of the first time. Calls that
overtook others on their way wait until those are here.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from concurrent.futures import Future
from typing import Any, TypeGuard

from symbiosis.errors import OutOfOrder, OutOfRange, SymbiosisError, TooManyRequests, Withdrawn
from symbiosis.finetuning.calls import Call, ForwardBackward, LoadCheckpoint, OptimStep, SampleCall

_REMEMBERED = 64


class CallQueue:
    def __init__(self, most: int, most_tokens: int, tenant_tokens: int) -> None:
        self._most, self._most_tokens, self._tenant_tokens = most, most_tokens, tenant_tokens
        self.tokens = 0
        """Of the calls that wait, or are sampled."""
        self.answers = 0
        """That were asked for and have not come."""
        self._next = 1
        self._waiting: deque[Call] = deque()
        self._early: dict[int, Call] = {}
        self._sampled: list[SampleCall] = []
        self._known: OrderedDict[int, Call] = OrderedDict()
        self._kept = 0
        """Tokens of answers of those that are known."""
        self._in_step = False
        """Whether the last step that was begun to be asked for is not whole yet."""
        self._stopped = False
        self._ended: SymbiosisError | None = None

    @property
    def ended(self) -> SymbiosisError | None:
        """Why nothing is taken any more; None while the session lives."""
        return self._ended

    @property
    def waiting(self) -> deque[Call]:
        """First is next. A call stays until `done`."""
        return self._waiting

    def put(self, call: Call, number: int | None, *, taken: int, answers: int = 0) -> tuple[int, Future[Any]]:
        """The number of a call and its answer to come; without a number, it is the next. Tokens of its tenant are `taken`.

        There is room for so many `answers`.

        Raises `OutOfRange`, `OutOfOrder`, `TooManyRequests`, `Withdrawn`, or what ended the session.
        """
        if number is None:
            number = self._next
        if type(number) is not int or number < 1:
            raise OutOfRange(f"the call's number is {number!r:.80}", field="number", expected="a whole number from 1 on")
        known = self._known.get(number) or self._early.get(number)
        if known is not None:
            if not known.same(call):
                raise OutOfOrder(f"call {number} of this session was another one; every call needs a number of its own")
            return number, known.answer
        if self._ended is not None:
            raise copy.copy(self._ended)  # one that is raised again and again keeps every caller's frames
        if self._stopped and not self._in_step and (_is_batch(call) or isinstance(call, OptimStep)):
            raise withdrawn()
        if number < self._next:
            raise OutOfOrder(f"call {number} is too long ago: the next number is {self._next}")
        under_way = len(self._waiting) + len(self._early) + len(self._sampled)
        if under_way >= self._most or number >= self._next + self._most:
            raise TooManyRequests(f"{self._most} calls of this session are waiting already, or call {number} is too far ahead")
        share = 1 if number == self._next else 2  # calls that overtook others leave room for those
        if self.tokens + call.size > self._most_tokens // share or taken + call.size > self._tenant_tokens // share:
            raise TooManyRequests("too many tokens of this session, or of its tenant, are waiting already", retry_s=0.1)
        if call.answers > answers:
            raise TooManyRequests(f"{call.answers} answers are asked for, and there is room for {answers}: wait for others")
        self.tokens += call.size
        self.answers += call.answers
        self._early[number] = call
        while self._next in self._early:
            arrived = self._early.pop(self._next)
            self._waiting.append(arrived)
            if _is_batch(arrived):
                arrived.begins, self._in_step = not self._in_step, True
            elif isinstance(arrived, OptimStep | LoadCheckpoint):
                self._in_step = False
            self._known[self._next] = arrived
            self._kept += arrived.kept
            self._next += 1
        self._remember()
        return number, call.answer

    def _remember(self) -> None:
        """Forget the oldest if there are too many, or too many answers."""
        while len(self._known) > _REMEMBERED + self._most or self._kept > self._most_tokens:
            self._kept -= self._known.popitem(last=False)[1].kept

    def done(self, call: Call) -> None:
        assert self._waiting[0] is call, "calls end in their order"
        self._waiting.popleft()
        self._let_go(call)

    def leave(self, call: SampleCall) -> None:
        """It holds up nobody behind it any more; until `sampled` it counts."""
        assert self._waiting[0] is call, "calls end in their order"
        self._waiting.popleft()
        self._sampled.append(call)

    def sampled(self, call: SampleCall) -> bool:
        """Its answers have come, or nobody wants them any more; False if that was so before."""
        if call not in self._sampled:
            return False
        self._sampled.remove(call)
        self._let_go(call)
        return True

    @property
    def sampling(self) -> list[SampleCall]:
        """Those that have left."""
        return list(self._sampled)

    def _let_go(self, call: Call) -> None:
        self.tokens -= call.size
        self.answers -= call.answers
        call.forget()

    def stop(self) -> list[Call]:
        """No step is begun any more. Returns what is left without an answer: all behind the step that is at the head."""
        self._stopped = True
        kept = 1  # what is at the head may be under way
        while kept < len(self._waiting) and not (_is_batch(call := self._waiting[kept]) and call.begins):
            kept += 1
        left = [self._waiting.pop() for _ in range(len(self._waiting) - kept)][::-1]
        if left:
            self._in_step = False
        for call in left:
            self._let_go(call)
        return left

    def end(self, error: SymbiosisError) -> list[Call]:
        """Nothing is taken any more. Returns the calls that are left without an answer, but for those that have left."""
        left = [*self._waiting, *self._early.values()]
        self._ended = self._ended or copy.copy(error)
        self._waiting.clear()
        self._early.clear()
        for call in left:
            self._let_go(call)
        return left

    def forget(self) -> None:
        """Also the answers of old."""
        self._known.clear()
        self._kept = 0


def withdrawn() -> Withdrawn:
    return Withdrawn("this training session was told to stop, and had not begun this step")


def _is_batch(call: Call) -> TypeGuard[ForwardBackward]:
    """That is learned from."""
    return isinstance(call, ForwardBackward) and call.learns
