"""Small models of one family, and a zoo."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from symbiosis.zoo.zoo import Zoo

CONFIG = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64,
}  # fmt: skip


def make_model(seed: int = 0, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**CONFIG, **changes})).eval()


def fine_tuned(model: LlamaForCausalLM, layers: range, seed: int = 1) -> LlamaForCausalLM:
    """A copy with other weights in some layers."""
    made = LlamaForCausalLM(model.config).eval()
    made.load_state_dict(model.state_dict())
    torch.manual_seed(seed)
    with torch.no_grad():
        for layer in layers:
            for weight in made.model.layers[layer].parameters():
                weight.add_(0.01 * torch.randn_like(weight))
    return made


@pytest.fixture
def base():
    return make_model()


@pytest.fixture
def save(tmp_path):
    def save(model, name: str) -> Path:
        model.save_pretrained(tmp_path / "models" / name)
        return tmp_path / "models" / name

    return save


@pytest.fixture
def zoo(tmp_path):
    return Zoo(tmp_path / "zoo", create=True)


WORDS = """the a red blue old new ship tree river stone runs falls sings sleeps under over near with and then""".split()  # noqa: SIM905
_LETTERS = sorted({*"".join(WORDS), " ", ".", "\n"})


def make_text(seed: int, words: list[str], count: int = 1500) -> str:
    """Sentences of these words."""
    numbers = random.Random(seed)
    return "".join(numbers.choice(words) + numbers.choice([" ", " ", " ", ".\n"]) for _ in range(count))


def save_tokenizer(folder: Path) -> None:
    """One token for each letter."""
    vocab = {letter: number for number, letter in enumerate(["?", *_LETTERS])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)


def train(model, text: str, steps: int, *, seed: int = 0, rate: float = 3e-3):
    """A few steps on a text of letters, in place."""
    ids = torch.tensor([1 + _LETTERS.index(letter) for letter in text if letter in _LETTERS])
    torch.manual_seed(seed)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - 48, (8,))
        x = torch.stack([ids[start : start + 48] for start in starts.tolist()])
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def as_full_fine_tune(base, text: str, *, rank: int = 2, steps: int = 60, seed: int = 0, targets="all-linear"):
    """Trained as LoRA and merged: a checkpoint whose difference has this rank."""
    adapted = get_peft_model(copy.deepcopy(base), LoraConfig(r=rank, lora_alpha=8, target_modules=targets))
    return train(adapted, text, steps, seed=seed, rate=1e-2).merge_and_unload()


@pytest.fixture(scope="session")
def words():
    """Words of the base, and words of its fine-tunes."""
    return WORDS[:12], WORDS[8:]


@pytest.fixture(scope="session")
def trained_base(words):
    model = make_model(tie_word_embeddings=True, hidden_size=64, intermediate_size=96)
    return train(model, make_text(0, words[0]), 150)


@pytest.fixture(scope="session")
def trained(trained_base, words):
    """A full fine-tune: its difference is low-rank, and its loss gain is large."""
    return as_full_fine_tune(trained_base, make_text(1, words[1]))


@pytest.fixture(scope="session")
def sample(words):
    """A calibration text that was not trained on."""
    return "held-out.txt", make_text(2, words[1], 1200)


@pytest.fixture
def save_with_tokenizer(save):
    def save_both(model, name: str) -> Path:
        folder = save(model, name)
        save_tokenizer(folder)
        return folder

    return save_both


@pytest.fixture
def zoo_with_base(zoo, save_with_tokenizer, trained_base):
    zoo.add("base", save_with_tokenizer(trained_base, "base"))
    return zoo
