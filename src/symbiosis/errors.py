"""The error tree. Every error class has a code, which crosses links unchanged.

A message states what was wrong, what was expected and what to do. A tenant's link raises an error of the executor again as
the same class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BY_CODE: dict[str, type[SymbiosisError]] = {}


class SymbiosisError(RuntimeError):
    """Root of all errors that this package raises on purpose."""

    code = "error"

    def __init_subclass__(cls, *, code: str | None = None) -> None:
        """The code is the class argument `code` or the class attribute of that name; without either it is inherited."""
        if code is not None:
            cls.code = code
        if "code" in vars(cls):
            _BY_CODE[cls.code] = cls


def from_code(code: str, message: str) -> SymbiosisError:
    """The error for a code received from the other end; a plain `SymbiosisError` for an unknown code."""
    return _BY_CODE.get(code, SymbiosisError)(message)


class UnknownModel(SymbiosisError, code="unknown_model"):
    """The model name is neither a folder nor a hub id that can be loaded."""


class CannotSplit(SymbiosisError, code="cannot_split"):
    """The model has no layer that the executor can host, or a tenant cannot rebuild it."""


class CannotServe(SymbiosisError, code="cannot_serve"):
    """The model's code needs a feature that the serving engine does not have."""


class CannotTrain(SymbiosisError, code="cannot_train"):
    """The model's code needs a feature that packed fine-tuning does not have."""


class Diverged(SymbiosisError, code="diverged"):
    """The loss or a gradient of a training session is not finite; only this session is affected."""


