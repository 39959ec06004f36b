"""Limits of a trainer."""

from __future__ import annotations

from dataclasses import dataclass

from symbiosis.errors import OutOfRange


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """Raises `OutOfRange` for an invalid value. Limits named `tenant_` are for all sessions of one tenant."""

    max_rows: int = 4096
    """Of one example, and of one pass over all sessions."""
    pass_rows: int | None = None
    """Rows of a pass, unless one example is longer; None: 256 on a CPU, where larger passes are not faster, else `max_rows`."""
    max_examples: int = 1024
    """Of one forward_backward, which may take several passes."""
    max_sessions: int = 256
    tenant_sessions: int = 64
    max_parameters: int = 1 << 30
    """Trained at once; each takes 16 bytes with its gradient and AdamW's state."""
    tenant_parameters: int = 1 << 28
    """Also the limit of one adapter."""
    max_waiting: int = 64
    """Pending calls of one session."""
    max_waiting_tokens: int = 1 << 20
    """Pending tokens of one session; a batch has half of it at most."""
    tenant_waiting_tokens: int = 1 << 22
    max_completions: int = 4096
    """Requested by `sample` and not finished."""
    tenant_completions: int = 1024
    graphs: int = 16
    """CUDA graphs of passes kept for each stream; 0 for none. Each graph is for one shape of pass."""
    serving_pass_s: float | None = None
    """Target time of a pass while the engine serves; a single example may take longer.

    None: 0.1 on a CPU, where passes and serving alternate. A GPU runs both at once (`device_sharing/gpu_partition`), so
    the time of a pass does not matter there.
    """

    def __post_init__(self) -> None:
        seconds: object = self.serving_pass_s
        if seconds is not None and (type(seconds) not in (int, float) or not 0.001 <= seconds <= 3600):  # type: ignore[operator]
            raise OutOfRange(f"serving_pass_s is {seconds!r}", field="serving_pass_s", expected="0.001 to 3600")
        for name in set(self.__slots__) - {"serving_pass_s"} - ({"pass_rows"} if self.pass_rows is None else set()):
            value, least = getattr(self, name), 0 if name == "graphs" else 1
            if type(value) is not int or not least <= value <= 1 << 31:
                raise OutOfRange(f"{name} is {value!r}", field=name, expected=f"a whole number from {least} on")
