"""Models of a zoo in memory, each block once.

Each model has modules of its own. Tensors of one block are the same memory in all models that have it, at any depth. Blocks are
mapped from their files, and hashed before.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from symbiosis.models.fuse_projections import fuse_projections
from symbiosis.zoo.checkpoint import CONFIG, read_json
from symbiosis.zoo.errors import BadZoo, NotAdmitted, UnknownZooModel
from symbiosis.zoo.manifest import ModelManifest, StoredObject
from symbiosis.zoo.object_folder import ObjectFolder, describe
from symbiosis.zoo.partition import BlockPlace, name_in_model, partition
from symbiosis.zoo.zoo import Progress, Zoo

_GENERATION = "generation_config.json"
_SAME_RESULTS = {
    "_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id",
}  # fmt: skip
"""Config keys that a model's computation does not depend on. How it generates is in its generation config."""


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """A model of a zoo in memory, without its adapter."""

    name: str
    chain: str
    """Hash of all its blocks and of its config. Equal: equal models."""
    model: PreTrainedModel
    has_adapter: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """Models of a zoo that one engine can serve together, the default first, and why it cannot serve others."""

    manifests: tuple[ModelManifest, ...]
    refused: Mapping[str, str]
    """The reason by name."""

    @property
    def blocks(self) -> dict[str, StoredObject]:
        """Each block once, by hash, in the order of the models."""
        return {block.object.sha256: block.object for manifest in self.manifests for block in manifest.chain}

    @property
    def bytes(self) -> int:
        """Of the blocks on disk."""
        return sum(each.size for each in self.blocks.values())


def select_models(root: Path, names: Sequence[str] | None = None) -> Selection:
    """The models of these names of a zoo, of all by default: the first one added is the default then.

    Models with another config than the default are refused. Raises `UnknownZooModel`, or `BadZoo` for an empty zoo.
    """
    zoo = Zoo(root)
    known = zoo.names()
    if not known:
        raise BadZoo("the zoo is empty: add models with `symbiosis zoo add FOLDER MODEL`")
    for name in names or ():
        if name not in known:
            raise UnknownZooModel(f"the zoo has no model {name!r:.80}: expected some of {', '.join(known)}")
    manifests = [zoo.manifest(name) for name in names or known]
    if names is None:
        manifests.sort(key=lambda manifest: (bool(manifest.adapter), *_added(root, manifest), manifest.name))
    first, refused = _shape_of(root, manifests[0]), {}
    for manifest in manifests[1:]:
        other = _shape_of(root, manifest)
        different = sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))
        if different:
            key = different[0]
            refused[manifest.name] = (
                f"its {key} is {other.get(key)!r:.60}, that of {manifests[0].name} is {first.get(key)!r:.60}: models of one "
                "engine have one config"
            )
    return Selection(tuple(each for each in manifests if each.name not in refused), refused)


def chain_hash(manifest: ModelManifest) -> str:
    """Equal for models that compute the same: their blocks, in their places, and their config."""
    digest = hashlib.sha256()
    for block in manifest.chain:
        digest.update(f"{block.place} {block.object.sha256}\n".encode())
    for name in (CONFIG, _GENERATION):
        digest.update(f"{manifest.files[name].sha256 if name in manifest.files else ''}\n".encode())
    return digest.hexdigest()


def load_models(
    root: Path,
    selection: Selection,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    progress: Progress = lambda what, done, total: None,
) -> list[ServedModel]:
    """The models, in their order. `dtype`: None for that of the checkpoints.

    Raises `BadZoo` for a block that is missing or was changed, `NotAdmitted` for a model of another dtype.
    """
    pool = _BlockPool(root, device, progress, len(selection.blocks))
    found: list[ServedModel] = []
    for manifest in selection.manifests:
        hash = chain_hash(manifest)
        model = next((each.model for each in found if each.chain == hash), None) or pool.load(manifest, dtype)
        if found and model.dtype is not found[0].model.dtype:
            raise NotAdmitted(
                f"{manifest.name} has the dtype {str(model.dtype).removeprefix('torch.')}, {found[0].name} has "
                f"{str(found[0].model.dtype).removeprefix('torch.')}: name one for all with --dtype"
            )
        found.append(ServedModel(manifest.name, hash, model, bool(manifest.adapter)))
    return found


