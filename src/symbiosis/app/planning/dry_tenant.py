"""A split tenant's process as a dry run: the tenant's own code, over a link that replies without values."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from symbiosis.errors import SymbiosisError
from symbiosis.models.client_part import describe_model
from symbiosis.planning.adapter_config import build_adapter_config
from symbiosis.planning.gpu_kernels import use_gpu_kernels
from symbiosis.planning.live_memory import LiveMemory, dry_run
from symbiosis.planning.model_size import ModelSize
from symbiosis.planning.tenants import OPTIMIZERS, TenantLoad, Workload
from symbiosis.split.client.assemble import assemble
from symbiosis.transport.base import Link
from symbiosis.transport.messages import Kind, Message
from symbiosis.types import LayerKind, Limits, Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantMemory:
    """Bytes of a tenant's process on the device of its part, and its traffic."""

    client_part: int
    adapter: int
    gradients: int
    optimizer: int
    kv_cache: int
    activations: int
    """Of a training step beyond its gradients, or of the prefill."""
    calls: int
    """Layer calls of a training step, or of a generated token."""
    sent: int
    received: int
    """Bytes of these calls."""

    @property
    def total(self) -> int:
        return self.client_part + self.adapter + self.gradients + self.optimizer + self.kv_cache + self.activations


class _DryLink(Link):
    """Replies with tensors of the right shapes. Frames are allocated as a TCP link allocates them."""

    def __init__(
        self, manifest: Manifest, model_class: type[PreTrainedModel], tensors: dict[str, Tensor], *, has_frames: bool
    ) -> None:
        self._manifest, self._model_class, self._tensors, self._has_frames = manifest, model_class, tensors, has_frames
        self._blocks = {layer.handle for layer in manifest.layers if layer.kind is LayerKind.BLOCK}
        self.reset()

    def reset(self) -> None:
        self.calls = self.block_calls = self.sent = self.received = 0

    def request(self, message: Message) -> Message:
        assert message.kind is Kind.MANIFEST, f"a dry run has no values to send: {message.kind.name}"
        return Message(Kind.REPLY, body=self._manifest.to_json())

    def call(self, message: Message, widths: list[int]) -> tuple[Tensor, ...]:
        first = message.tensors[0]
        dtype = first.dtype if first.is_floating_point() else getattr(torch, self._manifest.dtype)
        leading, sent = first.shape[:-1], sum(tensor.nbytes for tensor in message.tensors)
        results = tuple(torch.empty(*leading, width, dtype=dtype, device=first.device) for width in widths)
        received = sum(result.nbytes for result in results)
        if self._has_frames:
            torch.empty(max(sent, received), dtype=torch.uint8)  # the frame, next to its tensors
        self.block_calls += message.layers[0] in self._blocks
        self.calls, self.sent, self.received = self.calls + 1, self.sent + sent, self.received + received
        return results

    def model_class(self) -> type[PreTrainedModel]:
        return self._model_class

    def client_tensors(self) -> dict[str, Tensor]:
        return self._tensors

    def release_tensors(self) -> None:
        self._tensors = {}

    def close(self) -> None:
        """There is nothing to close."""


def run_tenant(size: ModelSize, load: TenantLoad, kind: str = "cpu") -> TenantMemory:
    """The memory of one tenant with its part on a device of this kind (cpu, cuda)."""
    manifest = Manifest(
        **describe_model(size.model, size.name),
        layers=tuple(layer.spec for layer in size.split.layers),
        ties=size.split.ties,
        client_weights=None,
        tokenizer=None,
    )
    with dry_run(kind) as memory:
        tensors = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in size.split.client_tensors.items()}
        link = _DryLink(manifest, type(size.model), tensors, has_frames=kind == "cpu")
        model: Any = assemble(link, {"limits": Limits().to_json()}, torch.device("cpu"), "executor")
        link.release_tensors()
        del tensors
        if kind == "cuda":
            use_gpu_kernels(model)
        run = _train if load.workload is Workload.TRAIN else _generate
        return run(model, load, memory, link)


def _train(model: Any, load: TenantLoad, memory: LiveMemory, link: _DryLink) -> TenantMemory:
    client_part = memory.live
    model = with_adapter(model, load)
    adapter = memory.live - client_part
    if load.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = sum(p.nbytes for p in parameters)
    optimizer = gradients * OPTIMIZERS[load.optimizer]

    def step() -> None:
        ids = torch.zeros(load.batch, load.length, dtype=torch.long)
        model(input_ids=ids, labels=ids).loss.backward()

    before = memory.live
    memory.reset_peak()
    step()  # learns which layers are called together
    for parameter in parameters:
        parameter.grad = None
    link.reset()
    step()
    return TenantMemory(
        client_part=client_part,
        adapter=adapter,
        gradients=gradients,
        optimizer=optimizer,
        kv_cache=0,
        activations=max(0, memory.peak - before - gradients),
        calls=link.calls - link.block_calls,  # a block and the layer before it become one program
        sent=link.sent,
        received=link.received,
    )


@torch.no_grad()
def _generate(model: Any, load: TenantLoad, memory: LiveMemory, link: _DryLink) -> TenantMemory:
    client_part = memory.live
    if load.method != "none":
        model = with_adapter(model, load)
    adapter = memory.live - client_part
    rows, before = load.streams, memory.live
    prompt = max(1, load.context - 2)
    memory.reset_peak()
    cache = _forward(model, torch.zeros(rows, prompt, dtype=torch.long), None)
    cache = _forward(model, torch.zeros(rows, 1, dtype=torch.long), cache)
    link.reset()
    cache = _forward(model, torch.zeros(rows, 1, dtype=torch.long), cache)
    kv_cache = memory.live - before
    del cache
    return TenantMemory(
        client_part=client_part,
        adapter=adapter,
        gradients=0,
        optimizer=0,
        kv_cache=kv_cache,
        activations=memory.peak - before - kv_cache,
        calls=link.calls - max(0, 2 * link.block_calls - 1),  # one program from an attention to the next
        sent=link.sent,
        received=link.received,
    )


def _forward(model: Any, ids: Tensor, cache: Any) -> Any:
    options: dict[str, Any] = {"logits_to_keep": 1} if _takes(model, "logits_to_keep") else {}
    return model(input_ids=ids, past_key_values=cache, use_cache=True, **options).past_key_values


def _takes(model: Any, name: str) -> bool:
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return name in inspect.signature(base.forward).parameters


def with_adapter(model: Any, load: TenantLoad) -> Any:
    """The model with the adapter of a load."""
    return add_adapter(model, build_adapter_config(load, model.config.model_type))


def add_adapter(model: Any, adapter: PeftConfig) -> Any:
    """As PEFT makes it. Raises `SymbiosisError` if the model has no such layers."""
    try:
        return get_peft_model(model, adapter)
    except ValueError as error:
        raise SymbiosisError(f"PEFT rejects the adapter: {str(error).splitlines()[0]:.200}") from None
