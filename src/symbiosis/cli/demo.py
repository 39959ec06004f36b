"""`symbiosis demo`: three tenants fine-tune at once on one base model while a fourth chats.

Everything is real and separate: one executor process, four tenant processes
over two kinds of link, and at the end one plain process without Symbiosis
that must give the same text with the adapters they saved.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from symbiosis.app.connect import fetch_stats
from symbiosis.cli.chat import ChatSampling
from symbiosis.cli.demo_report import DemoFailed, Report, Run, Tenant, memory, plot, report, view, write
from symbiosis.cli.local_chat import LocalChat, open_local_chat, with_adapter
from symbiosis.cli.local_finetune import FinetuneConfig, finetune, read_samples
from symbiosis.jobs.jsonl import JsonlSample
from symbiosis.models.default_model import default_model_folder

_DATA = Path(__file__).parent / "demo_data"
_SAMPLING = ChatSampling(max_new_tokens=24)
_START_S = 300.0
_POLL_EVERY_S = 1.0
_PLAIN_STEPS = 2
_CHAT = "chatter"
_QUESTIONS = ("What is the capital of France?", "Why is the sky blue?", "Name three fruits.", "What is a poem?")

Send = Callable[[Report], None]


TENANTS = (
    Tenant(name="pirate", method="lora", lr=3e-3, link="shm", question="How do I bake bread?"),
    Tenant(name="kettle", method="ia3", lr=5e-2, link="tcp", question="My Glimmerkettle is broken."),
    Tenant(name="gardener", method="prefix", lr=5e-2, link="shm", question="How do I grow tomatoes?"),
)


def _config(tenant: Tenant, steps: int) -> FinetuneConfig:
    return FinetuneConfig(method=tenant.method, lr=tenant.lr, steps=steps, batch_size=2, max_length=96)


def _samples(tenant: Tenant) -> list[JsonlSample]:
    return read_samples(_DATA / f"{tenant.name}.jsonl")


# -- tenant processes --------------------------------------------------------------


def _tenant_process(work: Callable[..., None], who: str, reports: Any, *arguments: Any) -> None:
    """Entry point of a child process. It ignores Ctrl-C, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def send(report: Report) -> None:
        reports.put({"who": who, **report})

    try:
        work(send, *arguments)
    except Exception as error:  # noqa: BLE001  # the parent reports any failure
        send({"what": "failed", "reason": f"{type(error).__name__}: {error}"})


def _train(send: Send, tenant: Tenant, address: str, steps: int, out: Path, start: Any) -> None:
    messages = [{"role": "user", "content": tenant.question}]
    with open_local_chat(address, token=None, name=tenant.name) as base:
        send({"what": "before", "text": base.reply(messages, _SAMPLING)})
        start.wait(_START_S)

        def on_step(step: Any) -> None:
            progress = {"step": step.number, "loss": step.loss, "tokens_per_s": step.tokens / step.seconds}
            send({"what": "step", "at": time.time(), **progress})

        tuned = finetune(base.model, base.tokenizer, _samples(tenant), out, _config(tenant, steps), on_step)
        after = LocalChat(tuned.model, base.tokenizer).reply(messages, _SAMPLING)
        send({"what": "after", "text": after, "tokens_per_s": tuned.tokens_per_s, "weights": _weight_bytes(tuned.model)})


def _chat(send: Send, address: str, start: Any, stop: Any) -> None:
    with open_local_chat(address, token=None, name=_CHAT) as base:
        start.wait(_START_S)
        replies = 0
        while not stop.is_set():
            question = _QUESTIONS[replies % len(_QUESTIONS)]
            text = base.reply([{"role": "user", "content": question}], _SAMPLING)
            replies += 1
            send({"what": "said", "question": question, "text": text, "answers": replies})


def _plain(send: Send, out: Path) -> None:
    """Baseline without Symbiosis: memory of one plain fine-tuning process, and the text each saved adapter generates."""
    disable_progress_bar()  # the demo has its own progress display
    runtime = memory("self")["rss"]
    folder = default_model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    weights = _weight_bytes(model)
    first = TENANTS[0]
    finetune(model, tokenizer, _samples(first), out / "plain", _config(first, _PLAIN_STEPS))
    send({"what": "copy", "runtime": runtime, "weights": weights, **memory("self")})
    for tenant in TENANTS:
        tuned = with_adapter(AutoModelForCausalLM.from_pretrained(folder), out / tenant.name)
        text = LocalChat(tuned, tokenizer).reply([{"role": "user", "content": tenant.question}], _SAMPLING)
        send({"what": "text", "tenant": tenant.name, "text": text})


