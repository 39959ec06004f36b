"""The weight of a virtual layer: a tensor that knows its shape, dtype and device, but holds no numbers.

What is asked of it decides what happens, cheapest first:
- its shape, dtype, device: answered here;
- a product with it (`F.linear`, `@`): a layer call;
- the norm of its rows, also plus a low-rank change (DoRA): row norms from the
  executor and one small layer call;
- anything else: the numbers are fetched, where the provider allows it, and
  kept while they are in use. Writing to them makes the layer the tenant's own:
  the shared weight never changes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from symbiosis.errors import BadCall, CannotMerge
from symbiosis.split.client.tensor_version import version_of
from symbiosis.types import LayerKind

if TYPE_CHECKING:
    from symbiosis.split.client.virtual_layers import VirtualLayer

_T: Any = torch.Tensor
_METADATA = {
    getattr(_T, name).__get__
    for name in (
        "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "is_cuda",
        "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mps", "is_xpu", "itemsize", "nbytes",
    )
} | {
    _T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.element_size, _T.is_floating_point, _T.is_complex,
    _T.stride, _T.is_contiguous, _T.storage_offset, _T.get_device, _T.is_inference, _T.__len__, _T.is_signed,
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor,
}  # fmt: skip
_STATE = {
    getattr(_T, name).__get__ for name in ("requires_grad", "is_leaf", "grad", "grad_fn", "retains_grad")
} | {_T.grad.__set__, _T.data.__set__, _T.requires_grad.__set__, _T.requires_grad_}  # fmt: skip
_ESCAPES = {_T.numpy, _T.__array__, _T.__dlpack__}  # whoever has the memory can write to it unseen
_IN_PLACE = {
    getattr(_T, name) for name in ("__iadd__", "__isub__", "__imul__", "__itruediv__", "add_", "sub_", "mul_", "div_", "copy_")
}
_SAME = {_T.detach, _T.contiguous, _T.data.__get__, _T.requires_grad_, _T.clone, torch.clone, torch.detach}
_CASTS = {_T.float: torch.float32, _T.double: torch.float64, _T.half: torch.float16, _T.bfloat16: torch.bfloat16}
_TRANSPOSE = {_T.T.__get__, _T.mT.__get__, _T.t, torch.t}
_SWAP = {_T.transpose, torch.transpose, _T.swapaxes, torch.swapaxes}
_ADD = {_T.add, _T.__add__, _T.__radd__, torch.add}
_PRODUCT = {_T.matmul, _T.__matmul__, torch.matmul, _T.mm, torch.mm}
_NORM = {torch.linalg.norm, torch.norm, _T.norm, torch.linalg.vector_norm}
_MERGES = {"merge", "merge_and_unload", "merge_adapter", "_unload_and_optionally_merge", "_merge_and_unload"}


class VirtualWeight(torch.Tensor):
    """A view of a hosted weight: perhaps transposed, cast, or with a change added that is not applied yet."""

    _is_param = True  # isinstance(…, nn.Parameter) holds, as it does for a real layer's weight
    layer: VirtualLayer
    parameter: str
    turned: bool
    plus: Tensor | None
    alias: bool
    """Not the layer's own: whoever gives this one other numbers changes no layer."""
    is_copy: bool
    """Cast, or with a change added, and"""
    own: Tensor | None
    """its numbers, once somebody has asked for them."""
    _plus_version: int | None
    _graded: bool

    @staticmethod
    def __new__(
        cls: Any,
        layer: VirtualLayer,
        name: str,
        *,
        turned: bool = False,
        dtype: torch.dtype | None = None,
        plus: Tensor | None = None,
        alias: bool = True,
    ) -> VirtualWeight:
        shape = dict(layer.spec.weights)[name]
        self: VirtualWeight = torch.Tensor._make_wrapper_subclass(
            cls, tuple(reversed(shape)) if turned else shape, dtype=dtype or layer.dtype, device=layer.device
        )
        self.layer, self.parameter, self.turned, self.plus = layer, name, turned, plus
        self.alias, self.own = alias, None
        self.is_copy = plus is not None or self.dtype is not layer.dtype
        self._plus_version, self._graded = None if plus is None else version_of(plus), torch.is_grad_enabled()
        if self.is_copy:
            layer._copies = [*(copy for copy in layer._copies if copy() is not None), weakref.ref(self)]
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"VirtualWeight({self.layer.spec.paths[0]}.{self.parameter}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.numbers().clone()

    def numbers(self) -> Tensor:
        """The weight itself, fetched. Raises `WeightsWithheld`, or `CannotMerge` when asked in order to merge."""
        refuse_to_merge(self.layer)
        if self.own is not None:
            return self.own
        weight = self.made
        weight = self.layer.fetched(self.parameter) if weight is None else weight
        if self.turned:
            weight = weight.transpose(0, 1)
        if not self.is_copy:
            return weight
        if not self.is_whole():
            raise BadCall(f"{self!r} plus a change: the change was written to before the sum was used. Clone it before you do")
        with torch.set_grad_enabled(self._graded):  # when it was made
            weight = weight.to(self.dtype)
            self.own = weight if self.plus is None else weight + self.plus
        return self.own

    def is_whole(self) -> bool:
        """Whether what it was made of is still what it was."""
        return self.plus is None or version_of(self.plus) == self._plus_version

    @property
    def made(self) -> Tensor | None:
        """The tenant's own parameter, if the layer has one by now."""
        return self.layer._parameters.get(self.parameter)

    @property
    def by_outputs(self) -> bool | None:
        """True if this is [outputs, inputs] of a matrix, False if [inputs, outputs], None if no plain matrix."""
        kind = self.layer.spec.kind
        if kind not in (LayerKind.LINEAR, LayerKind.CONV1D) or self.plus is not None or self.own is not None:
            return None
        if self.layer.is_local:
            return None
        return (kind is LayerKind.LINEAR) != self.turned

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = _cheap_answer(func, args, kwargs)
        if answer is not NotImplemented:
            return answer
        holders = list(_holders((args, kwargs)))
        for copy in [copy() for weight in holders for copy in weight.layer._copies]:
            if copy is not None and copy.is_whole():
                copy.numbers()  # before anybody writes to what it is a copy of
        versions = {(id(w.layer), w.parameter): (w, w.numbers_version()) for w in holders if w.own is None and w.made is None}
        numbers = _plain(args)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*numbers, **_plain(kwargs))
        for weight, before in versions.values():
            weight.layer.keep_if_changed(weight.parameter, before, always=func in _ESCAPES)
        written = func in _IN_PLACE and isinstance(args[0], VirtualWeight) and result is numbers[0]
        return args[0] if written else result

    def numbers_version(self) -> int | None:
        refuse_to_merge(self.layer)
        return version_of(self.layer.fetched(self.parameter))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_plain(args), **_plain(kwargs or {}))


