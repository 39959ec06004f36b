"""Tenants and executors killed at any moment, a hundred times: no process hangs, no GPU memory is lost, nobody else notices.

`make kills` takes about two minutes on a GPU. Settings: SYMBIOSIS_KILLS (how many, 100), SYMBIOSIS_KILLS_SEED (as a
failure prints it, to kill at the same moments again), SYMBIOSIS_KILLS_DEVICE (cuda; cpu tries the test itself, without
direct tenants and GPU memory).
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
    pytest.mark.timeout(900),  # every wait has a deadline of its own: this is for the test at fault
    pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIDE_BY_SIDE = 5
START_S = 60.0  # a process comes up, connects, makes its first call
ANSWER_S = 20.0  # a process that has come up does what it is asked for
LOST_S = 20.0  # a tenant notices that its executor is dead
END_S = 20.0  # a process that ends, or was killed, is gone
TIDY_S = 60.0  # the executor notices its dead peers: it looks every 10 s for those silent for 10 s
GRACE_S = 5.0
SPARE_BYTES = 64 << 20
MODES = ("executor", "direct") if ON_GPU else ("executor", "executor")
KINDS = [(mode, work) for mode in MODES for work in ("train", "generate")]

_FORKS = get_context("forkserver")
_lock = threading.Lock()  # of two threads that ask for an exit code at once, one gets a wrong one


class Child:
    """A process with a pipe to it. Every wait ends: what is waited for comes, or an error tells where the process is."""

    def __init__(self, family: Family, name: str, role: Callable[..., None], *arguments: Any) -> None:
        self.name, self._family = f"{name} (seed {SEED})", family
        self.pipe, theirs = _FORKS.Pipe()
        self._process = _FORKS.Process(target=role, args=(theirs, str(family.stacks), DEVICE, *arguments), daemon=True)
        with _lock:
            self._process.start()
        theirs.close()
        self.pid: int = self._process.pid

    def hear(self, seconds: float, what: str) -> Any:
        try:
            if self.pipe.poll(seconds):
                return self.pipe.recv()
        except (EOFError, OSError):
            raise AssertionError(f"{self.name} died by itself, waited for: {what}; see its stderr") from None
        raise self.hung(seconds, what)

    def say(self, word: Any) -> None:
        with contextlib.suppress(OSError):  # whoever is gone is found by `hear` or `end`
            self.pipe.send(word)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def is_alive(self) -> bool:
        return not connection.wait([self._process.sentinel], 0)

    def end(self, seconds: float = END_S) -> int:
        """The exit code of a process that is about to end. No zombie is left."""
        deadline = time.monotonic() + seconds
        if not connection.wait([self._process.sentinel], seconds):
            raise self.hung(seconds, "its end")
        with _lock:
            self._process.join(1)
            code = self._process.exitcode
        while Path(f"/proc/{self.pid}").exists():
            if time.monotonic() > deadline:
                raise self.hung(seconds, "its entry in /proc to go")
            time.sleep(0.01)
        self.pipe.close()
        self._family.living.discard(self)
        return code

    def hung(self, seconds: float, what: str) -> AssertionError:
        around = [child for child in list(self._family.living) if child is not self and child.name.startswith(("exec", "byst"))]
        places = "\n\n".join(child.where() for child in (self, *around))
        return AssertionError(f"{self.name} hangs: waited {seconds:.0f} s for {what}\n\n{places}")

    def where(self) -> str:
        """The stacks of all its threads; what it wrote when a step took too long comes first."""
        file = self._family.stacks / str(self.pid)
        size = file.stat().st_size if file.exists() else 0
        status = "gone"
        with contextlib.suppress(OSError):
            if size or file.exists():  # else nobody would catch the signal
                os.kill(self.pid, signal.SIGUSR1)
            for _ in range(20):
                time.sleep(0.1)
                if file.exists() and file.stat().st_size > size:
                    break
            status = "".join(Path(f"/proc/{self.pid}/status").read_text().splitlines(keepends=True)[:3])
        return f"--- {self.name}, process {self.pid}\n{status}\n{file.read_text() if file.exists() else 'it has not begun'}"


class Family:
    """All processes of a test, killed at its end whatever happens."""

    def __init__(self, stacks: Path) -> None:
        self.stacks = stacks
        self.living: set[Child] = set()

    def _born(self, *arguments: Any) -> Child:
        child = Child(self, *arguments)
        self.living.add(child)
        return child

    def executor(self, name: str) -> Child:
        return self._born(f"executor {name}", kill_roles.executor)

    def bystander(self) -> Child:
        return self._born("bystander", kill_roles.bystander)

    def tenant(self, name: str, mode: str, work: str, *, polite: bool = True) -> Child:
        return self._born(f"{name}, {mode} {work}", kill_roles.tenant, mode, work, polite, GRACE_S)

    def close(self) -> None:
        for child in list(self.living):
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        for child in list(self.living):
            child.end()


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # should a library ask for GPUs on import: not by starting CUDA
    _FORKS.set_forkserver_preload([kill_roles.__name__])
    print(f"{COUNT} kills with SYMBIOSIS_KILLS_SEED={SEED}")
    made = Family(tmp_path)
    yield made
    made.close()


def used_bytes() -> int:
    if not ON_GPU:
        return 0
    free, total = torch.cuda.mem_get_info(DEVICE)
    return total - free


def level_of_memory() -> int:
    """The lowest within a while: whoever has just ended is no part of it."""
    levels = [used_bytes()]
    while ON_GPU and len(levels) < 20:
        time.sleep(0.1)
        levels.append(used_bytes())
    return min(levels)


def memory_is_back(level: int, what: str, seconds: float = END_S) -> None:
    """The GPU's memory is at a level of before; the driver may take a moment for it."""
    deadline = time.monotonic() + seconds
    while (more := used_bytes() - level) > SPARE_BYTES:
        assert time.monotonic() < deadline, f"{what}: {more >> 20} MiB of GPU memory are gone (seed {SEED})"
        time.sleep(0.1)
    print(f"{what}: {more / (1 << 20):+.1f} MiB of GPU memory" if ON_GPU else f"{what}: no GPU, no look at its memory")


