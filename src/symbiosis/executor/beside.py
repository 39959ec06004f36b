"""Serving and hosted training at the same time on one GPU: whose streams, on which multiprocessors.

Cores are shared by turns (`turns`); a GPU is not. Decoding waits for memory and training for multiprocessors, so both get
further side by side than one after the other. But a kernel of training fills the whole GPU for as long as it takes, and a
token needs hundreds of kernels: each would wait for a place, whatever its priority. So while answers are served, training
has a part of the multiprocessors, and when nobody is served, all.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from symbiosis.executor.turns import Turns
from symbiosis.links import driver

_SWITCH_S = 5e-4  # serving and training are threads of one interpreter: a token takes milliseconds
_LAST_S = 0.2  # training that ended so recently goes on
_WEIGHT = 0.05  # of the last pass
_log = logging.getLogger("symbiosis")


@dataclass(frozen=True, slots=True)
class Lane:
    """A stream, and how many multiprocessors it has; None for all."""

    stream: Any
    multiprocessors: int | None = None


def turns_on(device: torch.device, share: float | None = None) -> Turns:
    """How serving and training share this device; `share` is training's while answers are served."""
    if device.type == "cuda":
        return Beside(device) if share is None else Beside(device, share)
    return Turns() if share is None else Turns(share)


class Beside(Turns):
    """The thread of the engine and that of hosted training each compute on streams from here from their first pass on."""

    def __init__(
        self, device: torch.device, share: float = 0.6, *, apart: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`share` of the multiprocessors is training's while answers are served; 1.0: all, its kernels only come second.

        `apart`: then serving keeps to the others; else its kernels may go wherever there is room.
        """
        super().__init__(1.0, clock)
        self._device, self._share, self._apart = device, share, apart
        self._lanes: dict[str, Lane] | None = None
        self._trained = False
        """Beside the engine's pass that runs."""
        self._training_ended = -float("inf")
        self._pace: dict[str, float] = {}

    # The engine's

    def __enter__(self) -> None:
        self._trained = self._is_training()
        self._use("served apart" if self._trained and self._apart else "served")
        super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        if self._trained is self._is_training():
            name, seconds = "beside_s" if self._trained else "alone_s", self._ended - self._began
            before = self._pace.get(name, seconds)
            self._pace[name] = before + _WEIGHT * (seconds - before)

    def _is_training(self) -> bool:
        return self._training or self._clock() - self._training_ended < _LAST_S

    # Hosted training's

    def begin_pass(self, short_s: float, is_over: Callable[[], bool]) -> bool | None:
        """Never waits. True: answers are served, and the thread computes on training's part from now on."""
        if is_over():
            return None
        served = self.busy_until() is not None
        self._use("trained beside" if served else "trained")
        self._training = True
        return served

    def end_pass(self) -> None:
        self._training, self._training_ended = False, self._clock()

    # Both

    def figures(self) -> dict[str, float | None]:
        """How long passes of the engine take, alone and beside training, and what training has then."""
        lane = (self._lanes or {}).get("trained beside")
        return {**self._pace, "training_multiprocessors": None if lane is None else lane.multiprocessors}

    def _use(self, name: str) -> None:
        """Let the calling thread compute there, after all it has launched elsewhere."""
        if self._device.type != "cuda":
            return
        with self._changed:
            if self._lanes is None:
                self._lanes = _lanes(self._device, self._share)
                sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        lane, now = self._lanes[name], torch.cuda.current_stream(self._device)
        if now != lane.stream:
            lane.stream.wait_stream(now)
            torch.cuda.set_stream(lane.stream)
            _fit_products(self._device, lane.multiprocessors)


@functools.cache
def _whole(device: torch.device) -> tuple[Lane, Lane]:
    """One pair for the process, as below: CUDA graphs keep memory for each stream."""
    low, high = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
    return Lane(torch.cuda.Stream(device, priority=high)), Lane(torch.cuda.Stream(device, priority=low))  # type: ignore[no-untyped-call]


@functools.cache
def _parts(device: torch.device, count: int) -> tuple[Lane, Lane]:
    """Raises `DriverError`."""
    low, high = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
    trained, served = (Lane(*each) for each in driver.part_streams(device, count, (low, high)))
    return served, trained


def _lanes(device: torch.device, share: float) -> dict[str, Lane]:
    served, trained = apart, beside = _whole(device)
    if share < 1.0:
        count = round(share * torch.cuda.get_device_properties(device).multi_processor_count)
        try:
            apart, beside = _parts(device, max(1, count))
        except driver.DriverError as error:
            _log.warning("training and serving share all multiprocessors: %s", error)
    return {"served": served, "served apart": apart, "trained": trained, "trained beside": beside}


def _fit_products(device: torch.device, multiprocessors: int | None) -> None:
    """Let the library of matrix products choose its kernels, on this thread, for so many multiprocessors."""
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        ctypes.CDLL(f"libcublas.so.{major}").cublasSetSmCountTarget(handle, ctypes.c_int(multiprocessors or 0))
    except (OSError, AttributeError) as error:
        _log.warning("matrix products are made for a whole GPU: %s", error)
