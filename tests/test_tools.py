"""Tenants' tools run unmodified: Trainer, TRL, all modes of generate, and adapters that load without Symbiosis."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TextStreamer, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import symbiosis
from symbiosis.errors import NoTokenizer
from tests.lora import random_lora
from tests.parity.architectures import ARCHITECTURES, VOCAB
from tests.parity.pair import connected, trainable

LLAMA = ARCHITECTURES[0]
T5 = next(a for a in ARCHITECTURES if a.name == "t5")
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *[f"w{i}" for i in range(VOCAB - 4)]]


@pytest.fixture
def tokenizer():
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def seeded(model, config=None):
    torch.manual_seed(1)
    return get_peft_model(model, config or random_lora())


def settings(folder, **more):
    return {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-3, "disable_tqdm": True, "seed": 3, **more,
    }  # fmt: skip


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_trains_the_adapter_that_it_trains_on_the_plain_model(tmp_path, checkpointing):
    rows = [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in LLAMA.batch(rows=8)["input_ids"]]
    plain = LLAMA.model()
    adapters = []
    with connected(plain, "tcp") as model:
        for base in (copy.deepcopy(plain), model):
            arguments = TrainingArguments(
                **settings(tmp_path, gradient_checkpointing=checkpointing, gradient_accumulation_steps=2)
            )
            trainer = Trainer(seeded(base), arguments, train_dataset=Dataset.from_list(rows))
            trainer.train()
            adapters.append({name: p.detach().clone() for name, p in trainable(trainer.model).items()})
    for name, parameter in adapters[0].items():
        torch.testing.assert_close(adapters[1][name], parameter, atol=1e-4, rtol=0)


def test_sft_trainer_of_trl_trains_and_saves(tmp_path, tokenizer):
    texts = [{"text": " ".join(f"w{(i * j) % 80}" for j in range(8))} for i in range(8)]
    plain = LLAMA.model()
    losses = []
    with connected(plain, "shm") as model:
        for base in (copy.deepcopy(plain), model):
            torch.manual_seed(1)
            trainer = SFTTrainer(
                base, SFTConfig(**settings(tmp_path, max_length=16, bf16=False)), train_dataset=Dataset.from_list(texts),
                processing_class=tokenizer, peft_config=random_lora(),
            )  # fmt: skip
            losses.append(trainer.train().training_loss)
        trainer.save_model(str(tmp_path / "adapter"))
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    "mode",
    [
        {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
        {"num_return_sequences": 3, "do_sample": True},
    ],
    ids=str,
)
def test_generate_returns_what_the_plain_model_generates(mode):
    plain = LLAMA.model()
    ids = LLAMA.batch()["input_ids"]
    with connected(plain, "shm") as model:
        results = []
        for each in (plain, model):
            torch.manual_seed(4)
            results.append(each.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, **mode))
    assert torch.equal(*results)


def test_generate_with_a_streamer_and_left_padding(tokenizer, capsys):
    plain = LLAMA.model()
    encoded = tokenizer(["w1 w2 w3"], return_tensors="pt")
    with connected(plain, "tcp") as model:
        for each in (plain, model):
            each.generate(
                input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"], max_new_tokens=8, do_sample=False,
                streamer=TextStreamer(tokenizer),
            )  # fmt: skip
        lines = capsys.readouterr().out.strip().splitlines()
        assert len(lines) == 2
        assert lines[0] == lines[1]
        ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
        mask = (ids != 0).long()
        assert torch.equal(
            plain.generate(ids, attention_mask=mask, max_new_tokens=8),
            model.generate(ids, attention_mask=mask, max_new_tokens=8),
        )


def test_an_encoder_decoder_generates_with_beams():
    plain = T5.model()
    ids = T5.batch()["input_ids"]
    with connected(plain, "shm") as model:
        assert torch.equal(
            plain.generate(ids, num_beams=3, max_new_tokens=8), model.generate(ids, num_beams=3, max_new_tokens=8)
        )


@pytest.mark.parametrize(
    "config",
    [
        random_lora,
        lambda: IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
        lambda: PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        lambda: LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head", "up_proj"], task_type="CAUSAL_LM"),
    ],
    ids=["lora", "ia3", "prefix", "modules_to_save"],
)
def test_a_saved_adapter_loads_without_symbiosis(tmp_path, config):
    plain = LLAMA.model()
    with connected(plain, "tcp") as model:
        shared = seeded(model, config())
        optimizer = torch.optim.AdamW(trainable(shared).values(), lr=1e-2)
        shared(**LLAMA.batch()).loss.backward()
        optimizer.step()
        shared.eval()
        shared.save_pretrained(tmp_path)
        expected = shared(**LLAMA.batch()).logits
    loaded = PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path).eval()
    torch.testing.assert_close(loaded(**LLAMA.batch()).logits, expected, atol=1e-5, rtol=0)
    with connected(plain, "inproc") as model:
        again = PeftModel.from_pretrained(model, tmp_path).eval()
        torch.testing.assert_close(again(**LLAMA.batch()).logits, expected, atol=1e-5, rtol=0)


def test_model_and_tokenizer_come_from_the_executor_alone(tmp_path, tokenizer):
    LLAMA.model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    with symbiosis.Executor(tmp_path / "model") as executor:
        model = symbiosis.connect(executor.listen())
        assert isinstance(model, LlamaForCausalLM)
        assert model.symbiosis.tokenizer()("w1 w2")["input_ids"] == tokenizer("w1 w2")["input_ids"]
        assert model.generation_config.to_dict() == plain.generation_config.to_dict()
        assert torch.equal(model(**LLAMA.batch()).logits, plain(**LLAMA.batch()).logits)


def test_a_model_without_a_tokenizer_says_so():
    with connected(LLAMA.model(), "tcp") as model, pytest.raises(NoTokenizer, match="without a tokenizer"):
        model.symbiosis.tokenizer()
