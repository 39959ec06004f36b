"""Hosted fine-tuning over one frozen model: one thread that packs what waits into passes.

Before each pass, steps of optimizers are made; then waiting batches of all sessions are joined, as many as fit, by
`fairness`. Nobody is waited for: a session that has nothing to compute is not in the pass, and one that comes
while a pass runs is in the next. Files are read and written on one other thread, one after the
other: their session waits, and whoever else has files, but no pass does. Adapters that are sampled from are copied
on a third.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from peft import PeftConfig
from torch import Tensor
from transformers import PreTrainedModel

from symbiosis.adapters.files import quote
from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.common import denormals
from symbiosis.device_sharing.cpu_time_share import CpuTimeShare, PassBudget
from symbiosis.errors import BadCall, Closed, Diverged, OutOfRange, PassFailed, SymbiosisError, TooManyRequests
from symbiosis.finetuning import checkpoint
from symbiosis.finetuning.adapter_factory import AdapterFactory
from symbiosis.finetuning.call_queue import CallQueue, withdrawn
from symbiosis.finetuning.calls import (
    Call,
    ForwardBackward,
    LoadCheckpoint,
    LossResult,
    OptimStep,
    SampleCall,
    SaveCheckpoint,
    StepResult,
)
from symbiosis.finetuning.checkpoint import Progress
from symbiosis.finetuning.config import TrainerConfig, TrainerStats
from symbiosis.finetuning.optimizer import AnyOptimizer
from symbiosis.finetuning.packed.async_copy import AsyncCopy
from symbiosis.finetuning.packed.batch import SessionSlice
from symbiosis.finetuning.packed.loss import accepts_loss_kwargs
from symbiosis.finetuning.packed.model import PackedModel, PassResult
from symbiosis.finetuning.sampler_protocol import SamplerProtocol
from symbiosis.finetuning.scheduling.batch_planner import BatchPlanner
from symbiosis.finetuning.scheduling.fairness import Candidate
from symbiosis.finetuning.scheduling.step_time_fairness import FEW_ROWS
from symbiosis.finetuning.session import SessionLimits, TrainingSession
from symbiosis.finetuning.trained_adapter import TrainedAdapter
from symbiosis.models.max_length import max_sequence_length

_STEP = 2000
"""How many rows a step of as many parameters as the model has would cost.

