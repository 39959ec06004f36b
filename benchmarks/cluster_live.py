"""What does a cluster cost, and what do clients see when its engines leave or die?

- *front door*: tokens/s of a cluster of one engine against `symbiosis serve` with the same model, in turns; on a GPU also of
  two engines under MPS;
- *engine killed*: the longest gap of streams whose engine is killed with SIGKILL, and how long as many prompts of that length
  take on the engines that are left;
- *node lost*: half of the engines stop at once without closing a connection (SIGSTOP), as when a host loses power;
- *scale-in*: an engine with 32 long completions on the cluster leaves: how many are interrupted, and how long it takes;
- *rolling restart*: all engines leave and are replaced, one at a time, under load.

Completions are greedy and compared with those of an undisturbed run.

    python -m benchmarks.cluster_live             # the default model, 4 engines: about 15 minutes on 2 cores
    python -m benchmarks.cluster_live 1b --mps    # on a GPU: random weights, 2 engines
    python -m benchmarks.cluster_live tiny --cpu  # to try it
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu import mps_daemon, options
from benchmarks.http_load.client import LoadClient
from benchmarks.http_load.figures import summarise
from benchmarks.http_load.workload import Request, Traffic, Workload
from benchmarks.results import compared, save
from symbiosis.app.cluster.engine_drain import drain_engines
from symbiosis.app.cluster.engine_launcher import EngineProcesses

QUESTION = str(__doc__).splitlines()[0]
DEFAULT = "default"
ADMIN = "admin-of-the-benchmark"
_GPU_CACHE_GB = 8.0
"""Several engines are on one GPU."""
_START_S = 300.0
_POLLED_S = 1.5
"""After which statistics are those of running streams."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    prompt: int = 64
    new: int = 64
    """Of requests of the front door's part."""
    streams: int = 32
    rounds: int = 2
    repetitions: int = 3
    long: int = 160
    """Tokens of long completions."""
    engines: int = 4


PLANS = {
    "tiny": Plan(prompt=12, new=16, streams=4, rounds=1, repetitions=1, long=400, engines=2),
    DEFAULT: Plan(),
    "1b": Plan(prompt=128, new=192, streams=128, rounds=3, repetitions=3, long=1500, engines=2),
}


