"""A session's adapter in a folder: PEFT's two files, and on demand what is needed to go on training.

A folder appears whole or not at all: it is written beside its place, brought to disk, then renamed.
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
from symbiosis.adapters.parts import Adapter, Ia3Part
from symbiosis.adapters.parts import LoraPart as StoredLowRank
from symbiosis.adapters.reader import read_adapter
from symbiosis.errors import BadAdapter, Diverged, NotStored, OutOfRange
from symbiosis.finetuning.optimizer import KEPT
from symbiosis.finetuning.trainable_parts import TrainableLora
from symbiosis.finetuning.trained_adapter import AdapterSnapshot, TrainedAdapter

STATE = "training_state.safetensors"
"""The optimizer's tensors, the parameters of an encoder, and how far the session had got."""
_DTYPES = ("F64", "F32", "F16", "BF16")
_ENTRIES, _HEADER = len(KEPT) + 1, 4096
"""Of each parameter: how many tensors there may be, and how many bytes of the file's header for each."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a session has got."""

    steps: int = 0
    batches: int = 0
    """Calls of forward_backward: dropout is seeded by their number."""


@dataclass(frozen=True, slots=True, eq=False)
class Resumed:
    """What was found beside an adapter."""

    progress: Progress
    optimizer: Mapping[str, Tensor]


