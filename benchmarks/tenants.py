"""Tenants in processes of their own, told from here what to do: the same for private copies of the model and shared ones."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from benchmarks.shapes import SHAPES, random_model

MODES = ("plain", "auto", "direct", "executor")
NEW_TOKENS = 32
_PATIENCE_S = 150.0


class Tenant:
    """One model with its adapter, inside a tenant's process."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.base: Any = None
        self.model: Any = None
        self.optimizer: Any = None
        self.cache: Any = None
        self.token: Any = None

    def context(self) -> None:
        """What takes seconds, in all processes at once; and a GPU context, before memory is counted."""
        import peft  # noqa: F401
        import torch
        import transformers.models.llama.modeling_llama  # noqa: F401

        if self.device != "cpu":
            torch.ones(8, 8, device=self.device) @ torch.ones(8, 8, device=self.device)

    def load(self, mode: str, shape: str, address: str = "", lora: int = 3) -> None:
        """`mode` is "plain" (a private copy) or a mode of `symbiosis.connect`."""
        self.shape = shape
        if mode == "plain":
            self.base = random_model(shape, self.device)
        else:
            import symbiosis

            # between processes on a CPU there is one mode
            self.base = symbiosis.connect(address, device=self.device, mode="auto" if self.device == "cpu" else mode)
        self.adapt(lora)

    def adapt(self, lora: int) -> None:
        """A new adapter of this setting, in place of the one there is."""
        import torch
        from peft import LoraConfig, get_peft_model

        if self.model is not None:
            self.base = self.model.unload()
        shape = SHAPES[self.shape]
        rank, layers = shape.lora[lora]
        self.model = get_peft_model(self.base, LoraConfig(r=rank, target_modules=layers))
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)
        self.ids = self.random_ids(shape.batch, shape.tokens)

    def random_ids(self, batch: int, tokens: int) -> Any:
        import torch

        return torch.randint(0, SHAPES[self.shape].config["vocab_size"], (batch, tokens), device=self.device)

    def resize(self, tokens: int, batch: int | None = None) -> None:
        """Fine-tune on sequences of this length from now on, and on so many at a time."""
        self.ids = self.random_ids(batch or SHAPES[self.shape].batch, tokens)

    def defer(self, wanted: bool) -> None:
        """Whether calls of the executor in training are deferred; a private copy makes none."""
        if (session := getattr(self.base, "symbiosis", None)) is not None:
            session.defer_training = wanted

    # One step of each kind of work. Each ends with a number on the host, as real loops do, which waits for the GPU.

    def train_step(self) -> None:
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        float(loss.detach())

    def decode_step(self) -> None:
        output = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True)
        self.token = output.logits[:, -1:].argmax(-1)
        # Always the same length: transformers' own cache, which plain tenants have, grows by copies to blocks that torch's
        # allocator never has. A connected model writes in place from the second step on.
        self.cache.crop(-1)
        int(self.token[0, 0])

    def prompt_step(self) -> None:
        int(self.model(input_ids=self.prompt, logits_to_keep=1).logits[0, -1].argmax())

    # Work by the number of steps, and by the clock.

    def train(self, steps: int) -> None:
        self.model.train()
        for _ in range(steps):
            self.train_step()

    def train_until(self, begin: float, end: float) -> list[float]:
        self.model.train()
        return window(self.train_step, begin, end)

    def prefill(self, batch: int, length: int) -> None:
        """Fill a cache for decode steps of `batch` sequences of this length, all alike."""
        import torch

        self.model.eval()
        with torch.no_grad():
            output = self.model(input_ids=self.random_ids(1, length), use_cache=True, logits_to_keep=1)
            self.cache, self.token = output.past_key_values, output.logits[:, -1:].argmax(-1).repeat(batch, 1)
            self.cache.batch_repeat_interleave(batch)
            self.decode_step()

    def fill(self, batch: int, length: int) -> None:
        """The same with random keys and values: where computing them would take long."""
        import torch
        from transformers import DynamicCache

        config = self.base.config
        shape = (batch, config.num_key_value_heads, length, config.head_dim)
        self.model.eval()
        self.cache, self.token = DynamicCache(), self.random_ids(batch, 1)
        for layer in range(config.num_hidden_layers):
            self.cache.update(*(torch.randn(shape, device=self.device, dtype=self.base.dtype) for _ in range(2)), layer)
        with torch.no_grad():
            self.decode_step()

    def decode_until(self, begin: float, end: float) -> list[float]:
        import torch

        self.model.eval()
        with torch.no_grad():
            return window(self.decode_step, begin, end)

    def prompt_until(self, tokens: int, begin: float, end: float) -> list[float]:
        """One prompt of so many tokens after the other, without a cache."""
        import torch

        self.model.eval()
        self.prompt = self.random_ids(1, tokens)
        with torch.no_grad():
            return window(self.prompt_step, begin, end)

    def generate(self) -> float:
        """Seconds per new token of one request."""
        import torch

        self.model.eval()
        prompt = self.random_ids(1, 128)
        mask = torch.ones_like(prompt)
        started = time.monotonic()
        with torch.no_grad():
            self.model.generate(
                input_ids=prompt, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
            )
        return (time.monotonic() - started) / NEW_TOKENS

    def reserved(self) -> int:
        """Bytes of GPU memory that torch holds for this process."""
        import torch

        return torch.cuda.memory_reserved() if self.device != "cpu" else 0

    def trim(self) -> None:
        """Give back what torch holds in reserve."""
        import torch

        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def drop(self) -> None:
        session = getattr(self.base, "symbiosis", None)
        self.model = self.base = self.optimizer = self.cache = self.token = None
        gc.collect()
        if session is not None:
            session.close()
        self.trim()


