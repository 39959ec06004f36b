"""One engine generates with several adapters in shared batches. Run: python examples/engine_with_adapters.py"""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import symbiosis
from symbiosis.models.default_model import default_model_folder


def save_random_adapter(folder: Path, seed: int) -> None:
    """A LoRA with random weights: in real use, the folder that PEFT's `save_pretrained` wrote after training."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(default_model_folder())
    config = LoraConfig(r=8, lora_alpha=64, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        engine = symbiosis.Engine()  # the embedded default model; or a folder, a hub id, a transformers model
        for seed, name in enumerate(("red", "blue")):
            save_random_adapter(Path(root) / name, seed)
            engine.add_adapter(name, Path(root) / name)
        adapters = [None, "red", "blue"]  # None: the base model
        sampling = symbiosis.Sampling(temperature=0.0, max_tokens=8)
        completions = engine.generate(["The capital of France is"] * 3, adapters=adapters, sampling=sampling)
        for adapter, completion in zip(adapters, completions, strict=True):
            print(f"{adapter or 'base'}: {completion.text!r} ({completion.reason})")
