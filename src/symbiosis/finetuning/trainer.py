"""Hosted fine-tuning over one frozen model: one thread packs pending batches of all sessions into passes.

Before each pass the trainer runs pending optimizer steps. The batch planner then fills the pass with examples of ready
sessions. The pass waits for no session: one that becomes ready during a pass takes part in the next. Saving, loading and
sampling run on other threads (`background_worker`).
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, Self

import torch
from peft import PeftConfig
from torch import Tensor
from transformers import PreTrainedModel

from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.common import denormals
from symbiosis.common.free_cores import FreeCores
from symbiosis.device_sharing.cpu_time_share import CpuTimeShare, PassBudget
from symbiosis.distributed.operations import FirstShard
from symbiosis.errors import BadCall, Closed, Diverged, PassFailed, SymbiosisError
from symbiosis.finetuning.adapters.adapter_factory import AdapterFactory
from symbiosis.finetuning.background_worker import BackgroundWorker, synchronize
from symbiosis.finetuning.call_queue import CallQueue
from symbiosis.finetuning.calls import BackgroundCall, ForwardBackward, LossResult, OptimStep, SessionCall, StepResult
from symbiosis.finetuning.checkpoint import Progress
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.finetuning.packed.async_copy import AsyncCopy
from symbiosis.finetuning.packed.batch import SessionSlice
from symbiosis.finetuning.packed.loss import accepts_loss_kwargs
from symbiosis.finetuning.packed.model import PackedModel, PassResult
from symbiosis.finetuning.packed.pass_runner import PassRunner
from symbiosis.finetuning.sampler_protocol import SamplerProtocol
from symbiosis.finetuning.scheduling.batch_planner import BatchPlanner
from symbiosis.finetuning.scheduling.fairness import Candidate
from symbiosis.finetuning.scheduling.session_registry import SessionRegistry, check_open
from symbiosis.finetuning.scheduling.step_time_fairness import FEW_ROWS
from symbiosis.finetuning.session import SessionLimits, TrainingSession
from symbiosis.finetuning.sharding.sharded_model import ShardedPackedModel
from symbiosis.finetuning.stats import TrainerStats
from symbiosis.models.max_length import max_sequence_length

_MODEL_STEP_ROWS = 2000
"""Cost in rows of an optimizer step over as many parameters as the model has.

