"""Is a token lost or doubled when processes of a cluster are killed?

A cluster on this host: front door with two workers, director, engines of the default model in float32, half of them on a node
that joins. Clients stream completions with `openai` all the time: eight LoRA adapters, greedy with n = 1, seeded with n = 4.
Meanwhile engines, the node with all its engines, the director and HTTP workers are killed with SIGKILL at random moments; all
are replaced. Every completion must equal that of an undisturbed run before. A killed worker ends its own connections: those
clients ask again, which is counted.

    python -m benchmarks.cluster_kills                   # 100 kills, 20 to 30 minutes on 2 cores
    python -m benchmarks.cluster_kills tiny --kills 3    # to try it: a tiny model
    python -m benchmarks.cluster_kills 1b --device cuda --kills 20  # two engines on one GPU under MPS, random weights
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cluster_live import DEFAULT, make_model
from benchmarks.gpu import mps_daemon
from benchmarks.results import FOLDER, save

NEW = 24
ADAPTERS = 8
SHARES = {"engine": 0.5, "node": 0.15, "director": 0.2, "worker": 0.15}
_PROMPT = "The following is a short story about a ship:"
_WORDS = " aaab aaac aaad"
_DEVICES: dict[str, dict[str, Any]] = {"cpu": {"threads": 1}, "cuda": {"device": "cuda", "cache_gb": 4.0}}
"""How engines start there."""
_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapters(source: str | None, folder: Path) -> dict[str, Path]:
    import torch
    from peft import LoraConfig, get_peft_model

    from symbiosis.models.loading import load

    model = load(source, device=torch.device("cpu"), dtype=None).model
    for number in range(ADAPTERS):
        torch.manual_seed(number)
        config = LoraConfig(r=8, target_modules=_TARGETS, init_lora_weights=False, task_type="CAUSAL_LM")
        adapted: Any = get_peft_model(model, config)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(0.05)
        adapted.save_pretrained(folder / f"a{number}")
        model = adapted.unload()
    return {f"a{number}": folder / f"a{number}" for number in range(ADAPTERS)}


class Clients:
    """Streams, each of which compares every completion with the undisturbed one."""

    def __init__(self, url: str, streams: int, prompt: str) -> None:
        import openai

        self._openai, self._prompt = openai, prompt
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        self._cases = [(f"a{number}", n) for number in range(ADAPTERS) for n in (1, 4)]
        self._expected: dict[tuple[str, int], list[str]] = {}
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(streams)]
        self.counts: Counter[str] = Counter()
        self.different: list[str] = []
        self.gaps: list[float] = []
        """The longest time without a token of each completion."""

    def learn(self) -> None:
        for case in self._cases:
            self._expected[case], _ = self._ask(*case)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            if thread.ident is not None:  # it has started
                thread.join()

    def _ask(self, model: str, n: int) -> tuple[list[str], float]:
        texts, gap, last = [""] * n, 0.0, 0.0
        sampling: dict[str, Any] = {"temperature": 0} if n == 1 else {"temperature": 1, "seed": 11}
        stream = self._client.completions.create(
            model=model, prompt=self._prompt, max_tokens=NEW, n=n, stream=True, extra_body={"ignore_eos": True}, **sampling
        )
        for chunk in stream:
            now = time.monotonic()
            gap, last = max(gap, now - last if last else 0.0), now
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        return texts, gap

    def _run(self, number: int) -> None:
        chosen = random.Random(number)
        while not self._over.is_set():
            case = chosen.choice(self._cases)
            try:
                texts, gap = self._ask(*case)
            except (self._openai.APIConnectionError, self._openai.APIError) as error:
                with self._lock:
                    self.counts["connections cut" if _is_cut(error) else f"failed: {error}"[:200]] += 1
                time.sleep(0.2)
                continue
            with self._lock:
                self.counts["requests"] += 1
                self.counts["completions"] += case[1]
                self.gaps.append(gap)
                if texts != self._expected[case]:
                    self.different.append(f"{case}: {texts} instead of {self._expected[case]}")


class Node:
    """`symbiosis cluster join` with its engines. A context manager."""

    def __init__(self, director: str, secret: str, engine: dict[str, Any], engines: int, folder: Path) -> None:
        file = folder / "node-secret"
        file.touch(mode=0o600)
        file.write_text(secret)
        command = [sys.executable, "-m", "symbiosis", "cluster", "join", director, "--secret-file", str(file)]
        command += ["--engines", str(engines), "--no-training"]
        for name, value in engine.items():
            if name != "training" and value:
                command += [f"--{name.replace('_', '-')}", str(value)]
        self._command = command
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    @property
    def engines(self) -> list[int]:
        """Their pids."""
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        return [int(pid) for task in tasks for pid in task.read_text().split()]

    def kill(self) -> None:
        """As when the host loses power. It joins again."""
        for pid in [self._process.pid, *self.engines]:
            os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._start()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)


def _is_cut(error: Exception) -> bool:
    text = f"{type(error).__name__} {error} {type(error.__cause__).__name__}".lower()
    return any(word in text for word in ("connection", "remoteprotocol", "readerror", "peer closed", "incomplete"))


def run(shape: str, device: str, kills: int, engines: int, streams: int, out: Path, *, seed: int = 0) -> dict[str, Any]:
    from symbiosis.app.cluster.cluster_host import ClusterHost
    from symbiosis.app.cluster.engine_launcher import EngineProcesses

    console, chosen, done = Console(width=120), random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        source = make_model(shape, folder)[0] or None
        engine = {"model": source, "dtype": "float32", "adapter_gb": 0.2, "adapter_host_gb": 0.2, "training": False}
        engine |= _DEVICES[device]
        adapters = write_adapters(source, folder / "adapters")
        with (
            ClusterHost(
                "127.0.0.1:0",
                engine=engine,
                engines=engines - engines // 2,
                state=folder / "state",
                workers=2,
                adapters=adapters,
            ) as host,
            Node(host.director.messages.removeprefix("tcp://"), host.secret, engine, engines // 2, folder) as node,
        ):
            closing, failure = threading.Event(), list[Exception]()

            def check() -> None:
                while not closing.wait(0.1):
                    try:
                        host.check()
                    except Exception as error:  # noqa: BLE001 - it ends the run
                        failure.append(error)
                        return

            clients = Clients(host.url, streams, _PROMPT if shape == DEFAULT else _WORDS)
            checker = threading.Thread(target=check)
            checker.start()
            try:
                _wait_for(host, engines, failure)
                clients.learn()
                clients.start()
                started = time.monotonic()
                while done.total() < kills:
                    time.sleep(chosen.uniform(0.5, 4.0))
                    kind = chosen.choices([*SHARES], [*SHARES.values()])[0]
                    if kind in ("engine", "node"):
                        _wait_for(host, engines - (kind == "engine" and engines > 2), failure)  # another one is there
                    if kind == "node":
                        node.kill()
                    else:
                        launcher = host.launcher
                        assert isinstance(launcher, EngineProcesses)
                        pids = {"engine": [*launcher.pids.values(), *node.engines], "director": [host.director_pid]}
                        os.kill(chosen.choice(pids.get(kind, host.http_pids[1:])), signal.SIGKILL)
                    done[kind] += 1
                    if done.total() % 10 == 0:
                        console.print(
                            f"{done.total()} kills, {clients.counts['requests']} requests, {len(clients.different)} differ"
                        )
                    if failure:
                        raise failure[0]
                _wait_for(host, engines, failure)
                time.sleep(5.0)
                seconds = time.monotonic() - started
            finally:
                clients.stop()
                closing.set()
                checker.join()
    gaps = sorted(clients.gaps)
    figures = {
        "script": "cluster_kills",
        "shape": shape,
        "device": device,
        "engines": engines,
        "streams": streams,
        "kills": dict(done),
        "seconds": seconds,
        "counts": dict(clients.counts),
        "different": clients.different[:5],
        "num_different": len(clients.different),
        "longest_gap_s": {"p50": statistics.median(gaps), "p99": gaps[int(0.99 * (len(gaps) - 1))], "max": gaps[-1]},
    }
    parts = ("cluster-kills", "" if shape == DEFAULT else shape, "" if device == "cpu" else device)
    save("-".join(part for part in parts if part), str(__doc__).splitlines()[0], figures, out)
    console.print(figures)
    return figures


def _wait_for(host: Any, engines: int, failure: Sequence[Exception]) -> None:
    while len(host.ask("statistics")["engines"]) < engines:
        if failure:
            raise failure[0]
        time.sleep(0.2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", choices=[DEFAULT, "tiny", "1b"], default=DEFAULT)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--engines", type=int, help="4, or 2 of another shape than the default")
    parser.add_argument("--streams", type=int, help="64, or 8 of the tiny shape")
    parser.add_argument("--device", choices=list(_DEVICES), default="cpu", help="cuda: under MPS")
    parser.add_argument("--out", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    engines = chosen.engines or (4 if chosen.shape == DEFAULT else 2)
    streams = chosen.streams or (8 if chosen.shape == "tiny" else 64)
    with mps_daemon(chosen.device == "cuda"):
        run(chosen.shape, chosen.device, chosen.kills, engines, streams, chosen.out)


if __name__ == "__main__":
    main()
