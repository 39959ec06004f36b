"""What a host is given, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass

from symbiosis.errors import OutOfRange


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """Limits of one host. All are checked."""

    max_rows: int = 4096
    """The longest example, and the most rows, over all sessions, that a pass may have."""
    pass_rows: int | None = None
    """Rows of a pass, but for one example that is longer; None: 256 on a CPU, which gains nothing by more, else `max_rows`."""
    max_examples: int = 1024
    """Most examples of one forward_backward; they may be computed in several passes."""
    max_sessions: int = 256
    tenant_sessions: int = 64
    max_parameters: int = 1 << 30
    """Most that are trained at once; each takes 16 bytes with its gradient and what AdamW keeps."""
    tenant_parameters: int = 1 << 28
    """Of one tenant, also in one adapter."""
    max_waiting: int = 64
    """Most calls of one session that wait at once."""
    max_waiting_tokens: int = 1 << 20
    """Most tokens of one session that wait at once; a batch has half of it at most."""
    tenant_waiting_tokens: int = 1 << 22
    max_answers: int = 4096
    """Most answers that are asked for by `sample` and have not come."""
    tenant_answers: int = 1024
    graphs: int = 16
    """Most CUDA graphs of passes that are kept, on all of a GPU and on a part; 0 for none. Each is of one kind of pass."""
    short_pass_s: float | None = None
    """How long a pass should take while answers are served beside; a single example may take longer.

    None: 0.1 where both compute on the same cores; a GPU computes them at the same time (`device_sharing/gpu_partition`), so there
    it does not matter how long a pass is.
    """

    def __post_init__(self) -> None:
        seconds: object = self.short_pass_s
        if seconds is not None and (type(seconds) not in (int, float) or not 0.001 <= seconds <= 3600):  # type: ignore[operator]
            raise OutOfRange(f"short_pass_s is {seconds!r}", field="short_pass_s", expected="0.001 to 3600")
        for name in set(self.__slots__) - {"short_pass_s"}:
            value, least = getattr(self, name), 0 if name == "graphs" else 1
            if name == "pass_rows" and value is None:
                continue
            if type(value) is not int or not least <= value <= 1 << 31:
                raise OutOfRange(f"{name} is {value!r}", field=name, expected=f"a whole number from {least} on")


@dataclass(frozen=True, slots=True)
class TrainerStats:
    passes: int = 0
    rows: int = 0
    sessions: int = 0
    """Of which the passes were made: 8 sessions in one pass count 8."""
    seconds: float = 0.0
    """That passes took."""
    beside_passes: int = 0
    """Those while answers were served; all of the above has them too."""
    beside_rows: int = 0
    beside_seconds: float = 0.0
    new_passes: int = 0
    """Those of a kind that was not ready yet, on a GPU: the next of it are faster."""
    steps: int = 0
    """Of optimizers."""
