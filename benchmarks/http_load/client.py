"""The load client: processes that send requests over raw sockets and note when frames come.

It parses no JSON while it measures: of each answer it counts frames, and checks status, number of tokens, finish_reason and
[DONE] at its end. Answers that are kept whole are checked frame by frame, after the measurement or, in a soak, in words.
"""

from __future__ import annotations

import gc
import heapq
import json
import multiprocessing as mp
import select
import socket
import struct
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from types import TracebackType
from typing import Any

from benchmarks.http_load.answer import Answer
from benchmarks.http_load.connection import Connection
from benchmarks.http_load.workload import Request, Workload

_START_S = 0.3
"""From the command to a run until its start, in which requests are encoded and connections opened."""
_IN, _OUT = select.EPOLLIN | select.EPOLLRDHUP, select.EPOLLOUT
_RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: closing sends a reset
_MAX_EVENTS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """What readers do in the middle of answers: shares of the requests."""

    cut: float = 0.0
    """The connection is closed."""
    stalled: float = 0.0
    """Nothing is read for `pause_s`."""
    stalled_for_good: float = 0.0
    pause_s: float = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The part of a workload that one process sends."""

    address: tuple[str, int]
    requests: Sequence[tuple[int, Request]]
    connections: int | None
    """None: as many as are needed at the arrivals."""
    stream: bool
    start: float
    keep_every: int
    """Of so many answers one is kept whole and checked; 0: none."""
    is_in_words: bool = False
    """Answers are texts of `vocabulary`."""
    until: float | None = None
    """Send the requests over and over until then."""
    faults: Faults | None = None
    has_small_buffers: bool = False


@dataclass(kw_only=True)
class Report:
    """What one process, or all of them, saw."""

    answers: list[Answer] = field(default_factory=list)
    """Without arrivals."""
    first_s: array[float] = field(default_factory=lambda: array("d"))
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    """Of readers that never stall."""
    frames: int = 0
    cpu_s: list[float] = field(default_factory=list)
    """Of each process."""
    differing: int = 0
    """Answers with another text than the first of the same request."""
    kept: int = 0
    """Answers that were kept whole."""


def merge(reports: Iterable[Report]) -> Report:
    merged = Report()
    for report in reports:
        for name in ("answers", "first_s", "gaps_s", "cpu_s"):
            getattr(merged, name).extend(getattr(report, name))
        for name in ("frames", "differing", "kept"):
            setattr(merged, name, getattr(merged, name) + getattr(report, name))
    return merged


def encode(request: Request, address: tuple[str, int], *, stream: bool) -> bytes:
    body = json.dumps(request.body(stream=stream), separators=(",", ":")).encode()
    key = f"Authorization: Bearer {request.key}\r\n" if request.key else ""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nContent-Type: application/json\r\n{key}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class _Loop:
    """One run in one process: an epoll loop."""

    def __init__(self, task: Task) -> None:
        self._task, self._epoll = task, select.epoll()
        self._data = [encode(request, task.address, stream=task.stream) for _, request in task.requests]
        self._due = [None if each.arrival_s is None else task.start + each.arrival_s for _, each in task.requests]
        self._next, self._is_closed = 0, task.connections is not None
        self._by_fd: dict[int, Connection] = {}
        self._idle: list[Connection] = []
        self._num_reading = 0
        self._faults: dict[int, tuple[str, int]] = {}  # by file descriptor: what happens, and after how many frames
        self._resumes: list[tuple[float, int]] = []  # a heap: when, and the file descriptor of the stalled connection
        self._stalled: set[int] = set()
        self._report, self._kept = Report(), list[tuple[Answer, bytes]]()
        self._random, self._texts = Random(task.start), dict[int, bytes]()
        for _ in range(task.connections or 0):
            self._connect()

    def run(self) -> Report:
        gc.disable()
        time.sleep(max(0.0, self._task.start - time.monotonic()))
        cpu_s = time.process_time()
        while self._send_due() or self._num_reading:
            for fd, mask in self._epoll.poll(self._timeout_s(), _MAX_EVENTS):
                connection = self._by_fd.get(fd)
                if connection is None:
                    continue
                if mask & _OUT:
                    self._flush(connection)
                if mask & ~_OUT and connection.read():
                    self._finish(connection)
                elif self._faults and fd in self._faults:
                    self._try_fault(connection)
            if self._resumes:
                self._resume()
        self._report.cpu_s.append(time.process_time() - cpu_s)
        for connection in [*self._by_fd.values()]:
            self._drop(connection)
        for answer, body in self._kept:
            self._check(answer, body)
        gc.enable()
        return self._report

    def _timeout_s(self) -> float:
        if self._is_closed and not self._resumes:
            return 1.0
        now, times = time.monotonic(), [each[0] for each in self._resumes[:1]]
        if self._next < len(self._due) and (due := self._due[self._next]) is not None:
            times.append(due)
        return min(1.0, max(0.0, min(times) - now)) if times else 1.0

    # Requests

    def _connect(self) -> None:
        connection = Connection(self._task.address, has_small_buffers=self._task.has_small_buffers)
        self._by_fd[connection.fd] = connection
        self._epoll.register(connection.fd, _IN)
        self._idle.append(connection)

    def _drop(self, connection: Connection) -> None:
        self._report.frames += connection.frames
        if connection.fd not in self._stalled:
            self._epoll.unregister(connection.fd)
        self._stalled.discard(connection.fd)
        self._faults.pop(connection.fd, None)
        del self._by_fd[connection.fd]
        connection.close()

    def _send_due(self) -> bool:
        """Send what is due; False if nothing is left to be sent."""
        task = self._task
        if self._is_closed and not self._idle and task.until is None:
            return True
        while True:
            if task.until is not None:
                if time.monotonic() > task.until:
                    return False
                self._next %= len(self._data)
            if self._next >= len(self._data):
                return False
            due = self._due[self._next]
            if due is not None and due > time.monotonic():
                return True
            if not self._idle:
                if task.connections is not None:
                    return True
                self._connect()
            self._begin(self._idle.pop(), self._next, due)
            self._next += 1

    def _begin(self, connection: Connection, place: int, due: float | None) -> None:
        task, (index, request) = self._task, self._task.requests[place]
        answer = Answer(index, time.monotonic() if due is None else due, request.new)
        keep = task.keep_every > 0 and place % task.keep_every == 0
        connection.begin(answer, self._data[place], keep=keep)
        self._num_reading += 1
        if task.faults is not None:
            self._plan_fault(connection, task.faults, request.new)
        if connection.unsent:
            self._epoll.modify(connection.fd, _IN | _OUT)

    def _flush(self, connection: Connection) -> None:
        connection.flush()
        if not connection.unsent:
            self._epoll.modify(connection.fd, _IN)

    def _finish(self, connection: Connection) -> None:
        """The answer is complete, or the connection broken."""
        answer, connection.answer = connection.answer, None
        self._faults.pop(connection.fd, None)
        if answer is None:  # closed between two requests
            self._idle.remove(connection)
        else:
            self._num_reading -= 1
            if not answer.error:
                answer.check(connection.body_end(), stream=self._task.stream)
            self._note(answer)
            if connection.is_whole and not answer.error:
                if self._task.until is None:
                    self._kept.append((answer, connection.body()))
                else:
                    self._check(answer, connection.body())
        if connection.is_broken:
            self._drop(connection)
            if self._task.connections is not None:
                self._connect()
        else:
            self._idle.append(connection)

    def _note(self, answer: Answer) -> None:
        report = self._report
        report.answers.append(answer)
        if answer.arrivals and self._task.stream and answer.status == 200:
            report.first_s.append(answer.arrivals[0] - answer.due)
            if not answer.is_stalled:
                report.gaps_s.extend(answer.gaps())
        answer.arrivals = array("d")

    def _check(self, answer: Answer, body: bytes) -> None:
        """Of an answer that was kept whole."""
        self._report.kept += 1
        if self._task.is_in_words:
            answer.check_words(body)
        if self._task.stream and self._task.until is None:
            answer.check_frames(body)
        first = self._texts.setdefault(answer.request, answer.text)
        self._report.differing += first != answer.text
        answer.text = b""

    # Faults

    def _plan_fault(self, connection: Connection, faults: Faults, new: int) -> None:
        chances = {"cut": faults.cut, "stall": faults.stalled, "stall for good": faults.stalled_for_good}
        place = self._random.random()
        for fault, share in chances.items():
            place -= share
            if place < 0:
                self._faults[connection.fd] = fault, connection.frames + self._random.randrange(1, max(2, new // 4))
                return

    def _try_fault(self, connection: Connection) -> None:
        fault, frames = self._faults[connection.fd]
        if connection.frames < frames or connection.answer is None:
            return
        del self._faults[connection.fd]
        self._num_reading -= 1
        if fault == "cut":
            connection.answer.is_cut = True
            self._note(connection.answer)
            if self._random.random() < 0.5:
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._drop(connection)
            self._connect()
            return
        connection.answer.is_stalled = True
        self._epoll.unregister(connection.fd)
        self._stalled.add(connection.fd)
        if fault == "stall":
            assert self._task.faults is not None
            heapq.heappush(self._resumes, (time.monotonic() + self._task.faults.pause_s, connection.fd))

    def _resume(self) -> None:
        now = time.monotonic()
        while self._resumes and self._resumes[0][0] <= now:
            _, fd = heapq.heappop(self._resumes)
            self._stalled.discard(fd)
            self._epoll.register(fd, _IN)
            self._num_reading += 1


def _serve(pipe: Any) -> None:
    """The process of a client: tasks in, reports out."""
    while (task := pipe.recv()) is not None:
        pipe.send(_Loop(task).run())


class LoadClient:
    """`processes` of clients. A context manager."""

    def __init__(self, processes: int) -> None:
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def pids(self) -> list[int]:
        return [int(process.pid or 0) for process in self._processes]

    def send(self, url: str, workload: Workload, *, keep_every: int, is_in_words: bool = False) -> Report:
        """Send a workload and wait for all answers."""
        used = min(len(self), workload.concurrency or len(self), len(workload.requests))
        start = time.monotonic() + _START_S
        tasks = [
            Task(
                address=parse_url(url),
                requests=[*enumerate(workload.requests)][number::used],
                connections=None if workload.concurrency is None else len(range(number, workload.concurrency, used)),
                stream=workload.stream,
                start=start,
                keep_every=keep_every,
                is_in_words=is_in_words,
            )
            for number in range(used)
        ]
        return merge(self.run(tasks))

    def run(self, tasks: Sequence[Task]) -> list[Report]:
        """One task in each of the first processes."""
        pipes = self._pipes[: len(tasks)]
        for pipe, task in zip(pipes, tasks, strict=True):
            pipe.send(task)
        return [pipe.recv() for pipe in pipes]

    def __enter__(self) -> LoadClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def parse_url(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)