def _holders(value: Any) -> Iterator[VirtualWeight]:
    if isinstance(value, VirtualWeight):
        yield value
    elif isinstance(value, dict):
        yield from _holders(list(value.values()))
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        for item in value:
            yield from _holders(item)


def _plain(value: Any) -> Any:
    if isinstance(value, VirtualWeight):
        return value.numbers()
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        made = [_plain(item) for item in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _cheap_answer(func: Any, args: Any, kwargs: Any) -> Any:
    """The answer where the numbers are not needed, else NotImplemented."""
    if func in _STATE and isinstance(args[0], VirtualWeight) and not args[0].alias and args[0].made is not None:
        return func(args[0].made, *args[1:], **kwargs)  # whoever held it when it became a parameter trains that
    if func in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func is F.linear:
        return _linear(*args, **kwargs)
    if func in _PRODUCT:
        return NotImplemented if kwargs or len(args) != 2 else _product(*args)
    weight = args[0] if args else None
    if func in _ADD and not kwargs and len(args) == 2:
        return _sum(args[0], args[1])
    if not isinstance(weight, VirtualWeight):
        return NotImplemented
    if func == _T.data.__set__:
        refuse_to_merge(weight.layer)
        if weight.alias:
            weight.own = _plain(args[1]).detach()
        else:
            weight.layer.change(weight.parameter, _plain(args[1]).detach())
        return None
    if func == _T.requires_grad.__set__ or func is _T.requires_grad_:
        return _asked_to_train(weight, *args[1:], **kwargs)
    if func in _NORM and weight.own is None:
        return _norm(weight, *args[1:], **kwargs)
    return _view(func, weight, args, kwargs)


def _asked_to_train(weight: VirtualWeight, requires_grad: bool = True) -> Any:
    """The layer's own weight becomes a parameter; an alias a tensor that shares its memory, as with a plain layer."""
    if not requires_grad or _is_asked_by("transpose"):  # PEFT's makes a parameter of what it only reads
        return weight
    if weight.is_copy or weight.turned or not weight.alias:
        if weight.alias:
            return weight.numbers().detach().requires_grad_()
        if weight.made is None:
            weight.layer.make_parameters(trainable=True)
        return weight.layer._parameters[weight.parameter].requires_grad_()  # type: ignore[union-attr]
    numbers = weight.numbers()
    if weight.made is None:
        weight.layer.change(weight.parameter, numbers)
    return numbers.detach().requires_grad_()


def _view(func: Any, weight: VirtualWeight, args: Any, kwargs: Any) -> Any:
    """Casts, transposes and aliases stay virtual."""
    if weight.own is not None:
        return NotImplemented

    def again(*, turned: bool = weight.turned, dtype: torch.dtype = weight.dtype) -> VirtualWeight:
        return VirtualWeight(weight.layer, weight.parameter, turned=turned, dtype=dtype, plus=weight.plus)

    if func in _SAME and func not in (_T.clone, torch.clone):
        return weight if func == _T.data.__get__ else again()
    if func in _CASTS:
        return again(dtype=_CASTS[func])
    if func is _T.to and not kwargs.get("copy"):
        try:
            device, dtype, _, _ = torch._C._nn._parse_to(*args[1:], **{k: v for k, v in kwargs.items() if k != "copy"})
        except (RuntimeError, TypeError):
            return NotImplemented
        if device is None or device == weight.device or (device.type == weight.device.type and device.index is None):
            return again(dtype=dtype or weight.dtype)
        return NotImplemented
    if weight.plus is None and weight.ndim == 2:
        if func in _TRANSPOSE:
            return again(turned=not weight.turned)
        if func in _SWAP and len(args) == 3 and {args[1] % 2, args[2] % 2} == {0, 1}:
            return again(turned=not weight.turned)
    return NotImplemented


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, VirtualWeight) or isinstance(input, VirtualWeight) or weight.by_outputs is None:
        return NotImplemented
    layer = weight.layer
    result = layer.product(input) if weight.by_outputs else layer.transposed_product(input)
    return result if bias is None else result + _plain(bias)


