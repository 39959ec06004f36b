"""Assembling a connected model: skeleton, virtual layers, client part."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from symbiosis.errors import BadMessage, CannotSave, CannotSplit, DirectRefused
from symbiosis.gpu import driver
from symbiosis.models.client_part import build_skeleton, fill_skeleton, load_weights, resolve_class
from symbiosis.models.device_dtype import check_dtype
from symbiosis.models.loading import shared_copy
from symbiosis.models.patches.fused_ops import patch_fused_ops
from symbiosis.models.split import weights_identity
from symbiosis.planning.memory_check import check_fits
from symbiosis.split.client.blob_download import download
from symbiosis.split.client.call_grouping import CallGroups
from symbiosis.split.client.deferred.norm import enable_deferral
from symbiosis.split.client.direct_mode import MappedParameter, MappedWeights, open_mapping
from symbiosis.split.client.kv_cache import preallocate_caches
from symbiosis.split.client.long_context.generation import generate
from symbiosis.split.client.loss import use_fused_loss
from symbiosis.split.client.session import ClientSession
from symbiosis.split.client.virtual_block import make_block
from symbiosis.split.client.virtual_experts import make_experts
from symbiosis.split.client.virtual_layers import VirtualConv1D, VirtualEmbedding, VirtualLayer, VirtualLinear
from symbiosis.transport.base import Link
from symbiosis.transport.messages import Kind, Message
from symbiosis.types import LayerKind, LayerSpec, Limits, Manifest

_log = logging.getLogger("symbiosis")
MODES = ("auto", "direct", "executor")


def assemble(
    link: Link, welcome: dict[str, Any], device: torch.device, mode: str, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The connected model: a plain transformers model that holds no base weights. `dtype` is that of the client part."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    manifest, limits = _read_manifest(link, welcome)
    check_dtype(manifest.dtype, device)
    model_class = link.model_class() or resolve_class(manifest.model_class)
    is_converted = dtype is not None and dtype is not getattr(torch, manifest.dtype)
    if is_converted:
        if mode == "direct":
            raise DirectRefused(f"direct mode computes in the executor's dtype, {manifest.dtype}: leave dtype= out")
        mode = "executor"
    session = ClientSession(link, manifest, limits, model_class)
    mapped = _map(link, welcome, limits, device, mode)
    model = build_skeleton(manifest, model_class)
    groups = replace_hosted_layers(model, session)
    fill_skeleton(model, _client_part(link, manifest, mapped, device), manifest.ties)
    for module in model.modules():
        if isinstance(module, VirtualLinear | VirtualConv1D):
            module.remember_bias()
    model.eval()
    if any(tensor.device != device for tensor in [*model.parameters(), *model.buffers()]):
        model.to(device)
    if is_converted:
        model.to(dtype)
    if mode != "executor" and mapped.base:
        for module in list(model.modules()):
            if isinstance(module, VirtualLayer):
                module.map_weights({name: mapped.base[module.spec.handle, name] for name, _ in module.spec.weights})
    elif device.type == "cuda" and (executor_gpu := driver.find_gpu(welcome.get("gpu"))) is not None:
        link.use_gpu(device, executor_gpu)
    if device.type == "cuda":
        patch_fused_ops(model)
    if (not mapped.base or mode == "executor") and not is_converted:  # programs round sums in the executor's dtype
        enable_deferral(model, session)
        groups.train.find_starts()
    use_fused_loss(model)
    preallocate_caches(model)
    model.symbiosis = session
    model.generate = MethodType(generate, model)  # a copy of the model has its own: methods are copied with their object
    model.save_pretrained = _cannot_save
    return model


def attach(link: Link, welcome: dict[str, Any], model: PreTrainedModel, paths: Sequence[str]) -> PreTrainedModel:
    """A copy of a local model, which shares its tensors, whose modules at these paths call the executor's layers.

    Raises `CannotSplit` if the executor's layers there are not those of the model.
    """
    manifest, limits = _read_manifest(link, welcome)
    if model.dtype is not getattr(torch, manifest.dtype):
        raise CannotSplit(f"the executor computes in {manifest.dtype}, the local model in {model.dtype}: load it in that dtype")
    inside = tuple(f"{path}." for path in paths)
    layers = tuple(spec for spec in manifest.layers if any(f"{each}.".startswith(inside) for each in spec.paths))
    for path in paths:
        if not any(f"{each}.".startswith(f"{path}.") for spec in layers for each in spec.paths):
            raise CannotSplit(f"the executor of {manifest.name} hosts no layer of {path}: is it another model?")
    for spec in layers:
        if spec.kind in (LayerKind.LINEAR, LayerKind.CONV1D):
            weight = getattr(_submodule(model, spec.paths[0]), "weight", None)
            if weight is None or weights_identity(spec.kind.value, {"weight": weight.detach()}) != spec.identity:
                raise CannotSplit(f"{spec.paths[0]} of the executor is not that of the local model: expected equal weights")
    session = ClientSession(link, replace(manifest, layers=layers), limits, type(model))
    attached = shared_copy(model)
    replace_hosted_layers(attached, session)
    for module in attached.modules():
        if isinstance(module, VirtualLinear | VirtualConv1D):
            module.remember_bias()
    attached.eval()
    if model.device.type == "cpu":
        enable_deferral(attached, session)
    preallocate_caches(attached)
    attached.symbiosis = session
    return attached


def _read_manifest(link: Link, welcome: dict[str, Any]) -> tuple[Manifest, Limits]:
    try:
        return Manifest.from_json(link.request(Message(Kind.MANIFEST)).body), Limits.from_json(welcome["limits"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadMessage(f"the executor's description of its model is malformed: {error!r}") from error


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise CannotSplit(f"the executor hosts {path}, which this model does not have") from None


def _map(link: Link, welcome: dict[str, Any], limits: Limits, device: torch.device, mode: str) -> MappedWeights:
    """The executor's memory, as far as this tenant may use it in place and `mode` calls for it."""
    base = link.base_tensors()
    if base is not None:
        device_types = {weight.device.type for weight in base.values()}
        is_direct = mode == "direct" or (mode == "auto" and device_types == {device.type} == {"cuda"})
        return MappedWeights(base=base) if is_direct and limits.direct else _map_nothing(mode, limits)
    gpu = welcome.get("gpu")
    same_gpu = gpu is not None and device.type == "cuda" and driver.gpu_name(device) == gpu
    if not same_gpu or not limits.direct:
        return _map_nothing(mode, limits)
    try:
        return open_mapping(link.request(Message(Kind.MAP)).body, device)
    except (driver.DriverError, DirectRefused) as error:
        if mode == "direct":
            raise
        _log.warning("the executor's memory cannot be mapped (%s): its client part is copied, its layers are called", error)
        return MappedWeights()


