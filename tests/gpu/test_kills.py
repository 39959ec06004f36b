"""Tenants and executors killed at any moment, a hundred times: no hang, no lost GPU memory, no effect on others.

`make kills` takes about two minutes on a GPU. Settings: SYMBIOSIS_KILLS (number of kills, 100), SYMBIOSIS_KILLS_SEED
(printed by a failure, repeats the same moments), SYMBIOSIS_KILLS_DEVICE (cuda; cpu checks the test itself, without direct
tenants and GPU memory).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import kill_roles

DEVICE = os.environ.get("SYMBIOSIS_KILLS_DEVICE", "cuda")
COUNT = int(os.environ.get("SYMBIOSIS_KILLS", "100"))
SEED = int(os.environ.get("SYMBIOSIS_KILLS_SEED") or random.SystemRandom().randrange(1 << 32))
ON_GPU = DEVICE != "cpu"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # every wait has its own deadline: this one is for errors of the test
    pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONCURRENT = 5
START_S = 60.0  # a process starts, connects, makes its first call
REPLY_S = 20.0  # a started process replies to a command
LOST_S = 20.0  # a tenant detects the death of its executor
END_S = 20.0  # a process ends, by itself or killed
TIDY_S = 60.0  # the executor detects dead peers: every 10 s it checks those silent for 10 s
GRACE_S = 5.0
SPARE_BYTES = 64 << 20
MODES = ("executor", "direct") if ON_GPU else ("executor", "executor")
KINDS = [(mode, work) for mode in MODES for work in ("train", "generate")]

_FORKS = get_context("forkserver")
_lock = threading.Lock()  # of two threads that read an exit code at once, one gets a wrong one


class Child:
    """A process with a pipe. Every wait has a deadline, after which an error shows where the process is."""

    def __init__(self, group: ProcessGroup, name: str, role: Callable[..., None], *arguments: Any) -> None:
        self.name, self._group = f"{name} (seed {SEED})", group
        self.pipe, theirs = _FORKS.Pipe()
        self._process = _FORKS.Process(target=role, args=(theirs, str(group.stacks), DEVICE, *arguments), daemon=True)
        with _lock:
            self._process.start()
        theirs.close()
        self.pid: int = self._process.pid

    def receive(self, seconds: float, what: str) -> Any:
        try:
            if self.pipe.poll(seconds):
                return self.pipe.recv()
        except (EOFError, OSError):
            raise AssertionError(f"{self.name} died by itself, waited for: {what}; see its stderr") from None
        raise self.hang_error(seconds, what)

    def send(self, word: Any) -> None:
        with contextlib.suppress(OSError):  # `receive` or `end` finds a dead process
            self.pipe.send(word)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def is_alive(self) -> bool:
        return not connection.wait([self._process.sentinel], 0)

    def end(self, seconds: float = END_S) -> int:
        """The exit code of a process that is about to end. No zombie is left."""
        deadline = time.monotonic() + seconds
        if not connection.wait([self._process.sentinel], seconds):
            raise self.hang_error(seconds, "its end")
        with _lock:
            self._process.join(1)
            code = self._process.exitcode
        while Path(f"/proc/{self.pid}").exists():
            if time.monotonic() > deadline:
                raise self.hang_error(seconds, "the end of its entry in /proc")
            time.sleep(0.01)
        self.pipe.close()
        self._group.running.discard(self)
        return code

    def hang_error(self, seconds: float, what: str) -> AssertionError:
        others = [child for child in list(self._group.running) if child is not self and child.name.startswith(("exec", "byst"))]
        stacks = "\n\n".join(child.stacks() for child in (self, *others))
        return AssertionError(f"{self.name} hangs: waited {seconds:.0f} s for {what}\n\n{stacks}")

    def stacks(self) -> str:
        """The stacks of all threads, after those of a step that took too long."""
        file = self._group.stacks / str(self.pid)
        size = file.stat().st_size if file.exists() else 0
        status = "gone"
        with contextlib.suppress(OSError):
            if size or file.exists():  # else the signal has no handler
                os.kill(self.pid, signal.SIGUSR1)
            for _ in range(20):
                time.sleep(0.1)
                if file.exists() and file.stat().st_size > size:
                    break
            status = "".join(Path(f"/proc/{self.pid}/status").read_text().splitlines(keepends=True)[:3])
        return f"--- {self.name}, process {self.pid}\n{status}\n{file.read_text() if file.exists() else 'not started'}"


class ProcessGroup:
    """All processes of a test, killed at its end in any case."""

    def __init__(self, stacks: Path) -> None:
        self.stacks = stacks
        self.running: set[Child] = set()

    def _start(self, *arguments: Any) -> Child:
        child = Child(self, *arguments)
        self.running.add(child)
        return child

    def executor(self, name: str) -> Child:
        return self._start(f"executor {name}", kill_roles.executor)

    def bystander(self) -> Child:
        return self._start("bystander", kill_roles.bystander)

    def tenant(self, name: str, mode: str, work: str, *, closes: bool = True) -> Child:
        return self._start(f"{name}, {mode} {work}", kill_roles.tenant, mode, work, closes, GRACE_S)

    def close(self) -> None:
        for child in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        for child in list(self.running):
            child.end()


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroup]:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a library that counts GPUs on import must not initialise CUDA
    _FORKS.set_forkserver_preload([kill_roles.__name__])
    print(f"{COUNT} kills with SYMBIOSIS_KILLS_SEED={SEED}")
    made = ProcessGroup(tmp_path)
    yield made
    made.close()


def used_bytes() -> int:
    if not ON_GPU:
        return 0
    free, total = torch.cuda.mem_get_info(DEVICE)
    return total - free


def lowest_used_bytes() -> int:
    """The lowest within a while: without processes that have just ended."""
    levels = [used_bytes()]
    while ON_GPU and len(levels) < 20:
        time.sleep(0.1)
        levels.append(used_bytes())
    return min(levels)


def assert_memory_freed(level: int, what: str, seconds: float = END_S) -> None:
    """The GPU's used memory returns to an earlier level, perhaps after a moment."""
    deadline = time.monotonic() + seconds
    while (more := used_bytes() - level) > SPARE_BYTES:
        assert time.monotonic() < deadline, f"{what}: {more >> 20} MiB of GPU memory are gone (seed {SEED})"
        time.sleep(0.1)
    print(f"{what}: {more / (1 << 20):+.1f} MiB of GPU memory" if ON_GPU else f"{what}: no GPU, memory not checked")