class Server:
    """`symbiosis serve` or `symbiosis cluster up` as a process. A context manager."""

    def __init__(self, model: str, options: Sequence[str], *, engines: int = 0) -> None:
        self._stack = ExitStack()
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        common = ["--http", f"127.0.0.1:{self.port}", "--admin-key", ADMIN, "--key", f"ann={ADMIN}-ann", *options]
        if engines:
            state = self._stack.enter_context(tempfile.TemporaryDirectory())
            command = ["cluster", "up", model, "--engines", str(engines), "--port", "0", "--state", state]
            command += ["--launcher", "processes", *common]
        else:
            command = ["serve", model, "--listen", "tcp://127.0.0.1:0", *common]
        self._command = [sys.executable, "-m", "symbiosis", *[part for part in command if part]]
        self._engines = engines

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        self._stack.callback(self._stop)
        deadline = time.monotonic() + _START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._stack.close()
                raise RuntimeError(f"{' '.join(self._command)} did not start: see above")
            time.sleep(0.2)
        return self

    def _is_ready(self) -> bool:
        try:
            self.model = self.ask("/v1/models")["data"][0]["id"]
            return not self._engines or self.engines() == self._engines
        except OSError:
            return False

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Authorization": f"Bearer {ADMIN}", "Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            found: dict[str, Any] = json.load(reply)
        return found

    def engines(self) -> int:
        return len(self.ask("/v1/statistics")["engines"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Stream:
    """A completion, as its client sees it."""

    prompt: list[int]
    times: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""

    def read(self, url: str, model: str, tokens: int) -> None:
        import openai

        client = openai.OpenAI(base_url=f"{url}/v1", api_key=f"{ADMIN}-ann", max_retries=0, timeout=300)
        try:
            for chunk in client.completions.create(
                model=model, prompt=self.prompt, max_tokens=tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
            ):
                self.times.append(time.monotonic())
                self.text += chunk.choices[0].text if chunk.choices else ""
        except openai.OpenAIError as error:
            self.error = str(error)

    @property
    def gap(self) -> float:
        return max((after - before for before, after in zip(self.times, self.times[1:], strict=False)), default=0.0)


class Cluster:
    """Engines, director and front door of this host, with each member that has died replaced. A context manager."""

    def __init__(self, model: str, plan: Plan, engine: dict[str, Any], state: Path, **options: Any) -> None:
        from symbiosis.app.cluster.cluster_host import ClusterHost

        self.host = ClusterHost(
            "127.0.0.1:0",
            engine={"model": model or None, "adapter_gb": 0.1, "adapter_host_gb": 0.1, "training": False, **engine},
            engines=plan.engines,
            state=state,
            workers=2,
            keys={"ann": f"{ADMIN}-ann"},
            admin_key=ADMIN,
            **options,
        )
        self._count, self._closing = plan.engines, threading.Event()
        self._checker = threading.Thread(target=self._check)
        self._checker.start()
        self.model = self.host.ask("statistics")["model"]

    def _check(self) -> None:
        while not self._closing.wait(0.05):
            self.host.check()

    def engines(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.host.ask("statistics")["engines"]
        return found

    def pid(self, name: str) -> int:
        assert isinstance(self.host.launcher, EngineProcesses)
        return self.host.launcher.pids[name]

    def until_complete(self) -> None:
        deadline = time.monotonic() + _START_S
        while len(self.engines()) != self._count:
            if time.monotonic() > deadline:
                raise RuntimeError("an engine was not replaced: see above")
            time.sleep(0.1)

    def __enter__(self) -> Cluster:
        self.until_complete()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._checker.join()
        self.host.close()


@contextmanager
def running(cluster: Cluster, prompts: Sequence[list[int]], tokens: int) -> Iterator[list[Stream]]:
    """Streams that have begun when this yields, and have ended when it returns."""
    streams = [Stream(prompt) for prompt in prompts]
    threads = [threading.Thread(target=each.read, args=(cluster.host.url, cluster.model, tokens)) for each in streams]
    for thread in threads:
        thread.start()
    while not all(len(each.times) > 3 or each.error for each in streams):
        time.sleep(0.01)
    try:
        yield streams
    finally:
        for thread in threads:
            thread.join()


class Scenarios:
    """Each on the same prompts, compared with the undisturbed texts."""

    def __init__(self, cluster: Cluster, plan: Plan, prompts: Sequence[list[int]]) -> None:
        self.cluster, self.plan, self.prompts = cluster, plan, prompts
        with running(cluster, prompts, plan.long) as streams:
            pass
        self.expected = [each.text for each in streams]
        self.undisturbed = [each.gap for each in streams]

    def _outcome(self, streams: Sequence[Stream]) -> dict[str, Any]:
        return {
            "streams": len(streams),
            "interrupted": sum(bool(each.error) for each in streams),
            "differ": sum(each.text != text for each, text in zip(streams, self.expected, strict=True)),
            "longest_gaps_s": _quantiles([each.gap for each in streams]),
        }

    def engine_killed(self) -> dict[str, Any]:
        return self._lost(1, signal.SIGKILL)

    def node_lost(self) -> dict[str, Any]:
        return self._lost(max(1, self.plan.engines // 2), signal.SIGSTOP)

    def _lost(self, count: int, number: signal.Signals) -> dict[str, Any]:
        """Engines are lost at once; the gap around that moment of the streams that they had."""
        with running(self.cluster, self.prompts, self.plan.long) as streams:
            time.sleep(_POLLED_S)
            engines = self.cluster.engines()
            names = sorted(engines, key=lambda each: -engines[each]["running"])[:count]
            lost = max(1, sum(engines[name]["running"] for name in names))
            pids = [self.cluster.pid(name) for name in names]
            delivered = round(statistics.mean(len(each.times) for each in streams))
            for pid in pids:
                os.kill(pid, number)
            at = time.monotonic()
        if number is signal.SIGSTOP:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        gaps = sorted(
            after - before
            for each in streams
            for before, after in zip(each.times, each.times[1:], strict=False)
            if before <= at < after
        )[-lost:]
        outcome = self._outcome(streams)
        self.cluster.until_complete()
        again = self._again(lost, delivered)
        return {**outcome, "engines": count, "streams_there": lost, "gap_s": _quantiles(gaps), "prefill_s": again}

    def _again(self, count: int, delivered: int) -> float:
        """Seconds until as many streams, with the tokens delivered as part of their prompts, have begun next to the others."""
        with running(self.cluster, self.prompts[count:], self.plan.long):
            prompts = [prompt[::-1] + prompt[:1] * delivered for prompt in self.prompts[:count]]  # in no prefix cache
            started = time.monotonic()
            with running(self.cluster, prompts, 5) as streams:
                pass
            return max(each.times[0] for each in streams) - started

    def scale_in(self) -> dict[str, Any]:
        with running(self.cluster, self.prompts, self.plan.long) as streams:
            time.sleep(_POLLED_S)
            engines = self.cluster.engines()
            name = max(engines, key=lambda each: engines[each]["running"])
            started = time.monotonic()
            self.cluster.host.ask("drain", engine=name)
            while name in self.cluster.engines():
                time.sleep(0.02)
            left = time.monotonic() - started
        self.cluster.until_complete()
        return {**self._outcome(streams), "streams_there": engines[name]["running"], "left_after_s": left}

    def rolling_restart(self) -> dict[str, Any]:
        over, outcomes = threading.Event(), list[dict[str, Any]]()

        def load() -> None:
            while not over.is_set():
                with running(self.cluster, self.prompts, self.plan.long) as streams:
                    pass
                outcomes.append(self._outcome(streams))

        thread = threading.Thread(target=load)
        thread.start()
        started, count = time.monotonic(), self.plan.engines
        director = self.cluster.host.director.messages.removeprefix("tcp://")
        drain_engines(director, self.cluster.host.secret, [], timeout_s=_START_S, drained=lambda *_: None)
        seconds = time.monotonic() - started
        over.set()
        thread.join()
        total = {key: sum(each[key] for each in outcomes) for key in ("streams", "interrupted", "differ")}
        longest = max(each["longest_gaps_s"]["max"] for each in outcomes)
        return {**total, "engines": count, "seconds": seconds, "longest_gap_s": longest}


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {"p50": statistics.median(values), "max": max(values)}


def throughput(servers: dict[str, Server], plan: Plan, vocabulary: int, show: Callable[[str], None]) -> dict[str, Any]:
    runs: dict[str, list[float]] = {name: [] for name in servers}
    with LoadClient(1) as client:
        for repetition in range(-1, plan.repetitions):  # the first one is to warm up
            for name, server in servers.items():
                traffic = Traffic(vocabulary=vocabulary, prompt=plan.prompt, new=plan.new)
                made = traffic.requests(plan.streams * plan.rounds, (repetition, name))
                requests = [
                    Request(prompt=each.prompt, new=each.new, adapter=server.model, key=f"{ADMIN}-ann") for each in made
                ]
                figures = summarise(
                    client.send(server.url, Workload(requests=requests, concurrency=plan.streams), keep_every=0)
                )
                if figures["errors"]:
                    raise RuntimeError(f"{name}: {figures['first_errors']}")
                show(f"{name}: {figures['tokens_per_s']:.0f} tokens/s")
                if repetition >= 0:
                    runs[name].append(figures["tokens_per_s"])
    return compared(runs, "serve")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(str(__doc__), shapes=list(PLANS), shape=DEFAULT)
    parser.add_argument("--only", choices=["front-door", "faults"])
    chosen = parser.parse_args(arguments)
    plan, console, record = PLANS[chosen.shape], Console(width=140), dict[str, Any]()
    device = chosen.device if chosen.shape == "1b" else "cpu"
    with tempfile.TemporaryDirectory() as place, mps_daemon(chosen.mps):
        model, vocabulary = make_model(chosen.shape, Path(place))
        flags = ["--dtype", "float32"] if device == "cpu" else ["--device", device, "--cache-gb", str(_GPU_CACHE_GB)]
        if chosen.only != "faults":
            with ExitStack() as stack:
                servers = {"serve": Server(model, flags), "cluster of one": Server(model, flags, engines=1)}
                if device != "cpu":
                    servers[f"cluster of {plan.engines}"] = Server(model, flags, engines=plan.engines)
                for server in servers.values():
                    stack.enter_context(server)
                record["front_door"] = throughput(servers, plan, vocabulary, console.print)
        if chosen.only != "front-door":
            engine: dict[str, Any] = {"dtype": "float32", "threads": 1}
            if device != "cpu":
                engine = {"device": device, "cache_gb": _GPU_CACHE_GB}
            with Cluster(model, plan, engine, Path(place) / "state") as cluster:
                prompts = [
                    list(each.prompt) for each in Traffic(vocabulary=vocabulary, prompt=plan.prompt, new=1).requests(32, 1)
                ]
                scenarios = Scenarios(cluster, plan, prompts)
                record["undisturbed_gaps_s"] = _quantiles(scenarios.undisturbed)
                for name in ("engine_killed", "node_lost", "scale_in", "rolling_restart"):
                    record[name] = getattr(scenarios, name)()
                    console.print(name, record[name])
    parts = ("cluster-live", "" if chosen.shape == DEFAULT else chosen.shape, chosen.only or "")
    name = "-".join(part for part in parts if part)
    console.print(save(name, QUESTION, {"script": "cluster_live", "shape": chosen.shape, **record}, chosen.out))


def make_model(shape: str, folder: Path) -> tuple[str, int]:
    """What to serve, and the size of its vocabulary."""
    if shape == DEFAULT:
        return "", 49_000
    if shape == "tiny":
        from benchmarks.plan_memory import write_model

        write_model("tiny", str(folder / "tiny"))
        return str(folder / "tiny"), 100
    from benchmarks.http_load.vocabulary import save_tokenizer
    from benchmarks.shapes import random_model

    model = random_model(shape, "cpu").bfloat16()  # as models for GPUs are stored
    model.save_pretrained(folder / shape)
    save_tokenizer(model.config.vocab_size, folder / shape)
    return str(folder / shape), model.config.vocab_size


if __name__ == "__main__":
    main()