def _map_nothing(mode: str, limits: Limits) -> MappedWeights:
    if mode != "direct":
        return MappedWeights()
    if not limits.direct:
        raise DirectRefused("the provider does not allow direct mode: use mode='executor'")
    raise DirectRefused("direct mode needs a tenant on the executor's GPU or in its process: pass device=, or mode='executor'")


def _client_part(link: Link, manifest: Manifest, mapped: MappedWeights, device: torch.device) -> dict[str, torch.Tensor]:
    if mapped.client:
        return {name: MappedParameter.over(t) if t.is_floating_point() else t for name, t in mapped.client.items()}
    tensors: dict[str, torch.Tensor] | None = link.client_tensors()
    if tensors is not None:
        return tensors
    if manifest.client_weights is None:
        raise BadMessage("the executor's manifest has no client part")
    parts, hint = {"client part": manifest.client_weights.size}, "free memory there, or pass another device="
    check_fits(f"the tenant's part of {manifest.name}", parts, device, hint)
    download(link, manifest.client_weights)
    return load_weights(manifest.client_weights)


def _cannot_save(*_: Any, **__: Any) -> NoReturn:
    raise CannotSave(
        "a connected model holds no base weights, so it cannot be saved whole: wrap it with PEFT "
        "(get_peft_model) and save the adapter, which `save_pretrained` of the PEFT model does"
    )


def replace_hosted_layers(model: nn.Module, session: ClientSession) -> CallGroups:
    """Put a virtual layer in the place of every hosted one. Raises `CannotSplit` if the model differs."""
    groups = CallGroups(session)
    hosted = [spec for spec in session.manifest.layers if spec.kind is not LayerKind.NORM]
    blocks_last = sorted(hosted, key=lambda spec: spec.kind is LayerKind.BLOCK)
    for spec in blocks_last:
        module = _submodule(model, spec.paths[0])
        if spec.kind is LayerKind.BLOCK:
            make_block(module, spec)
        elif spec.kind is LayerKind.EXPERTS:
            make_experts(module, spec, session)
        else:
            layer = _make_virtual(module, spec, groups)
            for path in spec.paths:
                parent, _, name = path.rpartition(".")
                model.get_submodule(parent)._modules[name] = layer
    return groups


def _make_virtual(module: nn.Module, spec: LayerSpec, groups: CallGroups) -> VirtualLayer:
    shape = tuple(getattr(module, "weight", torch.empty(0)).shape)
    if shape != dict(spec.weights).get("weight"):
        raise CannotSplit(f"the executor's {spec.paths[0]} is {dict(spec.weights)}, this model's is {shape}: versions differ")
    if spec.kind is LayerKind.EMBEDDING:
        return VirtualEmbedding(spec, groups.session, getattr(module, "padding_idx", None))
    kind = VirtualLinear if spec.kind is LayerKind.LINEAR else VirtualConv1D
    return kind(spec, groups, getattr(module, "bias", None))
