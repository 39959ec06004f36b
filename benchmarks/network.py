"""What does a network between tenant and executor cost?

Tenant and executor are processes in two network namespaces. The link between them has a round trip of 0, 1, 10 or 50 ms and
a rate of 1 or 10 Gbit/s in each direction (tests/network/emulated_link.py). The tenant fine-tunes a LoRA of the default
model and generates, with each wire format, and with micro-batches in flight. The baseline is the same tenant over TCP on
this host, in the same round. Reported are times, round trips, and bytes on the wire with all headers.

    python -m benchmarks.network           # about 25 minutes on 2 cores, as root
    python -m benchmarks.network --tiny    # seconds, for the tests
"""

from __future__ import annotations

import itertools
import multiprocessing as mp
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tests.network.emulated_link import Conditions, Host

QUESTION = str(__doc__).splitlines()[0]
TOKEN = "the tenant of the benchmark"
ADAPTERS = {
    "rank 8 on q, v": (8, ["q_proj", "v_proj"]),
    "rank 16 on all": (16, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
}
_START_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    round_trips_ms: tuple[float, ...] = (0.0, 1.0, 10.0, 50.0)
    rates_gbit: tuple[float, ...] = (10.0, 1.0)
    batch: int = 4
    tokens: int = 128
    prompt: int = 32
    new_tokens: int = 16
    steps: int = 2
    rounds: int = 2
    threads: int = 2
    tiny: bool = False

    def conditions(self) -> list[Conditions]:
        pairs = itertools.product(self.round_trips_ms, self.rates_gbit)
        return [Conditions(round_trip_ms=round_trip_ms, gbit_per_s=rate) for round_trip_ms, rate in pairs]


def serve(host: Host | None, plan: Plan, pipe: Any) -> None:
    if host is not None:
        host.enter()
    import torch

    import symbiosis

    torch.set_num_threads(plan.threads)
    model = None
    if plan.tiny:
        from benchmarks.shapes import random_model

        model = random_model("tiny", "cpu")
    tokens = {} if host is None else {"tenant": TOKEN}
    with symbiosis.Executor(model, tokens=tokens) as executor:
        pipe.send(executor.listen(f"tcp://{'127.0.0.1' if host is None else host.ip}:0"))
        pipe.recv()


class Tenant:
    """A connected model with an adapter, inside a tenant's process."""

    def __init__(self, address: str, token: str | None, wire: str, plan: Plan) -> None:
        import torch

        import symbiosis

        torch.set_num_threads(plan.threads)
        self.plan = plan
        self.base = symbiosis.connect(address, token=token, wire=wire)
        self.session, self.model, self.optimizer = self.base.symbiosis, None, None

    def adapt(self, adapter: str) -> None:
        import torch
        from peft import LoraConfig, get_peft_model

        if self.model is not None:
            self.base = self.model.unload()
        torch.manual_seed(0)
        rank, layers = ADAPTERS[adapter]
        self.model = get_peft_model(self.base, LoraConfig(r=rank, target_modules=layers))
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)
        self.ids = torch.randint(0, 1000 if not self.plan.tiny else 64, (self.plan.batch, self.plan.tokens))

    def step(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step_in_parts(self) -> None:
        """The same step in micro-batches of one sequence, all in flight."""
        import symbiosis

        batches = [{"input_ids": ids, "labels": ids} for ids in self.ids.split(1)]
        symbiosis.accumulate_gradients(self.model, batches, in_flight=self.plan.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def generate(self, lookup: int | None = None) -> None:
        """Greedy, batch 1. With `lookup`, drafts of so many tokens are taken from the prompt (prompt lookup)."""
        import torch

        new = self.plan.new_tokens
        ids = self.ids[:1, : self.plan.prompt]
        if lookup:  # a text that repeats itself, as a summary repeats its source
            ids = ids[:, :8].repeat(1, self.plan.prompt // 8)
        with torch.no_grad():
            out = self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                prompt_lookup_num_tokens=lookup,
            )  # fmt: skip
        assert out.shape[1] >= ids.shape[1] + new - 1

    def measure(self, work: str, times: int) -> dict[str, Any]:
        """Seconds of each repetition, and the traffic of one."""
        self.model.train(work != "generate")
        before, seconds = self.session.traffic(), []
        for _ in range(times):
            started = time.perf_counter()
            getattr(self, work)()
            seconds.append(time.perf_counter() - started)
        after = self.session.traffic()
        return {"seconds": seconds, **{name: (after[name] - before[name]) / times for name in after}}


def work(host: Host | None, address: str, token: str | None, wire: str, plan: Plan, pipe: Any) -> None:
    if host is not None:
        host.enter()
    tenant = Tenant(address, token, wire, plan)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        name, *arguments = asked
        pipe.send(getattr(tenant, name)(*arguments))
    tenant.session.close()


class Child:
    """A process and the pipe to it. A context manager."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(_START_S):
            raise RuntimeError(f"a process did not start within {_START_S:.0f} s")
        self.first = self._pipe.recv()

    def __call__(self, *asked: Any) -> Any:
        self._pipe.send(asked)
        return self._pipe.recv()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.is_alive() and error is None:
            self._pipe.send(None)
            self._process.join(30)
        self._process.kill()
        self._process.join()
