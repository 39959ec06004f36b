"""A tiny random chat model with a tokenizer, as a folder: for tests of the command line."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.conftest import tiny_config

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_SPECIAL = ["<pad>", "<end>", "<system>", "<user>", "<assistant>"]


def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="?")
    fast.add_special_tokens({"additional_special_tokens": _SPECIAL[2:]})
    fast.chat_template = template
    return fast


def make_tiny_chat(folder: Path, max_length: int = 256) -> Path:
    torch.manual_seed(0)
    # large weights: with transformers' small ones no adapter could change the most likely token
    config = tiny_config(eos_token_id=1, pad_token_id=0, max_position_embeddings=max_length, initializer_range=0.1)
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
