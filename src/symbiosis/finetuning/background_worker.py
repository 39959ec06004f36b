"""Calls that run outside of the passes on two threads: save and load on one, adapter snapshots for sampling on the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.errors import BadCall, Diverged
from symbiosis.finetuning import checkpoint
from symbiosis.finetuning.adapters.trained_adapter import TrainedAdapter
from symbiosis.finetuning.calls import BackgroundCall, LoadCheckpoint, SampleCall, SaveCheckpoint
from symbiosis.finetuning.optimizer import AnyOptimizer
from symbiosis.finetuning.session import TrainingSession


class BackgroundWorker:
    """A call blocks its own session and the calls of its thread, but no pass."""

    def __init__(
        self, device: torch.device, facts: ModelFacts, changed: threading.Condition, finish_call: Callable[..., None]
    ) -> None:
        """`finish_call(session, call, outcome)` resolves a call."""
        self._device, self._facts, self._changed, self._finish_call = device, facts, changed, finish_call
        self._files = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-training-files")
        self._snapshots = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-training-snapshots")

    def start(self, session: TrainingSession, call: BackgroundCall) -> None:
        """Run the head of a session's queue. The session is not ready until the call is off its queue."""
        session.background_call = call
        # the session drops its adapter when it is closed, so the task holds its own reference
        if isinstance(call, SampleCall):
            self._snapshots.submit(self._run_sample, session, call, session.adapter)
        else:
            synchronize(self._device)  # the steps to save
            session.file_task = self._files.submit(self._run_file_call, session, call, session.adapter, session.optimizer)

    def close(self) -> None:
        self._files.shutdown()
        self._snapshots.shutdown()

    def _run_file_call(
        self, session: TrainingSession, call: SaveCheckpoint | LoadCheckpoint, adapter: TrainedAdapter, optimizer: AnyOptimizer
    ) -> None:
        if session.queue.ended is not None:
            return
        outcome: Exception | None = None
        try:
            if isinstance(call, SaveCheckpoint):
                if call.optimizer and optimizer.gradients:
                    raise BadCall("gradients have accumulated: call optim_step before saving the optimizer")
                state = optimizer.state() if call.optimizer else None
                written = checkpoint.save(call.folder, adapter, state, session.progress, replace=call.replace)
                if call.keep is not None:
                    call.keep(written)
            else:
                session.progress, state = checkpoint.load(call.folder, adapter, self._facts)
                optimizer.restore(state)
        except Exception as error:  # noqa: BLE001 - whatever fails is this call's outcome
            outcome = error
        synchronize(self._device)
        self._finish_call(session, call, outcome)

    def _run_sample(self, session: TrainingSession, call: SampleCall, adapter: TrainedAdapter) -> None:
        """Copy the adapter and start sampling. The session's next call runs from then on."""
        request = call.request
        try:
            snapshot = adapter.snapshot()
            if not snapshot.is_finite:
                raise Diverged("the adapter has NaN or infinite parameters since its last step")
        except Exception as error:  # noqa: BLE001 - as above
            self._finish_call(session, call, error)
            return
        with self._changed:
            if request is None or not session.queue.launch_sample(call):
                return
            self._changed.notify_all()
        request.begin(snapshot).add_done_callback(
            lambda done: self._finish_call(session, call, done.exception() or done.result())
        )


def synchronize(device: torch.device) -> None:
    """Wait for what this thread has launched: other threads may compute on another stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
