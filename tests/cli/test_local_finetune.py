"""Fine-tuning in the client: data is checked by line, the assistant's tokens are labels, adapters load in plain PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import symbiosis
from symbiosis.cli.chat import ChatSampling
from symbiosis.cli.local_chat import LocalChat, with_adapter
from symbiosis.cli.local_finetune import METHODS, BadSettings, FinetuneConfig, encode, finetune, read_samples
from symbiosis.errors import BadAdapter, BadData
from symbiosis.finetuning.loop.recipe import Recipe
from symbiosis.jobs.jsonl import JsonlSample, parse_line
from tests.tiny_chat import make_tiny_chat, tiny_tokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo ho"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_chat(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def executor(folder):
    with symbiosis.Executor(folder) as executor:
        yield executor


@pytest.fixture
def model(executor):
    model = symbiosis.connect(executor)
    yield model
    model.symbiosis.close()


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def sample(line: int = 1, **row: object) -> JsonlSample:
    return parse_line(line, json.dumps(row).encode())


def chats(count: int = 6) -> list[JsonlSample]:
    replies = {"role": "assistant", "content": "arr" * 3}
    return [sample(n, messages=[{"role": "user", "content": f"say {n}"}, replies]) for n in range(count)]


# -- data -----------------------------------------------------------------------------------


def test_chats_and_texts_are_read_with_their_line_numbers(tmp_path):
    samples = read_samples(write(tmp_path / "chats.jsonl", CHAT, "", CHAT))
    assert [(each.line, bool(each.messages)) for each in samples] == [(1, True), (3, True)]
    (text,) = read_samples(write(tmp_path / "texts.jsonl", "", {"text": "once"}))
    assert (text.line, text.messages, text.text) == (2, (), "once")


def test_a_mark_at_the_beginning_is_not_part_of_the_text(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "once"}\n', encoding="utf-8-sig")
    assert [each.text for each in read_samples(tmp_path / "data.jsonl")] == ["once"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [', "not JSON"),
        ("[1, 2]", "got list"),
        ({}, "an empty one"),
        ({"prompt": "x"}, "'prompt'"),
        ({"text": "x", "messages": []}, "exactly"),
        ({"text": "  "}, "non-empty string"),
        ({"text": 3}, "non-empty string"),
        ({"messages": []}, "non-empty list"),
        ({"messages": ["hi"]}, "'role', 'content'"),
        ({"messages": [{"role": "user", "content": "x", "name": "bo"}]}, "must have 'role', 'content'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "the role 'robot'"),
        ({"messages": [{"role": "assistant", "content": None}]}, "non-empty string"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant message"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, reason):
    with pytest.raises(BadData, match=r"data\.jsonl, line 2: ") as caught:
        read_samples(write(tmp_path / "data.jsonl", CHAT, line))
    assert reason in str(caught.value)


def test_a_file_that_is_missing_empty_or_no_text_is_refused(tmp_path):
    with pytest.raises(BadData, match="No such file"):
        read_samples(tmp_path / "none.jsonl")
    with pytest.raises(BadData, match="is empty"):
        read_samples(write(tmp_path / "empty.jsonl", "", ""))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadData, match="UTF-8"):
        read_samples(tmp_path / "binary.jsonl")


def learnt(tokenizer, example) -> str:
    return tokenizer.decode([label for label in example.labels if label >= 0])


def test_only_the_answers_of_a_chat_are_learnt():
    tokenizer = tiny_tokenizer()
    turns = [*CHAT["messages"], {"role": "user", "content": "and"}, {"role": "assistant", "content": "no"}]
    examples, only_answers = encode([sample(messages=turns)], tokenizer, 100)
    assert only_answers
    assert learnt(tokenizer, examples[0]) == "yo ho<end>no<end>"


def test_a_template_that_rewrites_the_past_makes_all_tokens_count():
    """Some templates drop earlier answers' thoughts: then a chat's beginning is no prefix of the chat."""
    tokenizer = tiny_tokenizer("{{ messages|length }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}")
    examples, only_answers = encode([sample(**CHAT)], tokenizer, 100)
    assert not only_answers
    assert examples[0].labels == examples[0].ids


def test_a_text_ends_with_the_end_token_and_counts_whole():
    tokenizer = tiny_tokenizer()
    examples, only_answers = encode([sample(text="abc")], tokenizer, 100)
    assert not only_answers
    assert learnt(tokenizer, examples[0]) == "abc<end>"


def test_a_chat_whose_answer_is_cut_off_is_refused_by_its_line():
    with pytest.raises(BadData, match=r"line 7: nothing to learn within its first 3 tokens"):
        encode([sample(7, **CHAT)], tiny_tokenizer(), 3)


def test_chats_need_a_chat_template():
    with pytest.raises(BadData, match="no chat template"):
        encode([sample(**CHAT)], tiny_tokenizer(None), 100)


# -- settings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"method": "magic"}, "unknown method 'magic': expected one of lora"),
        ({"method": "ia3", "rank": 4}, "ia3 has no rank"),
        ({"method": "prefix", "targets": ("q_proj",)}, "prefix has no targets"),
        ({"virtual_tokens": 4}, "lora has no virtual tokens"),
        ({"epochs": 1, "steps": 1}, "not both"),
        ({"rank": 0}, "at least 1"),
        ({"batch_size": 0}, "at least 1"),
        ({"epochs": 0}, "epochs is 0: expected a number above 0"),
        ({"epochs": float("nan")}, "above 0"),
        ({"max_length": 1}, "at least 2"),
        ({"lr": -1.0}, "positive"),
        ({"lr": float("nan")}, "positive"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, reason):
    with pytest.raises(BadSettings, match=reason):
        FinetuneConfig(**settings)


def test_targets_the_model_does_not_have_are_refused(model, tmp_path):
    config = FinetuneConfig(targets=("nowhere",))
    with pytest.raises(BadSettings, match="nowhere"):
        finetune(model, tiny_tokenizer(), chats(), tmp_path / "out", config)


def test_an_output_folder_that_is_a_file_is_refused(model, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(BadSettings, match="cannot write"):
        finetune(model, tiny_tokenizer(), chats(), tmp_path / "out", FinetuneConfig())


# -- training -------------------------------------------------------------------------------


def test_the_loss_falls_and_the_run_is_written_down(model, tmp_path):
    seen = []
    result = finetune(
        model, tiny_tokenizer(), chats(), tmp_path, FinetuneConfig(lr=1e-2, epochs=15, targets=("all-linear",)), seen.append
    )
    assert result.losses[-1] < 0.7 * result.losses[0]
    assert [step.number for step in seen] == list(range(1, 31))
    written = json.loads((tmp_path / "training.json").read_text())
    assert written["settings"]["method"] == "lora"
    assert len(written["losses"]) == 30
    assert written["loss_on"] == "the assistant's tokens"


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 1), (0.4, 1), (1.5, 3)])
def test_a_fraction_of_an_epoch_has_the_steps_that_a_server_would_do(model, tmp_path, epochs, steps):
    result = finetune(model, tiny_tokenizer(), chats(), tmp_path, FinetuneConfig(epochs=epochs))
    assert len(result.losses) == steps == Recipe(num_train_epochs=epochs, per_device_train_batch_size=4).total_steps(6)


def test_the_same_seed_gives_the_same_losses(executor, tmp_path):
    runs = []
    for _ in range(2):
        model = symbiosis.connect(executor)
        runs.append(finetune(model, tiny_tokenizer(), chats(), tmp_path, FinetuneConfig(steps=4, seed=3)).losses)
        model.symbiosis.close()
    assert runs[0] == runs[1]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_its_adapter_speaks_alike_in_plain_transformers(method, model, folder, tmp_path):
    tokenizer = tiny_tokenizer()
    config = FinetuneConfig(method=method, steps=3, lr=5e-2)
    tuned = finetune(model, tokenizer, chats(), tmp_path, config).model
    base = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("<user>hi<end><assistant>", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        untrained = base(ids).logits[:, -1]
        plain = with_adapter(base, tmp_path)
        assert (tuned(ids).logits[:, -1] - untrained).abs().max() > 1e-3
        torch.testing.assert_close(tuned(ids).logits, plain(ids).logits, atol=1e-5, rtol=1e-5)
    asked, sampling = [{"role": "user", "content": "hi"}], ChatSampling(max_new_tokens=12)
    assert LocalChat(tuned, tokenizer).reply(asked, sampling) == LocalChat(plain, tokenizer).reply(asked, sampling)


def test_a_folder_without_an_adapter_is_refused(model, tmp_path):
    with pytest.raises(BadAdapter, match=r"adapter_config\.json"):
        with_adapter(model, tmp_path)


def test_an_adapter_of_another_model_is_refused(model, tmp_path):
    finetune(model, tiny_tokenizer(), chats(), tmp_path, FinetuneConfig(steps=1))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "r": 3}))
    with pytest.raises(BadAdapter, match="does not fit"):
        with_adapter(model, tmp_path)