def side_by_side(one: Callable[[int], Any], count: int) -> list[Any]:
    """Rounds 0 to `count` - 1, several at a time; the first that fails ends it."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return list(pool.map(one, range(count)))


def test_tenants_killed_at_any_moment_are_noticed_by_nobody_and_leave_no_gpu_memory(family: Family):
    at_first, asking = level_of_memory(), threading.Lock()
    executor, bystander = family.executor("of all"), family.bystander()
    address = executor.hear(START_S, "its address")
    bystander.hear(START_S, "its start")
    bystander.say(address)
    word = bystander.hear(START_S, "its first right result")
    assert word == "calling", word

    def check() -> None:
        with asking:
            bystander.say("check")
            word = bystander.hear(ANSWER_S, "one more right result")
        assert word == "right", word
        assert executor.is_alive()

    def meet(name: str, kind: tuple[str, str]) -> Child:
        tenant = family.tenant(name, *kind)
        tenant.hear(START_S, "its start")
        tenant.say(address)
        return tenant

    def first_call(tenant: Child) -> None:
        word = tenant.hear(START_S, "its first result")
        assert word == "calling", f"{tenant.name} failed before anybody was killed: {word['text']}"

    def live(number: int) -> None:
        """Everything once without a kill: what the executor keeps for good, such as kernels, is not a leak."""
        tenant = meet(f"guest {number}", KINDS[number % 4])
        first_call(tenant)
        time.sleep(1)
        tenant.say("stop")
        report = tenant.hear(ANSWER_S, "its report")
        assert report["error"] is None, report["text"]
        assert not report["wrong"], f"{tenant.name}: {report}"
        assert tenant.end() == 0
        check()

    def die(number: int) -> str:
        rng = random.Random(f"{SEED} tenant {number}")
        connecting = number % 5 == 4
        tenant = meet(f"victim {number}", KINDS[number % 4])
        if connecting:
            time.sleep(rng.uniform(0, 0.5))
        else:
            first_call(tenant)
            time.sleep(rng.random())
        while tenant.pipe.poll(0):
            word = tenant.hear(0, "")
            assert word == "calling", f"{tenant.name} failed before it was killed: {word['text']}"
            connecting = False
        tenant.kill()
        assert tenant.end() == -signal.SIGKILL
        check()
        return f"{'connecting' if connecting else 'calling'}, {' '.join(KINDS[number % 4])}"

    def victims_known() -> int:
        executor.say("sessions")
        return executor.hear(ANSWER_S, "its figures")

    side_by_side(live, SIDE_BY_SIDE)
    assert victims_known() == 0, "tenants that said goodbye are still known"
    check()
    before = level_of_memory()
    print("killed while", dict(Counter(side_by_side(die, COUNT - COUNT // 2))))
    deadline = time.monotonic() + TIDY_S
    while known := victims_known():
        assert time.monotonic() < deadline, f"the executor has not noticed {known} sessions of the dead (seed {SEED})"
        time.sleep(0.5)
    check()
    memory_is_back(before, "after the dead were noticed")
    bystander.say("stop")
    steps = bystander.hear(ANSWER_S, "its last word")
    assert isinstance(steps, int), steps
    print(f"{steps} right steps of the bystander")
    executor.say("stop")
    assert (bystander.end(), executor.end()) == (0, 0)
    memory_is_back(at_first, "after all have ended")


def test_executors_killed_at_any_moment_leave_no_tenant_hanging_and_no_gpu_memory(family: Family):
    """A tenant that calls gets an error. One that computes itself goes on with the dead executor's weights.

    The driver keeps memory for as long as anybody maps it, so the latter's results stay right; what each got is
    printed (pytest -rP).
    """
    at_first = level_of_memory()

    def outlive(number: int) -> list[str]:
        rng = random.Random(f"{SEED} executor {number}")
        connecting = number % 5 == 4
        executor = family.executor(str(number))
        works = [("train", "generate")[number // part % 2] for part in (1, 2)]
        tenants = [
            family.tenant(f"tenant of executor {number}", mode, work, polite=rng.random() < 0.5)
            for mode, work in zip(MODES, works, strict=True)
        ]
        address = executor.hear(START_S, "its address")
        for tenant in tenants:
            tenant.hear(START_S, "its start")
        for tenant in tenants:
            tenant.say(address)
        if connecting:
            time.sleep(rng.uniform(0, 0.5))
        else:
            for tenant in tenants:
                word = tenant.hear(START_S, "its first result")
                assert word == "calling", f"{tenant.name} failed before anybody was killed: {word['text']}"
            time.sleep(rng.random())
        executor.kill()
        killed = time.monotonic()
        assert executor.end() == -signal.SIGKILL
        outcomes = []
        for tenant, mode in zip(tenants, MODES, strict=True):
            if mode == "direct":
                time.sleep(0.5)  # let it use the memory whose owner is gone
                tenant.say("stop")
            report = tenant.hear(LOST_S, "an error or a report after the executor's end")
            while report == "calling":
                report = tenant.hear(LOST_S, "an error or a report after the executor's end")
            outcomes.append(judge(tenant, mode, report, connecting, time.monotonic() - killed))
            assert tenant.end() == 0, f"{tenant.name} did not end normally"
        return outcomes

    def judge(tenant: Child, mode: str, report: dict[str, Any], connecting: bool, seconds: float) -> str:
        when = "connecting" if connecting else "calling"
        if report["error"] is None:
            assert mode == "direct", f"{tenant.name} noticed nothing of its executor's end: {report}"
            assert not report["wrong"], f"{tenant.name} went on with wrong results: {report}"
            return f"{when}, direct: went on, all results right"
        assert report["meant"], f"{tenant.name} got an error that is nobody's: {report['text']}"
        # the streams that waited for the dead executor went on with whatever lay there, and the call after that failed
        wrong = f", {report['wrong']} wrong before" if report["wrong"] else ""
        return f"{when}, {mode}: {report['error']} within {next(s for s in (1, 10, 999) if seconds < s)} s{wrong}"

    outcomes = Counter(outcome for each in side_by_side(outlive, COUNT // 2) for outcome in each)
    print("\n".join(f"{count} × {outcome}" for outcome, count in sorted(outcomes.items())))
    memory_is_back(at_first, "after all have ended")
