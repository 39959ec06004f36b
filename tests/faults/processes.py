"""Real processes to be killed: an executor at a fixed address, and a tenant that trains or calls without end.

Run as `python -m tests.faults.processes executor ADDRESS SEED` or `… tenant ADDRESS [STEPS OUT]`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Process:
    """A child process that says READY; killed at the end, whatever happens."""

    def __init__(self, *arguments: str) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.processes", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def wait_until_ready(self) -> Process:
        for line in self._child.stdout:
            if line.startswith("READY"):
                return self
        raise RuntimeError(f"the child process ended with {self._child.wait()}")

    def signal(self, number: int) -> None:
        self._child.send_signal(number)

    def kill(self) -> None:
        """Like the kernel when memory is short: without a word."""
        self._child.send_signal(signal.SIGKILL)
        self._child.wait()

    def wait(self) -> int:
        return self._child.wait(timeout=120)

    def close(self) -> None:
        if self._child.poll() is None:
            self.kill()
        self._child.stdout.close()


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[Process]:
    child = Process(*arguments)
    try:
        yield child.wait_until_ready()
    finally:
        child.close()


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def seeded_model(seed: int = 0):
    import torch
    from transformers import LlamaForCausalLM

    from tests.conftest import tiny_config

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return LlamaForCausalLM(tiny_config()).eval().requires_grad_(False)


def train(model, steps: int, between=lambda step: None) -> dict:
    """A whole little fine-tune, the same every time: the adapter it ends with."""
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    torch.manual_seed(7)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    data = torch.Generator().manual_seed(11)
    for step in range(steps):
        ids = torch.randint(0, 128, (2, 12), generator=data)
        between(step)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return get_peft_model_state_dict(model)


def _executor(address: str, seed: str) -> None:
    import symbiosis

    executor = symbiosis.Executor(seeded_model(int(seed)))
    executor.listen(address)
    print("READY", flush=True)
    signal.pause()


def _tenant(address: str) -> None:
    import torch

    import symbiosis

    model = symbiosis.connect(address, name="victim")
    print("READY", flush=True)
    ids = torch.randint(0, 128, (4, 200))
    while True:
        model(ids, labels=ids).loss.backward()


if __name__ == "__main__":
    {"executor": _executor, "tenant": _tenant}[sys.argv[1]](*sys.argv[2:])
