"""The weight of a virtual layer: a tensor with shape, dtype and device, but without values.

The use decides what happens, cheapest first:
- shape, dtype, device: known here;
- a product with it (`F.linear`, `@`): a layer call;
- the norm of its rows, also plus a low-rank delta (DoRA): row norms from the
  executor and one small layer call;
- anything else: the values are fetched, where the provider allows it, and stored
  while they are in use. Writing to them makes the layer the tenant's own: the
  shared weight never changes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from symbiosis.errors import BadCall, CannotMerge
from symbiosis.split.client.hosted_layer import HostedLayer
from symbiosis.split.client.shared_params import version_of
from symbiosis.types import LayerKind

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
_EXPORTS = {_T.numpy, _T.__array__, _T.__dlpack__}  # the receiver can write to the memory without a version count
_IN_PLACE = {
    getattr(_T, name) for name in ("__iadd__", "__isub__", "__imul__", "__itruediv__", "add_", "sub_", "mul_", "div_", "copy_")
}
_ALIASES = {_T.detach, _T.contiguous, torch.detach}
_CASTS = {_T.float: torch.float32, _T.double: torch.float64, _T.half: torch.float16, _T.bfloat16: torch.bfloat16}
_TRANSPOSE = {_T.T.__get__, _T.mT.__get__, _T.t, torch.t}
_SWAP = {_T.transpose, torch.transpose, _T.swapaxes, torch.swapaxes}
_ADD = {_T.add, _T.__add__, _T.__radd__, torch.add}
_PRODUCT = {_T.matmul, _T.__matmul__, torch.matmul, _T.mm, torch.mm}
_NORM = {torch.linalg.norm, torch.norm, _T.norm, torch.linalg.vector_norm}
_MERGES = {"merge", "merge_and_unload", "merge_adapter", "_unload_and_optionally_merge", "_merge_and_unload"}


class VirtualWeight(torch.Tensor):
    """A view of a hosted weight: perhaps transposed, cast, or with a delta that is not applied yet."""

    _is_param = True  # isinstance(…, nn.Parameter) holds, as for a real layer's weight
    layer: HostedLayer
    name_in_layer: str
    is_transposed: bool
    delta: Tensor | None
    is_alias: bool
    """Not the layer's own: assigning other values to this one changes no layer."""
    is_copy: bool
    """Cast, or with a delta."""
    own: Tensor | None
    """The values of a copy, once they were read."""
    _delta_version: int | None
    _grad_enabled: bool

    @staticmethod
    def __new__(
        cls: Any,
        layer: HostedLayer,
        name: str,
        *,
        transposed: bool = False,
        dtype: torch.dtype | None = None,
        delta: Tensor | None = None,
        alias: bool = True,
    ) -> VirtualWeight:
        shape = dict(layer.spec.weights)[name]
        self: VirtualWeight = torch.Tensor._make_wrapper_subclass(
            cls, tuple(reversed(shape)) if transposed else shape, dtype=dtype or layer.dtype, device=layer.device
        )
        self.layer, self.name_in_layer, self.is_transposed, self.delta = layer, name, transposed, delta
        self.is_alias, self.own = alias, None
        self.is_copy = delta is not None or self.dtype is not layer.dtype
        self._delta_version, self._grad_enabled = None if delta is None else version_of(delta), torch.is_grad_enabled()
        if self.is_copy:
            layer._copies = [*(copy for copy in layer._copies if copy() is not None), weakref.ref(self)]
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"VirtualWeight({self.layer.spec.paths[0]}.{self.name_in_layer}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.fetch().clone()

    def fetch(self) -> Tensor:
        """The values. Raises `WeightsWithheld`, or `CannotMerge` when called by a merge."""
        check_not_merging(self.layer)
        if self.own is not None:
            return self.own
        weight = self.layer.get_weight(self.name_in_layer)
        if self.is_transposed:
            weight = weight.transpose(0, 1)
        if not self.is_copy:
            return weight
        if not self.is_intact():
            raise BadCall(f"{self!r} plus a delta: the delta was written to before the sum was used. Clone it before you do")
        with torch.set_grad_enabled(self._grad_enabled):  # as when it was made
            weight = weight.to(self.dtype)
            self.own = weight if self.delta is None else weight + self.delta
        return self.own

    def is_intact(self) -> bool:
        """Whether its delta is unchanged."""
        return self.delta is None or version_of(self.delta) == self._delta_version

    @property
    def parameter(self) -> Tensor | None:
        """The tenant's own parameter, if the layer has one by now."""
        return self.layer._parameters.get(self.name_in_layer)

    @property
    def outputs_first(self) -> bool | None:
        """True for [outputs, inputs] of a hosted matrix, False for [inputs, outputs], None for anything else."""
        kind = self.layer.spec.kind
        if kind not in (LayerKind.LINEAR, LayerKind.CONV1D) or self.delta is not None or self.own is not None:
            return None
        if self.layer.is_local:
            return None
        return (kind is LayerKind.LINEAR) != self.is_transposed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _try_without_values(func, args, kwargs)
        if result is not NotImplemented:
            return result
        weights = list(_find_weights((args, kwargs)))
        for copy in [copy() for weight in weights for copy in weight.layer._copies]:
            if copy is not None and copy.is_intact():
                copy.fetch()  # before a write to what it is a copy of
        values = _plain(args)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*values, **_plain(kwargs))
        for weight in weights:
            weight.layer.adopt_written(weight.name_in_layer if func in _EXPORTS and weight.own is None else None)
        written = func in _IN_PLACE and isinstance(args[0], VirtualWeight) and result is values[0]
        return args[0] if written else result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_plain(args), **_plain(kwargs or {}))


