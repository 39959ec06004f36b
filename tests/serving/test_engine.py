"""Requests with every kind of adapter in shared batches: each matches plain PEFT alone."""

from __future__ import annotations

import copy
import re
import signal
from dataclasses import replace

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model

from symbiosis.errors import CannotServe, ContextTooLong, OutOfRange, UnknownAdapter
from symbiosis.serving.engine import Engine
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.scheduling.sequence import FinishReason, Sampling
from tests.parity.architectures import ARCHITECTURES

LLAMA = ARCHITECTURES[0]
BY_NAME = {a.name: a for a in ARCHITECTURES}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS = {
    "rank4": LoraConfig(r=4, lora_alpha=6, target_modules=ALL, init_lora_weights=False, task_type="CAUSAL_LM"),
    "rank16": LoraConfig(r=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"),
    "rslora": LoraConfig(r=7, target_modules=ALL, use_rslora=True, init_lora_weights=False, task_type="CAUSAL_LM"),
    "dora": LoraConfig(
        r=3, target_modules=["k_proj", "down_proj"], use_dora=True, init_lora_weights=False, task_type="CAUSAL_LM"
    ),
    "ia3": IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "head": LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False, task_type="CAUSAL_LM"
    ),
    "prefix": PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
    "prompt": PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """A plain model, PEFT models over copies of it, and the folders they were saved to."""
    base = LLAMA.model().eval()
    folder, models = tmp_path_factory.mktemp("adapters"), {}
    for number, (name, config) in enumerate(KINDS.items()):
        torch.manual_seed(number)
        model = get_peft_model(copy.deepcopy(base), copy.deepcopy(config)).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    noise = 0.4 * torch.randn_like(parameter)
                    parameter.copy_(parameter + noise if "magnitude" not in parameter_name else parameter * (1 + noise / 4))
        model.save_pretrained(folder / name)
        models[name] = model
    return base, models, folder


def greedy(model, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by whole forward num_steps, without any cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(("pages", "max_rows"), [(400, 2048), (60, 300)], ids=["many blocks", "few blocks"])
def test_a_mixed_batch_matches_peft_for_every_request(adapters, pages, max_rows):
    base, models, folder = adapters
    engine = Engine(copy.deepcopy(base), pages=pages, page_size=4, max_rows=max_rows)
    for name in models:
        engine.add_adapter(name, folder / name)
    names = [None, *models] * 2
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 90, (3 + 5 * (i % 7),), generator=generator).tolist() for i in range(len(names))]
    sampling = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
    completions = engine.generate(prompts, names, sampling)
    for name, prompt, completion in zip(names, prompts, completions, strict=True):
        assert completion.tokens == greedy(models[name] if name else base, prompt, 12), name
        assert completion.reason is FinishReason.LENGTH
    again = engine.generate(prompts, names, sampling)  # now with cached prefixes
    assert [completion.tokens for completion in again] == [completion.tokens for completion in completions]


@pytest.mark.parametrize("name", [a.name for a in ARCHITECTURES if a.name not in ("bert", "t5", "llama")])
def test_every_decoder_serves(name):
    base = BY_NAME[name].model().eval()
    prompts = [[5, 6, 7], list(range(1, 24)), [9]]
    sampling = Sampling(temperature=0.0, max_tokens=10, ignore_eos=True)
    completions = Engine(copy.deepcopy(base), pages=64, page_size=4).generate(prompts, sampling=sampling)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.tokens == greedy(base, prompt, 10)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_models_that_are_no_decoders_are_rejected_with_the_reason(name):
    with pytest.raises(CannotServe, match="cannot be served"):
        EngineCore(BY_NAME[name].model())


def test_seeds_reproduce_in_any_batch(adapters):
    base, _, folder = adapters
    engine = Engine(copy.deepcopy(base), pages=400, page_size=4)
    engine.add_adapter("rank4", folder / "rank4")
    sampling = Sampling(temperature=1.0, seed=7, max_tokens=16, ignore_eos=True)
    alone = engine.generate([[1, 2, 3]], ["rank4"], sampling)[0].tokens
    other = Sampling(temperature=1.0, seed=8, max_tokens=9, ignore_eos=True)
    batch = engine.generate([[4, 5], [1, 2, 3], [6] * 20], [None, "rank4", "rank4"], [other, sampling, other])
    assert batch[1].tokens == alone


def test_an_adapter_reloaded_under_its_name_is_the_new_one_and_an_unknown_one_an_error(adapters):
    base, models, folder = adapters
    engine = Engine(copy.deepcopy(base), pages=100, page_size=4)
    sampling = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
    for name in ("rank4", "rslora"):
        engine.add_adapter("mine", folder / name)
        assert engine.generate([[1, 2, 3]], ["mine"], sampling)[0].tokens == greedy(models[name], [1, 2, 3], 8)
    engine.remove_adapter("mine")
    with pytest.raises(UnknownAdapter, match="mine"):
        engine.generate([[1, 2, 3]], ["mine"], sampling)


def tiny_engine(adapters) -> Engine:
    base, _, folder = adapters
    engine = Engine(copy.deepcopy(base), pages=100, page_size=4)
    engine.add_adapter("mine", folder / "rank4")
    return engine


MISTAKES = {
    "one text": (("Hello",), OutOfRange, "prompts is 'Hello', expected a list of prompts"),
    "nothing": ((None,), OutOfRange, "prompts is None, expected a list of prompts"),
    "no prompt": (([[1, 2], 5],), OutOfRange, "a prompt is 5, expected a text, or a list of token ids"),
    "empty": (([[1, 2], []],), OutOfRange, "the prompt has no tokens, expected at least one"),
    "too long": (([[1, 2], [1] * 1000],), ContextTooLong, "1000"),
    "one name": (([[1, 2]], "mine"), OutOfRange, "adapters is 'mine', expected a list with one for each prompt, 1 here"),
    "too few": (([[1, 2], [3]], ["mine"]), OutOfRange, "expected a list with one for each prompt, 2 here"),
    "unknown": (([[1, 2], [3]], ["mine", "yours"]), UnknownAdapter, "there is no adapter 'yours': loaded adapters are mine"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_list_with_a_mistake_leaves_nothing_behind(adapters, kind):
    arguments, error, message = MISTAKES[kind]
    engine, sampling = tiny_engine(adapters), Sampling(temperature=0.0, max_tokens=4, logprobs=1, ignore_eos=True)
    expected = engine.generate([[7, 8]], ["mine"], sampling)
    with pytest.raises(error, match=re.escape(message)):
        engine.generate(*arguments, sampling=sampling)
    assert engine._core.is_idle()
    assert engine.generate([[7, 8]], ["mine"], sampling) == expected


@pytest.fixture
def interruptible():
    """Processes in the background inherit an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_call_and_not_the_engine(adapters):
    engine, sampling = tiny_engine(adapters), Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
    expected = engine.generate([[7, 8]], ["mine"], sampling)
    step = engine._core.step

    def interrupted() -> object:
        if engine._core.num_steps == num_steps + 1:
            signal.raise_signal(signal.SIGINT)
        return step()

    for _ in range(3):
        num_steps, engine._core.step = engine._core.num_steps, interrupted
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1, 2, 3], [4]], ["mine", None], replace(sampling, max_tokens=50))
        engine._core.step = step
        assert engine._core.num_steps == num_steps + 2
        assert engine._core.is_idle()
        engine._core.scheduler.check_integrity()
        assert engine.generate([[7, 8]], ["mine"], sampling) == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
