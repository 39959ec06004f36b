"""A model's files as they come to a zoo: a folder as `save_pretrained` writes it. Tensors are read one at a time."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from symbiosis.zoo.errors import NotAdmitted

CONFIG, ADAPTER_CONFIG, ADAPTER_TENSORS = "config.json", "adapter_config.json", "adapter_model.safetensors"
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHERS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
    "tokenizer.model", "added_tokens.json", "chat_template.jinja", "preprocessor_config.json",
)  # fmt: skip
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_MAX_JSON_BYTES = 64 << 20


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


class Checkpoint:
    """An open checkpoint. A context manager."""

    def __init__(self, folder: Path) -> None:
        """Raises `NotAdmitted`."""
        self._folder, self._stack = folder, ExitStack()
        self.config = read_json(folder / CONFIG)
        if not isinstance(self.config.get("model_type"), str):
            raise NotAdmitted(f"{CONFIG} of {folder.name} has no model_type: expected that of a transformers model")
        self._files: dict[str, Any] = {}
        """The open file of each tensor."""
        try:
            for file in self._tensor_files():
                self._open(file)
        except BaseException:
            self._stack.close()
            raise

    def _tensor_files(self) -> list[str]:
        if (self._folder / _INDEX).is_file():
            places = read_json(self._folder / _INDEX).get("weight_map")
            names = set(places.values()) if isinstance(places, dict) else set()
            if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
                raise NotAdmitted(f"{_INDEX} of {self._folder.name} has no weight_map of file names")
            return sorted(names)
        if (self._folder / _WHOLE).is_file():
            return [_WHOLE]
        raise NotAdmitted(
            f"{self._folder.name} has no {_WHOLE}: expected a folder as `save_pretrained` writes it, or a GGUF file"
        )

    def _open(self, name: str) -> None:
        try:
            file = self._stack.enter_context(safe_open(self._folder / name, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise NotAdmitted(f"{name} of {self._folder.name} cannot be read: {error}") from None
        for tensor in file.keys():  # noqa: SIM118 - it is no dict
            self._files[tensor] = file

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        found: Tensor = self._files[name].get_tensor(name)
        return found

    @property
    def other_files(self) -> dict[str, Path]:
        """Config and tokenizer."""
        return {name: path for name in (CONFIG, *_OTHERS) if (path := self._folder / name).is_file()}

    @property
    def tokenizer_file(self) -> str:
        """The file that says what token ids mean; empty without a tokenizer."""
        return next((name for name in _TOKENIZERS if (self._folder / name).is_file()), "")

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()


def read_json(path: Path) -> dict[str, Any]:
    """Raises `NotAdmitted`."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError
    except (OSError, ValueError, RecursionError):
        raise NotAdmitted(f"{path.parent.name} has no {path.name} that can be read: expected a JSON object") from None
    return found