class DoesNotFit(SymbiosisError, code="does_not_fit"):
    """More memory is needed than there is; `needed` and `available` are bytes."""

    def __init__(self, message: str, *, needed: int = 0, available: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class BadData(SymbiosisError, code="bad_data"):
    """Training data that cannot be used; the message names the line or the field."""


class NotStored(SymbiosisError, code="not_stored"):
    """The provider's disk failed to write or to read."""


class StoreUnavailable(SymbiosisError, code="store_unavailable"):
    """The store of a cluster cannot be read or written now: unreachable, read-only, or without access."""


class StoreFull(StoreUnavailable, code="store_full"):
    """The store of a cluster has no space left: nothing was written."""


class BadArtifact(SymbiosisError, code="bad_artifact"):
    """An artifact of the store that is missing, incomplete, or differs from what was written."""


class OutOfOrder(SymbiosisError, code="out_of_order"):
    """A call of a training session whose number belongs to another call, or to one that was dropped."""


class Withdrawn(SymbiosisError, code="withdrawn"):
    """A call of a training session that had not begun when the session was stopped."""


class BadAddress(SymbiosisError, code="bad_address"):
    """An address in a form that no link accepts."""


class AddressInUse(SymbiosisError, code="address_in_use"):
    """Another process listens at the address."""


class InsecureListen(SymbiosisError, code="insecure_listen"):
    """Listening beyond this machine without auth tokens."""


class Unreachable(SymbiosisError, code="unreachable"):
    """No executor replies at the address."""


class ExecutorLost(SymbiosisError, code="executor_lost"):
    """The executor is gone and did not return within the grace period."""


class ModelChanged(SymbiosisError, code="model_changed"):
    """The executor was restarted with another model."""


class VersionMismatch(SymbiosisError, code="version_mismatch"):
    """The two ends use different versions of the protocol."""


class DtypeMissing(SymbiosisError, code="dtype_missing"):
    """One end uses a dtype that the other end, or its device, does not have."""


class Unauthorized(SymbiosisError, code="unauthorized"):
    """No auth token, or one that the executor does not accept."""


class HelloFirst(SymbiosisError, code="hello_first"):
    """A call from a peer without a session: the executor was restarted, or the peer sent no HELLO."""


class BadMessage(SymbiosisError, code="bad_message"):
    """Bytes that are not a message of this protocol."""


class BadCall(SymbiosisError, code="bad_call"):
    """A call whose rows do not fit the layer: width, dtype, number of tensors, range of indices."""


class UnknownLayer(SymbiosisError, code="unknown_layer"):
    """A layer that the executor does not host."""


class TooLarge(SymbiosisError, code="too_large"):
    """More rows or bytes than the provider allows."""


class TooManyCalls(SymbiosisError, code="too_many_calls"):
    """A second call on a channel with a call in flight, or too many sessions."""


class WeightsWithheld(SymbiosisError, code="weights_withheld"):
    """A method reads a base weight, and the provider does not export weights."""


class DirectRefused(SymbiosisError, code="direct_refused"):
    """Direct mode is not allowed or not possible for this tenant."""


class CannotMerge(SymbiosisError, code="cannot_merge"):
    """An adapter cannot be merged into a weight that the executor holds."""


class CannotSave(SymbiosisError, code="cannot_save"):
    """A connected model holds no base weights, so it cannot be saved whole."""


class NoTokenizer(SymbiosisError, code="no_tokenizer"):
    """The executor was started from a model without a tokenizer."""


class Closed(SymbiosisError, code="closed"):
    """The session or executor was closed."""


class LayerFailed(SymbiosisError, code="layer_failed"):
    """The layer failed in the executor; only this call is affected."""


class ShardLost(SymbiosisError, code="shard_lost"):
    """A process that holds a part of the model has ended or does not answer: the executor ends."""


class UnknownAdapter(SymbiosisError, code="unknown_adapter"):
    """A name that no served adapter has."""


class BadAdapter(SymbiosisError, code="bad_adapter"):
    """An adapter that is malformed, hostile, inconsistent, or does not fit the model."""


class UnsupportedAdapter(SymbiosisError, code="unsupported_adapter"):
    """A sound adapter that cannot be served: by its method, by a setting, or because it was made for another model."""


class OutOfRange(SymbiosisError, code="out_of_range"):
    """A request's value that is not allowed; `field` names it and `expected` states what is."""

    def __init__(self, message: str, *, field: str = "", expected: str = "") -> None:
        super().__init__(f"{message}, expected {expected}" if expected else message)
        self.field = field
        self.expected = expected


class ContextTooLong(SymbiosisError, code="context_too_long"):
    """A prompt, or a prompt with its completion, that is longer than the model or the KV cache allows."""


class TooManyRequests(SymbiosisError, code="too_many_requests"):
    """The request limit of one tenant or of the provider is reached; retry after `retry_s`."""

    def __init__(self, message: str, *, retry_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class PassFailed(SymbiosisError, code="pass_failed"):
    """A forward pass of the engine failed, and with it all of its requests: `requests`."""

    def __init__(self, message: str, requests: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.requests = requests


class AnswerFailed(SymbiosisError, code="answer_failed"):
    """The model's logits are NaN or infinite, so no token can be sampled; only this request is affected."""


class AdapterExists(SymbiosisError, code="adapter_exists"):
    """Another adapter is served under that name."""


class QuotaExceeded(SymbiosisError, code="quota_exceeded"):
    """More adapters, or bytes of adapters, than the provider stores for one tenant."""


class EngineLost(SymbiosisError, code="engine_lost"):
    """The process of the serving engine is gone or does not reply."""


class Forbidden(SymbiosisError, code="forbidden"):
    """A valid key without the right to this operation."""


class CannotOffload(SymbiosisError, code="cannot_offload"):
    """A model or a call of `generate` does not support a KV cache in host memory."""


class BadTrace(SymbiosisError, code="bad_trace"):
    """A trace of requests that cannot be read; the message names the line."""


class BadProfile(SymbiosisError, code="bad_profile"):
    """A profile of an engine that `symbiosis profile` did not write, or whose values are out of range."""


class UnknownEngine(SymbiosisError, code="unknown_engine"):
    """The cluster has no engine of this name."""


class UnknownPolicy(SymbiosisError, code="unknown_policy"):
    """A name that no policy of the simulator has."""


class OutOfHostMemory(SymbiosisError, code="out_of_host_memory"):
    """Host memory is too small for a KV cache."""
