"""The client part: everything of a model that is not a base layer, and how a tenant gets it.

The executor writes it once as safetensors, named by the hash of its content. A tenant on the same host maps that file;
others download it once.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, PreTrainedModel

from symbiosis.errors import CannotSplit
from symbiosis.models import blob_store, default_model
from symbiosis.types import BlobRef, Manifest

_TOKENIZER_FILES = (".json", ".txt", ".model", ".jinja", ".bpe", ".vocab", ".spm")
_MAX_TOKENIZER_BYTES = 256 << 20


def store_weights(tensors: dict[str, Tensor]) -> BlobRef:
    """Write the client part's tensors into the cache."""
    with blob_store.new_file(blob_store.root() / "blobs") as path:
        # clone: safetensors rejects tensors that share memory
        save_file({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}, path)
        return blob_store.adopt(path)


def store_bytes(content: bytes) -> BlobRef:
    with blob_store.new_file(blob_store.root() / "blobs") as path:
        path.write_bytes(content)
        return blob_store.adopt(path)


def load_weights(ref: BlobRef) -> dict[str, Tensor]:
    """The tensors of a cached client part, mapped from the file."""
    tensors: dict[str, Tensor] = load_file(blob_store.blob_path(ref))
    return tensors


def unpack_tokenizer(ref: BlobRef) -> Path:
    """A folder with the tokenizer's files. Only plain names and known endings are written."""
    folder = blob_store.root() / "tokenizers" / ref.sha256
    if folder.is_dir():
        return folder
    with blob_store.locked(f"tokenizer-{ref.sha256[:16]}"), zipfile.ZipFile(blob_store.blob_path(ref)) as archive:
        entries = archive.infolist()
        if len(entries) > 64 or sum(entry.file_size for entry in entries) > _MAX_TOKENIZER_BYTES:
            raise CannotSplit("the executor's tokenizer exceeds the size limit: not unpacked")
        scratch = folder.with_name(f"{folder.name}.part")
        scratch.mkdir(parents=True, exist_ok=True)
        for entry in entries:
            if Path(entry.filename).name != entry.filename or not entry.filename.endswith(_TOKENIZER_FILES):
                raise CannotSplit(
                    f"the executor's tokenizer holds {entry.filename!r}, which is no tokenizer file: not unpacked"
                )
            (scratch / entry.filename).write_bytes(archive.read(entry))
        if not folder.is_dir():
            scratch.rename(folder)
    return folder


def resolve_class(name: str) -> type[PreTrainedModel]:
    """A model class by its name, from transformers only."""
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise CannotSplit(
            f"the executor serves a {name!r}, which transformers {transformers.__version__} does not have; "
            "install the executor's version of transformers, or connect in process for a custom class"
        )
    return found


class _WithoutWeights(TorchFunctionMode):
    """Builds a model with weights on the meta device and without initialisation; computed tensors stay real.

    A mode is local to its thread. Common ways of skipping initialisation are global, and would affect a model that another
    tenant's thread builds at the same time.
    """

    _INITIALISERS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.random_, nn.init.trunc_normal_})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            return func(*args, **{**(kwargs or {}), "device": "meta"})
        return args[0] if func in self._INITIALISERS and args else func(*args, **(kwargs or {}))


def describe_model(model: PreTrainedModel, name: str) -> dict[str, Any]:
    """The fields of a `Manifest` that the model itself determines."""
    config = model.config.to_dict()
    attention = getattr(model.config, "_attn_implementation", None)
    generation = getattr(model, "generation_config", None)
    return {
        "name": name,
        "model_class": type(model).__name__,
        "config": json.loads(json.dumps(config, default=str)),
        "generation_config": json.loads(json.dumps(generation.to_dict(), default=str)) if generation else None,
        "attention": attention if attention in ("eager", "sdpa") else None,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def build_skeleton(manifest: Manifest, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """The model without weights: parameters on the meta device, all other tensors real."""
    settings = {key: value for key, value in manifest.config.items() if key != "auto_map"}
    config = model_class.config_class.from_dict(settings)
    # of the default model the hub id, with which adapters load elsewhere too
    config._name_or_path = default_model.HUB_ID if manifest.name == default_model.NAME else manifest.name
    if manifest.attention:
        config._attn_implementation = manifest.attention
    config.dtype = getattr(torch, manifest.dtype)
    with _WithoutWeights():
        model = model_class(config)
    if manifest.generation_config is not None and model.can_generate():
        model.generation_config = GenerationConfig.from_dict(manifest.generation_config)
    return model


def fill_skeleton(model: nn.Module, tensors: dict[str, Tensor], ties: dict[str, str]) -> None:
    """Put the client part's tensors into the skeleton. Raises `CannotSplit` if one is missing."""
    placed = {name: _place(model, name, tensor) for name, tensor in tensors.items()}
    for name, other in ties.items():
        if other not in placed:
            raise CannotSplit(f"the client part ties {name} to {other}, which it does not hold")
        _place(model, name, placed[other])
    missing = [name for name, p in model.named_parameters(remove_duplicate=False) if p.is_meta]
    if missing:
        raise CannotSplit(f"the client part lacks {missing[:5]}: executor and tenant differ in their version of transformers?")


def _place(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise CannotSplit(f"the client part holds {name}, which this model does not have") from None
    if leaf in module._parameters:
        if not isinstance(tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        module._parameters[leaf] = tensor
    elif leaf in module._buffers:
        module._buffers[leaf] = tensor.detach().clone() if isinstance(tensor, nn.Parameter) else tensor
    else:
        raise CannotSplit(f"the client part holds {name}, which this model does not have")
    return tensor