def _find_weights(value: Any) -> Iterator[VirtualWeight]:
    if isinstance(value, VirtualWeight):
        yield value
    elif isinstance(value, dict):
        yield from _find_weights(list(value.values()))
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        for item in value:
            yield from _find_weights(item)


def _plain(value: Any) -> Any:
    """`value` with every virtual weight, nested ones included, replaced by its fetched values."""
    if isinstance(value, VirtualWeight):
        return value.fetch()
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        made = [_plain(item) for item in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _try_without_values(func: Any, args: Any, kwargs: Any) -> Any:
    """The result where no values are needed, else NotImplemented."""
    weight = args[0] if args else None
    if func in _STATE and isinstance(weight, VirtualWeight) and not weight.is_alias and weight.parameter is not None:
        return func(weight.parameter, *args[1:], **kwargs)  # a reference from before it became a parameter
    if func in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func is F.linear:
        return _linear(*args, **kwargs)
    if func in _PRODUCT:
        return NotImplemented if kwargs or len(args) != 2 else _product(*args)
    if func in _ADD and not kwargs and len(args) == 2:
        return _sum(*args)
    if not isinstance(weight, VirtualWeight):
        return NotImplemented
    if func == _T.data.__set__:
        check_not_merging(weight.layer)
        if weight.is_alias:
            weight.own = _plain(args[1]).detach()
        else:
            weight.layer.set_weight(weight.name_in_layer, _plain(args[1]).detach())
        return None
    if func == _T.requires_grad.__set__ or func is _T.requires_grad_:
        return _set_requires_grad(weight, *args[1:], **kwargs)
    if func in _NORM and weight.own is None:
        return _norm(weight, *args[1:], **kwargs)
    return _view(func, weight, args, kwargs)


def _set_requires_grad(weight: VirtualWeight, requires_grad: bool = True) -> Any:
    """The layer's own weight becomes a parameter; an alias a tensor that shares its memory, as with a plain layer."""
    if not requires_grad or _is_called_by("transpose"):  # PEFT's `transpose` makes a parameter of what it only reads
        return weight
    if not weight.is_alias:
        if weight.parameter is None:
            weight.layer.make_parameters(trainable=True)
        return weight.parameter.requires_grad_()  # type: ignore[union-attr]
    values = weight.fetch()
    if not (weight.is_copy or weight.is_transposed) and weight.parameter is None:
        weight.layer.set_weight(weight.name_in_layer, values)
    return values.detach().requires_grad_()


def _view(func: Any, weight: VirtualWeight, args: Any, kwargs: Any) -> Any:
    """Casts, transposes and aliases stay virtual."""
    if weight.own is not None:
        return NotImplemented

    def view(*, transposed: bool = weight.is_transposed, dtype: torch.dtype = weight.dtype) -> VirtualWeight:
        return VirtualWeight(weight.layer, weight.name_in_layer, transposed=transposed, dtype=dtype, delta=weight.delta)

    if func == _T.data.__get__:
        return weight
    if func in _ALIASES:
        return view()
    if func in _CASTS:
        return view(dtype=_CASTS[func])
    if func is _T.to and not kwargs.get("copy"):
        try:
            device, dtype, _, _ = torch._C._nn._parse_to(*args[1:], **{k: v for k, v in kwargs.items() if k != "copy"})
        except (RuntimeError, TypeError):
            return NotImplemented
        if device is None or device == weight.device or (device.type == weight.device.type and device.index is None):
            return view(dtype=dtype or weight.dtype)
        return NotImplemented
    if weight.delta is None and weight.ndim == 2:
        is_swap = func in _SWAP and len(args) == 3 and {args[1] % 2, args[2] % 2} == {0, 1}
        if func in _TRANSPOSE or is_swap:
            return view(transposed=not weight.is_transposed)
    return NotImplemented


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, VirtualWeight) or isinstance(input, VirtualWeight) or weight.outputs_first is None:
        return NotImplemented
    layer = weight.layer
    result = layer.multiply(input) if weight.outputs_first else layer.multiply_transposed(input)
    return result if bias is None else result + _plain(bias)


