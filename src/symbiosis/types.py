"""Small frozen value objects that all parts share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum, StrEnum
from typing import Any

WITH_BIAS = 1 << 31
"""Flag in the handle of a matrix in a forward call: the executor adds the bias, which the tenant has not changed."""


class Direction(IntEnum):
    """What a layer call computes."""

    FORWARD = 0
    BACKWARD = 1
    PROGRAM = 2
    """Forward of a layer program: layers that follow each other, with the norms and sums between them."""
    PROGRAM_BACKWARD = 3
    """Backward of a layer program, from the rows of its `ProgramOp.SAVE`."""

    @property
    def is_backward(self) -> bool:
        return self in (Direction.BACKWARD, Direction.PROGRAM_BACKWARD)

    @property
    def is_program(self) -> bool:
        return self in (Direction.PROGRAM, Direction.PROGRAM_BACKWARD)


class ProgramOp(IntEnum):
    """Ops among the layers of a layer program. Each one reads or changes the current rows."""

    ADD = (1 << 31) - 1
    """Add the next tensor of the call."""
    ADD_FLOAT = (1 << 31) - 5
    """Add the next tensor of the call in float32, then round to the dtype of the rows."""
    PUSH = (1 << 31) - 2
    """Save the rows for `ADD_SAVED`."""
    ADD_SAVED = (1 << 31) - 3
    """Add the saved rows."""
    SAVE = (1 << 31) - 6
    """As `PUSH`, and the saved rows are a result too: the backward program reads them."""
    HEADS = (1 << 31) - 4
    """End of the sequence. Each layer after it reads the final rows, and its output is a result too."""

    @property
    def handle(self) -> int:
        return int(self)


class LayerKind(StrEnum):
    """What a base layer computes."""

    LINEAR = "linear"
    """`nn.Linear`: weight is [out, in]. The tenant holds the bias too, and may train it."""
    CONV1D = "conv1d"
    """transformers' `Conv1D`: weight is [in, out]. The tenant holds the bias too, and may train it."""
    EMBEDDING = "embedding"
    """`nn.Embedding`, only if the provider hosts it."""
    EXPERTS = "experts"
    """A module of stacked expert weights: rows, expert indices and expert weights in, rows out."""
    BLOCK = "block"
    """A row-wise sub-module of hosted layers, such as an MLP."""
    NORM = "norm"
    """A norm between hosted layers. The tenant holds and computes it too; the executor runs it in layer programs only."""


class ExpertCall(StrEnum):
    """What a module of stacked experts takes."""

    CHOICES = "choices"
    """Rows, the experts of each row, their weights."""
    SEQUENCES = "sequences"
    """As CHOICES, with rows by sequence, [B, T, width]."""
    EQUAL_GROUPS = "equal_groups"
    """Rows sorted by expert, equally many of each; those of experts that are not chosen are zero."""
    SIZED_GROUPS = "sized_groups"
    """Rows sorted by expert, and how many there are of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """What a tenant needs to replace a base layer by a virtual layer."""

    handle: int
    """Number of the layer in calls; larger is later in a forward pass."""
    identity: str
    """Hash of kind, shapes and weights: equal identities are one layer in memory."""
    kind: LayerKind
    paths: tuple[str, ...]
    """Module paths in the model; several if the module is shared."""
    in_width: int
    out_width: int
    train_safe: bool = True
    """For blocks: whether training mode computes the same as evaluation mode."""
    weights: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Names and shapes of the weights that the executor holds."""
    experts: int = 0
    """For experts: their number. For embeddings: the number of rows."""
    expert_call: ExpertCall = ExpertCall.CHOICES
    """For experts: what the tenant's module takes. The executor takes choices."""

    def __hash__(self) -> int:  # hashed in every call: one number instead of all fields
        return self.handle

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

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
            expert_call=ExpertCall(data["expert_call"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobRef:
    """A file that tenants download, named by the hash of its content."""

    sha256: str
    size: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BlobRef:
        digest, size = str(data["sha256"]), int(data["size"])
        if len(digest) != 64 or set(digest) - set("0123456789abcdef") or size < 0:
            raise ValueError(f"not a blob reference: {data!r}")
        return cls(sha256=digest, size=size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A model as a tenant sees it: its config, its hosted layers, and the files of the rest."""

    name: str
    model_class: str
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    attention: str | None
    dtype: str
    layers: tuple[LayerSpec, ...]
    ties: dict[str, str]
    """Tied names in the client part, and the name that holds the tensor."""
    client_weights: BlobRef | None
    tokenizer: BlobRef | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

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
    """What the executor accepts. Sent to each tenant in WELCOME."""

    max_rows: int = 8192
    """Most rows of one layer call. Clients split longer calls."""
    max_bytes: int = 33 << 20
    """Most bytes of one message. Clients split longer calls. Fits half a layer in one call for 1,024 rows of a 7B model in
    half precision: with the residual and an adapter's delta in float32 these have a little more than 32 MiB."""
    max_sessions: int = 1024
    """Most open sessions, over all tenants."""
    max_tenant_sessions: int = 64
    """Most open sessions of one tenant, if tenants have auth tokens."""
    weights: bool = True
    """Whether tenants may download base weights, for methods that need them."""
    direct: bool = True
    """Whether tenants on the executor's GPU may map its memory. A mapping is writable."""

    @property
    def max_choices(self) -> int:
        """Most expert indices of one call, over all its rows."""
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
