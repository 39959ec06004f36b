"""What does a network between tenant and executor cost?

Tenant and executor are processes in two network namespaces. The link between them has a round trip of 0, 1, 10 or 50 ms and
a rate of 1 or 10 Gbit/s in each direction (tests/network/emulated_link.py). The tenant fine-tunes a LoRA of the default
model and generates, with each wire format, and with micro-batches in flight. The baseline is the same tenant over TCP on
this host, without a token and so without encryption, in the same round. Each process has one thread of torch. Reported are
times, round trips, and bytes on the wire with all headers. A machine with other work inflates times, so `idle_ratio` is the
ratio that follows from CPU time, round trips and bytes if nothing overlaps.

    python -m benchmarks.network           # about 20 minutes on 2 cores, as root
    python -m benchmarks.network --tiny    # seconds, for the tests
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing as mp
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.plots import draw
from benchmarks.results import FOLDER, save
from tests.network.emulated_link import Conditions, EmulatedLink, Host

QUESTION = str(__doc__).splitlines()[0]
TOKEN = "the tenant of the benchmark"  # beyond loopback the executor requires one
QUERY_VALUE = "rank 8 on q, v"
ALL = "rank 16 on all"
ADAPTERS = {
    QUERY_VALUE: (8, ["q_proj", "v_proj"]),
    ALL: (16, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
}
DRAFT_TOKENS = 8
_START_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    round_trips_ms: tuple[float, ...] = (0.0, 1.0, 10.0, 50.0)
    rates_gbit: tuple[float, ...] = (10.0, 1.0)
    batch: int = 4
    tokens: int = 16
    long_tokens: int = 64
    """Of each sequence where both adapters are compared: a round trip of 1 ms and 10 Gbit/s."""
    prompt: int = 12
    new_tokens: int = 5
    steps: int = 1
    threads: int = 1
    tiny: bool = False

    def conditions(self) -> list[Conditions]:
        pairs = itertools.product(self.rates_gbit, self.round_trips_ms)
        return [Conditions(round_trip_ms=round_trip_ms, gbit_per_s=rate) for rate, round_trip_ms in pairs]


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
        while pipe.recv() is not None:
            pipe.send(time.process_time())


class Tenant:
    """A connected model with an adapter, inside a tenant's process."""

    def __init__(self, address: str, token: str | None, plan: Plan) -> None:
        import torch

        torch.set_num_threads(plan.threads)
        self.plan, self.address, self.token = plan, address, token
        self.session: Any = None

    def connect(self, wire: str, adapter: str, tokens: int) -> None:
        """A new connection, which learns the conditions of the link from its start."""
        import torch
        from peft import LoraConfig, get_peft_model

        import symbiosis

        self.close()
        base = symbiosis.connect(self.address, token=self.token, wire=wire)
        self.session = base.symbiosis
        torch.manual_seed(0)
        rank, layers = ADAPTERS[adapter]
        self.model = get_peft_model(base, LoraConfig(r=rank, target_modules=layers))
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)
        self.ids = torch.randint(0, 64 if self.plan.tiny else 10_000, (self.plan.batch, tokens))

    def close(self) -> None:
        if self.session is not None:
            self.session.close()

    def step(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def micro_batches(self) -> None:
        """The same step in micro-batches of one sequence, all in flight."""
        import symbiosis

        batches = [{"input_ids": ids, "labels": ids} for ids in self.ids.split(1)]
        symbiosis.accumulate_gradients(self.model, batches, in_flight=self.plan.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _generate(self, ids: Any, count: int, **options: Any) -> Any:
        import torch

        lengths = {"max_new_tokens": count, "min_new_tokens": count}
        with torch.no_grad():
            mask = torch.ones_like(ids)
            return self.model.generate(input_ids=ids, attention_mask=mask, do_sample=False, **lengths, **options)

    def prompt(self) -> None:
        self._generate(self.ids[:1, : self.plan.prompt], 1)

    def generate(self) -> None:
        """Greedy, one sequence: the prompt and the first token, then the others one by one."""
        self._generate(self.ids[:1, : self.plan.prompt], self.plan.new_tokens)

    def prompt_lookup(self) -> None:
        """As `generate`, from a prompt that repeats itself. Drafts are copied from it."""
        ids = self.ids[:1, :6].repeat(1, self.plan.prompt // 6)
        self._generate(ids, self.plan.new_tokens, prompt_lookup_num_tokens=DRAFT_TOKENS)

    def measure(self, work: str, times: int) -> dict[str, Any]:
        """Seconds of each repetition, and the traffic of one."""
        self.model.train(work in ("step", "micro_batches"))
        before, seconds, cpu = self.session.traffic(), [], time.process_time()
        for _ in range(times):
            started = time.perf_counter()
            getattr(self, work)()
            seconds.append(time.perf_counter() - started)
        after = self.session.traffic()
        cpu_s = (time.process_time() - cpu) / times
        return {"seconds": seconds, "cpu_s": cpu_s, **{name: (after[name] - before[name]) / times for name in after}}


def work(host: Host | None, address: str, token: str | None, plan: Plan, pipe: Any) -> None:
    if host is not None:
        host.enter()
    tenant = Tenant(address, token, plan)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        name, *arguments = asked
        pipe.send(getattr(tenant, name)(*arguments))
    tenant.close()


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


@dataclass(frozen=True)
class Pair:
    """A tenant and its executor."""

    tenant: Child
    executor: Child

    def __call__(self, *asked: Any) -> Any:
        """What the tenant answers. CPU time is that of both processes, encryption included."""
        before = self.executor("cpu")
        found = self.tenant(*asked)
        if asked[0] == "measure":
            found["cpu_s"] += (self.executor("cpu") - before) / asked[2]
        return found


class Round:
    """All work under one condition, local and remote in turns."""

    def __init__(self, plan: Plan, link: EmulatedLink, local: Pair, remote: Pair, conditions: Conditions) -> None:
        self._plan, self._link, self._local, self._remote, self._conditions = plan, link, local, remote, conditions
        self.cells: list[dict[str, Any]] = []
        link.set(conditions)

    def connect(self, wire: str, adapter: str, tokens: int, *, local: bool = False) -> None:
        """And warm up: the tenant learns which layers go together, and TCP how fast it may send."""
        self._setting = {"wire": wire, "adapter": adapter, "batch": self._plan.batch, "tokens": tokens}
        tenants = (self._local, self._remote) if local else (self._remote,)
        for tenant in tenants:
            tenant("connect", "exact" if tenant is self._local else wire, adapter, tokens)
            tenant("measure", "step", 1)

    def run(self, work: str, times: int, baseline: dict[str, Any] | None = None) -> dict[str, Any]:
        """Measure remote work; `baseline` is the local figure."""
        before = self._link.counts().bytes
        found = self._remote("measure", work, times)
        found["wire_bytes"] = (self._link.counts().bytes - before) / times
        cell = {**asdict(self._conditions), **self._setting, "work": work, **found}
        if baseline is not None:
            cell["local_seconds"] = baseline["seconds"]
            cell["ratio"] = statistics.median(found["seconds"]) / statistics.median(baseline["seconds"])
            cell["local_cpu_s"] = baseline["cpu_s"]
            if work == "step":  # the round trips of micro-batches overlap
                cell["idle_ratio"] = self._idle_s(found) / baseline["cpu_s"]
        self.cells.append(cell)
        return found

    def _idle_s(self, found: dict[str, Any]) -> float:
        """The time on an idle machine, if nothing overlaps: CPU time, round trips, and bytes in one direction at a time."""
        rate_bytes = self._conditions.gbit_per_s * 1e9 / 8
        waits_s = found["round_trips"] * self._conditions.round_trip_ms / 1e3
        return float(found["cpu_s"] + waits_s + found["wire_bytes"] / rate_bytes)

    def local(self, work: str, times: int) -> dict[str, Any]:
        return self._local("measure", work, times)  # type: ignore[no-any-return]

    def decode(self, baseline: dict[str, Any] | None) -> None:
        """One token of `generate` after the first."""
        steps = self._plan.new_tokens - 1
        self._remote("measure", "prompt", 1)
        prompt, whole = self.run("prompt", 1), self.run("generate", 1)
        del self.cells[-2:]
        found = {name: (whole[name] - prompt[name]) / steps for name in whole if name != "seconds"}
        seconds = (whole["seconds"][0] - prompt["seconds"][0]) / steps
        cell = {**asdict(self._conditions), **self._setting, "work": "decode", "seconds": [seconds], **found}
        if baseline is not None:
            cell |= {"local_seconds": [baseline["token"]], "ratio": seconds / baseline["token"]}
            cell |= {"local_cpu_s": baseline["cpu_s"], "idle_ratio": self._idle_s(found) / baseline["cpu_s"]}
        self.cells.append(cell)

    def local_decode(self) -> dict[str, float]:
        self._local("measure", "prompt", 1)
        prompt, whole = self.local("prompt", 1), self.local("generate", 1)
        steps = self._plan.new_tokens - 1
        seconds, cpu_s = whole["seconds"][0] - prompt["seconds"][0], whole["cpu_s"] - prompt["cpu_s"]
        return {"token": seconds / steps, "cpu_s": cpu_s / steps}


def run_conditions(each: Round, plan: Plan, conditions: Conditions) -> None:
    each.connect("exact", QUERY_VALUE, plan.tokens, local=True)
    baseline, token = each.local("step", plan.steps), each.local_decode()
    each.run("step", plan.steps, baseline)
    if conditions.round_trip_ms >= 10:
        each.run("micro_batches", 1)  # opens its connections
        del each.cells[-1]
        each.run("micro_batches", plan.steps, baseline)
    each.decode(token)
    if conditions == plan.conditions()[len(plan.round_trips_ms) - 1]:  # the longest round trip
        each.run("generate", 1)
        each.run("prompt_lookup", 1)
    each.connect("bf16", QUERY_VALUE, plan.tokens)
    each.run("step", plan.steps, baseline)
    each.decode(token)


def run_long(each: Round, plan: Plan) -> None:
    """Longer sequences, both adapters, both wire formats."""
    for adapter in ADAPTERS:
        each.connect("exact", adapter, plan.long_tokens, local=True)
        baseline = each.local("step", plan.steps)
        each.run("step", plan.steps, baseline)
        each.connect("bf16", adapter, plan.long_tokens)
        each.run("step", plan.steps, baseline)


@contextmanager
def progress_of(total: int, console: Console) -> Iterator[Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda what, done=0: progress.update(task, description=what, advance=done)


def show(console: Console, cells: Sequence[dict[str, Any]]) -> None:
    for cell in cells:
        ratio = f" ({cell['ratio']:.2f} of local)" if "ratio" in cell else ""
        ratio += f" (at most {cell['idle_ratio']:.2f} on an idle machine)" if "idle_ratio" in cell else ""
        console.print(
            f"{cell['round_trip_ms']:g} ms, {cell['gbit_per_s']:g} Gbit/s, {cell['wire']}, {cell['adapter']}, "
            f"{cell['batch']} × {cell['tokens']}, {cell['work']}: {statistics.median(cell['seconds']):.3f} s{ratio}, "
            f"{cell['round_trips']:.0f} round trips, {cell['wire_bytes'] / 1e6:.2f} MB"
        )


def run(plan: Plan, folder: Path = FOLDER) -> dict[str, Any]:
    console, cells = Console(width=160), list[dict[str, Any]]()
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    figures: dict[str, Any] = {"script": "network", "plan": asdict(plan), "congestion_control": control}
    with EmulatedLink(offload=True) as link:
        figures["link"] = link.kind
        here, there = link.hosts
        with (
            Child(serve, None, plan) as near,
            Child(serve, there, plan) as far,
            Child(work, None, near.first, None, plan) as local,
            Child(work, here, far.first, TOKEN, plan) as remote,
            progress_of(len(plan.conditions()) + 1, console) as report,
        ):
            near_pair, far_pair = Pair(local, near), Pair(remote, far)
            rounds = [Conditions(round_trip_ms=1.0, gbit_per_s=10.0), *plan.conditions()]
            for number, conditions in enumerate(rounds):
                report(f"{conditions.round_trip_ms:g} ms, {conditions.gbit_per_s:g} Gbit/s")
                each = Round(plan, link, near_pair, far_pair, conditions)
                if number == 0:
                    run_long(each, plan)
                else:
                    run_conditions(each, plan, conditions)
                show(console, each.cells)
                cells += each.cells
                figures |= {"runs": cells}
                path = save("network", QUESTION, figures, folder)  # after each round: a broken run leaves what it has
                report("", done=1)
    draw(path)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random toy model and two conditions, for the tests")
    parser.add_argument("--out", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    small = {"round_trips_ms": (10.0,), "tokens": 12, "long_tokens": 16, "new_tokens": 3, "steps": 1, "tiny": True}
    run(Plan(**small) if chosen.tiny else Plan(), chosen.out)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
