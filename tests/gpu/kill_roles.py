"""The processes of test_kills.py: an executor, tenants that call without end, and a tenant that checks every result.

The fork server imports this module once, so that a process starts within moments. The import must not touch the GPU: a
forked process could not use it afterwards.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import signal
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import LlamaForCausalLM

import symbiosis.app.connect
from tests.conftest import tiny_config
from tests.lora import with_random_lora

if find_spec("triton") is not None:
    import symbiosis.kernels.cross_entropy  # once here, not in every process

STUCK_S = 15.0
"""A step that takes longer writes the stacks of all threads to the process's file."""
_IDS = torch.arange(24).view(2, 12) % 128
_stacks: Any = None


def set_up_process(stacks: str, device: str) -> None:
    """Write stacks on SIGUSR1 and when a step takes too long; initialise the GPU."""
    global _stacks  # noqa: PLW0603 - faulthandler writes to it until the process ends
    _stacks = open(f"{stacks}/{os.getpid()}", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=_stacks, all_threads=True)
    restart_stuck_timer()
    torch.set_num_threads(1)
    if device != "cpu":
        assert not torch.cuda._is_in_bad_fork(), "the fork server has touched the GPU while it imported: see kill_roles.py"
        torch.zeros(1, device=device)


def restart_stuck_timer() -> None:
    faulthandler.dump_traceback_later(STUCK_S, file=_stacks)


def plain(device: str) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config()).eval().requires_grad_(False).to(device)


def train_step(model: Any, device: str) -> Callable[[], list[torch.Tensor]]:
    """A step of a LoRA fine-tune without an update, so that all its results are equal."""
    adapted, ids = with_random_lora(model, ("q_proj", "v_proj", "o_proj")).to(device), _IDS.to(device)

    def step() -> list[torch.Tensor]:
        adapted.zero_grad()
        out = adapted(input_ids=ids, labels=ids)
        out.loss.backward()
        grads = [p.grad.flatten() for p in adapted.parameters() if p.grad is not None]
        return [out.logits.detach().cpu(), torch.cat(grads).cpu()]

    return step


def generate_step(model: Any, device: str) -> Callable[[], list[torch.Tensor]]:
    prompt = _IDS[:, :4].to(device)
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    return lambda: [model.generate(prompt, attention_mask=torch.ones_like(prompt), **options).cpu()]


WORK = {"train": train_step, "generate": generate_step}


def is_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.allclose(f.float(), e.float(), atol=1e-4, rtol=1e-3) for f, e in zip(found, expected, strict=True))


def executor(pipe: Connection, stacks: str, device: str) -> None:
    """Serves; on command sends the number of victims' sessions, or stops."""
    set_up_process(stacks, device)
    faulthandler.cancel_dump_traceback_later()  # an executor has no steps
    with symbiosis.Executor(plain(device), device=device) as served:
        pipe.send(served.listen("shm://"))
        while pipe.recv() != "stop":
            tenants = served.stats()["tenants"]
            pipe.send(sum(figures["sessions"] for name, figures in tenants.items() if name != "bystander"))


def bystander(pipe: Connection, stacks: str, device: str) -> None:
    """Checks every result; on command confirms one more result, of a call that began after the command."""
    set_up_process(stacks, device)
    expected = train_step(plain(device), device)()
    pipe.send("started")
    address = pipe.recv()
    try:
        model = symbiosis.connect(address, device=device, mode="executor", name="bystander", grace_s=60)
        step, steps = train_step(model, device), 0

        def check() -> None:
            nonlocal steps
            restart_stuck_timer()
            steps += 1
            found = step()
            off = [(f - e).abs().max().item() for f, e in zip(found, expected, strict=True)]
            assert is_same(found, expected), f"step {steps} is wrong: logits and gradients are off by up to {off}"

        check()
        pipe.send("calling")
        while True:
            check()
            if pipe.poll(0):
                if pipe.recv() == "stop":
                    break
                check()
                pipe.send("right")
        model.symbiosis.close()
        pipe.send(steps)
    except BaseException:
        pipe.send(f"the bystander failed:\n{traceback.format_exc()}")
        raise


def tenant(pipe: Connection, stacks: str, device: str, mode: str, work: str, closes: bool, grace_s: float) -> None:
    """Calls until a stop command or a failed call; sends a report, and ends like any other process.

    With `closes` it closes its session; without, the end of the process does.
    """
    set_up_process(stacks, device)
    pipe.send("started")
    address = pipe.recv()
    restart_stuck_timer()
    report: dict[str, Any] = {"steps": 0, "wrong": 0, "error": None}
    model: Any = None
    try:
        model = symbiosis.connect(address, device=device, mode=mode, name="victim", grace_s=grace_s)
        step = WORK[work](model, device)
        first = step()
        pipe.send("calling")
        while not pipe.poll(0):
            restart_stuck_timer()
            report["wrong"] += not is_same(step(), first)
            report["steps"] += 1
    except Exception as error:
        report["error"] = type(error).__name__
        report["expected"] = isinstance(error, RuntimeError)  # as all errors of symbiosis and torch are
        report["text"] = traceback.format_exc()
    restart_stuck_timer()
    pipe.send(report)
    with contextlib.suppress(RuntimeError):
        if closes and model is not None:
            model.symbiosis.close()
    with contextlib.suppress(RuntimeError):
        if device != "cpu":
            torch.cuda.synchronize()  # like the end of a process that was not forked: no stream waits for ever
    step = model = None
    gc.collect()
    atexit._run_exitfuncs()  # a forked process does not run them by itself