class _BlockPool:
    """Tensors by block."""

    def __init__(self, root: Path, device: torch.device, progress: Progress, blocks: int) -> None:
        self._root, self._device, self._progress, self._num_blocks = root, device, progress, blocks
        self._files: dict[str, dict[str, Tensor]] = {}
        """As they are stored."""
        self._tensors: dict[tuple[str, str], nn.Parameter | Tensor] = {}
        """As models have them, by block and name within it."""

    def load(self, manifest: ModelManifest, dtype: torch.dtype | None) -> PreTrainedModel:
        model = self._build(manifest)
        self._share(model, manifest, add=False)  # those are on the device, with fused projections
        self._move(model, dtype)
        fuse_projections(model)
        self._share(model, manifest, add=True)
        return model

    def _build(self, manifest: ModelManifest) -> PreTrainedModel:
        state: dict[str, Tensor] = {}
        for block in manifest.chain:
            sha256 = block.object.sha256
            if sha256 not in self._files:
                self._files[sha256] = self._read(manifest, block.object, block.place)
                self._progress("loading", len(self._files), self._num_blocks)
            state |= {name_in_model(name, block.place): tensor for name, tensor in self._files[sha256].items()}
        config = _config(self._root, manifest)
        shown = is_progress_bar_enabled()
        disable_progress_bar()  # one line a model
        try:
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
                None, config=config, state_dict=state, dtype="auto"
            )
        finally:
            if shown:
                enable_progress_bar()
        if _GENERATION in manifest.files:
            model.generation_config = GenerationConfig.from_dict(_read(self._root, manifest, _GENERATION))
        model.name_or_path = model.config._name_or_path = manifest.name
        found: PreTrainedModel = model.eval().requires_grad_(False)
        return found

    def _read(self, manifest: ModelManifest, object: StoredObject, place: BlockPlace) -> dict[str, Tensor]:
        path = _stored_path(self._root, object)
        if describe(path) != object:
            raise BadZoo(
                f"{manifest.name}: {place} was changed ({object.sha256[:12]}): `symbiosis zoo verify` says of which models; "
                "remove them and add them again"
            )
        found: dict[str, Tensor] = safetensors.torch.load_file(path)
        return found

    def _move(self, model: PreTrainedModel, dtype: torch.dtype | None) -> None:
        """To the device. Tied parameters stay tied."""
        moved: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in moved:
                        kind = dtype if parameter.is_floating_point() else None
                        moved[id(parameter)] = _moved(parameter, self._device, kind)
                    module._parameters[name] = moved[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self._device)

    def _share(self, model: PreTrainedModel, manifest: ModelManifest, *, add: bool) -> None:
        """Replace tensors by those of the pool, which gets the ones that it does not have if `add`."""
        hashes = {block.place: block.object.sha256 for block in manifest.chain}
        state = model.state_dict(keep_vars=True)
        shared: dict[int, nn.Parameter | Tensor] = {}
        for place, names in partition(state).items():
            for own, name in names.items():
                tensor = state[name]
                key = (hashes.get(place, ""), own)
                if key[0] and id(tensor) not in shared and (add or key in self._tensors):
                    shared[id(tensor)] = self._tensors.setdefault(key, tensor)
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, value in tensors.items():
                    if value is not None:
                        tensors[name] = shared.get(id(value), value)


def _moved(parameter: Tensor, device: torch.device, dtype: torch.dtype | None) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to(device=device, dtype=dtype), requires_grad=False)


def _added(root: Path, manifest: ModelManifest) -> tuple[str, int]:
    """When a model was added; its manifest was written then."""
    return manifest.provenance.get("added", ""), (root / "models" / f"{manifest.name}.json").stat().st_mtime_ns


def _config(root: Path, manifest: ModelManifest) -> PretrainedConfig:
    try:
        return AutoConfig.for_model(**_read(root, manifest, CONFIG))
    except (ValueError, TypeError, KeyError) as error:
        raise BadZoo(f"{manifest.name} has a config that transformers does not read: {error}") from None


def _shape_of(root: Path, manifest: ModelManifest) -> dict[str, Any]:
    """The config with all defaults."""
    return {key: value for key, value in _config(root, manifest).to_dict().items() if key not in _SAME_RESULTS}


def _read(root: Path, manifest: ModelManifest, file: str) -> dict[str, Any]:
    stored = manifest.files.get(file)
    if stored is None:
        raise BadZoo(f"{manifest.name} has no {file} in the zoo: remove the model and add it again")
    return read_json(_stored_path(root, stored))


def write_files(root: Path, manifest: ModelManifest, folder: Path) -> None:
    """Config and tokenizer of a model, and its adapter if it has one, as transformers and PEFT expect them in a folder."""
    for name, stored in {**manifest.files, **manifest.adapter}.items():
        path = _stored_path(root, stored)
        if describe(path) != stored:
            raise BadZoo(f"{manifest.name}: {name} was changed: remove the model and add it again")
        shutil.copyfile(path, folder / name)


def _stored_path(root: Path, object: StoredObject) -> Path:
    """Raises `BadZoo` if it is missing."""
    path = ObjectFolder(root).path(object)
    if not path.is_file():
        raise BadZoo(f"an object of the zoo is missing ({object.sha256[:12]}): `symbiosis zoo verify` says of which models")
    return path
