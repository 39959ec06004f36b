"""The whole model as a dry run, for processes that hold it: the engine and the trainer."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from torch import Tensor, nn
from torch.nn import functional as F

from symbiosis.app.planning.dry_tenant import add_adapter
from symbiosis.models.loading import shared_copy
from symbiosis.planning.adapter_config import build_adapter_config
from symbiosis.planning.gpu_kernels import fused_loss, use_gpu_kernels, use_packed_kernels
from symbiosis.planning.live_memory import dry_run
from symbiosis.planning.model_size import ModelSize
from symbiosis.planning.tenants import TenantLoad


def run_prefill(size: ModelSize, rows: int, sampled: int, device: str = "cpu") -> int:
    """Bytes of activations of an engine's step with so many rows, of which `sampled` are read by the head."""
    with dry_run(device) as memory:
        model = _materialize(size, device)
        ids = torch.zeros(1, rows, dtype=torch.long)
        before = memory.live
        with torch.no_grad():
            hidden = model.base_model(input_ids=ids, use_cache=False)[0]
            head = model.get_output_embeddings()
            if head is not None:
                head(hidden[:, :sampled]).float()
        return memory.peak - before


def run_training_pass(size: ModelSize, load: TenantLoad, rows: int, device: str = "cpu") -> tuple[int, int]:
    """`run_adapter_pass` with the adapter of a load."""
    return run_adapter_pass(size, build_adapter_config(load, size.model.config.model_type), rows, device)


def run_adapter_pass(size: ModelSize, adapter: PeftConfig, rows: int, device: str = "cpu") -> tuple[int, int]:
    """A pass of hosted training over one example of so many rows: parameters of its adapter, and bytes of activations."""
    with dry_run(device) as memory:
        model = _materialize(size, device)
        model.requires_grad_(False)
        adapted: Any = add_adapter(model, adapter)
        if device == "cuda" and isinstance(adapter, LoraConfig) and not adapter.use_dora:
            adapted.to(size.dtype)  # LoRA kernels read the rows as they are; PEFT's layers keep a copy in float32
        parameters = [p for p in adapted.parameters() if p.requires_grad]
        ids = torch.zeros(1, rows, dtype=torch.long)
        before = memory.live
        memory.reset_peak()
        logits: Tensor = adapted(input_ids=ids, use_cache=False).logits[:, -rows:].squeeze(0)
        on_cpu = device == "cpu"
        losses = F.cross_entropy(logits.float(), ids[0], reduction="none") if on_cpu else fused_loss(logits)
        del logits
        gradients = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
        size_of = sum(gradient.nbytes for gradient in gradients if gradient is not None)
        return sum(p.numel() for p in parameters), memory.peak - before - size_of


def _materialize(size: ModelSize, device: str) -> Any:
    """The model with tensors of a dry run."""
    model, made = shared_copy(size.model), dict[int, Tensor]()

    def make(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
        return made[id(tensor)]

    for module in model.modules():
        module._parameters.update({name: make(p) for name, p in module._parameters.items() if p is not None})
        module._buffers.update({name: make(b) for name, b in module._buffers.items() if b is not None})
    if device == "cuda":
        use_gpu_kernels(model)
        use_packed_kernels(model)
    return model