def _product(left: Any, right: Any) -> Any:
    """`x @ W` and `W @ x` as layer calls."""
    if isinstance(left, VirtualWeight) and isinstance(right, VirtualWeight):
        return NotImplemented
    if isinstance(right, VirtualWeight):
        return NotImplemented if right.outputs_first is None else _linear(left, right.T)
    return NotImplemented if left.outputs_first is None or right.ndim != 2 else _linear(right.T, left).T


def _sum(left: Any, right: Any) -> Any:
    weight, other = (left, right) if isinstance(left, VirtualWeight) else (right, left)
    if isinstance(other, VirtualWeight) or not isinstance(other, Tensor) or other.shape != weight.shape:
        return NotImplemented
    if weight.outputs_first is None or weight.layer.has_fetched(weight.name_in_layer):
        return NotImplemented
    return VirtualWeight(weight.layer, weight.name_in_layer, transposed=weight.is_transposed, dtype=weight.dtype, delta=other)


def _norm(weight: VirtualWeight, *args: Any, **kwargs: Any) -> Any:
    """Row norms of W, or of W plus a delta, as `torch.linalg.norm(…, dim=1)`."""
    if args or set(kwargs) - {"dim", "p", "ord", "keepdim"} or kwargs.get("dim") not in (1, -1):
        return NotImplemented
    if kwargs.get("p", 2) not in (2, "fro") or kwargs.get("ord") not in (None, 2) or kwargs.get("keepdim"):
        return NotImplemented
    layer, delta = weight.layer, weight.delta
    base = VirtualWeight(layer, weight.name_in_layer, transposed=weight.is_transposed, dtype=weight.dtype)
    if base.outputs_first is not True or layer.has_fetched(weight.name_in_layer):
        return NotImplemented
    if delta is None:
        return layer.session.fetch_row_squares(layer.spec).sqrt().to(weight.device, weight.dtype)
    factors = _factorize(delta.detach().float())
    if factors is None:
        return NotImplemented
    return _DeltaRowNorms.apply(delta, base, *factors)  # type: ignore[no-untyped-call]


class _DeltaRowNorms(torch.autograd.Function):
    """Row norms of W + left @ right without W: |w|² + 2 w·d + |d|² for each row. Only a gradient needs W itself."""

    @staticmethod
    def forward(ctx: Any, delta: Tensor, base: VirtualWeight, left: Tensor, right: Tensor) -> Tensor:
        layer = base.layer
        squares = layer.session.fetch_row_squares(layer.spec).to(delta.device)
        products = layer.multiply(right.to(layer.dtype))
        squares = squares + 2 * (left.double() * products.T.double()).sum(dim=1) + delta.double().square().sum(dim=1)
        norms: Tensor = squares.clamp(min=0).sqrt().to(base.dtype)
        ctx.base = base
        ctx.save_for_backward(delta, norms)
        return norms

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        delta, norms = ctx.saved_tensors
        return (ctx.base.fetch() + delta) * (grad / norms)[:, None], None, None, None


@torch.no_grad()
def _factorize(delta: Tensor) -> tuple[Tensor, Tensor] | None:
    """delta = left @ right with few columns, or None if its rank is not low."""
    scale = float(torch.linalg.norm(delta))
    generator = torch.Generator().manual_seed(0)
    rank = 16
    while rank <= min(delta.shape) // 2 or rank == 16:
        rank = min(rank, *delta.shape)
        probe = torch.randn(delta.shape[1], rank, generator=generator).to(delta)
        left, _ = torch.linalg.qr(delta @ probe)
        right = left.T @ delta
        if float(torch.linalg.norm(delta - left @ right)) <= 1e-6 * scale:
            return left, right
        rank *= 4
    return None


def check_not_merging(layer: HostedLayer) -> None:
    """Raise `CannotMerge` if PEFT is merging an adapter: that would copy the base model to the tenant."""
    if _is_called_by(*_MERGES):
        raise CannotMerge(
            f"{layer.spec.paths[0]} is in the executor, so an adapter cannot be merged into it. Save the adapter "
            "(save_pretrained) and merge it into a full copy of the model with plain PEFT, or serve it unmerged"
        )


def _is_called_by(*names: str) -> bool:
    """Whether one of these functions of PEFT is running."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(40):
        if frame is None:
            return False
        if frame.f_code.co_name in names and "peft" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
