"""Real processes to kill: an executor at a fixed address, and a tenant that trains without end.

A fork server has imported everything, so that a process starts within moments.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection

from tests.network.emulated_link import Host

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["symbiosis.app.connect", "peft", "transformers.models.llama.modeling_llama", "tests.conftest"])


class Process:
    """A child process that reports when it is ready; killed at the end in any case."""

    def __init__(self, role: str, *arguments: str) -> None:
        self._ready, theirs = _FORKS.Pipe(duplex=False)
        self._child = _FORKS.Process(target=ROLES[role], args=(theirs, *arguments), daemon=True)
        self._child.start()
        theirs.close()

    def wait_until_ready(self) -> Process:
        self._ready.recv()  # EOFError if the child has died
        return self

    def signal(self, number: int) -> None:
        os.kill(self._child.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, as the kernel does when memory is short."""
        self._child.kill()
        self._child.join()

    def close(self) -> None:
        self.kill()
        self._ready.close()


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


def train(model, steps: int, between=lambda step: None, snapshots: dict | None = None) -> dict:
    """A small deterministic fine-tune. Returns its adapter; `snapshots` gets the adapter after each step."""
    import torch
    from peft import get_peft_model_state_dict

    from tests.lora import with_random_lora

    model = with_random_lora(model, ("q_proj", "v_proj", "up_proj"), seed=7, init_lora_weights=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    data = torch.Generator().manual_seed(11)
    for step in range(steps):
        ids = torch.randint(0, 128, (2, 12), generator=data)
        between(step)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if snapshots is not None:
            snapshots["adapter"] = {name: t.clone() for name, t in get_peft_model_state_dict(model).items()}
    return get_peft_model_state_dict(model)


def _executor(ready: Connection, address: str, seed: str, namespace: str = "", token: str = "") -> None:
    """In a network namespace, if one is named. Beyond loopback a tenant needs a token."""
    if namespace:
        Host(namespace, "").enter()
    import symbiosis

    executor = symbiosis.Executor(seeded_model(int(seed)), tokens={"ann": token} if token else {})
    executor.listen(address)
    ready.send(True)
    signal.pause()


def _tenant(ready: Connection, address: str) -> None:
    import torch

    import symbiosis

    torch.set_num_threads(1)
    model = symbiosis.connect(address, name="victim")
    ready.send(True)
    ids = torch.randint(0, 128, (4, 200))
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    while True:
        model(inputs_embeds=embedded, labels=ids).loss.backward()


ROLES = {"executor": _executor, "tenant": _tenant}
