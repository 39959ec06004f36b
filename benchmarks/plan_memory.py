"""How close is `symbiosis plan` to the memory that processes really take?

Each case is planned by the command, and then run: a server by `symbiosis serve`, a tenant's process, requests or a job over
HTTP. On a CPU the measure is the peak resident set of each process (VmHWM). On a GPU it is what all processes of the case
take of the GPU together, by the driver's count, at its highest. Models have random weights in a folder, except the default
model. The errors without the processes' own memory (imports, CUDA contexts) are stated too.

    python -m benchmarks.plan_memory            # CPU, about 10 minutes on 2 cores
    python -m benchmarks.plan_memory --gpu      # one GPU, about 5 minutes
    python -m benchmarks.plan_memory --tiny     # for the tests: small models, figures without meaning
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu import used_bytes
from benchmarks.http_load.vocabulary import save_tokenizer, words
from benchmarks.results import FOLDER, save

MAX_PASS_ROWS = 4096  # of a trainer on a GPU
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": (
        "Llama",
        {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 12,
         "num_key_value_heads": 4, "vocab_size": 16000, "max_position_embeddings": 4096},
        "float32",
    ),
    "gpt2": ("GPT2", {"n_embd": 1024, "n_layer": 12, "n_head": 16, "vocab_size": 50257, "n_positions": 1024}, "float32"),
    "qwen3": (
        "Qwen3",
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 14, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 64000, "max_position_embeddings": 4096,
         "tie_word_embeddings": True},
        "bfloat16",
    ),
    "llama1b": (
        "Llama",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "max_position_embeddings": 8192},
        "bfloat16",
    ),
    "tiny": (
        "Llama",
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256,
         "max_position_embeddings": 256},
        "float32",
    ),
}  # fmt: skip
"""Family, config, dtype."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    model: str
    tenants: tuple[str, ...]
    """As given to `symbiosis plan`."""
    serve: tuple[str, ...] = ()
    """Further options of `symbiosis serve`."""
    run: str = ""
    """What runs: a tenant that trains or generates, requests, or a job."""
    measured: tuple[str, ...] = ("executor",)
    """Roles whose processes are compared, or the GPU."""


GPU = "cuda:0"
"""As a role: all processes on it."""
_LORA = "train,lora,r=8,targets=q_proj+v_proj"
_ALL = "q_proj+k_proj+v_proj+o_proj+gate_proj+up_proj+down_proj"
_HTTP = ("--http", "127.0.0.1:0")
CPU_CASES = (
    Case(name="executor alone", model="llama", tenants=("generate,context=16",)),
    Case(name="executor, training tenant", model="default", tenants=(f"{_LORA},batch=2x256",), run="train",
         measured=("executor", "tenant")),
    Case(name="training tenant, other model", model="llama", tenants=(f"{_LORA},batch=2x128",), run="train",
         measured=("executor", "tenant")),
    Case(name="generating tenant, 4k context", model="default", tenants=("generate,none,context=4096",), run="generate",
         measured=("tenant",)),
    Case(name="engine, 8 streams of 2k", model="default", tenants=("serve,none,context=2k,streams=8",), serve=_HTTP,
         run="requests", measured=("server",)),
    Case(name="hosted fine-tuning, 512 tokens", model="default", tenants=("job,lora,r=8,length=512",), serve=_HTTP, run="job",
         measured=("server",)),
    Case(name="two shards", model="llama", tenants=("generate,context=16",), serve=("--shards", "2"),
         measured=("shard", "shard")),
    Case(name="GPT-2, training tenant", model="gpt2", tenants=("train,lora,r=8,targets=c_attn,batch=2x256",), run="train",
         measured=("executor", "tenant")),
    Case(name="Qwen3 in bfloat16, training tenant", model="qwen3", tenants=(f"{_LORA},batch=1x256",), run="train",
         measured=("executor", "tenant")),
    Case(name="all projections, short sequences", model="llama", tenants=(f"train,lora,r=16,targets={_ALL},batch=4x64",),
         run="train", measured=("tenant",)),
    Case(name="gradient checkpointing", model="default", tenants=(f"{_LORA},batch=2x256,checkpointing",), run="train",
         measured=("tenant",)),
)  # fmt: skip
GPU_CASES = tuple(
    replace(case, measured=(GPU,))
    for case in (
        Case(name="executor, training tenant", model="llama1b", tenants=(f"{_LORA},cuda,batch=2x512",), run="train"),
        Case(name="generating tenant, 4k context", model="llama1b", tenants=("generate,none,cuda,context=4096",),
             run="generate"),
        Case(name="engine, 64 streams of 2k", model="llama1b", tenants=("serve,none,context=2k,streams=64",), serve=_HTTP,
             run="requests"),
        Case(name="hosted fine-tuning, 512 tokens", model="llama1b", tenants=("job,lora,r=8,length=512",), serve=_HTTP,
             run="job"),
        Case(name="training tenant, Qwen3", model="qwen3", tenants=(f"{_LORA},cuda,batch=4x512",), run="train"),
    )
)  # fmt: skip
TINY_CASES = (
    Case(name="executor, training tenant", model="tiny", tenants=(f"{_LORA},batch=2x16",), run="train",
         measured=("executor", "tenant")),
)  # fmt: skip


