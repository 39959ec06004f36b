"""Serving and hosted training at the same time on one GPU: whose streams, on which multiprocessors.

Cores are shared by turns (`turns`); a GPU is not. Decoding waits for memory and training for multiprocessors, so both get
further side by side than one after the other. But a kernel of training fills the whole GPU for as long as it takes, and a
token needs hundreds of kernels: each would wait for a place, whatever its priority. So while answers are served, training
has a part of the multiprocessors, and when nobody is served, all. For a while its passes are short then, and who comes
waits for the one that runs: an answer that begins a moment later is better than one whose words come haltingly.

How large that part may be depends on the model, the load and the GPU (its power is shared too). So it is found out: now
and then training pauses for a few passes of the engine, and by how much these are faster, the part becomes smaller or larger.
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
from types import TracebackType
from typing import Any

import torch

from symbiosis.device_sharing.cpu_time_share import CpuTimeShare, Permit
from symbiosis.device_sharing.share_controller import ShareController, tail
from symbiosis.errors import SymbiosisError
from symbiosis.gpu import driver

SLOWDOWN = 1.3
"""How many times as long a token may take while jobs train."""
_SWITCH_S = 5e-4  # serving and training are threads of one interpreter: a token takes milliseconds
_LAST_S = 0.2  # training that ended so recently goes on
_LATELY_S = 60.0  # somebody was served no longer ago: the next may come at any moment
_LATELY_PASS_S = 0.1  # who comes waits for half of it, on average; shorter ones cost a large model its speed
_PATIENCE_S = 0.15  # for a pass that takes longer after all
_EIGHT = 8  # and rounded down to so many multiprocessors: drivers round up
_FEW, _MANY = 8, 40  # passes of training before a comparison: after a change, and else
_BESIDE, _COMPARED = 64, 12  # passes of the engine with training, at least, and without
_REMEMBERED = 256  # of those with it
_NEW = 8  # passes of training in a row that had to be made ready: then that is how it is
_PAUSES = 1.5  # times what they took beside training, at most
_LEAST, _MOST = 1.2, 10.0  # what may be allowed
_ACTIVE_S = 0.05  # the engine has computed something no longer ago
_making = threading.Lock()
_log = logging.getLogger("symbiosis")


@dataclass(frozen=True, slots=True)
class GreenContext:
    """A stream, and how many multiprocessors it has; None for all."""

    stream: Any
    multiprocessors: int | None = None


def turns_on(device: torch.device, share: float | None = None, slowdown: float | None = None) -> CpuTimeShare:
    """How serving and training share this device, while answers are served.

    `share` is training's: of the time on a CPU, of the multiprocessors on a GPU. There it may be found out instead, so
    that a token takes `slowdown` times as long as without training. Raises `SymbiosisError`.
    """
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
        raise SymbiosisError(f"training_share={share!r:.80}: expected more than 0, at most 1")
    if device.type == "cuda":
        if share is not None and slowdown is not None:
            raise SymbiosisError("training's share is given, and a slowdown by which to find it: expected one of them")
        return GpuPartition(device, share, SLOWDOWN if slowdown is None else slowdown)
    if slowdown is not None:
        raise SymbiosisError(f"a slowdown is for a GPU; on {device.type} training has a share of the time")
    return CpuTimeShare() if share is None else CpuTimeShare(share)


class GpuPartition(CpuTimeShare):
    """The thread of the engine and that of hosted training each compute on streams from here from their first pass on."""

    _idle_s = 0.1  # between two passes of the engine there are a few milliseconds as long as it has anything to do

    def __init__(
        self,
        device: torch.device,
        share: float | None = None,
        slowdown: float = SLOWDOWN,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`share` of the multiprocessors is training's while answers are served; None: as many as `slowdown` allows.

        1.0: all, its kernels only come second.
        """
        super().__init__(1.0, clock)
        if not _LEAST <= slowdown <= _MOST:
            raise SymbiosisError(f"a slowdown of {slowdown}: expected {_LEAST} to {_MOST}")
        self._device, self._given = device, share
        self._steering = ShareController(slowdown)
        self._trained = False
        """Beside the engine's pass that runs."""
        self._training_ended = -math.inf
        self._has_all = False
        """Training's pass that runs has the whole GPU."""
        self._recent: dict[bool, deque[float]] = {True: deque(maxlen=_REMEMBERED), False: deque(maxlen=_COMPARED)}
        """Seconds of the engine's passes, beside training and not."""
        self._during = 0
        """How many of them came since training's pass began."""
        self._new = 0
        """The last so many passes of training had to be made ready."""
        self._pace: dict[str, float] = {}
        self._due = _FEW

    @property
    def share(self) -> float:
        """Training's, of the multiprocessors, while answers are served."""
        return self._steering.share if self._given is None else self._given

    # The engine's

    def __enter__(self) -> None:
        with self._changed:
            was_idle, self._wanted = self.busy_until() is None, True
            if was_idle and self._has_all:
                self._changed.wait_for(lambda: not self._has_all, timeout=_PATIENCE_S)
        self._trained = self._is_training()
        self._use(self._lane("served"))
        super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        if kind is None and self._trained is self._is_training():
            with self._changed:
                self._recent[self._trained].append(self._ended - self._began)
                self._during += self._trained
                self._changed.notify_all()

    def _is_training(self) -> bool:
        return self._training or self._clock() - self._training_ended < _LAST_S

    # Hosted training's

    def begin_pass(self, short_s: float, is_over: Callable[[], bool]) -> Permit | None:
        """Never waits, but for a comparison; the thread computes on training's part from now on if answers are served."""
        if is_over():
            return None
        if self.busy_until() is not None and self._given is None:
            self._due -= 1
            if self._due <= 0 and self._clock() - self._ended < _ACTIVE_S:
                self._compare()
        with self._changed:
            served = self.busy_until() is not None
            self._training, self._has_all, self._during = True, not served, 0
        try:
            self._use(self._lane("beside" if served else "trained"))
        except BaseException:
            self.end_pass()
            raise
        if served:
            return Permit(f"beside {self.share}", short_s, beside=True)
        lately = self._clock() - self._ended < _LATELY_S
        return Permit("lately", min(short_s, _LATELY_PASS_S)) if lately else Permit("full")

    def end_pass(self, *, is_new: bool = False) -> None:
        """Passes that have to be made ready take the interpreter, too: what the engine's took meanwhile does not count."""
        with self._changed:
            self._new = self._new + 1 if is_new else 0
            if 0 < self._new <= _NEW:
                for _ in range(min(self._during, len(self._recent[True]))):
                    self._recent[True].pop()
            self._training, self._training_ended, self._has_all = False, self._clock(), False
            self._changed.notify_all()

    def _compare(self) -> None:
        """Let the engine compute by itself for a moment, and give training less or more."""
        self._due = _MANY
        with self._changed:
            beside = list(self._recent[True])
            if len(beside) < _BESIDE:
                self._due = 1
                return
            self._training_ended = -math.inf
            self._recent[False].clear()
            pause_s = _PAUSES * _COMPARED * statistics.median(beside)
            self._changed.wait_for(lambda: len(self._recent[False]) == _COMPARED, timeout=pause_s)
            alone = list(self._recent[False])
            if len(alone) < _COMPARED:  # the last answer has ended
                return
            self._recent[True].clear()
        self._pace = {"beside_s": statistics.median(beside), "tail_s": tail(beside), "alone_s": statistics.median(alone)}
        self._due = _FEW if self._steering.compare(beside, alone) else _MANY

    # Both

    def figures(self) -> dict[str, float]:
        """How long passes of the engine take, alone and beside training, and what training has then."""
        return {**self._pace, "training_share": self.share}

    def _lane(self, whose: str) -> GreenContext | None:
        """Serving's, training's, or training's while answers are served; None where there are no streams."""
        if self._device.type != "cuda":
            return None
        with _making:
            if whose == "beside" and self.share < 1.0:
                return _part(self._device, self.share)
            return _whole(self._device)[0 if whose == "served" else 1]

    def _use(self, lane: GreenContext | None) -> None:
        """Let the calling thread compute there, after all it has launched elsewhere."""
        if lane is None:
            return
        now = torch.cuda.current_stream(self._device)
        if now != lane.stream:
            lane.stream.wait_stream(now)
            torch.cuda.set_stream(lane.stream)
            _fit_products(lane.multiprocessors)


