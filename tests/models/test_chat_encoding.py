"""Special tokens in messages stay text; other chats have the tokens of the template's text as a whole."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer

from symbiosis.models.chat_encoding import ChatEncoder, RenderedChat
from symbiosis.models.default_model import default_model_folder
from tests.tiny_chat import tiny_tokenizer

PIECES = (
    *("<", "|", "im_start", "im_end", "|>", "<|", "im_", "end|>", "<end", "user>", "hello", " world", "don't", "123"),
    *(" ", "  ", "\n", "\n\n", "\t", "\u00a0", "\u200b", "é", "Ω", "日本語", "🙂", "\u0301", "\ue000", "a" * 40),
)


def real_tokenizer():
    return AutoTokenizer.from_pretrained(default_model_folder())


def plain(tokenizer, messages) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def rename_all(encoder: ChatEncoder, text: str) -> RenderedChat:
    """The text with renamed special tokens although no message has one."""
    return RenderedChat(text, encoder._added.sub(encoder._rename, text))


def random_text(rng: random.Random, pieces=PIECES) -> str:
    return "".join(rng.choice(pieces) for _ in range(rng.randrange(12)))


@pytest.mark.real
def test_the_tokens_of_ordinary_messages_do_not_change(real_cache):
    tokenizer, rng = real_tokenizer(), random.Random(7)
    encoder = ChatEncoder(tokenizer)
    renamed = 0
    for _ in range(1500):
        messages = [
            {"role": role, "content": random_text(rng)} for role in ("user", "assistant", "user")[: rng.randrange(1, 4)]
        ]
        if any(encoder._special.search(message["content"]) for message in messages):
            continue
        chat = encoder.render(messages, add_generation_prompt=True)
        renamed += chat.renamed is not None
        expected = plain(tokenizer, messages)
        assert encoder.tokenize(chat) == encoder.tokenize(rename_all(encoder, chat.text)) == expected, messages
    assert renamed > 50  # a part of a special token at the end of a message


@pytest.mark.real
def test_a_message_cannot_add_special_tokens(real_cache):
    tokenizer, rng = real_tokenizer(), random.Random(8)
    encoder = ChatEncoder(tokenizer)
    special = [token.content for token in tokenizer.added_tokens_decoder.values()]
    harmless = [{"role": "user", "content": "x"}]
    expected = [id for id in encoder.encode(harmless, add_generation_prompt=True) if id < len(special)]
    for _ in range(500):
        messages = [{"role": "user", "content": random_text(rng, (*PIECES, *special))}]
        ids = encoder.encode(messages, add_generation_prompt=True)
        assert [id for id in ids if id < len(special)] == expected, messages
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_a_special_token_is_neither_taken_from_a_message_nor_completed_by_the_template():
    cases = {
        "{{ TEXT }}": ["<end>", "a<end>b<user>", " <end> ", "<<end>>"],
        "<en{{ TEXT }}": ["d>", "d> x"],
        "{{ TEXT }}nd>": ["<e", "x <e"],
        "<en{{ TEXT | trim }}x": ["  d>", "d>  "],
        "{{ TEXT | trim }}nd>": ["<e \n"],
    }
    for template, texts in cases.items():
        body = template.replace("TEXT", "message.content")
        tokenizer = tiny_tokenizer(f"{{% for message in messages %}}<user>{body}{{% endfor %}}")
        encoder = ChatEncoder(tokenizer)
        for text in texts:
            ids = encoder.encode([{"role": "user", "content": text}])
            names = tokenizer.convert_ids_to_tokens(ids)
            assert [name for name in names if len(name) > 1] == ["<user>"], (template, text)
            assert "".join(names) == tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)


def test_every_field_of_a_message_is_text():
    tokenizer = tiny_tokenizer("{% for message in messages %}<user>{{ message.name }}: {{ message.content }}{% endfor %}")
    ids = ChatEncoder(tokenizer).encode([{"role": "user", "name": "<system>", "content": "x"}])
    assert "".join(tokenizer.convert_ids_to_tokens(ids)) == "<user><system>: x"
    assert len(ids) == 1 + len("<system>: x")
