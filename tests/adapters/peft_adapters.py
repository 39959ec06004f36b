"""Realistic adapters: created by PEFT, changed as by training, saved by PEFT."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.parity.architectures import ARCHITECTURES, MORE, VOCAB

NAMES = {architecture.name: architecture for architecture in [*ARCHITECTURES, *MORE]}


def base(name: str) -> PreTrainedModel:
    """A deterministic model; `tied_llama` is a Llama whose head is its embedding."""
    model = NAMES[name].model() if name != "tied_llama" else _tied_llama()
    model.set_experts_implementation("eager")  # the grouped one lacks double precision
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # with transformers' initial weights attention is nearly uniform, which would hide errors
    return model


def _tied_llama() -> PreTrainedModel:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def save(name: str, config: PeftConfig, folder: Path) -> None:
    """Create an adapter, change all trainable parameters, save it."""
    torch.manual_seed(3)
    model = get_peft_model(base(name), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(str(folder))


def served_by_peft(name: str, folder: Path) -> PeftModel:
    return PeftModel.from_pretrained(base(name), str(folder)).eval()


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())


def set_config(folder: Path, **changes: Any) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(config_of(folder) | changes))


def drop_config(folder: Path, *keys: str) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in config_of(folder).items() if k not in keys}))


def split_file(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of the safetensors file."""
    raw = (folder / "adapter_model.safetensors").read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def write_file(folder: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)