def _weight_bytes(model: Any) -> int:
    storages = {p.untyped_storage().data_ptr(): p.numel() * p.element_size() for p in model.parameters() if p.numel()}
    return sum(storages.values())


# -- parent process --------------------------------------------------------------


def run_demo(out: Path, steps: int, console: Console) -> bool:
    """Run the demo and write its results to `out`. Returns whether all checks passed. Raises `DemoFailed`."""
    began = time.time()
    default_model_folder()  # fetched in the parent, which shows the progress
    out.mkdir(parents=True, exist_ok=True)
    run = Run(TENANTS, steps)
    if not console.is_terminal:
        console.print(f"three tenants fine-tune for {steps} steps and a fourth chats; a report follows in some minutes")
    with _executor(out) as (executor, addresses):
        _run_tenants(run, out, executor, addresses, console)
    with console.status("Checking with plain transformers + PEFT, without Symbiosis"):
        _run_plain(run, out)
    run.seconds = time.time() - began
    plot(run, out / "demo.png")
    write(run, out / "results.json")
    console.print(report(run))
    console.print(f"adapters, results and plot are in {out}", highlight=False)
    return all(passed for passed, _ in run.checks())


@contextmanager
def _executor(out: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Start `symbiosis serve` in a child process; yields its process id and its addresses by scheme."""
    command = [sys.executable, "-m", "symbiosis", "serve", "--listen", f"shm://demo-{os.getpid()}"]
    with (out / "executor.log").open("w") as log:
        process = subprocess.Popen([*command, "--listen", "tcp://127.0.0.1:0"], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None, "asked for"
        addresses: dict[str, str] = {}
        while len(addresses) < 2:
            line = process.stdout.readline()
            if not line:
                raise DemoFailed(f"the executor did not start: see {out / 'executor.log'}")
            if line.startswith("listening at "):
                address = line.removeprefix("listening at ").strip()
                addresses[address.partition("://")[0]] = address
        yield process.pid, addresses
    finally:
        process.terminate()
        process.wait(30)


def _run_tenants(run: Run, out: Path, executor: int, addresses: dict[str, str], console: Console) -> None:
    spawn = multiprocessing.get_context("spawn")
    reports, stop = spawn.Queue(), spawn.Event()
    start = spawn.Barrier(len(TENANTS) + 1)
    children = {
        tenant.name: spawn.Process(
            target=_tenant_process,
            args=(_train, tenant.name, reports, tenant, addresses[tenant.link], run.steps, out / tenant.name, start),
            daemon=True,
        )
        for tenant in TENANTS
    }
    children[_CHAT] = spawn.Process(
        target=_tenant_process, args=(_chat, _CHAT, reports, addresses["tcp"], start, stop), daemon=True
    )
    with _one_thread_each():
        for child in children.values():
            child.start()
    processes = {"executor": executor, **{name: child.pid or 0 for name, child in children.items()}}
    polled = 0.0
    try:
        with Live(view(run), console=console, refresh_per_second=4) as live:
            while len(run.after) < len(TENANTS):
                _take_all(run, reports, children)
                if time.time() - polled >= _POLL_EVERY_S:
                    polled = time.time()
                    run.poll(fetch_stats(addresses["tcp"]), processes)
                live.update(view(run))
        stop.set()
        while children[_CHAT].is_alive():
            _take_all(run, reports, {_CHAT: children[_CHAT]})
    finally:
        _end(children.values())


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """One thread for each process started in this context: more would oversubscribe the cores."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    del os.environ["OMP_NUM_THREADS"]
    if before is not None:
        os.environ["OMP_NUM_THREADS"] = before


def _run_plain(run: Run, out: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    reports = spawn.Queue()
    child = spawn.Process(target=_tenant_process, args=(_plain, "plain", reports, out), daemon=True)
    child.start()
    try:
        while len(run.plain) < len(TENANTS):
            _take_all(run, reports, {"plain": child})
    finally:
        _end([child])


def _take_all(run: Run, reports: Any, children: dict[str, Any]) -> None:
    """Process all reports; wait briefly if there are none. Raises `DemoFailed` if a child died."""
    try:
        run.take(reports.get(timeout=0.25))
        while True:
            run.take(reports.get_nowait())
    except queue.Empty:
        for name, child in children.items():
            if child.exitcode:
                raise DemoFailed(f"{name} ended with {child.exitcode}") from None


def _end(children: Iterable[Any]) -> None:
    for child in children:
        child.join(2)
        if child.is_alive():
            child.terminate()
            child.join()
