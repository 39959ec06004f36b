"""Errors of training files and fine-tuning jobs."""

from __future__ import annotations

from symbiosis.errors import SymbiosisError


class BadTrainingFile(SymbiosisError):
    """The data cannot be trained on. The message names the lines."""

    code = "invalid_training_file"

    def __init__(self, message: str, *, field: str = "training_file") -> None:
        super().__init__(message if field == "training_file" else f"{field}: {message}")
        self.field = field


class BadPlan(SymbiosisError):
    """Hyperparameters contradict each other, the method or the data; `name` is the hyperparameter."""

    code = "invalid_hyperparameters"

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.field = f"hyperparameters.{name}"


class UnknownFile(SymbiosisError):
    """The tenant has no file with this id."""

    code = "file_not_found"


class UnknownJob(SymbiosisError):
    """The tenant has no job with this id."""

    code = "job_not_found"


class WrongState(SymbiosisError):
    """The job's state does not allow the change."""

    code = "invalid_state"


class NameReserved(SymbiosisError):
    """The name is reserved for the adapter of a job."""

    code = "name_reserved"
    field = "name"


class KeyReused(SymbiosisError):
    """The Idempotency-Key belongs to a different request."""

    code = "idempotency_key_reused"


class StorageFull(SymbiosisError):
    """The disk is full."""

    code = "storage_full"
