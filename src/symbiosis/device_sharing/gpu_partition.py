"""Serving and hosted fine-tuning run concurrently on one GPU: streams, priorities and a partition of the multiprocessors.

Decoding is bound by memory bandwidth and training by multiprocessors, so time slices would waste both. A training kernel
fills the whole GPU, and each of a token's hundreds of kernels would wait for one, whatever its priority. So training runs
in a green context on a part of the multiprocessors while the engine serves, and on all of them while it is idle. For a
minute after the last step passes stay short, and the first step waits for the pass that runs: a higher time to first
token is preferred over inter-token jitter. The right share depends on the model, the load and the GPU. `ShareController`
finds it: now and then training pauses for a few steps of the engine, and the share follows from how much faster they are.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from symbiosis.device_sharing.cpu_time_share import CpuTimeShare, PassBudget
from symbiosis.device_sharing.share_controller import ShareController, tail_latency
from symbiosis.errors import SymbiosisError
from symbiosis.gpu import driver

DEFAULT_SLOWDOWN = 1.3
"""Step time of the engine with training, as a multiple of the step time without."""
_MIN_SLOWDOWN, _MAX_SLOWDOWN = 1.2, 10.0
_SWITCH_INTERVAL_S = 5e-4  # serving and training are threads of one interpreter: a token takes milliseconds
_TRAINING_GRACE_S = 0.2  # training counts as running this long after a pass
_RECENT_S = 60.0  # after the last step a request is likely at any moment
_RECENT_PASS_S = 0.1  # a request waits half of it on average; shorter passes slow a large model down
_MAX_PASS_WAIT_S = 0.15  # for a pass that exceeds its budget
_GRANULARITY = 8  # multiprocessors: drivers round up to multiples
_PASSES_AFTER_CHANGE, _PASSES_BETWEEN = 8, 40  # passes of training before a comparison
_MIN_COLOCATED, _MAX_COLOCATED, _ALONE = 64, 256, 12  # steps that a comparison takes, with and without training
_MAX_NEW = 8  # passes in a row that were prepared: from then on they are the normal case
_PAUSE_FACTOR = 1.5  # longest pause of training, as a multiple of the expected duration of the steps
_ACTIVE_S = 0.05  # the engine counts as active this long after its last step
_creating = threading.Lock()
_log = logging.getLogger("symbiosis")


@dataclass(frozen=True, slots=True)
class GreenContext:
    """A stream and its number of multiprocessors; None for all."""

    stream: Any
    multiprocessors: int | None = None


def create_device_share(device: torch.device, share: float | None = None, slowdown: float | None = None) -> CpuTimeShare:
    """How serving and training share this device while the engine serves.

    `share` is training's: of the time on a CPU, of the multiprocessors on a GPU. On a GPU without `share`, a controller
    chooses it so that a step takes `slowdown` times as long as without training. Raises `SymbiosisError`.
    """
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
        raise SymbiosisError(f"training_share={share!r:.80}: expected more than 0, at most 1")
    if device.type == "cuda":
        if share is not None and slowdown is not None:
            raise SymbiosisError("training_share and training_slowdown exclude each other: expected one of them")
        return GpuPartition(device, share, DEFAULT_SLOWDOWN if slowdown is None else slowdown)
    if slowdown is not None:
        raise SymbiosisError(f"training_slowdown is for a GPU: on {device.type}, set training_share")
    return CpuTimeShare() if share is None else CpuTimeShare(share)


class GpuPartition(CpuTimeShare):
    """Selects the CUDA stream of the engine's thread and of hosted fine-tuning's thread. Neither waits for time slices."""

    _idle_after_s = 0.1  # a busy engine has a few milliseconds between two steps

    def __init__(
        self,
        device: torch.device,
        share: float | None = None,
        slowdown: float = DEFAULT_SLOWDOWN,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`share` of the multiprocessors is training's while the engine serves; None: as many as `slowdown` allows.

        With 1.0 there is no partition: training's stream has a lower priority.
        """
        super().__init__(1.0, clock)
        if not _MIN_SLOWDOWN <= slowdown <= _MAX_SLOWDOWN:
            raise SymbiosisError(f"training_slowdown={slowdown}: expected {_MIN_SLOWDOWN} to {_MAX_SLOWDOWN}")
        self._device, self._fixed_share = device, share
        self._controller = ShareController(slowdown)
        self._step_is_colocated = False
        self._pass_ended = -math.inf
        self._pass_has_whole_gpu = False
        # Recent steps of the engine in seconds, by whether training ran.
        self._step_durations: dict[bool, deque[float]] = {True: deque(maxlen=_MAX_COLOCATED), False: deque(maxlen=_ALONE)}
        self._steps_of_pass = 0  # recorded as co-located since the pass began
        self._new_passes = 0  # in a row
        self._last_comparison: dict[str, float] = {}
        self._passes_to_comparison = _PASSES_AFTER_CHANGE

    @property
    def share(self) -> float:
        """Training's share of the multiprocessors while the engine serves."""
        return self._controller.share if self._fixed_share is None else self._fixed_share

    # -- engine -----------------------------------------------------------------------------

    def __enter__(self) -> None:
        with self._changed:
            was_idle, self._engine_waiting = self.busy_until() is None, True
            if was_idle and self._pass_has_whole_gpu:
                self._changed.wait_for(lambda: not self._pass_has_whole_gpu, timeout=_MAX_PASS_WAIT_S)
        self._step_is_colocated = self._is_training()
        self._switch_to("serving")
        super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        super().__exit__(kind)
        if kind is None and self._step_is_colocated is self._is_training():
            with self._changed:
                self._step_durations[self._step_is_colocated].append(self._step_ended - self._step_started)
                self._steps_of_pass += self._step_is_colocated
                self._changed.notify_all()

    def _is_training(self) -> bool:
        return self._pass_running or self._clock() - self._pass_ended < _TRAINING_GRACE_S

    # -- hosted fine-tuning -----------------------------------------------------------------

    def begin_pass(self, short_s: float, is_cancelled: Callable[[], bool]) -> PassBudget | None:
        """Select the stream of the calling thread for one pass. Waits for a comparison only."""
        if is_cancelled():
            return None
        if self.busy_until() is not None and self._fixed_share is None:
            self._passes_to_comparison -= 1
            if self._passes_to_comparison <= 0 and self._clock() - self._step_ended < _ACTIVE_S:
                self._compare()
        with self._changed:
            is_serving = self.busy_until() is not None
            self._pass_running, self._pass_has_whole_gpu, self._steps_of_pass = True, not is_serving, 0
        try:
            self._switch_to("partition" if is_serving else "training")
        except BaseException:
            self.end_pass()
            raise
        if is_serving:
            return PassBudget(f"partition {self.share}", short_s, is_serving=True)
        is_recent = self._clock() - self._step_ended < _RECENT_S
        return PassBudget("recent", min(short_s, _RECENT_PASS_S)) if is_recent else PassBudget("full")

    def end_pass(self, *, is_new: bool = False) -> None:
        """The pass has ended. Preparing a pass holds the interpreter, so steps concurrent with it are not counted."""
        with self._changed:
            self._new_passes = self._new_passes + 1 if is_new else 0
            if 0 < self._new_passes <= _MAX_NEW:
                colocated = self._step_durations[True]
                for _ in range(min(self._steps_of_pass, len(colocated))):
                    colocated.pop()
            self._pass_running, self._pass_ended, self._pass_has_whole_gpu = False, self._clock(), False
            self._changed.notify_all()

    def _compare(self) -> None:
        """Pause training for a few steps of the engine, then let the controller adapt the share."""
        self._passes_to_comparison = _PASSES_BETWEEN
        with self._changed:
            colocated_s = list(self._step_durations[True])
            if len(colocated_s) < _MIN_COLOCATED:
                self._passes_to_comparison = 1
                return
            self._pass_ended = -math.inf
            self._step_durations[False].clear()
            pause_s = _PAUSE_FACTOR * _ALONE * statistics.median(colocated_s)
            self._changed.wait_for(lambda: len(self._step_durations[False]) == _ALONE, timeout=pause_s)
            alone_s = list(self._step_durations[False])
            if len(alone_s) < _ALONE:  # the last request has ended
                return
            self._step_durations[True].clear()
        self._last_comparison = {
            "colocated_s": statistics.median(colocated_s),
            "tail_s": tail_latency(colocated_s),
            "alone_s": statistics.median(alone_s),
        }
        has_changed = self._controller.update(colocated_s, alone_s)
        self._passes_to_comparison = _PASSES_AFTER_CHANGE if has_changed else _PASSES_BETWEEN

    # -- both -------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Step times of the engine with and without training at the last comparison, and training's share."""
        return {**self._last_comparison, "training_share": self.share}

    def _select_context(self, use: str) -> GreenContext:
        """For "serving", "training" (on the whole GPU) or a "partition" for training."""
        with _creating:
            if use == "partition" and self.share < 1.0:
                return _partition_context(self._device, self.share)
            return _whole_gpu_contexts(self._device)[0 if use == "serving" else 1]

    def _switch_to(self, use: str) -> None:
        """Switch the calling thread to the stream of this use, ordered after all the thread has launched."""
        if self._device.type != "cuda":
            return
        context, now = self._select_context(use), torch.cuda.current_stream(self._device)
        if now != context.stream:
            context.stream.wait_stream(now)
            torch.cuda.set_stream(context.stream)
            _set_cublas_multiprocessors(context.multiprocessors)