AdamW moves some 30 bytes of each parameter, a row takes some 4 operations with each weight, and devices do hundreds of
operations in the time they move a byte.
"""


_SHORT_S, _LONG_S = 0.1, 60.0
_MAX_NAME = 256


@dataclass(frozen=True, slots=True, eq=False)
class _Stepped:
    """Steps that were launched and not answered yet."""

    calls: list[tuple[TrainingSession, OptimStep, int]]
    """With the number of the step."""
    norms: AsyncCopy | None


_NO_STEPS = _Stepped([], None)


class Trainer:
    """Owns a thread and modules of its own over the model's weights; the model itself is not touched."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig = TrainerConfig(),  # noqa: B008 - frozen
        turns: CpuTimeShare | None = None,
        sampler: SamplerProtocol | None = None,
    ) -> None:
        """`turns` are taken with others who compute on the same cores; `sampler` answers prompts. Raises `CannotTrain`."""
        self.config, self._sampler = config, sampler
        self._device, on_cpu = model.device, model.device.type == "cpu"
        few, usual_s = (FEW_ROWS, _SHORT_S) if on_cpu else (config.max_rows, _LONG_S)
        self._portions = BatchPlanner(min(config.pass_rows or few, config.max_rows), least=1 if on_cpu else FEW_ROWS)
        self._short_s = usual_s if config.short_pass_s is None else config.short_pass_s
        self._turns = turns or CpuTimeShare(share=1.0)
        self._later: list[tuple[Future[Any], Any]] = []
        """Answers to passes that are due."""
        self._packed = PackedModel(model, graphs=config.graphs)
        self._maker = AdapterFactory(model, max_parameters=min(config.tenant_parameters, config.max_parameters))
        self._step_rows = _STEP / sum(parameter.numel() for parameter in model.parameters())
        self._takes_items = accepts_loss_kwargs(model)
        text = model.config.get_text_config()
        self._bounds = SessionLimits(
            vocabulary=int(text.vocab_size),
            rows=config.max_rows,
            positions=max_sequence_length(text),
            examples=config.max_examples,
            tokens=min(config.max_waiting_tokens, config.tenant_waiting_tokens) // 2,
        )
        self._opening = threading.Lock()  # one at a time: what was admitted is still admitted once it is made
        self._changed = threading.Condition()
        self._sessions: dict[str, TrainingSession] = {}
        self._gone: list[TrainingSession] = []
        """Closed, but the thread may still be computing for them."""
        self._ids = itertools.count(1)
        self._stepped = _NO_STEPS
        self._closing = False
        self.stats = TrainerStats()
        self._files = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-training-files")
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-training-copies")
        self._thread = threading.Thread(target=self._run, name="symbiosis-training", daemon=True)
        self._thread.start()

    def open(
        self, tenant: str, adapter: PeftConfig | Mapping[str, Any], *, seed: int = 42, weight: float = 1.0
    ) -> TrainingSession:
        """A new session. Its adapter starts as PEFT's `get_peft_model` after `set_seed(seed)` would.

        Raises `BadAdapter`, `UnsupportedAdapter`, `TooLarge`, `OutOfRange`, `TooManyRequests` or `Closed`.
        """
        if not isinstance(tenant, str) or not 0 < len(tenant) <= _MAX_NAME:
            raise OutOfRange(f"tenant is {quote(tenant)}", field="tenant", expected=f"a name of 1 to {_MAX_NAME} characters")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.001 <= weight <= 1000:
            raise OutOfRange(f"weight is {quote(weight)}", field="weight", expected="an int or float from 0.001 to 1000")
        if type(seed) is not int or not 0 <= seed < 1 << 63:
            raise OutOfRange(f"seed is {quote(seed)}", field="seed", expected="an int from 0 to 2**63 - 1")
        limits = self.config
        with self._opening:
            self._admit(tenant)
            made = self._maker.make(adapter, seed=seed, admit=partial(self._admit, tenant))
            self._finish()
            with self._changed:
                self._admit(tenant)
                session = TrainingSession(
                    f"session-{next(self._ids)}",
                    tenant,
                    made,
                    seed=seed,
                    weight=weight,
                    takes_items=self._takes_items,
                    bounds=self._bounds,
                    line=CallQueue(limits.max_waiting, limits.max_waiting_tokens, limits.tenant_waiting_tokens),
                    sampler=self._sampler,
                    submit=self._submit,
                    hold=self._hold,
                    stop=self._stop_session,
                    close=self._close_session,
                )
                self._sessions[session.id] = session
        return session

    def check(self, adapter: Mapping[str, Any]) -> None:
        """Whether a session could have it. Raises `BadAdapter`, `UnsupportedAdapter` or `TooLarge`."""
        self._maker.check(adapter)

    @property
    def facts(self) -> ModelFacts:
        """What adapters of this model are checked against."""
        return self._maker.facts

    @property
    def longest(self) -> int:
        """Most tokens of an example, virtual ones included."""
        return min(self._bounds.rows, self._bounds.positions)

    def beside(self) -> dict[str, float]:
        """What whoever is served on this device notices, as far as it was measured."""
        return {**self._turns.stats(), "pass_rows": self._portions.rows}

    def _finish(self) -> None:
        """What this thread has launched is done: the thread of passes may compute on another stream."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _admit(self, tenant: str, parameters: int = 0) -> None:
        """One session more, with about so many parameters."""
        with self._changed:
            if self._closing:
                raise Closed("this host is closed")
            everybody = list(self._sessions.values())
            mine = [session for session in everybody if session.tenant == tenant]
            if len(everybody) >= self.config.max_sessions or len(mine) >= self.config.tenant_sessions:
                raise TooManyRequests(f"{len(everybody)} sessions are open, {len(mine)} of this tenant: close one first")
            room = min(self.config.max_parameters - _parameters(everybody), self.config.tenant_parameters - _parameters(mine))
            if parameters > room:
                raise TooManyRequests(f"{parameters} parameters, and there is room for {room}: close a session first")

    def is_alive(self) -> bool:
        """False once it is closed, or the device has failed: nothing is trained by this host any more."""
        return not self._closing

    def close(self) -> None:
        """Stop after the pass that runs. What waits ends in `Closed`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._files.shutdown()
        self._copies.shutdown()
        for session in list(self._sessions.values()):
            self._close_session(session)
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # Any thread

    def _submit(self, session: TrainingSession, call: Call, number: int | None) -> Future[Any]:
        with self._changed:
            if self._closing:
                raise Closed("this host is closed")
            everybody = self._sessions.values()
            mine = [each.line for each in everybody if each.tenant == session.tenant]
            answers = 0
            if call.answers:
                all_room = self.config.max_answers - sum(each.line.answers for each in everybody)
                answers = min(all_room, self.config.tenant_answers - sum(line.answers for line in mine))
            _, answer = session.line.put(call, number, taken=sum(line.tokens for line in mine), answers=answers)
            self._changed.notify_all()
        return answer

    def _hold(self, session: TrainingSession, held: bool) -> None:
        with self._changed:
            session.held = held
            self._changed.notify_all()

    def _stop_session(self, session: TrainingSession) -> None:
        with self._changed:
            for call in session.line.stop():
                call.answer.set_exception(withdrawn())  # here: whoever asks for more sees that its step is no more

    def _close_session(self, session: TrainingSession) -> None:
        with self._changed:
            if self._sessions.pop(session.id, None) is not None:
                self._gone.append(session)
            self._portions.forget(session.tenant, session.id)
            self._changed.notify_all()
        closed = Closed("this training session was closed")
        self._end(session, closed)
        for call in session.line.sampling:
            self._sampled(session, call, closed)

    def _end(self, session: TrainingSession, error: SymbiosisError) -> None:
        with self._changed:
            left = session.line.end(error)
        for call in left:
            call.answer.set_exception(copy.copy(error))

    def _answer(self, session: TrainingSession, call: Call, result: Any, *, later: bool = False) -> None:
        """The call at the head of a session's line is done; an error is an answer too. `later`: it is said in `_deliver`."""
        with self._changed:
            session.busy = False
            if session.line.ended is not None:
                return  # it was answered when the session ended
            session.line.done(call)
            self._changed.notify_all()
        if isinstance(result, Exception):
            call.answer.set_exception(result.with_traceback(None))
        elif later:
            self._later.append((call.answer, result))
        else:
            call.answer.set_result(result)

    # The thread

    def _deliver(self) -> None:
        """Who waits for a pass is told while the next one is computed: many who go on at once would hold that up."""
        later, self._later = self._later, []
        for answer, result in later:
            answer.set_result(result)

    def _run(self) -> None:
        why: SymbiosisError = Closed("hosted training has stopped")
        denormals.flush_to_zero()
        try:
            while self._round():
                pass
        except PassFailed as error:
            why = error
        finally:  # whatever happened: nobody waits for an answer that will not come
            self._closing = True
            self._deliver()
            for _, call, _ in self._stepped.calls:
                call.answer.set_exception(copy.copy(why))
            for session in list(self._sessions.values()):
                self._end(session, why)

    def _round(self) -> bool:
        """Wait for something to do, and do it. Nothing of a session is kept by this thread in between."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._gone or self._later or any(s.ready for s in self._sessions.values())
            )
            if self._closing:
                return False
            self._release()
            is_idle = not any(s.ready for s in self._sessions.values())
        if is_idle:
            self._deliver()
            return True
        permit = self._turns.begin_pass(self._short_s, lambda: self._closing)
        if permit is None:
            return False
        new = self.stats.new_passes
        try:
            self._turn(permit)
        finally:
            self._turns.end_pass(is_new=self.stats.new_passes > new)
        return True

    def _turn(self, permit: PassBudget) -> None:
        with self._changed:
            heads = [(s, s.line.waiting[0]) for s in self._sessions.values() if s.ready]
        for session, call in heads:
            if isinstance(call, SaveCheckpoint | LoadCheckpoint):
                self._carry(session, call)
            elif isinstance(call, SampleCall):
                self._copy(session, call)
        self._step([(session, call) for session, call in heads if isinstance(call, OptimStep)])
        self._pass(permit)  # whoever has just stepped may have a batch for it

    def _release(self) -> None:
        with self._changed:
            gone, self._gone = self._gone, []
            for session in gone:
                session.release()

    def _step(self, asked: list[tuple[TrainingSession, OptimStep]]) -> None:
        """Launch steps. Their calls leave their lines now and are answered in `_tell`, when the norms are known."""
        launched: list[tuple[TrainingSession, OptimStep, Tensor]] = []
        for session, call in asked:
            try:
                norm = session.optimizer.step(call.settings)
            except BadCall as error:
                self._answer(session, call, error)
            except Exception as error:  # noqa: BLE001 - nobody knows what has been changed: this session is over, not the thread
                self._check_device(error)
                self._end(session, PassFailed(f"a step failed: {type(error).__name__}: {error}"))
            else:
                session.adapter.clear_caches()
                with self._changed:
                    if session.line.ended is not None:
                        continue  # it was answered when the session ended
                    session.line.done(call)
                    self._portions.fairness.charge(session.tenant, session.size * self._step_rows / session.weight)
                session.progress = Progress(session.progress.steps + 1, session.progress.batches)
                self._count(steps=1)
                launched.append((session, call, norm))
        if launched:
            norms = AsyncCopy(torch.stack([norm.float() for *_, norm in launched]))
            self._stepped = _Stepped([(session, call, session.progress.steps) for session, call, _ in launched], norms)

    def _tell(self) -> None:
        """Answer the steps that were launched."""
        if self._stepped.norms is None:
            return
        try:
            norms = self._stepped.norms.read().tolist()
        except Exception as error:  # noqa: BLE001 - a device says so here if something before has failed
            self._check_device(error)
            norms = [math.nan] * len(self._stepped.calls)
        stepped, self._stepped = self._stepped, _NO_STEPS
        for (session, call, number), norm in zip(stepped.calls, norms, strict=True):
            if math.isfinite(norm):
                call.answer.set_result(StepResult(number, norm))
            else:
                why = Diverged(f"the gradient's norm is {norm}; a smaller learning rate or clipping may help")
                call.answer.set_exception(copy.copy(why))
                self._end(session, why)

    def _carry(self, session: TrainingSession, call: SaveCheckpoint | LoadCheckpoint) -> None:
        with self._changed:
            session.busy = True
        self._finish()  # the steps that are to be saved
        session.filing = self._files.submit(self._file, session, call, session.adapter, session.optimizer)

    def _file(
        self, session: TrainingSession, call: SaveCheckpoint | LoadCheckpoint, adapter: TrainedAdapter, optimizer: AnyOptimizer
    ) -> None:
        """On the other thread: read or write what a session asks for; one that is closed meanwhile has no adapter any more."""
        result: Exception | None = None
        if session.line.ended is not None:
            return  # it was answered when the session ended
        try:
            if isinstance(call, SaveCheckpoint):
                if call.optimizer and optimizer.has_gradients:
                    raise BadCall("gradients have gathered: call optim_step before saving the optimizer")
                state = optimizer.state() if call.optimizer else None
                made = checkpoint.save(call.folder, adapter, state, session.progress, replace=call.replace)
                if call.keep is not None:
                    call.keep(made)
            else:
                resumed = checkpoint.load(call.folder, adapter, self._maker.facts)
                optimizer.restore(resumed.optimizer)
                session.progress = resumed.progress
        except Exception as error:  # noqa: BLE001 - whatever went wrong with a file is this call's answer
            result = error
        self._finish()
        self._answer(session, call, result)

    def _copy(self, session: TrainingSession, call: SampleCall) -> None:
        with self._changed:
            session.busy = True
        self._copies.submit(self._sample, session, call, session.adapter)

    def _sample(self, session: TrainingSession, call: SampleCall, adapter: TrainedAdapter) -> None:
        """On the third thread: have answers computed by the adapter as it is now. From then on its session goes on."""
        asked = call.asked
        try:
            made = adapter.snapshot()
            if not made.is_finite:
                raise Diverged("the adapter has numbers that are none (NaN or infinite): the last step has spoilt it")
        except Exception as error:  # noqa: BLE001 - it is this call's answer
            self._answer(session, call, error)
            return
        with self._changed:
            session.busy = False
            self._changed.notify_all()
            if session.line.ended is not None or asked is None:
                return  # it was answered when the session ended
            session.line.leave(call)
        asked.begin(made).add_done_callback(lambda done: self._sampled(session, call, done.exception() or done.result()))

    def _sampled(self, session: TrainingSession, call: SampleCall, result: Any) -> None:
        """By any thread: what came of it, or why nothing will."""
        with self._changed:
            asked = call.asked
            if not session.line.sampled(call):
                return
        if isinstance(result, Exception):
            if asked is not None:
                asked.cancel()
            call.answer.set_exception(copy.copy(result))
        else:
            call.answer.set_result(result)

    def _pass(self, permit: PassBudget) -> None:
        began = time.monotonic()
        with self._changed:
            room = self._portions.room(permit)
            waiting = {s.id: s for s in self._sessions.values() if s.ready}
            candidates = [Candidate(s.id, s.tenant, s.weight, s.costs(room)) for s in waiting.values()]
            picked = self._portions.pick([each for each in candidates if each.costs], permit)
            chosen = [(waiting[id], waiting[id].pieces(count)) for id, count in picked.items()]
            cost = sum(sum(each.costs[: picked.get(each.session, 0)]) for each in candidates)
        if not chosen:
            self._tell()
            self._deliver()
            return
        shares = [SessionSlice(s.adapter, tuple(piece for _, piece in pieces), pieces[0][0].learns) for s, pieces in chosen]
        try:
            outcomes = self._computed(shares)
        except torch.OutOfMemoryError:  # nothing of it counts: what waits is picked again, less at a time
            self._portions.too_large(cost)
            self._packed.trim()
            return
        seconds, rows = time.monotonic() - began, sum(share.rows for share in shares)
        self._portions.note(permit, cost, seconds, is_new=self._packed.is_new)
        self._count(passes=1, rows=rows, sessions=len(shares), seconds=seconds, new_passes=int(self._packed.is_new))
        if permit.is_serving:
            self._count(beside_passes=1, beside_rows=rows, beside_seconds=seconds)
        for (session, pieces), outcome in zip(chosen, outcomes, strict=True):
            self._settle(session, [call for call, _ in pieces], outcome)

    def _count(self, **more: float) -> None:
        self.stats = replace(self.stats, **{name: getattr(self.stats, name) + value for name, value in more.items()})

    def _computed(self, shares: list[SessionSlice], *, trimmed: bool = False) -> list[PassResult | Exception]:
        """A pass; if it fails, each share alone, so that only who is at fault fails. Steps are answered while it runs.

        Raises `torch.OutOfMemoryError` if less at a time may help.
        """
        failed: Exception | None = None
        try:
            launched = self._packed.launch(shares)
        except Exception as error:  # noqa: BLE001 - a model's code may raise anything; it is the call's answer
            failed = error
        self._tell()
        self._deliver()
        if failed is None:
            try:
                return [*launched.results()]
            except Exception as error:  # noqa: BLE001 - as above
                failed = error
        if isinstance(failed, torch.OutOfMemoryError):
            failed = failed.with_traceback(None)
            if trimmed or sum(len(share.examples) for share in shares) > 1:
                raise failed
            self._packed.trim()  # one example: what is kept for later passes may be what is in its way
            try:
                return self._computed(shares, trimmed=True)
            except torch.OutOfMemoryError as error:
                return [error.with_traceback(None)]
        self._check_device(failed)
        if len(shares) == 1:
            return [failed]
        return [self._computed([share])[0] for share in shares]

    def _check_device(self, error: Exception) -> None:
        """After an error: if nothing can be computed any more, it is nobody's fault, and the host's end."""
        if not self._packed.is_sound():
            raise PassFailed(f"the device fails, hosted training has stopped: {type(error).__name__}: {error}") from None

    def _settle(self, session: TrainingSession, calls: list[ForwardBackward], outcome: PassResult | Exception) -> None:
        if isinstance(outcome, Exception) or not outcome.is_finite:
            session.optimizer.clear()
            self._end(session, _failure(outcome))
            return
        if outcome.gradients:
            session.optimizer.accumulate(outcome.gradients)
        for call, loss in zip(calls, outcome.losses, strict=True):
            call.losses.append(loss)
            if len(call.losses) == len(call.examples):
                session.progress = Progress(session.progress.steps, session.progress.batches + call.learns)
                self._answer(session, call, LossResult(sum(call.losses), call.tokens), later=self._device.type == "cuda")


def _failure(outcome: PassResult | Exception) -> SymbiosisError:
    if isinstance(outcome, Exception):
        return PassFailed(f"a training pass failed: {type(outcome).__name__}: {outcome}")
    return Diverged(f"the loss or its gradient is no number any more (loss {sum(outcome.losses)})")


def _parameters(sessions: list[TrainingSession]) -> int:
    return sum(session.size for session in sessions)
