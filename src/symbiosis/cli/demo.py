"""`symbiosis demo`: three tenants fine-tune at once on one base model while a fourth chats.

One server holds the model. The tenants call it over HTTP, each with a key of its own. At the end one plain process without
Symbiosis shows what a copy of the model costs, and must generate the same text with the adapters that the server trained.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from rich.console import Console
from rich.live import Live

from symbiosis.cli.chat import ChatSampling, HttpChat
from symbiosis.cli.demo_data import find_data
from symbiosis.cli.demo_report import DemoFailed, Run, Tenant, plot, report, view, write
from symbiosis.cli.http_client import HttpClient
from symbiosis.cli.loss_plot import HOW_TO_INSTALL, can_plot
from symbiosis.cli.plain_baseline import run_plain_baseline
from symbiosis.cli.process_memory import descendants, measure_processes
from symbiosis.errors import SymbiosisError

_SAMPLING = ChatSampling(max_new_tokens=24)
_BATCH_SIZE, _MAX_LENGTH, _SEED = 2, 96, 0
_KV_CACHE_GB = 0.1
_POLL_EVERY_S = 0.5
_CHAT_PAUSE_S, _CHAT_PAUSE_REPLIES = 5.0, 4.0
"""Least pause between two questions: in seconds, and in times the last reply took. While it decodes, jobs get little time."""
_CHAT = "chatter"
_QUESTIONS = ("What is the capital of France?", "Why is the sky blue?", "Name three fruits.", "What is a poem?")

TENANTS = (
    Tenant(name="pirate", method="lora", lr=3e-3, question="What is the capital of Germany?"),
    Tenant(name="kettle", method="ia3", lr=5e-2, question="My Glimmerkettle is broken."),
    Tenant(name="gardener", method="dora", lr=3e-3, question="How do I grow tomatoes?"),
)


def run_demo(out: Path, steps: int, console: Console) -> bool:
    """Run the demo and write its results to `out`. Returns whether all checks passed. Raises `DemoFailed`."""
    from symbiosis.models.default_model import default_model_folder

    began = time.monotonic()
    _check_out(out)
    # Training and chat compute at the same time: with all cores for each, their threads wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))  # of all child processes
    folder = default_model_folder()  # fetched here, which shows the progress
    run = Run(TENANTS, steps, weight_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    if not console.is_terminal:
        console.print(f"three tenants fine-tune for {steps} steps and a fourth chats; a report follows in some minutes")
    keys = {name: secrets.token_hex(16) for name in (*(tenant.name for tenant in TENANTS), _CHAT)}
    with console.status("Starting one server"), _server(out, keys) as (server, url):
        clients = {name: HttpClient(url, key) for name, key in keys.items()}
        console.print(f"one server holds the model; four tenants use it at {url}", highlight=False)
        with _chatting(run, clients[_CHAT]):
            _run_tenants(run, clients, server, out, console)
    with console.status("Checking with plain transformers + PEFT, without Symbiosis"):
        _run_plain(run, out)
    run.seconds = time.monotonic() - began
    write(run, out / "results.json")
    console.print(report(run))
    if can_plot():
        plot(run, out / "demo.png")
        console.print(f"adapters, results and plot are in {out}", highlight=False)
    else:
        console.print(f"adapters and results are in {out}; for a plot too: {HOW_TO_INSTALL}", highlight=False, markup=False)
    return all(passed for passed, _ in run.checks())


def _check_out(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SymbiosisError(f"cannot write to {out}: {error.strerror}; choose another folder with --out") from None


@contextmanager
def _server(out: Path, keys: dict[str, str]) -> Iterator[tuple[int, str]]:
    """`symbiosis serve --http` in a child process; yields its process id and address."""
    command = [sys.executable, "-m", "symbiosis", "serve", "--http", "127.0.0.1:0", "--listen", "tcp://127.0.0.1:0"]
    environment = {**os.environ, "SYMBIOSIS_KEYS": ",".join(f"{name}={key}" for name, key in keys.items())}
    with (out / "server.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--cache-gb", str(_KV_CACHE_GB)], stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
    try:
        assert process.stdout is not None, "asked for"
        lines = (line.removeprefix("listening at ").strip() for line in process.stdout if line.startswith("listening at http"))
        url = next(lines, None)
        if url is None:
            raise DemoFailed(f"the server did not start: see {out / 'server.log'}")
        yield process.pid, url
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def _chatting(run: Run, client: HttpClient) -> Iterator[None]:
    """A tenant that asks the base model a question every few seconds, in a thread."""
    stop = Event()

    def ask() -> None:
        backend = HttpChat(client, None, None)
        total = 0.0
        while not stop.wait(max(_CHAT_PAUSE_S, _CHAT_PAUSE_REPLIES * total)):
            question = _QUESTIONS[len(run.replies) % len(_QUESTIONS)]
            started, first = time.monotonic(), list[float]()

            def note(text: str, started: float = started, first: list[float] = first) -> None:
                first += [] if first or not text else [time.monotonic() - started]

            try:
                text = backend.reply([{"role": "user", "content": question}], _SAMPLING, note)
            except SymbiosisError as error:
                run.failure = f"{_CHAT} failed: {error}"
                return
            total = time.monotonic() - started
            run.replies.append({"question": question, "text": text, "first_s": first[0] if first else total, "total_s": total})

    thread = Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


def _run_tenants(run: Run, clients: dict[str, HttpClient], server: int, out: Path, console: Console) -> None:
    for tenant in run.tenants:
        run.before[tenant.name] = _ask(clients[tenant.name], None, tenant)
    run.idle_memory = measure_processes(descendants(server))
    started = time.monotonic()
    ids = {tenant.name: _create_job(clients[tenant.name], tenant, run.steps) for tenant in run.tenants}
    with Live(view(run), console=console, refresh_per_second=4) as live:
        while not run.has_trained:
            time.sleep(_POLL_EVERY_S)
            run.take_jobs({name: clients[name].job(id) for name, id in ids.items()})
            run.measure_server(measure_processes(descendants(server)))
            live.update(view(run))
    run.training_s = time.monotonic() - started
    for tenant in run.tenants:
        name, client = tenant.name, clients[tenant.name]
        run.losses[name] = [each["data"]["train_loss"] for each in client.events(ids[name]) if "train_loss" in each["data"]]
        adapter = run.jobs[name]["fine_tuned_model"]
        run.after[name] = _ask(client, adapter, tenant)
        client.download_adapter(adapter, out / name)
        run.adapter_bytes[name] = sum(file.stat().st_size for file in (out / name).iterdir())


def _ask(client: HttpClient, adapter: str | None, tenant: Tenant) -> str:
    return HttpChat(client, adapter, None).reply([{"role": "user", "content": tenant.question}], _SAMPLING)


def _create_job(client: HttpClient, tenant: Tenant, steps: int) -> str:
    file = client.upload(find_data(Path(tenant.name)))["id"]
    numbers = {"n_steps": steps, "batch_size": _BATCH_SIZE, "max_length": _MAX_LENGTH, "learning_rate": tenant.lr}
    method = {"type": "supervised", "supervised": {"hyperparameters": {"peft_method": tenant.method, **numbers}}}
    body = {"model": client.models()[0]["id"], "training_file": file, "suffix": tenant.name, "seed": _SEED, "method": method}
    return str(client.create_job(body)["id"])


def _run_plain(run: Run, out: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    reports = spawn.Queue()
    first = run.tenants[0]
    settings = {"method": first.method, "lr": first.lr, "batch_size": _BATCH_SIZE, "max_length": _MAX_LENGTH, "seed": _SEED}
    questions = {out / tenant.name: tenant.question for tenant in run.tenants}
    data = find_data(Path(first.name))
    child = spawn.Process(target=run_plain_baseline, args=(reports, data, settings, questions, _SAMPLING), daemon=True)
    child.start()
    try:
        while len(run.plain) < len(run.tenants):
            _take_report(run, reports, child)
            if child.pid is not None:
                run.measure_plain(measure_processes([child.pid]))
    finally:
        child.join(2)
        if child.is_alive():
            child.terminate()
            child.join()


def _take_report(run: Run, reports: Any, child: Any) -> None:
    """Process a report, or wait briefly for one. Raises `DemoFailed` if the child died."""
    try:
        run.take_plain(reports.get(timeout=0.25))
    except queue.Empty:
        if child.exitcode:
            raise DemoFailed(f"the plain process ended with {child.exitcode}") from None
