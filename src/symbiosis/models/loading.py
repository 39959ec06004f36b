"""Loading a model: from an instance, a folder, a hub id, or the embedded default."""

from __future__ import annotations

import copy
import errno
import io
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from symbiosis.errors import UnknownModel
from symbiosis.models.default_model import NAME as DEFAULT_NAME
from symbiosis.models.default_model import default_model_folder
from symbiosis.models.device_dtype import resolve_device, resolve_dtype
from symbiosis.models.fuse_projections import fuse_projections
from symbiosis.models.model_source import check_found, is_default

ModuleT = TypeVar("ModuleT", bound=nn.Module)
ModelSource: TypeAlias = PreTrainedModel | str | PathLike[str] | None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model, its name, and its tokenizer's files packed into one zip."""

    model: PreTrainedModel
    name: str
    tokenizer: bytes | None
    borrowed: bool
    """True if the model is the caller's own instance, which must not be changed."""


def load(source: ModelSource, *, device: torch.device, dtype: torch.dtype | None, tokenizer: Any = None) -> LoadedModel:
    """Load a model from any source. Raises `UnknownModel` with what was tried."""
    if isinstance(source, PreTrainedModel):
        check_no_adapters(source)
        model: Any = source
        if any(p.device != device or (dtype and p.is_floating_point() and p.dtype != dtype) for p in model.parameters()):
            model = model.to(device=device, dtype=dtype)
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        return LoadedModel(model, name, _pack_tokenizer(tokenizer), borrowed=True)
    model, found = load_model_and_tokenizer(source, device=device, dtype=dtype)
    return LoadedModel(
        model, DEFAULT_NAME if is_default(source) else str(source), _pack_tokenizer(tokenizer or found), borrowed=False
    )


def check_no_adapters(model: PreTrainedModel) -> None:
    """Raises `UnknownModel` if the model has adapters."""
    if hasattr(model, "peft_config"):
        raise UnknownModel("this model already carries adapters; serve the plain base model")


def load_model_and_tokenizer(
    source: str | PathLike[str] | None, *, device: torch.device, dtype: torch.dtype | None
) -> tuple[PreTrainedModel, Any]:
    """A model and its tokenizer (None if it has none). Raises `UnknownModel`."""
    if source is not None and (not isinstance(source, str | PathLike) or not str(source)):
        what = repr(source) if isinstance(source, str) else f"an object of type {type(source).__name__}"
        raise UnknownModel(
            f"{what} is no model: expected a transformers model without adapters, a folder as `save_pretrained` writes it, "
            "a hub id, or None for the default model"
        )
    folder = str(default_model_folder()) if is_default(source) else str(source)
    return _load_pretrained(folder, device, dtype), load_tokenizer(folder)


def load_for_hosting(
    model: ModelSource, tokenizer: Any, device: str, dtype: str | torch.dtype | None
) -> tuple[PreTrainedModel, Any]:
    """A plain model with fused projections, loaded unless it is one already, and its tokenizer."""
    if not isinstance(model, PreTrainedModel):
        model, found = load_model_and_tokenizer(model, device=resolve_device(device), dtype=resolve_dtype(dtype))
        tokenizer = tokenizer or found
    check_no_adapters(model)
    fuse_projections(model)
    return model, tokenizer


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules that shares all tensors: changes of its modules do not affect the original."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def frozen_copy(model: ModuleT) -> ModuleT:
    """A copy of the modules and parameters that shares the memory. Its parameters never require gradients."""
    parameters = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, {**parameters, **{id(buffer): buffer for buffer in model.buffers()}})


def load_config(source: str | PathLike[str] | None) -> Any:
    """The config of a model that is not loaded. Raises `UnknownModel`."""
    name = str(default_model_folder()) if is_default(source) else str(source)
    check_found(name)
    with _unknown_model(name):
        return AutoConfig.from_pretrained(name, trust_remote_code=False)


def build_meta_model(config: Any, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model on the meta device: shapes and dtypes, without memory. `dtype`: None for that of the config."""
    model_class = model_class_of(config)
    with torch.device("meta"):
        model: Any = (
            model_class.from_config(config) if model_class in (AutoModel, AutoModelForCausalLM) else model_class(config)
        )
    dtype = dtype or getattr(config, "dtype", None) or torch.get_default_dtype()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model.eval()


def _load_pretrained(name: str, device: torch.device, dtype: torch.dtype | None) -> PreTrainedModel:
    check_found(name)
    with _unknown_model(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        model: PreTrainedModel = model_class_of(config).from_pretrained(
            name,
            config=config,
            dtype=dtype or "auto",
            device_map={"": device} if device.type != "cpu" else None,
            trust_remote_code=False,
            use_safetensors=True,
        )
    return model


@contextmanager
def _unknown_model(name: str) -> Iterator[None]:
    """Raise what transformers raises as `UnknownModel`."""
    try:
        yield
    except UnknownModel:
        raise
    except Exception as error:  # transformers raises a dozen kinds here, all with the same meaning
        if (unwritable := _permission_error(error)) is not None:
            raise UnknownModel(
                f"{name!r} cannot be fetched: {unwritable.filename or 'the cache of the hub'}: {unwritable.strerror}; "
                "expected a cache that you can write to: name one with HF_HOME=FOLDER"
            ) from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnknownModel(
            f"{name!r} is neither a model folder on this machine nor a model that the hub has ({reason}). "
            "Pass a folder as `save_pretrained` writes it, a hub id, or nothing for the default model"
        ) from error


def _permission_error(error: BaseException | None) -> OSError | None:
    """The refused write that an error of transformers comes from, if any."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC):
            return error
        error = error.__cause__ or error.__context__
    return None


def model_class_of(config: Any) -> Any:
    """The transformers class of the checkpoint, or the best automatic choice."""
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    return AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModel


def load_tokenizer(name: str) -> Any:
    """None for a model without one."""
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception:  # noqa: BLE001 - a model without a tokenizer is valid: `tokenizer()` raises
        return None


def _pack_tokenizer(tokenizer: Any) -> bytes | None:
    """The files of a tokenizer as one zip with fixed times: equal content has one hash."""
    if tokenizer is None:
        return None
    packed = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).iterdir()):
            if path.is_file():
                archive.writestr(zipfile.ZipInfo(path.name, (1980, 1, 1, 0, 0, 0)), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()
