"""A zoo: many models of one family in a folder, each block of them once.

zoo.json            the format
objects/            blocks and other files, by hash (`object_folder`)
models/NAME.json    manifests

A manifest is written after all that it names, and removed before it: whenever a process is killed, each model is there whole or
not at all. What no manifest names is removed by `gc`.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from symbiosis.models.gguf import convert_gguf
from symbiosis.zoo.checkpoint import ADAPTER_CONFIG, ADAPTER_TENSORS, CONFIG, Checkpoint, is_adapter, read_json
from symbiosis.zoo.differences.difference_adapter import merge_adapter
from symbiosis.zoo.errors import BadZoo, NotAdmitted, UnknownZooModel
from symbiosis.zoo.manifest import FORMAT, NAME, ChainBlock, ModelManifest, StoredObject, StoredSurrogate
from symbiosis.zoo.object_folder import ObjectFolder, describe, sync_folder
from symbiosis.zoo.partition import BlockPlace, name_in_model, partition

Progress = Callable[[str, int, int], None]
"""Called with what is done, and how much of how much."""
_ZOO = "zoo.json"
_VERIFY = "`symbiosis zoo verify` says of which models"
_NONE: Mapping[Any, Any] = MappingProxyType({})


def _ignore(what: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Added:
    """What a new model takes."""

    manifest: ModelManifest
    new_blocks: int
    new_bytes: int


@dataclass(frozen=True, slots=True)
class ZooUsage:
    """What the models of a zoo take together."""

    models: int
    blocks: int
    bytes: int
    bytes_as_copies: int
    """If each model had a folder of its own."""


class Zoo:
    """Of this folder. Processes of one host may share it: those that change it take turns."""

    def __init__(self, root: Path, *, create: bool = False) -> None:
        """Raises `BadZoo` if the folder is no zoo; `create` makes an empty or missing folder one."""
        self._root, self._models = root, root / "models"
        self._objects = ObjectFolder(root)
        if not (root / _ZOO).is_file():
            self._create(create)
        try:
            is_known = json.loads((root / _ZOO).read_bytes()) == {"format": FORMAT}
        except (OSError, ValueError):
            is_known = False
        if not is_known:
            raise BadZoo(f"{_ZOO} of {root} is not that of a zoo of format {FORMAT}: was it made by a newer version?")

    def _create(self, create: bool) -> None:
        root = self._root
        if not create:
            raise BadZoo(f"{root} is no zoo: expected a folder that `symbiosis zoo add` has made")
        try:
            root.mkdir(parents=True, exist_ok=True)
            known = {"objects", "scratch", "models", "lock"}  # of a process that was killed here
            if other := next((each.name for each in root.iterdir() if each.name not in known), None):
                raise BadZoo(f"{root} has other files ({other}): expected an empty folder, or one that does not exist")
            self._models.mkdir(exist_ok=True)
            self._objects.create()
            with self._locked():
                self._objects.write_file(root / _ZOO, json.dumps({"format": FORMAT}).encode())
        except OSError as error:
            raise BadZoo(f"{root} cannot become a zoo: {error.strerror}") from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._root / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # What is there

    def names(self) -> list[str]:
        return sorted(path.stem for path in self._models.glob("*.json"))

    def manifest(self, name: str) -> ModelManifest:
        """Raises `UnknownZooModel` or `BadZoo`."""
        try:
            if NAME.fullmatch(name) is None:
                raise FileNotFoundError
            raw = (self._models / f"{name}.json").read_bytes()
        except FileNotFoundError:
            known = ", ".join(self.names()[:5]) or "none yet"
            raise UnknownZooModel(f"the zoo has no model {name!r:.80}: there are {known}") from None
        return ModelManifest.decode(raw, name)

    def manifests(self) -> list[ModelManifest]:
        return [self.manifest(name) for name in self.names()]

    def usage(self) -> ZooUsage:
        manifests = self.manifests()
        objects = {each.sha256: each.size for manifest in manifests for each in manifest.objects}
        blocks = {block.object.sha256 for manifest in manifests for block in manifest.chain}
        return ZooUsage(len(manifests), len(blocks), sum(objects.values()), sum(each.size for each in manifests))

    def users(self, name: str) -> dict[str, list[str]]:
        """The other models that share each block of a model, by hash."""
        own = {block.object.sha256 for block in self.manifest(name).chain}
        others: dict[str, list[str]] = {sha256: [] for sha256 in own}
        for manifest in self.manifests():
            if manifest.name != name:
                for sha256 in own & {block.object.sha256 for block in manifest.chain}:
                    others[sha256].append(manifest.name)
        return others

    # Changes

    def add(
        self,
        name: str,
        source: Path,
        *,
        base: str | None = None,
        provenance: Mapping[str, str] = _NONE,
        progress: Progress = _ignore,
    ) -> Added:
        """Add a checkpoint, a GGUF file, or a PEFT adapter on the model `base`. Raises `NotAdmitted`, and changes nothing."""

        def make() -> ModelManifest:
            if is_adapter(source):
                return self._put_adapter(name, source, base)
            if base is not None:
                raise NotAdmitted(f"{source.name} is no PEFT adapter: a base is for adapters, and for --may-lose")
            with self.opened(source, progress) as folder:
                return self._put_checkpoint(name, folder, progress)

        return self._add(name, make, {"source": source.name, **provenance})

    def add_difference(
        self, name: str, adapter: Path, model: Path, base: ModelManifest, provenance: Mapping[str, str]
    ) -> Added:
        """Add a model as an adapter of the chain of `base`, with the tokenizer files of the folder `model`."""

        def make() -> ModelManifest:
            self._check_unchanged(base)
            with Checkpoint(model) as checkpoint:
                files = {each: self._objects.put(path) for each, path in checkpoint.other_files.items() if each != CONFIG}
            stored = self._put_adapter(name, adapter, base.name)
            return replace(stored, files={CONFIG: base.files[CONFIG], **files})

        return self._add(name, make, provenance)

    def add_sharing(
        self, name: str, model: Path, places: Collection[BlockPlace], base: ModelManifest, provenance: Mapping[str, str]
    ) -> Added:
        """Add a checkpoint with the blocks of `base` at some places in place of its own."""

        def make() -> ModelManifest:
            self._check_unchanged(base)
            shared = {each.place: each.object for each in base.chain if each.place in places}
            return self._put_checkpoint(name, model, _ignore, shared)

        return self._add(name, make, provenance)

    def _check_unchanged(self, base: ModelManifest) -> None:
        """What was measured with a base is true of that chain only."""
        if self.manifest(base.name).chain != base.chain:
            raise NotAdmitted(f"{base.name} was replaced while a model was measured against it: try again")

    def check_name(self, name: str) -> None:
        """Raises `NotAdmitted` if a new model cannot have it."""
        if NAME.fullmatch(name) is None:
            raise NotAdmitted(f"{name!r:.80} is no name of a model: expected letters, digits, dots, dashes, at most 100")
        if (self._models / f"{name}.json").exists():
            raise NotAdmitted(f"the zoo has a model {name}: remove it first, or choose another name")

    def _add(self, name: str, make: Callable[[], ModelManifest], provenance: Mapping[str, str]) -> Added:
        self.check_name(name)
        with self._locked():
            self.check_name(name)
            known = {each.sha256 for manifest in self.manifests() for each in manifest.objects}
            manifest = make()
            now = datetime.now(UTC).isoformat(timespec="seconds")
            manifest = replace(manifest, provenance={"added": now, **manifest.provenance, **provenance})
            self._objects.write_file(self._models / f"{name}.json", manifest.encode())
        new = {each.sha256: each.size for each in manifest.objects if each.sha256 not in known}
        blocks = {block.object.sha256 for block in manifest.chain}
        return Added(manifest, len(blocks & new.keys()), sum(new.values()))

    @contextmanager
    def opened(self, source: Path, progress: Progress = _ignore) -> Iterator[Path]:
        """The folder of a model: the source, or the plain weights that a GGUF file stands for. Raises `NotAdmitted`."""
        if source.suffix != ".gguf":
            yield source
            return
        with tempfile.TemporaryDirectory(dir=self._root / "scratch") as place:
            progress("converting", 0, 1)
            try:
                convert_gguf(source, Path(place) / "model")
            except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
                raise NotAdmitted(f"{source.name} cannot be converted: {_first_line(error)}") from None
            yield Path(place) / "model"

    def describe_blocks(self, source: Path) -> dict[BlockPlace, StoredObject]:
        """The blocks that a checkpoint has; nothing is stored. Raises `NotAdmitted` if it does not fit this zoo."""
        with Checkpoint(source) as checkpoint:
            self._check_family(checkpoint, source)
            blocks = partition(checkpoint.names)
            self._check_complete(source)
            return {place: describe(_block_content(checkpoint, names)) for place, names in blocks.items()}

    def _put_checkpoint(
        self, name: str, source: Path, progress: Progress, shared: Mapping[BlockPlace, StoredObject] = _NONE
    ) -> ModelManifest:
        """`shared`: blocks in place of its own."""
        with Checkpoint(source) as checkpoint:
            self._check_family(checkpoint, source)
            blocks = partition(checkpoint.names)
            self._check_complete(source)
            chain = []
            for done, (place, names) in enumerate(blocks.items()):
                stored = shared.get(place) or self._objects.put(_block_content(checkpoint, names))
                chain.append(ChainBlock(place, stored))
                progress(str(place), done + 1, len(blocks))
            files = {each: self._objects.put(path) for each, path in checkpoint.other_files.items()}
        return ModelManifest(name=name, chain=tuple(chain), files=files)

    def _put_adapter(self, name: str, source: Path, base: str | None) -> ModelManifest:
        if base is None:
            raise NotAdmitted(f"{source.name} is a PEFT adapter: name the model of the zoo that it was made for, with --base")
        of_base = self.plain_manifest(base)
        read_json(source / ADAPTER_CONFIG)
        if not (source / ADAPTER_TENSORS).is_file():
            raise NotAdmitted(
                f"{source.name} has no {ADAPTER_TENSORS}: expected a folder as PEFT's `save_pretrained` writes it"
            )
        adapter = {each: self._objects.put(source / each) for each in (ADAPTER_CONFIG, ADAPTER_TENSORS)}
        return replace(of_base, name=name, adapter=adapter, provenance={"base": base})

    def plain_manifest(self, base: str) -> ModelManifest:
        """Of a model without an adapter. Raises `NotAdmitted`."""
        found = self.manifest(base)
        if found.adapter:
            raise NotAdmitted(f"{base} has an adapter itself: an adapter is added to a model without one")
        return found

    def _check_family(self, checkpoint: Checkpoint, source: Path) -> None:
        """A zoo has models of one architecture with one tokenizer."""
        for first in self.names()[:1]:
            manifest = self.manifest(first)
            config = json.loads(self._objects.path(manifest.files[CONFIG]).read_bytes())
            for key in ("model_type", "vocab_size"):
                if config.get(key) != checkpoint.config.get(key):
                    raise NotAdmitted(
                        f"{source.name} has the {key} {checkpoint.config.get(key)!r:.60}, the models of this zoo have "
                        f"{config.get(key)!r:.60}: expected one of the same family"
                    )
            file = checkpoint.tokenizer_file
            stored = manifest.files.get(file)
            if stored is not None and _tokens(checkpoint.other_files[file], file) != _tokens(self.path(stored), file):
                raise NotAdmitted(
                    f"{source.name} has another tokenizer than the models of this zoo ({file} differs): expected equal tokens"
                )

    def _check_complete(self, source: Path) -> None:
        """All tensors of the architecture are there, in their shapes, and no others."""
        try:
            _, info = AutoModelForCausalLM.from_pretrained(
                source, device_map="meta", output_loading_info=True, trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise NotAdmitted(f"{source.name} cannot be loaded as a causal language model: {_first_line(error)}") from None
        wrong = [("has no tensor", info["missing_keys"]), ("has a tensor of another shape,", info["mismatched_keys"])]
        wrong.append(("has a tensor that its architecture does not have,", info["unexpected_keys"]))
        for what, names in wrong:
            if names:
                first = min(str(each[0]) if isinstance(each, tuple) else str(each) for each in names)
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                raise NotAdmitted(f"{source.name} {what} {first:.100}{more}: expected the whole model")

    def add_surrogate(
        self, name: str, piece: str, content: bytes, places: Sequence[BlockPlace], figures: dict[str, float]
    ) -> StoredSurrogate:
        """Keep a block that stands in for those at `places` of a model. It is removed with the model."""
        with self._locked():
            manifest = self.manifest(name)
            stands_for = tuple(block.object.sha256 for block in manifest.chain if block.place in places)
            stored = StoredSurrogate(self._objects.put(content), stands_for, figures)
            changed = replace(manifest, surrogates={**manifest.surrogates, piece: stored})
            self._objects.write_file(self._models / f"{name}.json", changed.encode())
        return stored

    def remove(self, name: str) -> None:
        """Raises `UnknownZooModel`. Blocks that no other model has stay until `gc`."""
        with self._locked():
            self.manifest(name)
            (self._models / f"{name}.json").unlink()
            sync_folder(self._models)

    def gc(self) -> tuple[int, int]:
        """Remove what no model needs: how many files, and their bytes."""
        with self._locked():
            return self._objects.keep_only([each for manifest in self.manifests() for each in manifest.objects])

    def verify(self, progress: Progress = _ignore) -> list[str]:
        """What is wrong, a line each: all content is hashed again."""
        manifests = self.manifests()
        objects = {each.sha256: each for manifest in manifests for each in manifest.objects}
        total, done = sum(each.size for each in objects.values()), 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            progress("hashed", done, total)

        wrong = self._objects.verify(objects.values(), count)
        lines = []
        for manifest in manifests:
            places = {each.object.sha256: str(each.place) for each in manifest.chain}
            places |= {each.sha256: name for name, each in (manifest.files | manifest.adapter).items()}
            places |= {each.object.sha256: f"surrogate of {name}" for name, each in manifest.surrogates.items()}
            lines += [f"{manifest.name}: {place} {wrong[sha256]}" for sha256, place in places.items() if sha256 in wrong]
        return lines

    # Use

    def path(self, object: StoredObject) -> Path:
        """Of a block or another file. Raises `BadZoo`."""
        path = self._objects.path(object)
        if not path.is_file():
            raise BadZoo(f"an object of the zoo is missing ({object.sha256[:12]}): {_VERIFY}")
        return path

    def read(self, object: StoredObject) -> bytes:
        """Raises `BadZoo`."""
        return self.path(object).read_bytes()

    def block_tensors(self, object: StoredObject) -> dict[str, Tensor]:
        """Of a block, by their names within it. Raises `BadZoo`."""
        try:
            found: dict[str, Tensor] = safetensors.torch.load_file(self.path(object))
        except SafetensorError:
            raise BadZoo(f"a block of the zoo cannot be read ({object.sha256[:12]}): {_VERIFY}") from None
        return found

    def check_content(self, manifest: ModelManifest) -> None:
        """Hash all that a model has. Raises `BadZoo` if something is missing or was changed."""
        for sha256, what in self._objects.verify(manifest.objects).items():
            raise BadZoo(f"a block of {manifest.name} {what} ({sha256[:12]}): {_VERIFY}")

    def tensors(self, manifest: ModelManifest) -> dict[str, Tensor]:
        """All tensors of a chain, by the names of the model. Those of equal blocks of other models are other objects."""
        found: dict[str, Tensor] = {}
        for block in manifest.chain:
            for name, tensor in self.block_tensors(block.object).items():
                found[name_in_model(name, block.place)] = tensor
        return found

    def load(self, name: str) -> PreTrainedModel:
        """A model, equal to the checkpoint that was added. What was stored as a low-rank difference is merged into its base; of
        a PEFT adapter it is the model that it was made for.
        """
        manifest = self.manifest(name)
        model = self.load_chain(manifest)
        if manifest.is_difference:
            with self.adapter_folder(manifest) as folder:
                merge_adapter(model, folder)
        return model

    def load_chain(self, manifest: ModelManifest) -> PreTrainedModel:
        """The model of a chain, without an adapter."""
        config = AutoConfig.for_model(**json.loads(self.path(manifest.files[CONFIG]).read_bytes()))
        model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            None, config=config, state_dict=self.tensors(manifest), dtype="auto"
        )
        return model.eval()

    @contextmanager
    def adapter_folder(self, manifest: ModelManifest) -> Iterator[Path]:
        """The files of a model's adapter, or of its low-rank difference, under the names that PEFT reads."""
        with tempfile.TemporaryDirectory() as place:
            for each, stored in manifest.adapter.items():
                shutil.copyfile(self.path(stored), Path(place) / each)
            yield Path(place)


def _block_content(checkpoint: Checkpoint, names: Mapping[str, str]) -> bytes:
    content: bytes = safetensors.torch.save({own: checkpoint.tensor(each).contiguous() for own, each in names.items()})
    return content


def _tokens(path: Path, file: str) -> Any:
    """What a tokenizer file says of token ids; settings such as padding may differ."""
    if file.endswith(".model"):
        return path.read_bytes()
    found = read_json(path)
    model = found.get("model")
    return (model.get("vocab"), found.get("added_tokens")) if isinstance(model, dict) else found


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200] or type(error).__name__
