"""How rows travel between hosts: as they are, or rounded to bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from symbiosis.errors import DtypeMissing, SymbiosisError
from symbiosis.transport.messages import DTYPE_NAMES

if TYPE_CHECKING:
    from torch import Tensor

_MAX_DTYPES = 16  # an untrusted list, shown in an error


class WireFormat(StrEnum):
    """What a tenant chooses for its link. Weights and files always travel as they are."""

    EXACT = "exact"
    """Rows keep their dtype."""
    BF16 = "bf16"
    """Rows of float32 and float64 are rounded to bfloat16, in calls and in replies, forward and backward."""

    @classmethod
    def parse(cls, name: str) -> WireFormat:
        """Raises `SymbiosisError` for an unknown name."""
        if name not in cls._value2member_map_:
            raise SymbiosisError(f"wire={name!r}: expected one of {', '.join(cls)}")
        return cls(name)

    def round(self, rows: Tensor) -> Tensor:
        """The rows as they are sent."""
        if self is WireFormat.EXACT or not rows.is_floating_point() or rows.element_size() <= 2:
            return rows
        import torch  # on first use: see `messages`

        return rows.to(torch.bfloat16)

    def check_peer(self, address: str, dtypes: object) -> None:
        """Raise `DtypeMissing` if the executor does not read what this format sends. `dtypes` is what its WELCOME lists."""
        known: Sequence[str] = DTYPE_NAMES
        if isinstance(dtypes, list):
            known = [str(name)[:20] for name in dtypes[:_MAX_DTYPES]]
        if self is WireFormat.BF16 and "bfloat16" not in known:
            raise DtypeMissing(
                f"wire='bf16' sends bfloat16, and the executor at {address} reads {', '.join(known) or 'no dtype'}: "
                "connect with wire='exact'"
            )
