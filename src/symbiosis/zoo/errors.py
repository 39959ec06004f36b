"""Errors of a zoo of models."""

from __future__ import annotations

from symbiosis.errors import SymbiosisError


class BadZoo(SymbiosisError, code="bad_zoo"):
    """The folder is no zoo, or something in it is missing or was changed."""


class UnknownZooModel(SymbiosisError, code="unknown_zoo_model"):
    """The zoo has no model of this name."""


class NotAdmitted(SymbiosisError, code="not_admitted"):
    """The model cannot be added to this zoo: another family or tokenizer, a missing tensor, a name in use."""


class ZooFull(BadZoo, code="zoo_full"):
    """The disk of the zoo has no space left: nothing was added."""


class BadText(SymbiosisError, code="bad_text"):
    """A calibration text cannot be read, or is no plain text."""


class UnknownBlock(SymbiosisError, code="unknown_block"):
    """The model has no block of this name."""


class NoSurrogate(SymbiosisError, code="no_surrogate"):
    """A block cannot have this surrogate, or has none: another architecture, nothing left to keep, no text."""


class CannotSpeculate(SymbiosisError, code="cannot_speculate"):
    """This generation cannot speculate at a block: several sequences, an option or a cache that it does not support."""
