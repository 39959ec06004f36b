"""The emitted text concatenates to the tokenizer's text of all tokens at once."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from symbiosis.errors import OutOfRange
from symbiosis.serving.byte_level import ByteLevelDetokenizer, byte_table
from symbiosis.serving.detokenizer import Detokenizer, StopStrings, TextStream
from tests.tiny_chat import tiny_tokenizer

CORPUS = [
    "Hello, world! How are you?",
    "naïve café, señor",
    "你好，世界",
    "👍🏽 👩‍👩‍👧 emoji",
    "  spaces   and\n\nlines\t",
    "don 't . do n't",
] * 3
SPECIAL = ["<s>", "</s>", "<|end|>"]


def finished(tokenizer):
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    return made


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL)
    )
    return finished(tokenizer)


def sentencepiece_with_bytes():
    """As in Llama 2 and Mistral."""
    pieces = [
        *SPECIAL,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁▁",
        "▁Hello",
        "▁world",
        "lo",
        "你",
        "▁a",
        "b",
        "!",
        "\n",
    ]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<s>", fuse_unk=True))
    fuse = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(fuse)
    return finished(tokenizer)


def unigram():
    """As in T5 and XLM-R."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="<s>"))
    return finished(tokenizer)


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=150, special_tokens=SPECIAL))
    made = finished(tokenizer)
    made.add_tokens([AddedToken("whole")])
    return made


TOKENIZERS = {
    make.__name__: make() for make in (byte_level, sentencepiece_with_bytes, unigram, word_piece, tiny_tokenizer)
}  # fmt: skip


_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
LETTERS = {byte: chr(byte) for byte in _PLAIN}
LETTERS |= {byte: chr(256 + n) for n, byte in enumerate(byte for byte in range(256) if byte not in _PLAIN)}
"""GPT-2's letter for each byte."""


def whole(tokenizer, ids, skip=True):
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def streamed(tokenizer, ids, skip=True):
    stream = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(stream.push(token) for token in ids), stream.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", CORPUS[:6])
def test_text_survives_encoding_and_decoding(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer(text, add_special_tokens=False).input_ids * 5
    assert "".join(streamed(tokenizer, ids)) == whole(tokenizer, ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32), skip=st.booleans(), length=st.integers(0, 120))
def test_arbitrary_tokens_decode_as_at_once(name, seed, skip, length):
    tokenizer, rng = TOKENIZERS[name], random.Random(seed)
    size = len(tokenizer)
    few = [rng.randrange(size) for _ in range(4)] + list(range(6))
    ids = [rng.choice(few) if rng.random() < 0.7 else rng.randrange(size) for _ in range(length)]
    assert "".join(streamed(tokenizer, ids, skip)) == whole(tokenizer, ids, skip)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_with_bytes"])
@settings(max_examples=100, deadline=None)
@given(data=st.lists(st.one_of(st.binary(max_size=40), st.text(max_size=8).map(str.encode), st.just(b"\x80" * 90)), max_size=4))
def test_arbitrary_bytes_decode_as_at_once(name, data):
    tokenizer = TOKENIZERS[name]
    if name == "byte_level":
        ids = [tokenizer.convert_tokens_to_ids(LETTERS[byte]) for chunk in data for byte in chunk]
    else:
        ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for chunk in data for byte in chunk]
    assert "".join(streamed(tokenizer, ids)) == whole(tokenizer, ids)


def test_no_delta_holds_an_incomplete_character():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer("a🦀🧪b你ß").input_ids
    assert len(ids) > 6
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == "a🦀🧪b你ß"
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces[:-1]


def test_text_is_emitted_as_soon_as_it_is_certain():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer("Hello, world!").input_ids
    pieces = streamed(tokenizer, ids)
    assert pieces[-1] == ""
    assert all(pieces[:-1])


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_with_bytes"])
def test_a_window_is_decoded_and_not_everything(name, monkeypatch):
    tokenizer, decoded = TOKENIZERS[name], []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: decoded.append(len(ids)) or decode(ids, **options))
    for ids in ([tokenizer.convert_tokens_to_ids("b")] * 3000, [10] * 3000):
        stream = Detokenizer(tokenizer)
        decoded.clear()
        for token in ids:
            stream.push(token)
        stream.flush()
        assert 0 < sum(decoded) < 50 * len(ids)


