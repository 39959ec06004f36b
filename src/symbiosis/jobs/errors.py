"""What can be wrong with a file or a job."""

from __future__ import annotations

from symbiosis.errors import SymbiosisError


class BadTrainingFile(SymbiosisError):
    """Data that cannot be learnt from; the message names the lines."""

    code = "invalid_training_file"

    def __init__(self, message: str, *, field: str = "training_file") -> None:
        super().__init__(message if field == "training_file" else f"{field}: {message}")
        self.field = field


class BadPlan(SymbiosisError):
    """Settings of a job that contradict each other, the method or the data."""

    code = "invalid_hyperparameters"

    def __init__(self, message: str, *, field: str = "hyperparameters") -> None:
        super().__init__(message)
        self.field = field


class UnknownFile(SymbiosisError):
    """No file of the caller's has this id."""

    code = "file_not_found"


class UnknownJob(SymbiosisError):
    """No job of the caller's has this id."""

    code = "job_not_found"


class WrongState(SymbiosisError):
    """What was asked of a job cannot be done in the state it is in."""

    code = "invalid_state"


class NameReserved(SymbiosisError):
    """A name that a job will give its adapter."""

    code = "name_reserved"
    field = "name"


class KeyReused(SymbiosisError):
    """An Idempotency-Key that stood for another request."""

    code = "idempotency_key_reused"


class StorageFull(SymbiosisError):
    """The disk takes no more."""

    code = "storage_full"