def save(
    folder: Path, adapter: TrainedAdapter, optimizer: Mapping[str, Tensor] | None, progress: Progress, *, replace: bool = False
) -> AdapterSnapshot:
    """Write the adapter as PEFT does; with the optimizer's state also what `load` needs to go on. Returns what was written.

    Raises `OutOfRange` if there is something already that is not to be replaced, or is no folder, `Diverged` if a number is
    none, `NotStored` if the disk does not take it.
    """
    _check_place(folder, replace=replace)
    made = adapter.snapshot()
    if not made.is_finite or not all(bool(torch.isfinite(tensor).all()) for tensor in (optimizer or {}).values()):
        raise Diverged("the adapter or its optimizer has numbers that are none (NaN or infinite): the last step has spoilt it")
    beside, older = (folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.{kind}") for kind in ("part", "old"))
    try:
        beside.mkdir(parents=True)
        (beside / CONFIG).write_text(adapter.config)
        save_file(dict(made.tensors), beside / TENSORS, metadata={"format": "pt"})
        if optimizer is not None:
            encoder = {f"{name}/value": adapter.parameters[name].detach().cpu() for name in _of_encoder(adapter)}
            said = {"steps": str(progress.steps), "batches": str(progress.batches)}
            save_file({**optimizer, **encoder}, beside / STATE, metadata=said)
        for file in beside.iterdir():
            _to_disk(file)
        _to_disk(beside)
        if replace and folder.exists():
            folder.replace(older)
        beside.replace(folder)
        _to_disk(folder.parent)
    except (OSError, SafetensorError) as error:
        if older.exists() and not folder.exists():
            older.replace(folder)
        raise _not_stored(error) from error
    finally:
        for left in (beside, older):
            shutil.rmtree(left, ignore_errors=True)
    return made


def _check_place(folder: Path, *, replace: bool) -> None:
    """Whether a folder may appear there."""
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


def load(folder: Path, adapter: TrainedAdapter, model: ModelFacts) -> Resumed:
    """Give the adapter the numbers in a folder: all of them, or none and `BadAdapter` or `UnsupportedAdapter`."""
    found = read_adapter(folder, model)
    if found.method != adapter.method:
        raise BadAdapter(f"{CONFIG} is of {found.method}, and the session trains {adapter.method}")
    state, progress = _state(folder, adapter)
    given = {name: state[f"{name}/value"] for name in _of_encoder(adapter) if f"{name}/value" in state}
    if not given:
        given = _values(adapter, found)
    for name, value in given.items():
        if value.shape != adapter.parameters[name].shape:
            expected = list(adapter.parameters[name].shape)
            raise BadAdapter(f"{TENSORS}: {name} has the shape {list(value.shape)}, the session's has {expected}")
    with torch.no_grad():
        for name, value in given.items():
            adapter.parameters[name].copy_(value)
    adapter.clear_caches()
    return Resumed(progress, {name: tensor for name, tensor in state.items() if not name.endswith("/value")})


def _of_encoder(adapter: TrainedAdapter) -> list[str]:
    return list(adapter.parameters) if adapter.virtual is not None else []


def _values(adapter: TrainedAdapter, found: Adapter) -> dict[str, Tensor]:
    """The parameters by name, as a checked adapter has them."""
    if adapter.virtual is not None:
        if len(adapter.parameters) != 1:
            raise BadAdapter(f"{TENSORS} has what an encoder gave, not the encoder: training cannot go on from it")
        (name,) = adapter.parameters
        return {name: _prompt(found).reshape(adapter.virtual.count, -1)}
    if set(found.parts) != set(adapter.parts):
        raise BadAdapter(f"{CONFIG} names other modules than the session trains")
    names = {id(parameter): name for name, parameter in adapter.parameters.items()}
    given: dict[str, Tensor] = {}
    for path, part in adapter.parts.items():
        (stored,) = found.parts[path]
        pairs: list[tuple[Tensor | None, Tensor | None]]
        if isinstance(part, TrainableLora) and isinstance(stored, StoredLowRank):
            if part.scale != stored.scale:
                raise BadAdapter(f"{CONFIG} scales {path} by {stored.scale}, the session by {part.scale}")
            pairs = [(part.a_rI, stored.a_RI), (part.b_Or, stored.b_OR)]
            pairs += [(part.magnitude_O, stored.magnitude_O), (part.bias_O, stored.bias_O)]
        elif isinstance(part, Ia3Part) and isinstance(stored, Ia3Part) and part.of_input == stored.of_input:
            pairs = [(part.vector, stored.vector.view(part.vector.shape))]
        else:
            raise BadAdapter(f"{CONFIG} does something else to {path} than the session")
        for parameter, value in pairs:
            if (parameter is None) != (value is None):
                raise BadAdapter(f"{CONFIG} has other tensors for {path} than the session")
            if parameter is not None and value is not None:
                given[names[id(parameter)]] = value
    return given


def _prompt(found: Adapter) -> Tensor:
    """Virtual tokens in PEFT's layout."""
    if found.prefix is not None:
        both = torch.stack([found.prefix.keys_LHTD, found.prefix.values_LHTD], dim=1)
        return both.permute(3, 0, 1, 2, 4)
    assert found.prompt is not None
    return found.prompt.embeddings_TD


def _state(folder: Path, adapter: TrainedAdapter) -> tuple[dict[str, Tensor], Progress]:
    """What lies beside the adapter, checked before a number of it is used; nothing if nothing does."""
    path = folder / STATE
    try:
        file_status = path.lstat()
    except FileNotFoundError:
        return {}, Progress()
    most = sum(_ENTRIES * (8 * parameter.numel() + _HEADER) for parameter in adapter.parameters.values())
    if not stat.S_ISREG(file_status.st_mode) or file_status.st_size > most:
        raise BadAdapter(f"{STATE} is no plain file of at most {most} bytes")
    try:
        with safe_open(path, framework="pt") as file:
            said = file.metadata() or {}
            progress = Progress(int(said["steps"]), int(said["batches"]))
            names = list(file.keys())
            _check_names(names, adapter)
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


def _check_names(names: list[str], adapter: TrainedAdapter) -> None:
    """Of each parameter all that AdamW keeps or nothing, of an encoder all values or none."""
    wanted = {f"{name}/value" for name in _of_encoder(adapter)}
    sets = [{f"{name}/{kept}" for kept in KEPT} for name in adapter.parameters]
    found = set(names)
    strange = found - wanted.union(*sets)
    if strange:
        raise BadAdapter(f"{STATE} has {quote(min(strange))}, which is nothing of this session")
    for each in [wanted, *sets]:
        if each & found and each - found:
            raise BadAdapter(f"{STATE} has {min(each & found)} without {min(each - found)}")


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
