"""Tiny random models of many architectures, and what to feed them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

VOCAB = 96


@dataclass(frozen=True)
class Architecture:
    """One row of the parity table."""

    name: str
    build: Callable[[], PreTrainedModel]
    targets: tuple[str, ...]
    """Modules that get a LoRA adapter."""
    generates: bool = True

    def model(self) -> PreTrainedModel:
        torch.manual_seed(7)
        model = self.build().eval()
        for parameter in model.parameters():  # zero biases and unit norms would hide a forgotten one
            if parameter.dim() == 1:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
        return model

    def batch(self, seed: int = 0, rows: int = 2, length: int = 12) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}


def _made(model: str, config: str, **settings: object) -> Callable[[], PreTrainedModel]:
    def build() -> PreTrainedModel:
        made = getattr(transformers, config)(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings)
        return getattr(transformers, model)(made)

    return build


_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


def _llama_like(
    name: str, prefix: str, targets: tuple[str, ...] = ("q_proj", "v_proj", "down_proj"), **more: object
) -> Architecture:
    return Architecture(name, _made(f"{prefix}ForCausalLM", f"{prefix}Config", **{**_LLAMA, **more}), targets)


ARCHITECTURES = [
    _llama_like("llama", "Llama"),
    _llama_like("mistral", "Mistral", sliding_window=8),
    _llama_like("gemma2", "Gemma2", head_dim=8, sliding_window=8),
    _llama_like("qwen2", "Qwen2"),
    _llama_like("qwen3", "Qwen3", head_dim=8),
    _llama_like("phi3", "Phi3", ("qkv_proj", "o_proj")),
    _llama_like("starcoder2", "Starcoder2", ("q_proj", "c_fc"), residual_dropout=0.0, embedding_dropout=0.0),
    _llama_like("granite", "Granite"),
    _llama_like("mixtral", "Mixtral", _QKVO, num_local_experts=4, num_experts_per_tok=2),
    Architecture(
        "gpt2",
        _made("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, n_positions=128),
        ("c_attn", "c_proj"),
    ),
    Architecture(
        "gpt_bigcode",
        _made("GPTBigCodeForCausalLM", "GPTBigCodeConfig", n_embd=32, n_layer=2, n_head=4, n_positions=128),
        ("c_attn", "c_fc"),
    ),
    Architecture(
        "opt",
        _made(
            "OPTForCausalLM", "OPTConfig", hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=128, word_embed_proj_dim=16,
        ),
        ("q_proj", "fc2"),
    ),
    Architecture(
        "gpt_neox",
        _made(
            "GPTNeoXForCausalLM", "GPTNeoXConfig", hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=128,
        ),
        ("query_key_value",),
    ),
    Architecture(
        "bert",
        _made(
            "BertForMaskedLM", "BertConfig", hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=128,
        ),
        ("query", "dense"),
        generates=False,
    ),
    Architecture(
        "t5",
        _made(
            "T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
            decoder_start_token_id=0,
        ),
        ("q", "v", "wo"),
    ),
]  # fmt: skip

# Beyond the required list: what users would try next.
MORE = [
    _llama_like("gemma", "Gemma", head_dim=8),
    _llama_like("olmo2", "Olmo2"),
    _llama_like("cohere", "Cohere"),
    _llama_like("stablelm", "StableLm"),
    _llama_like("phi", "Phi", ("q_proj", "fc2")),
    _llama_like("smollm3", "SmolLM3"),
    _llama_like("glm4", "Glm4", ("q_proj", "down_proj"), head_dim=8),
    _llama_like(
        "qwen2_moe", "Qwen2Moe", _QKVO, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=32, decoder_sparse_step=1,
    ),
    _llama_like("qwen3_moe", "Qwen3Moe", _QKVO, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8),
    _llama_like("olmoe", "Olmoe", _QKVO, num_experts=4, num_experts_per_tok=2),
    _llama_like(
        "deepseek_v3", "DeepseekV3", ("o_proj", "kv_b_proj"), n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_group=1, topk_group=1,
        first_k_dense_replace=1, num_key_value_heads=4,
    ),
    _llama_like("gpt_oss", "GptOss", _QKVO, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8),
    _llama_like("granitemoe", "GraniteMoe", _QKVO, num_local_experts=4, num_experts_per_tok=2),
    Architecture(
        "bloom", _made("BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=2, n_head=4), ("query_key_value", "dense")
    ),
    Architecture(
        "falcon",
        _made("FalconForCausalLM", "FalconConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        ("query_key_value", "dense_4h_to_h"),
    ),
    Architecture("gptj", _made("GPTJForCausalLM", "GPTJConfig", n_embd=32, n_layer=2, n_head=4, rotary_dim=8), ("q_proj", "fc_in")),
    Architecture(
        "gpt_neo",
        _made(
            "GPTNeoForCausalLM", "GPTNeoConfig", hidden_size=32, num_layers=2, num_heads=4,
            attention_types=[[["global", "local"], 1]], max_position_embeddings=128,
        ),
        ("q_proj", "c_fc"),
    ),
    Architecture(
        "llama4",
        _made(
            "Llama4ForCausalLM", "Llama4TextConfig", **_LLAMA, head_dim=8, intermediate_size_mlp=64, num_local_experts=4,
            num_experts_per_tok=1, interleave_moe_layer_step=1,
        ),
        _QKVO,
    ),
    Architecture(
        "jetmoe",
        _made(
            "JetMoeForCausalLM", "JetMoeConfig", hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_key_value_heads=2, kv_channels=8, num_local_experts=4, num_experts_per_tok=2,
        ),
        ("kv_proj",),
    ),
    Architecture(
        "dbrx",
        _made(
            "DbrxForCausalLM", "DbrxConfig", d_model=32, n_heads=4, n_layers=2, max_seq_len=128,
            attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        ),
        ("Wqkv", "out_proj"),
    ),
    Architecture(
        "mamba2",
        _made(
            "Mamba2ForCausalLM", "Mamba2Config", hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8,
            n_groups=1,
        ),
        ("in_proj",),
    ),
    Architecture(
        "mamba", _made("MambaForCausalLM", "MambaConfig", hidden_size=32, num_hidden_layers=2, state_size=8), ("in_proj", "x_proj")
    ),
    Architecture(
        "roberta",
        _made(
            "RobertaForMaskedLM", "RobertaConfig", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=128,
        ),
        ("query", "value"),
        generates=False,
    ),
    Architecture(
        "albert",
        _made(
            "AlbertForMaskedLM", "AlbertConfig", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            embedding_size=16, max_position_embeddings=128,
        ),
        ("query", "ffn"),
        generates=False,
    ),
    Architecture(
        "deberta_v2",
        _made(
            "DebertaV2ForMaskedLM", "DebertaV2Config", hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=128, relative_attention=True, pos_att_type=["p2c", "c2p"],
        ),
        ("query_proj", "value_proj"),
        generates=False,
    ),
    Architecture(
        "bart",
        _made(
            "BartForConditionalGeneration", "BartConfig", d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64,
            decoder_ffn_dim=64, encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=128,
            decoder_start_token_id=2, forced_eos_token_id=None,
        ),
        ("q_proj", "fc1"),
    ),
]  # fmt: skip
