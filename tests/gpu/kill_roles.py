"""The processes of test_kills.py: an executor, tenants that call without end, and one that checks every number it gets.

The fork server imports this module once, so that each process is there within
moments. Nothing here may touch the GPU on import: a forked process could not
use it any more.
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
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

import symbiosis.app.executor
from tests.conftest import tiny_config

if find_spec("triton") is not None:
    import symbiosis.kernels.cross_entropy  # once here, not in every process

STUCK_S = 15.0
"""A step that takes longer leaves the stacks of all threads in the process's file."""
_IDS = torch.arange(24).view(2, 12) % 128
_stacks: Any = None


def begin(stacks: str, device: str) -> None:
    """Say where this process hangs, when asked (SIGUSR1) or when a step takes too long; make the GPU ready."""
    global _stacks  # noqa: PLW0603 - faulthandler writes to it for as long as the process lives
    _stacks = open(f"{stacks}/{os.getpid()}", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=_stacks, all_threads=True)
    not_stuck()
    torch.set_num_threads(1)
    if device != "cpu":
        assert not torch.cuda._is_in_bad_fork(), "the fork server has touched the GPU while it imported: see kill_roles.py"
        torch.zeros(1, device=device)


def not_stuck() -> None:
    faulthandler.dump_traceback_later(STUCK_S, file=_stacks)


def plain(device: str) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config()).eval().requires_grad_(False).to(device)


def trainer(model: Any, device: str) -> Callable[[], list[torch.Tensor]]:
    """A step of a LoRA fine-tune; nothing is updated, so that its results are the same every time."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    adapted, ids = get_peft_model(model, config).to(device), _IDS.to(device)

    def step() -> list[torch.Tensor]:
        adapted.zero_grad()
        out = adapted(input_ids=ids, labels=ids)
        out.loss.backward()
        grads = [p.grad.flatten() for p in adapted.parameters() if p.grad is not None]
        return [out.logits.detach().cpu(), torch.cat(grads).cpu()]

    return step


def generator(model: Any, device: str) -> Callable[[], list[torch.Tensor]]:
    prompt = _IDS[:, :4].to(device)
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    return lambda: [model.generate(prompt, attention_mask=torch.ones_like(prompt), **options).cpu()]


WORK = {"train": trainer, "generate": generator}


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.allclose(f.float(), e.float(), atol=1e-4, rtol=1e-3) for f, e in zip(found, expected, strict=True))


def executor(pipe: Connection, stacks: str, device: str) -> None:
    """Serves; tells how many sessions victims have, or stops."""
    begin(stacks, device)
    faulthandler.cancel_dump_traceback_later()  # it has no steps
    with symbiosis.Executor(plain(device), device=device) as served:
        pipe.send(served.listen("shm://"))
        while pipe.recv() != "stop":
            tenants = served.stats()["tenants"]
            pipe.send(sum(figures["sessions"] for name, figures in tenants.items() if name != "bystander"))


def bystander(pipe: Connection, stacks: str, device: str) -> None:
    """Checks every result; on demand tells that one more, begun after the demand, was right."""
    begin(stacks, device)
    expected = trainer(plain(device), device)()
    pipe.send("here")
    address = pipe.recv()
    try:
        model = symbiosis.connect(address, device=device, mode="executor", name="bystander", grace_s=60)
        step, steps = trainer(model, device), 0

        def check() -> None:
            nonlocal steps
            not_stuck()
            steps += 1
            found = step()
            off = [(f - e).abs().max().item() for f, e in zip(found, expected, strict=True)]
            assert same(found, expected), f"step {steps} is wrong: logits and gradients are off by up to {off}"

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


def tenant(pipe: Connection, stacks: str, device: str, mode: str, work: str, polite: bool, grace_s: float) -> None:
    """Calls without end until told to stop or until a call fails; reports, and ends like any other process.

    A `polite` one closes its session, any other leaves that to the end of the process.
    """
    begin(stacks, device)
    pipe.send("here")
    address = pipe.recv()
    not_stuck()
    report: dict[str, Any] = {"steps": 0, "wrong": 0, "error": None}
    model: Any = None
    try:
        model = symbiosis.connect(address, device=device, mode=mode, name="victim", grace_s=grace_s)
        step = WORK[work](model, device)
        first = step()
        pipe.send("calling")
        while not pipe.poll(0):
            not_stuck()
            report["wrong"] += not same(step(), first)
            report["steps"] += 1
    except Exception as error:
        report["error"] = type(error).__name__
        report["meant"] = isinstance(error, RuntimeError)  # as all of symbiosis's and torch's own are
        report["text"] = traceback.format_exc()
    not_stuck()
    pipe.send(report)
    with contextlib.suppress(RuntimeError):
        if polite and model is not None:
            model.symbiosis.close()
    with contextlib.suppress(RuntimeError):
        if device != "cpu":
            torch.cuda.synchronize()  # as the end of a process that was not forked: no stream waits for ever
    step = model = None
    gc.collect()
    atexit._run_exitfuncs()  # which a forked process does not do by itself
