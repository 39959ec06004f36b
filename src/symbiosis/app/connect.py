"""The public `connect`: a transformers model whose base layers run in an executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from symbiosis.app.executor import Executor
from symbiosis.errors import BadAddress, SymbiosisError
from symbiosis.models.device_dtype import resolve_device, resolve_dtype
from symbiosis.split.client.assemble import MODES, assemble, attach
from symbiosis.transport.addresses import address_scheme, not_an_address
from symbiosis.transport.base import Link
from symbiosis.transport.shm import ShmLink
from symbiosis.transport.tcp import TcpLink
from symbiosis.transport.wire_format import WireFormat
from symbiosis.zoo.surrogates.block_modules import Piece, module_path

_LINKS: dict[str, type[TcpLink] | type[ShmLink]] = {"tcp": TcpLink, "shm": ShmLink}


def connect(
    address: str | Sequence[str] | Executor,
    *,
    token: str | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    privacy: str | None = None,
    mode: str = "auto",
    wire: str = "exact",
    name: str | None = None,
    grace_s: float = 60.0,
) -> PreTrainedModel:
    """A transformers model whose base layers run in the executor.

    `address` is what `Executor.listen` returned, or an `Executor` of this process. Several addresses (tcp://) are those of
    executors of the same model: when one is lost, in the middle of a step too, the next one goes on. `name` labels the
    session in statistics where no token names the tenant. Calls are retried for up to `grace_s` seconds while no executor
    replies.
    `device` and `dtype` are those of the tenant's part: adapters, attention, KV cache, embeddings, norms and head. By default
    it is on the CPU, in the executor's dtype. Rows of base layers are converted on their way.
    `mode` selects where base layers run: "executor" (batched with rows of other tenants), "direct" (in this process, on the
    executor's weights, which needs the same GPU or the same process) or "auto" (direct on the executor's GPU where the
    provider allows it, else executor).
    `wire` selects how rows travel over tcp://: "exact" (in their dtype) or "bf16" (rounded to bfloat16, half the bytes of
    float32; results differ by that rounding).
    """
    if privacy is not None:
        raise SymbiosisError(f"privacy={privacy!r}: this version has no privacy modes; activations are sent in plain form")
    if mode not in MODES:
        raise SymbiosisError(f"mode={mode!r}: expected one of {', '.join(MODES)}")
    wire_format, place, own_dtype = WireFormat.parse(wire), resolve_device(device or "cpu"), resolve_dtype(dtype)
    link, welcome = _link_to(address, wire_format, token=token, hello={"name": name or ""}, grace_s=grace_s)
    try:
        return assemble(link, welcome, place, mode, own_dtype)
    except BaseException:
        link.close()
        raise


def connect_blocks(
    model: PreTrainedModel,
    blocks: Sequence[str],
    address: str | Sequence[str] | Executor,
    *,
    token: str | None = None,
    wire: str = "exact",
    name: str | None = None,
    grace_s: float = 60.0,
) -> PreTrainedModel:
    """A copy of a local model of which some blocks run in an executor that serves the same model.

    `blocks` are names as those of a zoo: `ffn 12`, `attention 12` (its projections; the KV cache stays here) or `layer 12`.
    The copy shares all tensors with `model`, and has `symbiosis` as a connected model. The other options are those of
    `connect`. Raises `CannotSplit` if the executor serves other weights.
    """
    paths = [module_path(model, Piece.parse(block)) for block in blocks]
    wire_format = WireFormat.parse(wire)
    link, welcome = _link_to(address, wire_format, token=token, hello={"name": name or ""}, grace_s=grace_s)
    try:
        return attach(link, welcome, model, paths)
    except BaseException:
        link.close()
        raise


def _link_to(
    address: str | Sequence[str] | Executor, wire: WireFormat, *, hello: dict[str, Any], **options: Any
) -> tuple[Link, dict[str, Any]]:
    """A link, and what its executor says of itself."""
    if isinstance(address, Executor):
        _require_exact(wire, "an executor of this process")
        return address.link(hello), {"limits": address.limits.to_json()}
    link = _open_link(address, wire, hello=hello, **options)
    return link, link.welcome


def _require_exact(wire: WireFormat, place: str) -> None:
    if wire is not WireFormat.EXACT:
        raise SymbiosisError(
            f"wire={str(wire)!r} is for tcp:// addresses, got {place}: leave wire out, rows do not travel there"
        )


def _open_link(address: str | Sequence[str], wire: WireFormat, **options: Any) -> TcpLink | ShmLink:
    if not isinstance(address, str):
        schemes = [address_scheme(each) for each in address]
        if not schemes or set(schemes) != {"tcp"}:
            raise BadAddress(f"{list(address)!r}: expected one or more addresses tcp://HOST:PORT, of executors of one model")
        return TcpLink(address, wire=wire, **options)
    kind = _LINKS.get(address_scheme(address))
    if kind is None:
        raise not_an_address(address)
    if kind is TcpLink:
        return TcpLink(address, wire=wire, **options)
    _require_exact(wire, address)
    return kind(address, **options)
