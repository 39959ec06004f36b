"""GGUF files as folders that `from_pretrained` reads."""

from __future__ import annotations

from pathlib import Path


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write model and tokenizer, with plain weights. The file is trusted: transformers and gguf read it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # not for those who only ask for the default model's folder

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The weights are plain now: with this setting transformers would de-quantise them again.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None  # `save_pretrained` rejects a model with a GGUF quantizer
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
