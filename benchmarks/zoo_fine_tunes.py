"""Fine-tunes of one model on real text, for benchmarks of a zoo. No network: the text is that of installed packages.

Each kind of text is split by file: a fifth of the files is held out and never trained on.
"""

from __future__ import annotations

import ast
import hashlib
import random
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

HELD_OUT = 5
"""One file in so many."""
_MAX_CHARACTERS = 1_500_000
_MAX_FILE_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True)
class TextKind:
    """Files of installed packages, and how they are read."""

    package: str
    """Empty: the standard library. `*`: the descriptions of all installed packages."""
    pattern: str
    docstrings: bool = False


KINDS = {
    "c++": TextKind("torch", "include/torch/csrc/**/*.h"),
    "numpy docstrings": TextKind("numpy", "**/*.py", docstrings=True),
    "torch docstrings": TextKind("torch", "nn/**/*.py", docstrings=True),
    "standard library": TextKind("", "*.py"),
    "library docstrings": TextKind("", "*/*.py", docstrings=True),
    "package descriptions": TextKind("*", "METADATA"),
    "transformers": TextKind("transformers", "models/*/modeling_*.py"),
    "matplotlib docstrings": TextKind("matplotlib", "**/*.py", docstrings=True),
}


@dataclass(frozen=True, slots=True)
class FineTune:
    """A short training run."""

    name: str
    kind: str
    steps: int
    layers: int | None = None
    """Only so many of the last layers are trained. None: all weights, the embedding too. 0: a LoRA adapter."""
    learning_rate: float = 1e-4
    seed: int = 0
    batch: int = 4
    tokens: int = 128

    @property
    def is_admitted(self) -> bool:
        """Whether the zoo of 20 has it as admission stores it, too: those with the most layers."""
        return self.layers is None or self.layers > 8


FULL = (
    FineTune("full-cpp-40", "c++", 40),
    FineTune("full-numpy-80", "numpy docstrings", 80),
    FineTune("full-packages-60", "package descriptions", 60),
)
_ZOO_KINDS = ("c++", "standard library", "package descriptions", "transformers", "torch docstrings")
# What a zoo of them takes does not depend on the length of the training.
_SHORT: dict[str, Any] = {"steps": 2, "learning_rate": 2e-4, "batch": 2, "tokens": 64}
ZOO = (
    *(FineTune(f"lora-{i}", _ZOO_KINDS[i % 5], layers=0, seed=i, **_SHORT) for i in range(8)),
    *(FineTune(f"last8-{i}", _ZOO_KINDS[i % 5], layers=8, seed=i, **_SHORT) for i in range(6)),
    *(FineTune(f"last10-{i}", _ZOO_KINDS[i % 5], layers=10, seed=i, **_SHORT) for i in range(4)),
    *FULL[:2],
)
TINY_FULL = (
    FineTune("full-0", "package descriptions", 60, learning_rate=1e-2),
    FineTune("full-1", "standard library", 40, learning_rate=1e-2),
)
TINY_ZOO = (
    FineTune("lora-0", "package descriptions", 2, layers=0, learning_rate=5e-3),
    FineTune("last2-0", "standard library", 2, layers=2, learning_rate=1e-3),
    TINY_FULL[0],
)


def _files(kind: TextKind) -> list[Path]:
    if kind.package == "*":
        return sorted(Path(str(each.locate_file(""))) / each._path / kind.pattern for each in metadata.distributions())  # type: ignore[attr-defined]
    if not kind.package:
        return sorted(Path(sysconfig.get_paths()["stdlib"]).glob(kind.pattern))
    spec = util.find_spec(kind.package)
    assert spec is not None, f"{kind.package} is not installed"
    assert spec.origin is not None
    return sorted(Path(spec.origin).parent.glob(kind.pattern))


def _read(path: Path, kind: TextKind) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        if kind.package == "*":
            return text.partition("\n\n")[2]
        if not kind.docstrings:
            return text
        tree = ast.parse(text)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented))
    return "\n\n".join(each for each in found if len(each) > 200)


@cache
def texts(name: str) -> tuple[str, str, dict[str, Any]]:
    """Text to train on, held-out text of the same kind, and what they are."""
    kind, seen = KINDS[name], set()
    parts: tuple[list[str], list[str]] = ([], [])
    other = {"test", "tests", "site-packages", "idlelib", "lib2to3"}
    files = [path for path in _files(kind) if kind.package or not other & set(path.parts)]
    random.Random(0).shuffle(files)
    for number, path in enumerate(files):
        text = _read(path, kind)[:_MAX_FILE_CHARACTERS].strip()
        digest = hashlib.sha256(text.encode()).digest()
        held_out = number % HELD_OUT == 0
        if len(text) > 300 and digest not in seen and sum(map(len, parts[held_out])) < _MAX_CHARACTERS:
            seen.add(digest)
            parts[held_out].append(text)
    train, held = ("\n\n".join(part) for part in parts)
    about = {
        "package": {"": "standard library", "*": "all installed"}.get(kind.package, kind.package), "files": kind.pattern,
        "docstrings_only": kind.docstrings, "training_files": len(parts[0]), "held_out_files": len(parts[1]),
        "training_sha256": hashlib.sha256(train.encode()).hexdigest(),
        "held_out_sha256": hashlib.sha256(held.encode()).hexdigest(),
    }  # fmt: skip
    return train, held, about


def _batches(ids: Tensor, fine_tune: FineTune) -> Iterator[Tensor]:
    numbers = random.Random(fine_tune.seed)
    while True:
        starts = [numbers.randrange(len(ids) - fine_tune.tokens) for _ in range(fine_tune.batch)]
        yield torch.stack([ids[start : start + fine_tune.tokens] for start in starts])


def make(base: Path, fine_tune: FineTune, folder: Path) -> list[float]:
    """Train and save a checkpoint, or a PEFT adapter; the folder appears when it is whole. Returns the losses."""
    torch.manual_seed(fine_tune.seed)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if fine_tune.layers == 0:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    elif fine_tune.layers is not None:
        train_last(model, fine_tune.layers)
    train = texts(fine_tune.kind)[0][: 100 * fine_tune.steps * fine_tune.batch * fine_tune.tokens]
    ids = torch.tensor(AutoTokenizer.from_pretrained(base)(train, verbose=False)["input_ids"])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=fine_tune.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 4) * (1 - 0.9 * step / fine_tune.steps)
    )
    losses = []
    model.train()
    for _, x in zip(range(fine_tune.steps), _batches(ids, fine_tune), strict=False):
        loss = model(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    scratch = folder.with_name(folder.name + ".part")
    shutil.rmtree(scratch, ignore_errors=True)
    model.save_pretrained(scratch)
    if fine_tune.layers != 0:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (base / name).is_file():
                shutil.copy(base / name, scratch / name)
    scratch.rename(folder)
    return losses


def train_last(model: PreTrainedModel, layers: int) -> None:
    """Freeze all weights but those of the last layers."""
    for parameter in model.parameters():
        parameter.requires_grad = False
    for layer in model.base_model.layers[-layers:]:
        for parameter in layer.parameters():
            parameter.requires_grad = True