@functools.cache
def _whole_gpu_contexts(device: torch.device) -> tuple[GreenContext, GreenContext]:
    """For serving and for training. One pair per process: CUDA graphs hold memory for each stream."""
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
    low, high = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
    return GreenContext(torch.cuda.Stream(device, priority=high)), GreenContext(torch.cuda.Stream(device, priority=low))  # type: ignore[no-untyped-call]


@functools.cache
def _partition_context(device: torch.device, share: float) -> GreenContext:
    """For training, on a part of the multiprocessors; on all if the driver has no green contexts."""
    count = int(share * torch.cuda.get_device_properties(device).multi_processor_count) // _GRANULARITY * _GRANULARITY
    low, _ = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
    try:
        return GreenContext(*driver.part_stream(device, max(_GRANULARITY, count), low))
    except driver.DriverError as error:
        _log.warning("training and serving share all multiprocessors: %s", error)
        return _whole_gpu_contexts(device)[1]


def _set_cublas_multiprocessors(multiprocessors: int | None) -> None:
    """Let cuBLAS choose kernels for this many multiprocessors on the calling thread; None for all."""
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        failed = ctypes.CDLL(f"libcublas.so.{major}").cublasSetSmCountTarget(handle, ctypes.c_int(multiprocessors or 0))
    except (OSError, AttributeError) as error:
        failed = error
    if failed:
        _warn_once(f"cuBLAS chooses its kernels for a whole GPU: {failed}")


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)
