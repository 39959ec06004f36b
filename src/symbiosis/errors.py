"""The error tree. Every error has a code that crosses links unchanged.

A message says what was wrong, what was expected and what to do about it. An
error raised in the executor is raised again at the tenant as the same class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class SymbiosisError(RuntimeError):
    """Root of everything this package raises on purpose."""

    code = "error"


class UnknownModel(SymbiosisError):
    """The model named is neither a folder, nor a hub id that could be loaded."""

    code = "unknown_model"


class CannotSplit(SymbiosisError):
    """The model has no layer the executor could host, or cannot be rebuilt at a tenant."""

    code = "cannot_split"


class CannotServe(SymbiosisError):
    """The model's code asks for something the serving engine does not have."""

    code = "cannot_serve"


class CannotTrain(SymbiosisError):
    """The model's code asks for something that packed fine-tuning does not have."""

    code = "cannot_train"


class Diverged(SymbiosisError):
    """The loss or a gradient of a training session is no number any more; only this session is affected."""

    code = "diverged"


class BadData(SymbiosisError):
    """Training data that cannot be learnt from; the message says which line, or what of it."""

    code = "bad_data"


class NotStored(SymbiosisError):
    """The provider's disk did not take what was to be written, or does not give what was."""

    code = "not_stored"


class OutOfOrder(SymbiosisError):
    """A call of a training session whose number was used for another call, or is no longer known."""

    code = "out_of_order"


class Withdrawn(SymbiosisError):
    """A call of a training session that had not begun when the session was told to stop."""

    code = "withdrawn"


class BadAddress(SymbiosisError):
    """An address that is not of the form a link takes."""

    code = "bad_address"


class AddressInUse(SymbiosisError):
    """Somebody else listens there already."""

    code = "address_in_use"


class InsecureListen(SymbiosisError):
    """Listening beyond this machine without tokens."""

    code = "insecure_listen"


class Unreachable(SymbiosisError):
    """Nobody answers at the address."""

    code = "unreachable"


class ExecutorLost(SymbiosisError):
    """The executor went away and did not come back within the grace period."""

    code = "executor_lost"


class ModelChanged(SymbiosisError):
    """The executor came back with another model."""

    code = "model_changed"


class VersionMismatch(SymbiosisError):
    """The two ends speak different versions of the protocol."""

    code = "version_mismatch"


class Unauthorized(SymbiosisError):
    """No token, or one the executor does not know."""

    code = "unauthorized"


class HelloFirst(SymbiosisError):
    """A call from a peer the executor does not know: it was restarted, or the peer skipped HELLO."""

    code = "hello_first"


class BadMessage(SymbiosisError):
    """Bytes that are not a message of this protocol."""

    code = "bad_message"


class BadCall(SymbiosisError):
    """A call whose rows do not fit the layer: width, dtype, number of tensors, range of indices."""

    code = "bad_call"


class UnknownLayer(SymbiosisError):
    """A layer the executor does not host."""

    code = "unknown_layer"


class TooLarge(SymbiosisError):
    """More rows or bytes than the provider allows."""

    code = "too_large"


class TooManyCalls(SymbiosisError):
    """A second call on a channel whose first one has not been answered, or too many sessions."""

    code = "too_many_calls"


class WeightsWithheld(SymbiosisError):
    """A method needs a base weight itself, and the provider does not hand weights out."""

    code = "weights_withheld"


class DirectRefused(SymbiosisError):
    """A tenant asked to compute with the executor's weights itself, and may not or cannot."""

    code = "direct_refused"


class CannotMerge(SymbiosisError):
    """An adapter cannot be merged into a weight that lives in the executor."""

    code = "cannot_merge"


class CannotSave(SymbiosisError):
    """A connected model holds no base weights, so it cannot be saved whole."""

    code = "cannot_save"


class NoTokenizer(SymbiosisError):
    """The executor was started from a model without a tokenizer."""

    code = "no_tokenizer"


class Closed(SymbiosisError):
    """The session or executor was closed."""

    code = "closed"


class LayerFailed(SymbiosisError):
    """The layer itself failed in the executor; only this call was affected."""

    code = "layer_failed"


class UnknownAdapter(SymbiosisError):
    """A name that no served adapter has."""

    code = "unknown_adapter"


class BadAdapter(SymbiosisError):
    """An adapter that is malformed, hostile, disagrees with itself, or does not fit the model it is put on."""

    code = "bad_adapter"


class UnsupportedAdapter(SymbiosisError):
    """A sound adapter that cannot be served: its method or a setting of it, or it was made for another model."""

    code = "unsupported_adapter"


class OutOfRange(SymbiosisError):
    """A value of a request that is not one of those allowed; `field` and `expected` say which and what."""

    code = "out_of_range"

    def __init__(self, message: str, *, field: str = "", expected: str = "") -> None:
        super().__init__(f"{message}, expected {expected}" if expected else message)
        self.field = field
        self.expected = expected


class ContextTooLong(SymbiosisError):
    """A prompt, or a prompt and the answer asked for, longer than the model or the cache takes."""

    code = "context_too_long"


class TooManyRequests(SymbiosisError):
    """More requests than the provider takes, of one tenant or of all; after `retry_s` there may be room."""

    code = "too_many_requests"

    def __init__(self, message: str, *, retry_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class PassFailed(SymbiosisError):
    """A pass of the engine failed, and with it the answers that were computed in it: `requests`."""

    code = "pass_failed"

    def __init__(self, message: str, requests: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.requests = requests


class AnswerFailed(SymbiosisError):
    """The model gave no number to choose a token by (NaN or infinity); only this answer is affected."""

    code = "answer_failed"


class AdapterExists(SymbiosisError):
    """Another adapter is served under that name already."""

    code = "adapter_exists"


class QuotaExceeded(SymbiosisError):
    """More adapters, or bytes of them, than the provider keeps for one tenant."""

    code = "quota_exceeded"


class EngineLost(SymbiosisError):
    """The process with the serving engine is gone, or does not answer."""

    code = "engine_lost"


class Forbidden(SymbiosisError):
    """A key that is known, but not for this."""

    code = "forbidden"


def _tree(root: type[SymbiosisError]) -> dict[str, type[SymbiosisError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def from_code(code: str, message: str) -> SymbiosisError:
    """The error an answer from the other end stands for."""
    return _tree(SymbiosisError).get(code, SymbiosisError)(message)