def create_model(name: str, folder: Path) -> str | None:
    """A folder with a random model; None: the default one."""
    if name == "default":
        return None
    path = folder / name
    if not path.exists():
        code = "import sys; from benchmarks.plan_memory import write_model; write_model(*sys.argv[1:])"
        subprocess.run([sys.executable, "-c", code, name, str(path)], check=True, stderr=subprocess.DEVNULL)
    return str(path)


def write_model(name: str, path: str) -> None:
    import torch
    import transformers

    family, settings, dtype = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")
    kind(config).to(getattr(torch, dtype)).save_pretrained(path)
    save_tokenizer(config.vocab_size, Path(path))


def plan(case: Case, model: str | None, device: str) -> list[dict[str, Any]]:
    """The processes of the command's plan."""
    command = [sys.executable, "-m", "symbiosis", "plan", *([model] if model else []), "--json"]
    command += ["--devices", "cpu:200GB" if device == "cpu" else "cuda:130GB, cpu:100GB"]
    for tenants in case.tenants:
        command += ["--tenants", tenants]
    if "--shards" in case.serve:
        command += ["--shards", case.serve[case.serve.index("--shards") + 1]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case.name}: {done.stderr}")
    return list(json.loads(done.stdout)["processes"])


@contextmanager
def served(case: Case, model: str | None, device: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """`symbiosis serve` and its addresses by scheme."""
    command = [
        sys.executable,
        "-m",
        "symbiosis",
        "serve",
        *([model] if model else []),
        "--listen",
        "tcp://127.0.0.1:0" if device == "cpu" else "shm://",
    ]
    command += [*case.serve, *(["--device", device] if device != "cpu" else []), *cache_options(case, device)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    addresses: dict[str, str] = {}
    expected = 2 if case.serve[:1] in (("--http",), ("--shards",)) else 1
    found = 0
    while found < expected:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{case.name}: the server ended before it listened")
        for scheme, rest in re.findall(r"^listening at (\w+)://(\S+)", line):
            addresses[scheme] = f"{scheme}://{rest}"
            found += 1
    try:
        yield process, addresses
    finally:
        process.terminate()
        process.wait(120)


def cache_options(case: Case, device: str) -> list[str]:
    """The KV cache of the plan, where it is larger than the default."""
    if device == "cpu" or case.run != "requests":
        return []
    config = MODELS[case.model][1]
    token = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * 2
    token *= config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return ["--cache-gb", str(64 * 2048 * token / 1e9)]


def peak_resident(pid: int | str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"no figure for process {pid}")


def tenant(address: str, run: str, spec: str, device: str) -> int:
    """A tenant's process: its work, and its peak on the host."""
    code = "import sys; from benchmarks.plan_memory import work; work(*sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, address, run, spec, device], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return int(done.stdout.splitlines()[-1])


def work(address: str, run: str, spec: str, device: str) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    import symbiosis

    options = dict(word.split("=") for word in spec.split(",") if "=" in word)
    model: Any = symbiosis.connect(address, device=device, mode="executor")
    vocabulary = model.config.vocab_size
    if run == "train":
        batch, length = (int(number) for number in options["batch"].split("x"))
        config = LoraConfig(r=int(options["r"]), target_modules=options["targets"].split("+"), task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
        if "checkpointing" in spec.split(","):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        model.train()
        optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
        for _ in range(2):
            ids = torch.randint(0, vocabulary, (batch, length), device=device)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        prompt = torch.randint(3, vocabulary, (1, int(options["context"]) - 2), device=device)
        limits = {"min_new_tokens": 2, "max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **limits)
    print(peak_resident("self"))


def requests(url: str, model: str, context: int, streams: int) -> None:
    """So many completions at once; their prompts differ and fill the context."""

    def complete(number: int) -> None:
        prompt = [3 + (number * 7919 + position * 31) % 200 for position in range(context - 8)]
        body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        post(f"{url}/v1/completions", json.dumps(body).encode(), "application/json")

    threads = [threading.Thread(target=complete, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def post(url: str, body: bytes, kind: str) -> dict[str, Any]:
    request = urllib.request.Request(url, body, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=1800) as reply:
        return dict(json.load(reply))


def job(url: str, folder: Path, length: int, batch: int) -> None:
    """A job of two steps over long texts."""
    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": f" {word}" * (2 * length)}) + "\n" for word in words(2 * batch)))
    command = [sys.executable, "-m", "symbiosis", "finetune", str(data), "--hosted", "--connect", url, "--steps", "2"]
    command += ["--batch-size", str(batch), "--max-length", str(length), "--rank", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)


class GpuPeak:
    """The highest use of the GPU's memory since it was entered, sampled."""

    def __init__(self, device: str) -> None:
        self._device, self._start = device, used_bytes(device)
        self._stop, self.bytes = threading.Event(), 0

    def __enter__(self) -> GpuPeak:
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.02):
            self.bytes = max(self.bytes, used_bytes(self._device) - self._start)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(case: Case, model: str | None, device: str, folder: Path) -> list[int]:
    """The peak of each measured process."""
    spec = case.tenants[0]
    options = dict(word.split("=") for word in spec.split(",") if "=" in word)
    found: dict[str, list[int]] = {}
    with GpuPeak(device) as gpu, served(case, model, device) as (server, addresses):
        if case.run in ("train", "generate"):
            found["tenant"] = [tenant(addresses["tcp" if device == "cpu" else "shm"], case.run, spec, device)]
        elif case.run == "requests":
            with urllib.request.urlopen(f"{addresses['http']}/v1/models") as reply:
                name = json.load(reply)["data"][0]["id"]
            requests(addresses["http"], name, 2048, int(options["streams"]))
        elif case.run == "job":
            job(
                addresses["http"],
                folder,
                int(options["length"]),
                2 if device == "cpu" else MAX_PASS_ROWS // int(options["length"]),
            )
        time.sleep(0.5)
        if device == "cpu":
            pids = [server.pid, *_children(server.pid)] if "shard" in case.measured else [server.pid]
            role = case.measured[0]
            found[role] = found.get(role, []) + [peak_resident(pid) for pid in pids]
    if device != "cpu":
        found[GPU] = [gpu.bytes]
    return [found[role].pop(0) for role in case.measured]


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def compare(case: Case, planned: Sequence[dict[str, Any]], measured: Sequence[int], device: str) -> list[dict[str, Any]]:
    rows, left = [], list(planned)
    for role, found in zip(case.measured, measured, strict=True):
        if role == GPU:
            process = together([each for each in planned if each["device"] == GPU])
        else:
            process = next(each for each in left if each["role"] == role)
            left.remove(process)
        expected = process["peak_host_bytes"] if device == "cpu" else process["bytes"]
        base = process["parts"].get("process", process["parts"].get("CUDA context", 0))
        rows.append(
            {
                "case": case.name,
                "model": case.model,
                "role": role,
                "planned_bytes": expected,
                "measured_bytes": found,
                "error": expected / found - 1,
                "error_without_base": (expected - base) / max(1, found - base) - 1,
                "parts": process["parts"],
            }
        )
    return rows


def together(processes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several processes as one."""
    parts = Counter[str]()
    for process in processes:
        parts.update({name: process["count"] * size for name, size in process["parts"].items()})
    return {"bytes": parts.total(), "parts": dict(parts)}


def run(cases: Sequence[Case], device: str, name: str, out: Path = FOLDER) -> list[dict[str, Any]]:
    console, rows = Console(width=120), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            model = create_model(case.model, Path(folder))
            planned = plan(case, model, device)
            rows += compare(case, planned, measure(case, model, device, Path(folder)), device)
            for row in rows[-len(case.measured) :]:
                console.print(
                    f"{row['case']:36} {row['role']:9} planned {row['planned_bytes'] / 1e6:7.0f} MB, "
                    f"measured {row['measured_bytes'] / 1e6:7.0f} MB, {row['error']:+.1%} "
                    f"(without the process {row['error_without_base']:+.1%})"
                )
            worst = max(abs(row["error"]) for row in rows)
            save(name, str(__doc__).splitlines()[0], {"device": device, "worst": worst, "runs": rows}, out)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the cases of a GPU")
    parser.add_argument("--tiny", action="store_true", help="one small case")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    cases = TINY_CASES if chosen.tiny else GPU_CASES if chosen.gpu else CPU_CASES
    cases = tuple(case for case in cases if chosen.only is None or chosen.only in case.name)
    run(cases, "cuda" if chosen.gpu else "cpu", "plan-memory-gpu" if chosen.gpu else "plan-memory", chosen.out)


if __name__ == "__main__":
    main()
