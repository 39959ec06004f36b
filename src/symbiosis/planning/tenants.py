"""Tenants of a plan, parsed from `--tenants`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from symbiosis.errors import SymbiosisError
from symbiosis.planning.quantities import format_tokens, parse_tokens

GRAMMAR = (
    "[COUNT x] WORKLOAD[,OPTION ...], such as '8 x train,lora,r=16,batch=4x512', 'generate,context=8k', "
    "'serve,context=8k,streams=64,adapters=32' or '4 x job,length=1k'"
)
METHODS = ("lora", "rslora", "dora", "ia3", "prefix", "prompt", "ptuning", "none")
OPTIMIZERS = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1, "adafactor": 0, "lion": 1}
"""Values of state for each trained parameter, of the parameter's size."""
_MAX_COUNT, _MAX_RANK = 100_000, 4096


class Workload(StrEnum):
    """What a tenant does, and by which way in."""

    TRAIN = "train"
    """Split: the tenant's process trains an adapter."""
    GENERATE = "generate"
    """Split: the tenant's process generates."""
    SERVE = "serve"
    """Hosted serving."""
    JOB = "job"
    """Hosted fine-tuning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantLoad:
    """`count` tenants that do the same."""

    workload: Workload
    count: int = 1
    method: str = "lora"
    rank: int = 8
    targets: tuple[str, ...] | None = None
    """None: PEFT's default for the architecture."""
    virtual_tokens: int = 16
    optimizer: str = "adamw"
    batch: int = 1
    length: int = 512
    """Tokens of a training sequence."""
    context: int = 2048
    """Tokens of a sequence that generates, prompt included."""
    streams: int = 1
    """Sequences at once."""
    adapters: int = 0
    """Adapters served."""
    checkpointing: bool = False
    """Gradient checkpointing."""
    device: str | None = None
    """Kind of device of the tenant's part: cpu, cuda; None: the planner chooses."""
    remote: bool = False
    """The tenant's process is on another host."""

    @property
    def is_split(self) -> bool:
        return self.workload in (Workload.TRAIN, Workload.GENERATE)

    def describe(self) -> str:
        what = {
            Workload.TRAIN: f"train {self.method}, batch {self.batch}x{format_tokens(self.length)}",
            Workload.GENERATE: f"generate, context {format_tokens(self.context)}",
            Workload.SERVE: f"serve, context {format_tokens(self.context)}, {self.streams} streams",
            Workload.JOB: f"job {self.method}, length {format_tokens(self.length)}",
        }[self.workload]
        return f"{self.count} x {what}" if self.count > 1 else what


_OPTIONS = {
    Workload.TRAIN: {"batch", "length", "optimizer", "device", "link", "checkpointing", "method"},
    Workload.GENERATE: {"context", "streams", "device", "link", "method"},
    Workload.SERVE: {"context", "streams", "adapters", "method"},
    Workload.JOB: {"length", "batch", "method"},
}


def parse_tenants(specs: Sequence[str]) -> list[TenantLoad]:
    """Raises `SymbiosisError` with what was expected."""
    return [_parse_load(spec) for spec in specs]


def _parse_load(spec: str) -> TenantLoad:
    match = re.fullmatch(r"\s*(?:(\d{1,9})\s*[x×]\s+)?(.*)", spec, re.DOTALL)
    assert match is not None
    count = int(match[1] or 1)
    if not 1 <= count <= _MAX_COUNT:
        raise SymbiosisError(f"--tenants {spec!r:.60}: {count} tenants, expected 1 to {_MAX_COUNT}")
    words = [word for word in re.split(r"[,:\s]+", match[2].strip()) if word]
    values: dict[str, object] = {"count": count}
    groups: dict[str, str] = {}  # option to the word that gave it
    for word in words:
        for name, group, value in _parse_word(word, spec):
            if name in values:
                raise SymbiosisError(f"--tenants {spec!r:.60}: {name} is given twice, by {groups[name]!r} and {word!r:.40}")
            values[name], groups[name] = value, word
            groups.setdefault(f"group {group}", word)
    workload = values.get("workload")
    if workload is None:
        raise SymbiosisError(f"--tenants {spec!r:.60}: expected {GRAMMAR}")
    assert isinstance(workload, Workload)
    for key, word in groups.items():
        group = key.removeprefix("group ")
        if key != group and group not in (*_OPTIONS[workload], "workload"):
            raise SymbiosisError(f"--tenants {spec!r:.60}: {word!r:.40} does not apply to {workload.value}; expected {GRAMMAR}")
    return TenantLoad(**values)  # type: ignore[arg-type]


def _parse_word(word: str, spec: str) -> list[tuple[str, str, object]]:
    """(field, group of options, value) of one word."""
    name, mark, text = word.partition("=")
    where = f"--tenants {spec!r:.60}: {word!r:.40}"
    if not mark:
        if word in list(Workload):
            return [("workload", "workload", Workload(word))]
        if word in METHODS:
            return [("method", "method", word)]
        if word in OPTIMIZERS:
            return [("optimizer", "optimizer", word)]
        if word in ("cpu", "cuda"):
            return [("device", "device", word)]
        if word == "remote":
            return [("remote", "link", True)]
        if word == "checkpointing":
            return [("checkpointing", "checkpointing", True)]
        raise SymbiosisError(f"{where} is unknown; expected {GRAMMAR}")
    if name == "batch":
        sizes = re.fullmatch(r"(\d{1,6})(?:[x×](\w+))?", text)
        if sizes is None or int(sizes[1]) < 1:
            raise SymbiosisError(f"{where}: expected batch=SEQUENCES or batch=SEQUENCESxTOKENS, such as batch=4x512")
        length = [] if sizes[2] is None else [("length", "length", parse_tokens(sizes[2]))]
        return [("batch", "batch", int(sizes[1])), *length]
    if name in ("length", "context"):
        return [(name, name, parse_tokens(text))]
    if name in ("r", "rank", "streams", "adapters", "virtual_tokens"):
        most = _MAX_RANK if name in ("r", "rank") else _MAX_COUNT
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise SymbiosisError(f"{where}: expected a whole number from 1 to {most}")
        field = "rank" if name == "r" else name
        return [(field, "method" if field in ("rank", "virtual_tokens") else field, int(text))]
    if name == "targets":
        targets = tuple(each for each in text.split("+") if each)
        if not targets:
            raise SymbiosisError(f"{where}: expected names of layers, such as targets=q_proj+v_proj")
        return [("targets", "method", targets)]
    options = "batch, length, context, r, targets, virtual_tokens, streams, adapters"
    raise SymbiosisError(f"{where}: unknown option, expected one of {options}")
