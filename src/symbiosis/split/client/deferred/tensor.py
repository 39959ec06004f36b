"""Deferred tensors: results of layers that are computed when their values are read.

`graph` holds the nodes behind them, `decode` and `train` decide where deferral applies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from transformers import PreTrainedModel

from symbiosis.types import ProgramOp

_HALF_DTYPES = torch.bfloat16, torch.float16
_SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta")
METADATA = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex, Tensor.is_contiguous),
}
"""Functions that need no values."""
_AUTOGRAD_METADATA = {*(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn")), Tensor.is_inference}
_LEAF_TYPES = {Tensor, nn.Parameter, torch.dtype, torch.device, torch.Size, int, float, bool, str, type(None)}


class DeferredTensor(Tensor):
    """A tensor that is computed when its values are read. Sums with it and norms of it are deferred as well.

    `node` is its `graph.Node`. This class has no autograd history; `train.DeferredGradTensor` has one.
    """

    node: Any
    known: ClassVar[set[Any]] = METADATA | _AUTOGRAD_METADATA
    """Functions that are answered before the values exist."""

    # Properties are cheaper than a dispatch through torch.
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

    def __add__(self, other: Any) -> Any:
        return self._dispatch(Tensor.__add__, self, other)

    def __radd__(self, other: Any) -> Any:
        return self._dispatch(Tensor.__radd__, self, other)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self._dispatch(Tensor.to, self, *args, **kwargs)

    @staticmethod
    def __new__(cls: Any, node: Any, *, requires_grad: bool = False) -> DeferredTensor:
        made: DeferredTensor = Tensor._make_wrapper_subclass(
            cls, node.shape, dtype=node.dtype, device=node.device, requires_grad=requires_grad
        )
        made.node = node
        torch._C._set_throw_on_mutable_data_ptr(made)  # code that bypasses dispatch fails instead of reading no memory
        return made

    @classmethod
    def _dispatch(cls, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `__torch_function__` directly, unless a mode intercepts functions or overrides are disabled."""
        if torch._C._len_torch_function_stack() > 0 or not torch._C._is_torch_function_enabled():
            return func(*args, **kwargs)
        return cls.__torch_function__(func, (), args, kwargs)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SUMS and len(args) == 2 and not kwargs:
            total = _defer_sum(*args)
            if total is not None:
                return total
        x = args[0] if args else None
        if isinstance(x, DeferredTensor) and x.node.exposed is None:
            if func in cls.known:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if _is_no_op(func, x, args, kwargs):
                return x
            if func is Tensor.to and x.node.is_wide and len(args) == 2 and not kwargs:
                deferral = x.node.deferral
                if args[1] is deferral.dtype and deferral.is_active():
                    return type(x)(x.node.rounded())
        return func(*plain(args), **plain(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*plain(args), **plain(kwargs or {}))


def is_pending(x: Any) -> TypeGuard[DeferredTensor]:
    """Whether `x` is a deferred tensor without values, in the executor's dtype: further steps can start from it."""
    return isinstance(x, DeferredTensor) and x.node.value is None and not x.node.is_wide


def _defer_sum(one: Any, other: Any) -> Tensor | None:
    """The sum as a deferred tensor, or None if it must be computed now. Of two pending tensors one must lead to the other."""
    if not is_pending(one) or (is_pending(other) and one.node.leads_to(other.node)):
        one, other = other, one
    if not is_pending(one):
        return None
    kind, node = type(one), one.node
    deferral = node.deferral
    if type(other) is not Tensor:
        if type(other) is not kind:
            return None
        if deferral.has_history:
            return deferral.end(node, other.node)  # type: ignore[no-any-return]
        if other.node.value is None and not (deferral.owns(other) and other.node.leads_to(node)):
            other = plain(other)
    if node.value is not None or not deferral.can_defer(one) or not node.fits(2):
        return None
    if node.shape != other.shape or node.device != other.device:
        return None
    if type(other) is Tensor and other.layout is not torch.strided:
        return None
    if other.dtype is not node.dtype:  # an adapter in float32 on a model in half precision
        if other.dtype is not torch.float32 or node.dtype not in _HALF_DTYPES or type(other) is kind or other.is_inference():
            return None
        return kind(type(node)(deferral, ProgramOp.ADD_FLOAT, node, node.shape[-1], other.clone()))
    if not (deferral.has_history or is_pending(other) or deferral.can_defer(other)):
        return None
    addend = other.clone() if type(other) is Tensor else other.node.as_addend()
    return kind(type(node)(deferral, ProgramOp.ADD, node, node.shape[-1], addend))


def _is_no_op(func: Callable[..., Any], x: DeferredTensor, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this call returns `x` itself."""
    if func is F.dropout:
        return not kwargs.get("training", args[2] if len(args) > 2 else True)
    if func is Tensor.to:
        return len(args) == 2 and not kwargs and (args[1] is x.dtype or (type(args[1]) is torch.device and args[1] == x.device))
    return func is Tensor.contiguous and len(args) == 1 and not kwargs


def is_ordinary() -> bool:
    """Whether tensors compute as they are here: no autocast, no transform, not inside an autograd function."""
    if torch._C._is_any_autocast_enabled() or not torch._C._is_fwd_grad_enabled():
        return False
    return forward_ad._current_level < 0 and torch._C._functorch.maybe_current_level() is None


def ordinary() -> AbstractContextManager[Any]:
    """Tensors created inside are no inference tensors, in inference mode too: later code may write to them."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def plain(value: Any) -> Any:
    """`value` with every deferred tensor, nested ones included, replaced by its computed tensor."""
    if isinstance(value, DeferredTensor):
        return value.node.expose()
    if type(value) in _LEAF_TYPES:
        return value
    if isinstance(value, list | tuple):
        made = [plain(each) for each in value]
        if type(value) in (list, tuple):
            return type(value)(made)
        return type(value)(*made) if hasattr(value, "_fields") else made if isinstance(value, list) else tuple(made)
    return {key: plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def compute_outputs(model: nn.Module) -> None:
    """Make every transformers model inside `model` return computed tensors only."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.register_forward_hook(_compute_output)


def _compute_output(_: nn.Module, __: Any, output: Any) -> Any:
    if not isinstance(output, dict):
        return plain(output)
    for key, value in output.items():
        if isinstance(value, Tensor | tuple | list):
            output[key] = plain(value)
    return output