AdamW moves about 30 bytes of each parameter, a row takes about 4 operations with each weight, and devices do hundreds of
operations in the time they move a byte.
"""
_CPU_SERVING_PASS_S, _GPU_SERVING_PASS_S = 0.1, 60.0


class Trainer:
    """Owns a thread, and modules of its own over the model's weights. The model itself stays unchanged."""

    def __init__(
        self,
        model: PreTrainedModel | FirstShard,
        config: TrainerConfig = TrainerConfig(),  # noqa: B008 - frozen
        device_share: CpuTimeShare | None = None,
        sampler: SamplerProtocol | None = None,
    ) -> None:
        """`model` may be the first shard of one. `device_share` shares the device with serving. `sampler` completes prompts.

        Raises `CannotTrain`.
        """
        packed, model, factory = _prepare(model, config)
        self.config, self._sampler, self._device_share = config, sampler, device_share or CpuTimeShare(share=1.0)
        self._device, on_cpu = model.device, model.device.type == "cpu"
        self._free_cores = FreeCores() if on_cpu else nullcontext()
        pass_rows, pass_s = (FEW_ROWS, _CPU_SERVING_PASS_S) if on_cpu else (config.max_rows, _GPU_SERVING_PASS_S)
        self._planner = BatchPlanner(min(config.pass_rows or pass_rows, config.max_rows), min_rows=1 if on_cpu else FEW_ROWS)
        self._serving_pass_s = pass_s if config.serving_pass_s is None else config.serving_pass_s
        self._passes = PassRunner(packed, self._deliver)
        self._factory = factory
        self._step_rows_per_parameter = _MODEL_STEP_ROWS / sum(parameter.numel() for parameter in model.parameters())
        self._takes_items = accepts_loss_kwargs(model)
        text_config = model.config.get_text_config()
        self._session_limits = SessionLimits(
            vocabulary=int(text_config.vocab_size),
            max_rows=config.max_rows,
            max_positions=max_sequence_length(text_config),
            max_examples=config.max_examples,
            max_tokens=min(config.max_waiting_tokens, config.tenant_waiting_tokens) // 2,
        )
        self._opening = threading.Lock()  # admission and creation of a session are one operation
        self._changed = threading.Condition()
        self._registry = SessionRegistry(config)
        self._ids = itertools.count(1)
        self._launched_steps: list[tuple[TrainingSession, OptimStep, int]] = []
        self._norms: AsyncCopy | None = None  # of the launched steps
        self._deferred: list[tuple[SessionCall, LossResult]] = []  # set by the next `_deliver`
        self._closing = False
        self.stats = TrainerStats()
        self._background = BackgroundWorker(self._device, self.facts, self._changed, self._finish_call)
        self._thread = threading.Thread(target=self._run, name="symbiosis-training", daemon=True)
        self._thread.start()

    def open(
        self, tenant: str, adapter: PeftConfig | Mapping[str, Any], *, seed: int = 42, weight: float = 1.0
    ) -> TrainingSession:
        """A new session. Its adapter is initialized as by PEFT's `get_peft_model` after `set_seed(seed)`.

        Raises `BadAdapter`, `UnsupportedAdapter`, `TooLarge`, `OutOfRange`, `TooManyRequests` or `Closed`.
        """
        check_open(tenant, seed, weight)
        with self._opening:
            self._admit(tenant)
            created = self._factory.create(adapter, seed=seed, admit=lambda parameters: self._admit(tenant, parameters))
            synchronize(self._device)
            with self._changed:
                self._admit(tenant)
                session = TrainingSession(
                    f"session-{next(self._ids)}",
                    tenant,
                    created,
                    seed=seed,
                    weight=weight,
                    takes_items=self._takes_items,
                    limits=self._session_limits,
                    queue=CallQueue(self.config),
                    sampler=self._sampler,
                    changed=self._changed,
                    submit=self._submit,
                    close=self._close_session,
                )
                self._registry.add(session)
        return session

    def check(self, adapter: Mapping[str, Any]) -> PeftConfig:
        """PEFT's config. Raises `BadAdapter`, `UnsupportedAdapter` or `TooLarge` if no session can train this adapter."""
        return self._factory.check(adapter)

    @property
    def facts(self) -> ModelFacts:
        """Adapters are checked against these."""
        return self._factory.facts

    @property
    def longest(self) -> int:
        """Maximum tokens of an example, virtual ones included."""
        return min(self._session_limits.max_rows, self._session_limits.max_positions)

    def sharing_stats(self) -> dict[str, float]:
        """How training and serving share the device, as far as it was measured."""
        return {**self._device_share.stats(), "pass_rows": self._planner.rows}

    def tensors(self) -> list[Tensor]:
        """Parameters, gradients and optimizer states of the open sessions."""
        with self._changed:
            sessions = self._registry.sessions()
        return [tensor for each in sessions for tensor in (*each.adapter.parameters.values(), *each.optimizer.tensors())]

    def is_alive(self) -> bool:
        """False after `close`, or after the device failed."""
        return not self._closing

    def close(self) -> None:
        """Stop after the running pass. Pending calls fail with `Closed`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._background.close()
        for session in self._registry.sessions():
            self._close_session(session)
        self._registry.release_closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # On any thread

    def _check_open(self) -> None:
        if self._closing:
            raise Closed("this trainer is closed")

    def _admit(self, tenant: str, parameters: int = 0) -> None:
        with self._changed:
            self._check_open()
            self._registry.admit_session(tenant, parameters)

    def _submit(self, session: TrainingSession, call: SessionCall, number: int | None) -> Future[Any]:
        with self._changed:
            self._check_open()
            future = self._registry.submit(session, call, number)
            self._changed.notify_all()
        return future

    def _close_session(self, session: TrainingSession) -> None:
        with self._changed:
            self._registry.close(session)
            self._planner.remove_session(session.tenant, session.id)
            self._changed.notify_all()
        closed = Closed("this training session was closed")
        self._end_session(session, closed)
        for call in list(session.queue.sampling):
            request = call.request
            if request is not None:
                request.cancel()
            self._finish_call(session, call, copy.copy(closed))

    def _end_session(self, session: TrainingSession, error: SymbiosisError) -> None:
        with self._changed:
            dropped = session.queue.end(error)
        for call in dropped:
            call.resolve(copy.copy(error))

    def _finish_call(self, session: TrainingSession, call: SessionCall, outcome: Any, *, deferred: bool = False) -> None:
        """Take a call off its queue and resolve it, now or in `_deliver`. Without effect if the session ended first."""
        with self._changed:
            if not session.queue.finish(call):
                return
            self._changed.notify_all()
        if deferred:
            self._deferred.append((call, outcome))
        else:
            call.resolve(outcome)

    # On the trainer's thread

    def _run(self) -> None:
        error: SymbiosisError = Closed("hosted training has stopped")
        denormals.flush_to_zero()
        try:
            while self._run_once():
                pass
        except PassFailed as failed:
            error = failed
        finally:  # after any exception: every accepted call is resolved
            self._closing = True
            for call, result in self._deferred:
                call.resolve(result)
            for _, step, _ in self._launched_steps:
                step.resolve(copy.copy(error))
            for session in self._registry.sessions():
                self._end_session(session, error)

    def _run_once(self) -> bool:
        """Wait for work and do it. In between, this thread holds no reference to a session."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._deferred or self._registry.has_work())
            if self._closing:
                return False
            self._registry.release_closed()
            is_idle = not self._registry.ready()
        if is_idle:
            self._deliver()
            return True
        permit = self._device_share.begin_pass(self._serving_pass_s, lambda: self._closing)
        if permit is None:
            return False
        is_new = False
        try:
            with self._free_cores:
                is_new = self._run_calls(permit)
        finally:
            self._device_share.end_pass(is_new=is_new)
        return True

    def _run_calls(self, permit: PassBudget) -> bool:
        """Start the head of each ready session's queue. Returns whether the pass was of a new shape."""
        with self._changed:
            heads = [(session, session.queue.pending[0]) for session in self._registry.ready()]
        for session, call in heads:
            if isinstance(call, BackgroundCall):
                self._background.start(session, call)
        self._launch_steps([(session, call) for session, call in heads if isinstance(call, OptimStep)])
        return self._run_pass(permit)  # also with the next batches of the sessions that have stepped

    def _launch_steps(self, steps: list[tuple[TrainingSession, OptimStep]]) -> None:
        """Launch optimizer steps. Their calls leave the queues now; `_deliver` resolves them when the norms are known."""
        norms: list[Tensor] = []
        for session, call in steps:
            try:
                norm = session.optimizer.step(call.settings)
            except BadCall as error:
                self._finish_call(session, call, error)
                continue
            except Exception as error:  # noqa: BLE001 - the parameters may be half updated: the session ends, not the thread
                self._passes.check_device(error)
                self._end_session(session, PassFailed(f"a step failed: {type(error).__name__}: {error}"))
                continue
            session.adapter.clear_caches()
            with self._changed:
                if not session.queue.finish(call):
                    continue
                cost = session.parameter_count * self._step_rows_per_parameter / session.weight
                self._planner.fairness.charge(session.tenant, cost)
            session.progress = Progress(session.progress.steps + 1, session.progress.batches)
            self._launched_steps.append((session, call, session.progress.steps))
            norms.append(norm.float())
        if norms:
            self.stats = self.stats.add(steps=len(norms))
            self._norms = AsyncCopy(torch.stack(norms))

    def _deliver(self) -> None:
        """Resolve launched steps, and deferred results: on a GPU while the next pass computes.

        Many callers that continue at once would delay the launch of that pass.
        """
        if self._norms is not None:
            try:
                norms = self._norms.read().tolist()
            except Exception as error:  # noqa: BLE001 - the device reports failures of earlier work here
                self._passes.check_device(error)
                norms = [math.nan] * len(self._launched_steps)
            steps, self._launched_steps, self._norms = self._launched_steps, [], None
            for (session, call, number), norm in zip(steps, norms, strict=True):
                if math.isfinite(norm):
                    call.resolve(StepResult(number, norm))
                else:
                    diverged = Diverged(f"the gradient's norm is {norm}; a smaller learning rate or clipping may help")
                    call.resolve(copy.copy(diverged))
                    self._end_session(session, diverged)
        deferred, self._deferred = self._deferred, []
        for each, result in deferred:
            each.resolve(result)

    def _run_pass(self, permit: PassBudget) -> bool:
        """Compute the next pass, if there are examples. Returns whether it was of a new shape."""
        began = time.monotonic()
        with self._changed:
            max_rows = self._planner.max_rows(permit)
            ready = {session.id: session for session in self._registry.ready()}
            candidates = [Candidate(s.id, s.tenant, s.weight, s.pending_costs(max_rows)) for s in ready.values()]
            counts = self._planner.plan([each for each in candidates if each.costs], permit)
            chosen = [(ready[id], ready[id].pending_examples(count)) for id, count in counts.items()]
            cost = sum(sum(each.costs[: counts.get(each.session, 0)]) for each in candidates)
        if not chosen:
            self._deliver()
            return False
        slices = [SessionSlice(s.adapter, tuple(example for _, example in found), found[0][0].learns) for s, found in chosen]
        try:
            results = self._passes.run(slices)
        except torch.OutOfMemoryError:  # no outcome counts: the examples stay pending for smaller passes
            self._planner.record_out_of_memory(cost)
            self._passes.trim()
            return False
        is_new, seconds, rows = self._passes.is_new, time.monotonic() - began, sum(each.rows for each in slices)
        self._planner.record_pass(permit, cost, seconds, is_new=is_new)
        self.stats = self.stats.add(passes=1, rows=rows, sessions=len(slices), seconds=seconds, new_passes=int(is_new))
        if permit.is_serving:
            self.stats = self.stats.add(serving_passes=1, serving_rows=rows, serving_seconds=seconds)
        for (session, found), outcome in zip(chosen, results, strict=True):
            self._apply_outcome(session, [call for call, _ in found], outcome)
        return is_new

    def _apply_outcome(self, session: TrainingSession, calls: list[ForwardBackward], outcome: PassResult | Exception) -> None:
        """Accumulate a session's gradients and finish the calls whose last example was computed."""
        if isinstance(outcome, Exception) or not outcome.is_finite:
            session.optimizer.clear()
            if isinstance(outcome, Exception):
                error: SymbiosisError = PassFailed(f"a training pass failed: {type(outcome).__name__}: {outcome}")
            else:
                error = Diverged(f"the loss or its gradient is not finite (loss {sum(outcome.losses)})")
            self._end_session(session, error)
            return
        if outcome.gradients:
            session.optimizer.accumulate(outcome.gradients)
        for call, loss in zip(calls, outcome.losses, strict=True):
            call.losses.append(loss)
            if len(call.losses) == len(call.examples):
                session.progress = Progress(session.progress.steps, session.progress.batches + call.learns)
                result = LossResult(sum(call.losses), call.labels)
                self._finish_call(session, call, result, deferred=self._device.type == "cuda")


def _prepare(model: PreTrainedModel | FirstShard, config: TrainerConfig) -> tuple[PackedModel, PreTrainedModel, AdapterFactory]:
    """The packed model, a model with the shapes of the whole, and the factory of its adapters."""
    largest = min(config.tenant_parameters, config.max_parameters)
    if isinstance(model, FirstShard):
        sharded, skeleton = ShardedPackedModel(model), model.parallel.skeleton()
        factory = AdapterFactory(skeleton, max_parameters=largest, flat=False, complete=sharded.compute_magnitudes)
        return sharded, skeleton, factory
    return PackedModel(model, graphs=config.graphs), model, AdapterFactory(model, max_parameters=largest)
