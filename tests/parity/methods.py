"""Every PEFT method, as a configuration for a tiny Llama."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import peft
from peft import PeftConfig

ATTENTION = ["q_proj", "v_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Method:
    name: str
    config: Callable[[], PeftConfig]
    needs_weights: bool = False
    """Whether it needs the values of a base weight, beyond products with it."""


def _lora(name: str, *, needs_weights: bool = False, **settings: object) -> Method:
    def config() -> PeftConfig:
        return peft.LoraConfig(**{"r": 4, "target_modules": ALL, "task_type": "CAUSAL_LM", **settings})

    return Method(name, config, needs_weights)


def _method(name: str, kind: str, *, needs_weights: bool = False, **settings: object) -> Method:
    def config() -> PeftConfig:
        return getattr(peft, kind)(**{"task_type": "CAUSAL_LM", **settings})

    return Method(name, config, needs_weights)


# The required methods.
METHODS = [
    _lora("lora"),
    _lora("lora_random_init", init_lora_weights=False),
    _lora("lora_gaussian", init_lora_weights="gaussian"),
    _lora("rslora", use_rslora=True),
    _lora("lora_bias_all", bias="all"),
    _lora("lora_bias_own", bias="lora_only", target_modules=ATTENTION),
    _lora("dora", use_dora=True),
    _lora("dora_random_init", use_dora=True, init_lora_weights=False),
    _lora("pissa", init_lora_weights="pissa", needs_weights=True),
    _lora("pissa_niter", init_lora_weights="pissa_niter_4", needs_weights=True),
    _lora("olora", init_lora_weights="olora", needs_weights=True),
    _lora("lora_orthogonal", init_lora_weights="orthogonal"),
    _lora("lora_save_head", modules_to_save=["lm_head"]),
    _lora("lora_save_layer", target_modules=ATTENTION, modules_to_save=["up_proj"], needs_weights=True),
    _lora("lora_save_mlp", target_modules=ATTENTION, modules_to_save=["mlp"], needs_weights=True),
    _lora("lora_save_embeddings", target_modules=ATTENTION, modules_to_save=["embed_tokens", "lm_head"]),
    _lora("lora_on_embeddings", target_modules=["embed_tokens", *ATTENTION]),
    _lora("lora_trained_tokens", target_modules=ATTENTION, trainable_token_indices=[3, 5]),
    _method("adalora", "AdaLoraConfig", init_r=6, target_r=4, total_step=100, tinit=5, tfinal=10, target_modules=ALL),
    _method("loha", "LoHaConfig", r=4, target_modules=ALL),
    _method("lokr", "LoKrConfig", r=4, target_modules=ALL),
    _method("vera", "VeraConfig", r=8, target_modules=["q_proj", "o_proj"]),
    _method("oft", "OFTConfig", r=0, oft_block_size=8, target_modules=ALL),
    _method("boft", "BOFTConfig", boft_block_size=8, target_modules=ATTENTION),
    _method("ia3", "IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    _method("prefix", "PrefixTuningConfig", num_virtual_tokens=4),
    _method("prefix_projection", "PrefixTuningConfig", num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=16),
    _method("prompt", "PromptTuningConfig", num_virtual_tokens=4),
    _method("p_tuning", "PromptEncoderConfig", num_virtual_tokens=4, encoder_hidden_size=16),
]

# The rest of PEFT: users will try them. Not here: GLoRA, which refuses every subclass of nn.Linear, and AdaMSS,
# which needs scikit-learn.
MORE = [
    _method("hra", "HRAConfig", r=4, target_modules=ALL),
    _method("ln_tuning", "LNTuningConfig"),
    _method("fourierft", "FourierFTConfig", n_frequency=32, target_modules=ALL),
    _method("waveft", "WaveFTConfig", n_frequency=32, target_modules=ATTENTION),
    _method("vblora", "VBLoRAConfig", r=2, num_vectors=8, vector_length=8, topk=2, target_modules=ATTENTION),
    _method("unilora", "UniLoraConfig", r=4, target_modules=ATTENTION),
    _method("miss", "MissConfig", r=4, target_modules=ATTENTION),
    _method("miss_bat", "MissConfig", r=4, init_weights="bat", target_modules=["q_proj", "o_proj"], needs_weights=True),
    _method("randlora", "RandLoraConfig", r=4, target_modules=ATTENTION),
    _method("road", "RoadConfig", group_size=8, target_modules=ALL),
    _method("c3a", "C3AConfig", block_size=8, target_modules=ATTENTION),
    _method("shira", "ShiraConfig", r=4, target_modules=ATTENTION, needs_weights=True),
    _method("delora", "DeloraConfig", r=4, target_modules=ATTENTION, needs_weights=True),
    _method("gralora", "GraloraConfig", r=4, gralora_k=2, target_modules=ATTENTION),
    _method("osf", "OSFConfig", effective_rank=4, target_modules=ATTENTION, needs_weights=True),
    _method("hira", "HiraConfig", r=4, target_modules=ATTENTION, needs_weights=True),
    _method("pvera", "PveraConfig", r=8, target_modules=["q_proj", "o_proj"]),
    _method("lily", "LilyConfig", r=4, target_modules=ATTENTION),
    _method("peanut", "PeanutConfig", r=4, target_modules=ATTENTION),
    _method("psoft", "PsoftConfig", r=4, target_modules=ATTENTION, needs_weights=True),
    _method("tinylora", "TinyLoraConfig", r=2, u=4, target_modules=ATTENTION, needs_weights=True),
    _method("deft", "DeftConfig", r=4, target_modules=ATTENTION),
    _method("supertuning", "SupertuningConfig", target_modules=ATTENTION, needs_weights=True),
    _method("frod", "FrodConfig", target_modules=ATTENTION, progressbar=False, needs_weights=True),
    _method("beft", "BeftConfig", target_modules=ATTENTION),
    _method("poly", "PolyConfig", r=4, n_tasks=1, target_modules=ATTENTION),
    _method("cartridge", "CartridgeConfig", num_virtual_tokens=4),
    _method("adaption_prompt", "AdaptionPromptConfig", adapter_len=4, adapter_layers=2),
    _method("trainable_tokens", "TrainableTokensConfig", token_indices=[3, 4], target_modules=["embed_tokens"]),
]
