"""A session's adapter in a folder: PEFT's two files, and optionally the state that is needed to resume training.

A folder appears whole or not at all: it is written under a temporary name, synced, then renamed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from symbiosis.adapters.files import CONFIG, TENSORS, quote
from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.adapters.parts import Adapter, Ia3Part, LoraPart
from symbiosis.adapters.reader import read_adapter
from symbiosis.errors import BadAdapter, Diverged, NotStored, OutOfRange
from symbiosis.finetuning.adapters.lora_math import TrainableLora
from symbiosis.finetuning.adapters.trained_adapter import AdapterSnapshot, TrainedAdapter
from symbiosis.finetuning.optimizer import STATE_NAMES

STATE = "training_state.safetensors"
"""The optimizer's tensors, the parameters of a prompt encoder, and the session's progress."""
_DTYPES = ("F64", "F32", "F16", "BF16")
_MAX_TENSORS, _MAX_HEADER_BYTES = len(STATE_NAMES) + 1, 4096
"""Tensors of each parameter, and bytes of the file's header for each tensor."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Of a session."""

    steps: int = 0
    batches: int = 0
    """Calls of forward_backward: their number seeds dropout."""


def save(
    folder: Path, adapter: TrainedAdapter, optimizer: Mapping[str, Tensor] | None, progress: Progress, *, replace: bool = False
) -> AdapterSnapshot:
    """Write the adapter as PEFT does; with the optimizer's state also what `load` resumes from. Returns what was written.

    Raises `OutOfRange` if the path is not a folder, or a folder with files and `replace` is False, `Diverged` if a
    number is not finite, `NotStored` if the disk fails.
    """
    _check_destination(folder, replace=replace)
    snapshot = adapter.snapshot()
    if not snapshot.is_finite or not all(bool(torch.isfinite(tensor).all()) for tensor in (optimizer or {}).values()):
        raise Diverged("the adapter or its optimizer has NaN or infinite numbers since its last step")
    partial, older = (folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.{kind}") for kind in ("part", "old"))
    try:
        partial.mkdir(parents=True)
        (partial / CONFIG).write_text(adapter.config)
        save_file(dict(snapshot.tensors), partial / TENSORS, metadata={"format": "pt"})
        if optimizer is not None:
            encoder = {f"{name}/value": adapter.parameters[name].detach().cpu() for name in _encoder_parameters(adapter)}
            metadata = {"steps": str(progress.steps), "batches": str(progress.batches)}
            save_file({**optimizer, **encoder}, partial / STATE, metadata=metadata)
        for path in (*partial.iterdir(), partial):
            _sync(path)
        if replace and folder.exists():
            folder.replace(older)
        partial.replace(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        if older.exists() and not folder.exists():
            older.replace(folder)
        raise _not_stored(error) from error
    finally:
        for left in (partial, older):
            shutil.rmtree(left, ignore_errors=True)
    return snapshot


def _check_destination(folder: Path, *, replace: bool) -> None:
    try:
        if not folder.is_symlink() and not folder.exists():
            return
        if folder.is_symlink() or not folder.is_dir():
            raise OutOfRange(f"{quote(folder.name)} is a file or a link", field="folder", expected="a new or an empty folder")
        if not replace and any(folder.iterdir()):
            expected = "a new or an empty one, or replace=True"
            raise OutOfRange(f"the folder {quote(folder.name)} is not empty", field="folder", expected=expected)
    except OSError as error:
        raise _not_stored(error) from error


def _not_stored(error: Exception) -> NotStored:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return NotStored(f"the adapter could not be written: {reason}")


def load(folder: Path, adapter: TrainedAdapter, model: ModelFacts) -> tuple[Progress, dict[str, Tensor]]:
    """Copy the parameters in a folder into the adapter. Returns the progress and the optimizer's state, if stored.

    Raises `BadAdapter` or `UnsupportedAdapter` before anything is changed.
    """
    stored = read_adapter(folder, model)
    if stored.method != adapter.method:
        raise BadAdapter(f"{CONFIG} is of {stored.method}, and the session trains {adapter.method}")
    state, progress = _read_state(folder, adapter)
    values = {name: state[f"{name}/value"] for name in _encoder_parameters(adapter) if f"{name}/value" in state}
    values = values or _stored_values(adapter, stored)
    for name, value in values.items():
        if value.shape != adapter.parameters[name].shape:
            expected = list(adapter.parameters[name].shape)
            raise BadAdapter(f"{TENSORS}: {name} has the shape {list(value.shape)}, the session's has {expected}")
    with torch.no_grad():
        for name, value in values.items():
            adapter.parameters[name].copy_(value)
    adapter.clear_caches()
    return progress, {name: tensor for name, tensor in state.items() if not name.endswith("/value")}


def _encoder_parameters(adapter: TrainedAdapter) -> list[str]:
    return list(adapter.parameters) if adapter.virtual is not None else []


def _stored_values(adapter: TrainedAdapter, stored: Adapter) -> dict[str, Tensor]:
    """By parameter name. Raises `BadAdapter` if the stored adapter has another structure than the session's."""
    if adapter.virtual is not None:
        if len(adapter.parameters) != 1:
            raise BadAdapter(f"{TENSORS} has the output of a prompt encoder, not the encoder: training cannot resume from it")
        (name,) = adapter.parameters
        return {name: _prompt_embeddings(stored).reshape(adapter.virtual.count, -1)}
    if set(stored.parts) != set(adapter.parts):
        raise BadAdapter(f"{CONFIG} names other modules than the session trains")
    names = {id(parameter): name for name, parameter in adapter.parameters.items()}
    values: dict[str, Tensor] = {}
    for path, part in adapter.parts.items():
        (found,) = stored.parts[path]
        pairs: list[tuple[Tensor | None, Tensor | None]]
        if isinstance(part, TrainableLora) and isinstance(found, LoraPart):
            if part.scale != found.scale:
                raise BadAdapter(f"{CONFIG} scales {path} by {found.scale}, the session by {part.scale}")
            pairs = [(part.a_rI, found.a_RI), (part.b_Or, found.b_OR)]
            pairs += [(part.magnitude_O, found.magnitude_O), (part.bias_O, found.bias_O)]
        elif isinstance(part, Ia3Part) and isinstance(found, Ia3Part) and part.of_input == found.of_input:
            pairs = [(part.vector, found.vector.view(part.vector.shape))]
        else:
            raise BadAdapter(f"{CONFIG} has another method at {path} than the session")
        for parameter, value in pairs:
            if (parameter is None) != (value is None):
                raise BadAdapter(f"{CONFIG} has other tensors for {path} than the session")
            if parameter is not None and value is not None:
                values[names[id(parameter)]] = value
    return values


def _prompt_embeddings(stored: Adapter) -> Tensor:
    """Virtual tokens in PEFT's layout."""
    if stored.prefix is not None:
        return torch.stack([stored.prefix.keys_LHTD, stored.prefix.values_LHTD], dim=1).permute(3, 0, 1, 2, 4)
    assert stored.prompt is not None
    return stored.prompt.embeddings_TD


def _read_state(folder: Path, adapter: TrainedAdapter) -> tuple[dict[str, Tensor], Progress]:
    """The checked training state of a folder; empty if there is none."""
    path = folder / STATE
    try:
        status = path.lstat()
    except FileNotFoundError:
        return {}, Progress()
    max_bytes = sum(_MAX_TENSORS * (8 * parameter.numel() + _MAX_HEADER_BYTES) for parameter in adapter.parameters.values())
    if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
        raise BadAdapter(f"{STATE} is not a plain file of at most {max_bytes} bytes")
    try:
        with safe_open(path, framework="pt") as file:
            metadata, names = file.metadata() or {}, list(file.keys())
            progress = Progress(int(metadata["steps"]), int(metadata["batches"]))
            _check_names(set(names), adapter)
            for name in names:
                parameter, _, kind = name.rpartition("/")
                shape = [] if kind == "step" else list(adapter.parameters[parameter].shape)
                if file.get_slice(name).get_shape() != shape or file.get_slice(name).get_dtype() not in _DTYPES:
                    raise BadAdapter(f"{STATE}: {name} has another shape than the session's, or whole numbers")
            state = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, KeyError, ValueError) as error:
        raise BadAdapter(f"{STATE} cannot be read: {error}") from None
    if progress.steps < 0 or progress.batches < 0:
        raise BadAdapter(f"{STATE} counts {progress.steps} steps and {progress.batches} batches")
    for name, tensor in state.items():
        if not bool(torch.isfinite(tensor).all()) or (name.endswith(("/step", "/exp_avg_sq")) and bool((tensor < 0).any())):
            raise BadAdapter(f"{STATE}: {name} has numbers that are not finite, or below 0")
    return state, progress


def _check_names(found: set[str], adapter: TrainedAdapter) -> None:
    """Each parameter has all tensors of AdamW or none, an encoder all values or none."""
    groups = [{f"{name}/{kind}" for kind in STATE_NAMES} for name in adapter.parameters]
    groups.append({f"{name}/value" for name in _encoder_parameters(adapter)})
    unknown = found.difference(*groups)
    if unknown:
        raise BadAdapter(f"{STATE} has {quote(min(unknown))}, which is not of this session")
    for group in groups:
        if group & found and group - found:
            raise BadAdapter(f"{STATE} has {min(group & found)} without {min(group - found)}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
