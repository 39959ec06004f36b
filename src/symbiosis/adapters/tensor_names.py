"""PEFT's tensor names: each stands for a module's path and the tensor's role there."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from torch import Tensor

from symbiosis.adapters.config import PeftMethod
from symbiosis.adapters.files import CONFIG, TENSORS, join_names, quote
from symbiosis.adapters.model_facts import ModelFacts, ModuleFacts
from symbiosis.adapters.tensor_file import InMemoryTensors, TensorFile
from symbiosis.errors import BadAdapter, UnsupportedAdapter

PROMPT = "prompt_embeddings"


class Role(StrEnum):
    """The end of a tensor's name."""

    A = "lora_A.weight"
    B = "lora_B.weight"
    B_BIAS = "lora_B.bias"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    MAGNITUDE = "lora_magnitude_vector"
    SCALING = "ia3_l"
    TOKENS = "token_adapter.trainable_tokens_delta"
    TOKENS_BASE_WEIGHT = "token_adapter.base_layer.weight"
    BASE_WEIGHT = "base_layer.weight"
    BASE_BIAS = "base_layer.bias"
    WEIGHT = "weight"
    BIAS = "bias"


_COMMON_ROLES = (Role.WEIGHT, Role.BIAS)
_ROLES = {
    PeftMethod.LORA: tuple(role for role in Role if role is not Role.SCALING),
    PeftMethod.IA3: (Role.SCALING, *_COMMON_ROLES),
}
_WRAPPERS = {
    "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "ia3_l", "base_layer", "token_adapter", "original_module",
}  # fmt: skip
"""Names of PEFT's wrappers, which no path of a plain model contains."""
_PREFIX = {PeftMethod.LORA: "base_model.model.", PeftMethod.IA3: "base_model.model."}


class AdapterTensors:
    """The tensors of an adapter by path and role. Each is taken once; `finish` rejects the adapter if one is left."""

    def __init__(self, file: TensorFile | InMemoryTensors, method: PeftMethod, model: ModelFacts) -> None:
        """Raises `BadAdapter` or `UnsupportedAdapter` for an unknown name, before any tensor is read."""
        self._file = file
        self._model = model
        self._names: dict[tuple[str, Role], str] = {}
        self.has_prompt = PROMPT in file.entries
        prefix, roles = _PREFIX.get(method, "base_model."), _ROLES.get(method, _COMMON_ROLES)
        # longest first: lora_A.weight also ends with weight
        ordered = sorted(roles, key=len, reverse=True)
        for name in file.entries:
            if name == PROMPT and method not in _PREFIX:
                continue
            role = next((role for role in ordered if name.endswith(f".{role}")), None)
            parent, _, parameter = name.removeprefix(prefix).rpartition(".")
            if parent in model.modules and parameter in set(model.modules[parent].shapes) - {"weight", "bias"}:
                raise UnsupportedAdapter(
                    f"{TENSORS} has {name}: replacing {parameter} of a {describe_module(model.modules[parent])} is not served"
                )
            if role is None or not name.startswith(prefix) or _WRAPPERS & set(name.removesuffix(role).split(".")):
                raise BadAdapter(
                    f"{TENSORS} has {quote(name)}, which is no tensor of {method.value}: expected names such as "
                    f"{prefix}PATH.{roles[0]}"
                )
            path = name[len(prefix) : -len(role) - 1]
            if path not in model.modules:
                raise UnsupportedAdapter(
                    f"{TENSORS} has {quote(name)}, but {model.name} has no module {quote(path)} that can be adapted; was the "
                    "adapter made for another model, task or version of transformers?"
                )
            self._names[path, role] = name

    def paths(self, *roles: Role) -> list[str]:
        """Paths with tensors of these roles that are left, in model order."""
        found = {path for path, role in self._names if role in roles}
        return [path for path in self._model.modules if path in found]

    def has(self, path: str, role: Role) -> bool:
        return (path, role) in self._names

    def take(self, path: str, role: Role, shape: tuple[int, ...], *, fit: str, own: int | None = None) -> Tensor:
        """The tensor, which must have this shape. The model decides the sizes, as `fit` states for errors; the config decides
        the size of dimension `own`.
        """
        name = self._names.pop((path, role), None)
        if name is None:
            raise BadAdapter(f"{TENSORS} lacks {role} of {path}, which the config says it has")
        return self._read(name, shape, fit, own)

    def take_prompt(self, shape: tuple[int, int]) -> Tensor:
        if not self.has_prompt:
            raise BadAdapter(f"{TENSORS} lacks {PROMPT}")
        return self._read(PROMPT, shape, "", None)

    def _read(self, name: str, shape: tuple[int, ...], fit: str, own: int | None) -> Tensor:
        found = self._file.entries[name].shape
        if found != shape:
            # A mismatch with the model: made for another model. A mismatch with its own config: broken.
            broken = not fit or len(found) != len(shape) or (own is not None and found[own] != shape[own])
            raise (BadAdapter if broken else UnsupportedAdapter)(
                f"{TENSORS}: {name} has the shape {list(found)}, expected {list(shape)} as {CONFIG if broken else fit}"
                f"{' says' if broken else ''}"
            )
        return self._file.read(name)

    def shape(self, path: str, role: Role) -> tuple[int, ...]:
        return self._file.entries[self._names[path, role]].shape

    def finish(self, why: Mapping[Role, str]) -> None:
        """Raises `BadAdapter` if a tensor was not taken."""
        if self._names:
            names = list(self._names.values())
            (_, role), _ = next(iter(self._names.items()))
            reason = why.get(role, "no setting of the config refers to it")
            raise BadAdapter(f"{TENSORS} has {join_names(names)}: {reason}")


def describe_module(module: ModuleFacts) -> str:
    """The kind of a module, for a message."""
    return module.kind.value if module.kind else f"module of {', '.join(module.shapes)}"
