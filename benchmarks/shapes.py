"""Models of true shape with random weights, and the paper's four LoRA settings (its Table 2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    config: dict[str, Any]
    family: str = "Llama"
    batch: int = 2
    tokens: int = 512
    """Of each sequence of a fine-tuning batch."""
    lora: dict[int, tuple[int, list[str]]] = field(
        default_factory=lambda: {
            1: (8, ["q_proj"]),
            2: (64, ["q_proj"]),
            3: (8, ["q_proj", "k_proj", "v_proj", "o_proj"]),
            4: (64, ["q_proj", "k_proj", "v_proj", "o_proj"]),
        }
    )
    """Settings by the paper's number: rank, layers."""


SHAPES = {
    "tiny": Shape(
        config={
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256,
        },
        tokens=32,
    ),
    "small_long": Shape(  # for a CPU
        config={
            "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1024,
            "max_position_embeddings": 40960,
        },
    ),
    "1b_long": Shape(
        config={
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "max_position_embeddings": 40960,
        },
    ),
    "1b": Shape(
        config={
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "max_position_embeddings": 8192,
        },
    ),
    "qwen4b": Shape(
        family="Qwen3",
        config={
            "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
        },
    ),
    "7b": Shape(
        config={
            "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
            "vocab_size": 32000, "max_position_embeddings": 4096,
        },
    ),
    "7b_long": Shape(
        config={
            "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
            "vocab_size": 32000, "max_position_embeddings": 131072,
        },
    ),
    "13b": Shape(
        config={
            "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
            "vocab_size": 32000, "max_position_embeddings": 4096,
        },
    ),
    "gemma27b": Shape(
        family="Gemma2",
        config={
            "hidden_size": 4608, "intermediate_size": 36864, "num_hidden_layers": 46, "num_attention_heads": 32,
            "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 144, "vocab_size": 256000,
            # only this attention caps its scores as the model does
            "attn_implementation": "eager",
        },
        tokens=64,  # as the paper has it for this model; a plain copy and the executor's must fit side by side
    ),
}  # fmt: skip


def random_model(name: str, device: str) -> Any:
    """Made where it will be used, which for a GPU takes a second; bf16 there, float32 on a CPU."""
    import torch
    import transformers

    shape = SHAPES[name]
    config = getattr(transformers, f"{shape.family}Config")(**shape.config)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            return getattr(transformers, f"{shape.family}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