@functools.cache
def _whole(device: torch.device) -> tuple[GreenContext, GreenContext]:
    """Serving's and training's, one pair for the process, as below: CUDA graphs keep memory for each stream."""
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
    low, high = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
    return GreenContext(torch.cuda.Stream(device, priority=high)), GreenContext(torch.cuda.Stream(device, priority=low))  # type: ignore[no-untyped-call]


@functools.cache
def _part(device: torch.device, share: float) -> GreenContext:
    """Training's, on a part of the multiprocessors; on all if the driver cannot."""
    count = int(share * torch.cuda.get_device_properties(device).multi_processor_count) // _EIGHT * _EIGHT
    low, _ = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
    try:
        return GreenContext(*driver.part_stream(device, max(_EIGHT, count), low))
    except driver.DriverError as error:
        _log.warning("training and serving share all multiprocessors: %s", error)
        return _whole(device)[1]


def _fit_products(multiprocessors: int | None) -> None:
    """Let the library of matrix products choose its kernels, on this thread, for so many multiprocessors."""
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        failed = ctypes.CDLL(f"libcublas.so.{major}").cublasSetSmCountTarget(handle, ctypes.c_int(multiprocessors or 0))
    except (OSError, AttributeError) as error:
        failed = error
    if failed:
        _tell_once(f"matrix products are made for a whole GPU: {failed}")


@functools.cache
def _tell_once(what: str) -> None:
    _log.warning(what)