def _product(left: Any, right: Any) -> Any:
    """`x @ W` and `W @ x` as layer calls."""
    if isinstance(right, VirtualWeight) and not isinstance(left, VirtualWeight) and right.by_outputs is not None:
        return _linear(left, right.T)
    if (
        isinstance(left, VirtualWeight)
        and not isinstance(right, VirtualWeight)
        and left.by_outputs is not None
        and right.ndim == 2
    ):
        return _linear(right.T, left).T
    return NotImplemented


def _sum(left: Any, right: Any) -> Any:
    weight, other = (left, right) if isinstance(left, VirtualWeight) else (right, left)
    if isinstance(other, VirtualWeight) or not isinstance(other, Tensor) or other.shape != weight.shape:
        return NotImplemented
    if weight.by_outputs is None or weight.layer.has_fetched(weight.parameter):
        return NotImplemented
    return VirtualWeight(weight.layer, weight.parameter, turned=weight.turned, dtype=weight.dtype, plus=other)


def _norm(weight: VirtualWeight, *args: Any, **kwargs: Any) -> Any:
    """Row norms of W, or of W plus a change, as `torch.linalg.norm(…, dim=1)`."""
    if args or set(kwargs) - {"dim", "p", "ord", "keepdim"} or kwargs.get("dim") not in (1, -1):
        return NotImplemented
    if kwargs.get("p", 2) not in (2, "fro") or kwargs.get("ord") not in (None, 2) or kwargs.get("keepdim"):
        return NotImplemented
    layer, change = weight.layer, weight.plus
    whole = VirtualWeight(layer, weight.parameter, turned=weight.turned, dtype=weight.dtype)
    if whole.by_outputs is not True or layer.has_fetched(weight.parameter):
        return NotImplemented
    if change is None:
        return layer.session.row_squares(layer.spec).sqrt().to(weight.device, weight.dtype)
    factors = _low_rank(change.detach().float())
    if factors is None:
        return NotImplemented
    return _ChangedRowNorms.apply(change, whole, *factors)  # type: ignore[no-untyped-call]


class _ChangedRowNorms(torch.autograd.Function):
    """Row norms of W + left @ right without W: |w|² + 2 w·d + |d|² for each row. Only a gradient needs W itself."""

    @staticmethod
    def forward(ctx: Any, change: Tensor, whole: VirtualWeight, left: Tensor, right: Tensor) -> Tensor:
        layer = whole.layer
        squares = layer.session.row_squares(layer.spec).to(change.device)
        products = layer.product(right.to(layer.dtype))
        squares = squares + 2 * (left.double() * products.T.double()).sum(dim=1) + change.double().square().sum(dim=1)
        norms: Tensor = squares.clamp(min=0).sqrt().to(whole.dtype)
        ctx.whole = whole
        ctx.save_for_backward(change, norms)
        return norms

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        change, norms = ctx.saved_tensors
        return (ctx.whole.numbers() + change) * (grad / norms)[:, None], None, None, None


@torch.no_grad()
def _low_rank(change: Tensor) -> tuple[Tensor, Tensor] | None:
    """change = left @ right with few columns, or None if its rank is not low."""
    scale = float(torch.linalg.norm(change))
    generator = torch.Generator().manual_seed(0)
    rank = 16
    while rank <= min(change.shape) // 2 or rank == 16:
        rank = min(rank, *change.shape)
        probe = torch.randn(change.shape[1], rank, generator=generator).to(change)
        left, _ = torch.linalg.qr(change @ probe)
        right = left.T @ change
        if float(torch.linalg.norm(change - left @ right)) <= 1e-6 * scale:
            return left, right
        rank *= 4
    return None


def refuse_to_merge(layer: VirtualLayer) -> None:
    """Raise `CannotMerge` if PEFT is merging an adapter right now: that would pull the base model into the tenant."""
    if _is_asked_by(*_MERGES):
        raise CannotMerge(
            f"{layer.spec.paths[0]} lives in the executor, so an adapter cannot be merged into it. Save the adapter "
            "(save_pretrained) and merge it into a full copy of the model with plain PEFT, or serve it unmerged"
        )


def _is_asked_by(*names: str) -> bool:
    """Whether one of these functions of PEFT is running right now."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(40):
        if frame is None:
            return False
        if frame.f_code.co_name in names and "peft" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