def window(step: Callable[[], None], begin: float, end: float) -> list[float]:
    """Step until `end`; seconds of each step that ended after `begin` (monotonic times, the same in all processes).

    All tenants of a window are busy from before its begin to its end, so the mean of these is the time under load.
    """
    seconds: list[float] = []
    while True:
        started = time.monotonic()
        step()
        now = time.monotonic()
        if now > end:
            return seconds or [now - started]
        if now > begin:
            seconds.append(now - started)


def work(device: str, pipe: Any) -> None:
    """A tenant's process. It may hold several tenants, by key, of which one works at a time."""
    tenants: dict[str, Tenant] = {}
    while (order := pipe.recv()) is not None:
        key, name, args = order
        tenant = tenants.setdefault(key, Tenant(device))
        try:
            pipe.send((True, getattr(tenant, name)(*args)))
        except Exception:  # noqa: BLE001 - the parent shows it
            pipe.send((False, traceback.format_exc()))


class Workers:
    """Processes to be tenants: importing torch and transformers takes seconds, so they are started once. A context manager."""

    def __init__(self, count: int, device: str, apart: int = 0) -> None:
        """The first `apart` of them compute on the host's CPUs instead."""
        context = context_for(device)
        self.pipes, self.processes = [], []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=("cpu" if number < apart else device, theirs), daemon=True)
            process.start()
            theirs.close()  # so that a process that ended is noticed
            self.processes.append(process)
            self.pipes.append(ours)

    def tell(self, team: Sequence[int], name: str, *args: Any, key: str = "") -> None:
        for number in team:
            self.pipes[number].send((key, name, args))

    def hear(self, team: Sequence[int]) -> list[Any]:
        """What each of them found. Raises `RuntimeError` with the trace of the first that failed."""
        results = []
        for number in team:
            if not self.pipes[number].poll(_PATIENCE_S):
                raise RuntimeError(f"tenant {number} did not answer for {_PATIENCE_S:.0f} s")
            results.append(self.pipes[number].recv())
        for fine, result in results:
            if not fine:
                raise RuntimeError(result)
        return [result for _, result in results]

    def all(self, team: Sequence[int], name: str, *args: Any, key: str = "") -> list[Any]:
        self.tell(team, name, *args, key=key)
        return self.hear(team)

    def window(self, team: Sequence[int], name: str, seconds: float, key: str = "") -> list[list[float]]:
        """Seconds of each step, for each of the team, in a window that opens when all have warmed up."""
        begin, end = window_of(seconds)
        return self.all(team, name, begin, end, key=key)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        deadline = time.monotonic() + 15
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()


def window_of(seconds: float) -> tuple[float, float]:
    """Begin and end of a window that leaves time to get going."""
    begin = time.monotonic() + 0.3 * seconds
    return begin, begin + seconds


def context_for(device: str) -> Any:
    """How processes are started: on a CPU from one that has imported what takes seconds to import; a GPU allows no forks."""
    if device != "cpu":
        return mp.get_context("spawn")
    one_thread_each()
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama", "peft"])
    return context


def one_thread_each() -> None:
    """For processes started from here. `torch.set_num_threads` is not enough: BLAS libraries keep their own count."""
    os.environ["OMP_NUM_THREADS"] = "1"
