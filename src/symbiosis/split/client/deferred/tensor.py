"""Tensors whose numbers nobody has seen yet: they are computed when somebody looks.

`promise` has those of decoding, which know nothing of gradients; `half` those of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from transformers import PreTrainedModel

HALVES = torch.bfloat16, torch.float16
"""To which adapters in float32 may add."""
SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta")
FACTS = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex, Tensor.is_contiguous),
}
"""What is known of a tensor without its numbers."""
_SINGLE = {Tensor, nn.Parameter, torch.dtype, torch.device, torch.Size, int, float, bool, str, type(None)}


class Like(Protocol):
    """What knows a tensor's shape, dtype and device."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


class LazySource(Protocol):
    """How such a tensor comes about."""

    @property
    def like(self) -> Like: ...
    def public(self) -> Tensor:
        """Its numbers, for whatever somebody does with them."""


class LazyTensor(Tensor):
    """A tensor that is computed when somebody looks at its numbers. Subclasses say what may be done with it before."""

    node: Any

    # asked all the time, and cheaper by themselves than as functions of torch
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.node.like.shape  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.node.like.dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.node.like.device  # type: ignore[no-any-return]

    def dim(self) -> int:
        return len(self.node.like.shape)

    def numel(self) -> int:
        return math.prod(self.node.like.shape)

    def is_inference(self) -> bool:
        return False

    # These too, since torch takes its time to find out whom to ask
    def __add__(self, other: Any) -> Any:
        return self._straight(Tensor.__add__, self, other)

    def __radd__(self, other: Any) -> Any:
        return self._straight(Tensor.__radd__, self, other)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self._straight(Tensor.to, self, *args, **kwargs)

    @staticmethod
    def __new__(cls: Any, node: LazySource, *, requires_grad: bool = False) -> LazyTensor:
        like = node.like
        made: LazyTensor = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device, requires_grad=requires_grad
        )
        made.node = node
        torch._C._set_throw_on_mutable_data_ptr(made)  # to what does not ask, there are no numbers
        return made

    @classmethod
    def _straight(cls, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What torch would come to, unless somebody watches its functions, or wants none of ours."""
        if torch._C._len_torch_function_stack() > 0 or not torch._C._is_torch_function_enabled():
            return func(*args, **kwargs)
        return cls.__torch_function__(func, (), args, kwargs)  # type: ignore[no-untyped-call]


def is_ordinary() -> bool:
    """Whether tensors are computed with as they are, here and now, by no transform and in no function of autograd's."""
    if torch._C._is_any_autocast_enabled() or not torch._C._is_fwd_grad_enabled():  # what leaves a function gets a history
        return False
    return forward_ad._current_level < 0 and torch._C._functorch.maybe_current_level() is None


def ordinary() -> AbstractContextManager[Any]:
    """Tensors made in here can be written to anywhere, though somebody looks in inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def plain(value: Any) -> Any:
    """The same with numbers in the place of what nobody has seen."""
    if isinstance(value, LazyTensor):
        return value.node.public()
    if type(value) in _SINGLE:
        return value
    if isinstance(value, list | tuple):
        made = [plain(each) for each in value]
        if type(value) in (list, tuple):
            return type(value)(made)
        return type(value)(*made) if hasattr(value, "_fields") else made if isinstance(value, list) else tuple(made)
    return {key: plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def changes_nothing(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this gives its first argument itself."""
    x = args[0] if args else None
    if not isinstance(x, LazyTensor):
        return False
    if func is F.dropout:
        return not kwargs.get("training", args[2] if len(args) > 2 else True)
    if func is Tensor.to:
        return len(args) == 2 and not kwargs and (args[1] is x.dtype or (type(args[1]) is torch.device and args[1] == x.device))
    return func is Tensor.contiguous and len(args) == 1 and not kwargs


def look_at_results(model: nn.Module) -> None:
    """Let nothing unseen leave the models in this one: what they give has its numbers."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.register_forward_hook(_with_numbers)


def _with_numbers(_: nn.Module, __: Any, output: Any) -> Any:
    if not isinstance(output, dict):
        return plain(output)
    for key, value in output.items():
        if isinstance(value, Tensor | tuple | list):
            output[key] = plain(value)
    return output