def run_concurrently(one: Callable[[int], Any], count: int) -> list[Any]:
    """Rounds 0 to `count` - 1, several at a time; the first failure ends them."""
    with ThreadPoolExecutor(CONCURRENT) as pool:
        return list(pool.map(one, range(count)))


def test_tenants_killed_at_any_moment_affect_no_other_and_leave_no_gpu_memory(group: ProcessGroup):
    at_first, checking = lowest_used_bytes(), threading.Lock()
    executor, bystander = group.executor("of all"), group.bystander()
    address = executor.receive(START_S, "its address")
    bystander.receive(START_S, "its start")
    bystander.send(address)
    word = bystander.receive(START_S, "its first right result")
    assert word == "calling", word

    def check() -> None:
        with checking:
            bystander.send("check")
            word = bystander.receive(REPLY_S, "one more right result")
        assert word == "right", word
        assert executor.is_alive()

    def start_tenant(name: str, kind: tuple[str, str]) -> Child:
        tenant = group.tenant(name, *kind)
        tenant.receive(START_S, "its start")
        tenant.send(address)
        return tenant

    def first_call(tenant: Child) -> None:
        word = tenant.receive(START_S, "its first result")
        assert word == "calling", f"{tenant.name} failed before a kill: {word['text']}"

    def run_to_end(number: int) -> None:
        """Everything once without a kill: what the executor allocates once, such as kernels, is no leak."""
        tenant = start_tenant(f"guest {number}", KINDS[number % 4])
        first_call(tenant)
        time.sleep(1)
        tenant.send("stop")
        report = tenant.receive(REPLY_S, "its report")
        assert report["error"] is None, report["text"]
        assert not report["wrong"], f"{tenant.name}: {report}"
        assert tenant.end() == 0
        check()

    def kill_tenant(number: int) -> str:
        rng = random.Random(f"{SEED} tenant {number}")
        connecting = number % 5 == 4
        tenant = start_tenant(f"victim {number}", KINDS[number % 4])
        if connecting:
            time.sleep(rng.uniform(0, 0.5))
        else:
            first_call(tenant)
            time.sleep(rng.random())
        while tenant.pipe.poll(0):
            word = tenant.receive(0, "")
            assert word == "calling", f"{tenant.name} failed before it was killed: {word['text']}"
            connecting = False
        tenant.kill()
        assert tenant.end() == -signal.SIGKILL
        check()
        return f"{'connecting' if connecting else 'calling'}, {' '.join(KINDS[number % 4])}"

    def victims_sessions() -> int:
        executor.send("sessions")
        return executor.receive(REPLY_S, "its number of sessions")

    run_concurrently(run_to_end, CONCURRENT)
    assert victims_sessions() == 0, "closed sessions are still open in the executor"
    check()
    before = lowest_used_bytes()
    print("killed while", dict(Counter(run_concurrently(kill_tenant, COUNT - COUNT // 2))))
    deadline = time.monotonic() + TIDY_S
    while known := victims_sessions():
        assert time.monotonic() < deadline, f"the executor has not ended {known} sessions of dead tenants (seed {SEED})"
        time.sleep(0.5)
    check()
    assert_memory_freed(before, "after the sessions of dead tenants have ended")
    bystander.send("stop")
    steps = bystander.receive(REPLY_S, "its number of steps")
    assert isinstance(steps, int), steps
    print(f"{steps} right steps of the bystander")
    executor.send("stop")
    assert (bystander.end(), executor.end()) == (0, 0)
    assert_memory_freed(at_first, "after all have ended")


def test_executors_killed_at_any_moment_leave_no_tenant_hanging_and_no_gpu_memory(group: ProcessGroup):
    """A tenant in executor mode gets an error. One in direct mode continues with the dead executor's weights.

    The driver keeps memory as long as a process maps it, so the results of direct mode stay right. The test prints the outcome
    of each tenant (pytest -rP).
    """
    at_first = lowest_used_bytes()

    def kill_executor(number: int) -> list[str]:
        rng = random.Random(f"{SEED} executor {number}")
        connecting = number % 5 == 4
        executor = group.executor(str(number))
        works = [("train", "generate")[number // part % 2] for part in (1, 2)]
        tenants = [
            group.tenant(f"tenant of executor {number}", mode, work, closes=rng.random() < 0.5)
            for mode, work in zip(MODES, works, strict=True)
        ]
        address = executor.receive(START_S, "its address")
        for tenant in tenants:
            tenant.receive(START_S, "its start")
        for tenant in tenants:
            tenant.send(address)
        if connecting:
            time.sleep(rng.uniform(0, 0.5))
        else:
            for tenant in tenants:
                word = tenant.receive(START_S, "its first result")
                assert word == "calling", f"{tenant.name} failed before a kill: {word['text']}"
            time.sleep(rng.random())
        executor.kill()
        killed = time.monotonic()
        assert executor.end() == -signal.SIGKILL
        outcomes = []
        for tenant, mode in zip(tenants, MODES, strict=True):
            if mode == "direct":
                time.sleep(0.5)  # so that it uses the memory of the dead executor
                tenant.send("stop")
            report = tenant.receive(LOST_S, "an error or a report after the executor's end")
            while report == "calling":
                report = tenant.receive(LOST_S, "an error or a report after the executor's end")
            outcomes.append(judge(tenant, mode, report, connecting, time.monotonic() - killed))
            assert tenant.end() == 0, f"{tenant.name} did not end normally"
        return outcomes

    def judge(tenant: Child, mode: str, report: dict[str, Any], connecting: bool, seconds: float) -> str:
        when = "connecting" if connecting else "calling"
        if report["error"] is None:
            assert mode == "direct", f"{tenant.name} got no error after its executor's end: {report}"
            assert not report["wrong"], f"{tenant.name} continued with wrong results: {report}"
            return f"{when}, direct: continued, all results right"
        assert report["expected"], f"{tenant.name} got an unexpected error: {report['text']}"
        # The waiting streams were unblocked and read stale memory; the next call failed.
        wrong = f", {report['wrong']} wrong before" if report["wrong"] else ""
        return f"{when}, {mode}: {report['error']} within {next(s for s in (1, 10, 999) if seconds < s)} s{wrong}"

    outcomes = Counter(outcome for each in run_concurrently(kill_executor, COUNT // 2) for outcome in each)
    print("\n".join(f"{count} × {outcome}" for outcome, count in sorted(outcomes.items())))
    assert_memory_freed(at_first, "after all have ended")
