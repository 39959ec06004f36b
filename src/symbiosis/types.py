"""Ids and small frozen value objects that everybody may know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

WITH_BIAS = 1 << 31
"""Added to a matrix's handle in a forward call: the executor adds the bias, since the tenant has not changed it."""


class Direction(IntEnum):
    """Which way the rows of a layer call go."""

    FORWARD = 0
    BACKWARD = 1
    PROGRAM = 2
    """Forward through layers that follow each other, with the norms and sums between them."""
    PROGRAM_BACKWARD = 3
    """The gradients of a call onward that answered with what these need (`ProgramOp.SAVE`)."""

    @property
    def is_back(self) -> bool:
        return self in (Direction.BACKWARD, Direction.PROGRAM_BACKWARD)

    @property
    def is_way(self) -> bool:
        """Whether turns stand among the layers of such a call."""
        return self in (Direction.PROGRAM, Direction.PROGRAM_BACKWARD)


class ProgramOp(IntEnum):
    """What stands among the layers of a call onward and is none. They go one after the other; each changes the rows."""

    ADD = (1 << 31) - 1
    """The next of the call's tensors is added."""
    ADD_FLOAT = (1 << 31) - 5
    """The same in float32, as the tensor is, whatever the rows are; and rounded to that."""
    PUSH = (1 << 31) - 2
    """The rows as they are now are kept, and"""
    ADD_SAVED = (1 << 31) - 3
    """added here."""
    SAVE = (1 << 31) - 6
    """Kept as with `PUSH`, and an answer too: the gradients are computed from it."""
    HEADS = (1 << 31) - 4
    """The way ends. Layers after this read the rows, and their results are answers too."""

    @property
    def handle(self) -> int:
        return int(self)


class LayerKind(StrEnum):
    """What a base layer computes."""

    LINEAR = "linear"
    """`nn.Linear`: weight is [out, in]. The tenant has the bias too, and may train it."""
    CONV1D = "conv1d"
    """transformers' `Conv1D`: weight is [in, out]. The tenant has the bias too, and may train it."""
    EMBEDDING = "embedding"
    """`nn.Embedding`, only where the provider moved it to the executor."""
    EXPERTS = "experts"
    """A module of stacked expert weights: rows, expert indices and expert weights in, rows out."""
    BLOCK = "block"
    """A sub-module made of hosted layers that treats each row alone, such as a whole MLP."""
    NORM = "norm"
    """A norm between hosted layers. The tenant has it too, and computes it: the executor does on the way onward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """What a tenant must know of a base layer to stand a virtual layer in its place."""

    handle: int
    """Number of the layer in calls; larger is further on in a forward pass."""
    identity: str
    """Hash of kind, shapes and weights: equal identities are one layer in memory."""
    kind: LayerKind
    paths: tuple[str, ...]
    """Where the layer stands in the model (several where one module is used in several places)."""
    in_width: int
    out_width: int
    train_safe: bool = True
    """For blocks: whether training mode computes the same as evaluation mode."""
    weights: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Names and shapes of the weights that live in the executor."""
    experts: int = 0
    """For experts: how many there are. For embeddings: how many rows."""

    def __hash__(self) -> int:  # looked up in every call: by one number, not by all fields
        return self.handle

    def to_json(self) -> dict[str, Any]:
        return {
            "handle": self.handle,
            "identity": self.identity,
            "kind": self.kind.value,
            "paths": list(self.paths),
            "in_width": self.in_width,
            "out_width": self.out_width,
            "train_safe": self.train_safe,
            "weights": [[name, list(shape)] for name, shape in self.weights],
            "experts": self.experts,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LayerSpec:
        return cls(
            handle=int(data["handle"]),
            identity=str(data["identity"]),
            kind=LayerKind(data["kind"]),
            paths=tuple(str(path) for path in data["paths"]),
            in_width=int(data["in_width"]),
            out_width=int(data["out_width"]),
            train_safe=bool(data["train_safe"]),
            weights=tuple((str(n), tuple(int(d) for d in shape)) for n, shape in data["weights"]),
            experts=int(data["experts"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobRef:
    """A file the executor hands out, named by the hash of its content."""

    sha256: str
    size: int

    def to_json(self) -> dict[str, Any]:
        return {"sha256": self.sha256, "size": self.size}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BlobRef:
        digest, size = str(data["sha256"]), int(data["size"])
        if len(digest) != 64 or set(digest) - set("0123456789abcdef") or size < 0:
            raise ValueError(f"not a blob reference: {data!r}")
        return cls(sha256=digest, size=size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A model as a tenant sees it: how to build it, which layers are elsewhere, where the rest is."""

    name: str
    model_class: str
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    attention: str | None
    dtype: str
    layers: tuple[LayerSpec, ...]
    ties: dict[str, str]
    """Names in the client part that are another name's tensor."""
    client_weights: BlobRef | None
    tokenizer: BlobRef | None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "model_class": self.model_class,
            "config": self.config,
            "generation_config": self.generation_config,
            "attention": self.attention,
            "dtype": self.dtype,
            "layers": [layer.to_json() for layer in self.layers],
            "ties": self.ties,
            "client_weights": self.client_weights.to_json() if self.client_weights else None,
            "tokenizer": self.tokenizer.to_json() if self.tokenizer else None,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Manifest:
        weights, tokenizer = data["client_weights"], data["tokenizer"]
        return cls(
            name=str(data["name"]),
            model_class=str(data["model_class"]),
            config=dict(data["config"]),
            generation_config=data["generation_config"],
            attention=data["attention"],
            dtype=str(data["dtype"]),
            layers=tuple(LayerSpec.from_json(layer) for layer in data["layers"]),
            ties={str(name): str(other) for name, other in data["ties"].items()},
            client_weights=BlobRef.from_json(weights) if weights else None,
            tokenizer=BlobRef.from_json(tokenizer) if tokenizer else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the executor accepts, told to each tenant at the start."""

    max_rows: int = 8192
    """Most rows one layer call may carry; clients cut longer calls."""
    max_bytes: int = 33 << 20
    """Most bytes one message may carry; clients cut longer calls. Of a model of 7B parameters in half precision, 1,024 rows
    with the residual and an adapter's change in float32 (half a layer in one call) have 32 MiB and a little."""
    max_sessions: int = 1024
    """Most channels open at once, over all tenants."""
    max_tenant_sessions: int = 64
    """Of one tenant, where tenants have tokens."""
    weights: bool = True
    """Whether a tenant may fetch a base weight for a method that needs it."""
    direct: bool = True
    """Whether a tenant on the executor's GPU may map its memory, and so could write to it."""

    @property
    def max_choices(self) -> int:
        """Most experts that the rows of one call choose, all together."""
        return 8 * self.max_rows

    def to_json(self) -> dict[str, Any]:
        return {"max_rows": self.max_rows, "max_bytes": self.max_bytes, "weights": self.weights, "direct": self.direct}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Limits:
        return cls(
            max_rows=max(1, int(data["max_rows"])),
            max_bytes=max(1 << 16, int(data["max_bytes"])),
            weights=bool(data["weights"]),
            direct=bool(data["direct"]),
        )