class TestStopStrings:
    def parts(self, text, stops, cuts, **options):
        watch = StopStrings(stops, **options)
        edges = [0, *sorted(cuts), len(text)]
        pieces = [watch.push(text[start:end]) for start, end in pairwise(edges)]
        return "".join(pieces) + watch.flush(), watch.stopped

    def test_text_ends_before_the_stop_string(self):
        assert self.parts("one END two", ["END"], [5, 6]) == ("one ", "END")
        assert self.parts("one END two", ["END"], [5, 6], include=True) == ("one END", "END")

    def test_only_a_possible_beginning_is_held_back(self):
        watch = StopStrings(["STOP", "aab"])
        assert watch.push("xST") == "x"
        assert watch.push("Sa") == "STS"
        assert watch.push("a") == ""
        assert watch.push("a") == "a"
        assert watch.push("c") == "aac"
        assert watch.flush() == ""
        assert watch.push("ST") == ""
        assert watch.flush() == "ST"

    def test_nothing_is_emitted_after_the_stop_string(self):
        watch = StopStrings(["."])
        assert watch.push("a.b") == "a"
        assert watch.push("c") == watch.flush() == ""

    def test_the_first_to_be_complete_counts_and_of_these_the_longest(self):
        assert self.parts("abcd", ["abcd", "bc"], []) == ("a", "bc")
        assert self.parts("abcd", ["abc", "bc"], []) == ("", "abc")

    @given(
        st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.lists(st.integers(0, 30))
    )
    def test_the_split_of_the_text_does_not_matter(self, text, stops, cuts):
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
        expected = text[: min(ends)[0] + min(ends)[1]] if ends else text
        assert self.parts(text, stops, [min(cut, len(text)) for cut in cuts])[0] == expected

    @pytest.mark.parametrize("stops", [[""], ["x" * 1025], ["a"] * 17, [3]])
    def test_stop_strings_have_limits(self, stops):
        with pytest.raises(OutOfRange, match="stop"):
            StopStrings(stops)


class TestByteLevel:
    """Against the reference, on text and on random bytes."""

    @pytest.fixture(scope="class")
    def tokenizer(self):
        return byte_level()

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, 340), max_size=60), st.booleans())
    def test_same_text_as_the_tokenizer(self, tokenizer, tokens, skip):
        stream = ByteLevelDetokenizer(byte_table(tokenizer), skip_special_tokens=skip)
        text = "".join(map(stream.push, tokens)) + stream.flush()
        assert text == tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)

    @settings(max_examples=100, deadline=None)
    @given(st.text(max_size=40))
    def test_same_text_at_each_token_as_the_reference(self, tokenizer, text):
        fast, reference = ByteLevelDetokenizer(byte_table(tokenizer)), Detokenizer(tokenizer)
        for token in tokenizer(text)["input_ids"]:
            assert fast.push(token) == reference.push(token)
        assert fast.flush() == reference.flush()

    @pytest.mark.parametrize("make", [sentencepiece_with_bytes, unigram, word_piece])
    def test_other_tokenizers_have_no_table(self, make):
        assert byte_table(make()) is None

    def test_no_tokenizer_has_no_table(self):
        assert byte_table(None) is None


class TestTextStream:
    def test_a_stop_string_across_tokens_is_found(self):
        tokenizer = TOKENIZERS["byte_level"]
        ids = tokenizer("Hello, world! How are you?").input_ids
        stream = TextStream(tokenizer, ["ld! H"])
        pieces = [stream.push(token) for token in ids]
        assert "".join(pieces) + stream.finish() == "Hello, wor"
        assert stream.stopped == "ld! H"

    def test_without_a_stop_string_all_text_is_emitted(self):
        tokenizer = TOKENIZERS["byte_level"]
        ids = tokenizer("Hello, wor").input_ids
        stream = TextStream(tokenizer, ["world"])
        assert "".join(stream.push(token) for token in ids) + stream.finish() == "Hello, wor"
        assert stream.stopped is None

    def test_special_tokens_are_skipped_unless_requested(self):
        tokenizer = TOKENIZERS["byte_level"]
        ids = [*tokenizer("Hello").input_ids, tokenizer.eos_token_id]
        for skip, text in ((True, "Hello"), (False, "Hello</s>")):
            stream = TextStream(tokenizer, skip_special_tokens=skip)
            assert "".join(stream.push(token) for token in ids) + stream.finish() == text


@pytest.mark.real
def test_detokenizer_of_the_default_model(real_cache):
    from transformers import AutoTokenizer

    from symbiosis.models.default_model import default_model_folder

    tokenizer = AutoTokenizer.from_pretrained(default_model_folder())
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(len(tokenizer)) for _ in range(100)]
        assert "".join(streamed(tokenizer, ids)) == whole(tokenizer, ids)
