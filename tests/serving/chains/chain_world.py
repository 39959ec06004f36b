"""Zoos of tiny models with known completions."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from symbiosis.app.served_zoo import ServedZoo
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.scheduling.sequence import Sampling
from symbiosis.zoo.zoo import Zoo

NUM_TOKENS = 8
SAMPLING = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5] * 5, [40], [3, 1, 4, 1, 5, 9, 2, 6]]
_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "initializer_range": 0.2,
}  # fmt: skip


def _gpt2() -> GPT2LMHeadModel:
    sizes = {
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "vocab_size": 64,
        "n_positions": 128,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes))


ARCHITECTURES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=8, tie_word_embeddings=False)),
    "gpt2": _gpt2,
}


def make_base(architecture: str = "llama") -> Any:
    torch.manual_seed(0)
    return ARCHITECTURES[architecture]().eval()


def fine_tuned(model: Any, *parts: str, seed: int, scale: float = 0.2) -> Any:
    """A copy with other weights where a name has one of these parts; "" is in every name."""
    made = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if any(part in f".{name}." for part in parts):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=scale if parameter.dim() > 1 else 3 * scale)  # norms are about 1
    return made


def make_family(architecture: str = "llama") -> dict[str, Any]:
    """Models that share blocks in many ways: layers, single attentions and FFNs, embeddings, norms, nothing."""
    base = make_base(architecture)
    layer = ".h.{}." if architecture == "gpt2" else ".layers.{}."
    return {
        "base": base,
        "last": fine_tuned(base, layer.format(2), layer.format(3), seed=1),
        "last-too": fine_tuned(base, layer.format(2), layer.format(3), seed=2),
        "middle": fine_tuned(base, layer.format(1), seed=3),
        "ffn": fine_tuned(base, f"{layer.format(2)}mlp.", seed=4),
        "embedding": fine_tuned(base, ".embed_tokens.", ".wte.", seed=5),
        "norm": fine_tuned(base, ".model.norm.", ".ln_f.", seed=6),
        "full": fine_tuned(base, "", seed=7),
    }


def adapter_config(kind: str, architecture: str) -> Any:
    targets = ["c_attn", "c_fc"] if architecture == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    common = {"task_type": "CAUSAL_LM"}
    lora = {"r": 4, "target_modules": targets, "init_lora_weights": False, **common}
    if kind == "dora":
        return LoraConfig(use_dora=True, **lora)
    if kind == "head":
        return LoraConfig(modules_to_save=["lm_head"], **lora)
    if kind == "prefix":
        return PrefixTuningConfig(num_virtual_tokens=3, **common)
    if kind == "ia3":
        return IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], **common)
    return LoraConfig(**lora)


@dataclass
class ChainWorld:
    """Models and adapters on them, and transformers' completions: `completions[name][prompt number]`."""

    folder: Path
    architecture: str
    models: dict[str, Any]
    completions: dict[str, list[list[int]]] = field(default_factory=dict)
    bases: dict[str, str] = field(default_factory=dict)
    """The model of each adapter."""

    @classmethod
    def make(cls, folder: Path, architecture: str = "llama", models: dict[str, Any] | None = None) -> ChainWorld:
        world = cls(folder, architecture, make_family(architecture) if models is None else models)
        zoo = Zoo(folder / "zoo", create=True)
        for name, model in world.models.items():
            model.save_pretrained(folder / name)
            zoo.add(name, folder / name)
            world.completions[name] = complete(model)
        return world

    def add_adapter(self, name: str, base: str, kind: str, seed: int, *, to_zoo: bool = False) -> Path:
        """A PEFT adapter on a model. Its folder."""
        torch.manual_seed(seed)
        model = get_peft_model(copy.deepcopy(self.models[base]), adapter_config(kind, self.architecture)).eval()
        with torch.no_grad():
            for part, parameter in model.named_parameters():
                if "lora_B" in part or "magnitude" in part or "modules_to_save" in part:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                elif "ia3" in part or "prompt" in part:
                    parameter.copy_(1 + torch.randn_like(parameter) if "ia3" in part else torch.randn_like(parameter))
        model.peft_config["default"].base_model_name_or_path = f"/somewhere/else/{base}"
        model.save_pretrained(self.folder / name)
        self.completions[name], self.bases[name] = complete(model), base
        if to_zoo:
            Zoo(self.folder / "zoo").add(name, self.folder / name, base=base)
        return self.folder / name

    def serve(self, names: list[str] | None = None, device: str = "cpu", **settings: Any) -> ServedEngine:
        zoo = ServedZoo(self.folder / "zoo", names, device=device)
        core = EngineCore(zoo.chains[zoo.default].model, chains=zoo.chains, **{"pages": 256, **settings})
        for name, path in zoo.adapters.items():
            core.add_adapter(name, path, zoo.adapter_models[name])
        return ServedEngine(zoo, core)


@dataclass
class ServedEngine:
    zoo: ServedZoo
    core: EngineCore

    def __enter__(self) -> ServedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.zoo.close()

    def add(self, name: str, prompt: int, tenant: str = "") -> Any:
        is_model = name in self.core.chains.by_name
        names = {"model": name} if is_model else {"adapter": name}
        return self.core.add(PROMPTS[prompt], SAMPLING, tenant=tenant, **names)

    def run(self) -> None:
        while not self.core.is_idle():
            self.core.step()


@torch.no_grad()
def complete(model: Any) -> list[list[int]]:
    """Greedily, each prompt by itself."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=next(model.parameters()).device)
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        found.append(made[0, len(prompt) :].tolist())
    return found
