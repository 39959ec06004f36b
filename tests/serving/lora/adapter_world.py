"""Adapters with known completions, and a CPU stand-in for the pools of a GPU."""

from __future__ import annotations

import copy
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model

from symbiosis.serving.lora.device_pool import CpuPool
from symbiosis.serving.lora.host_pool import HostPool
from symbiosis.serving.lora.packed_adapter import PackedAdapter
from symbiosis.serving.scheduling.sequence import Sampling

NUM_TOKENS = 6
SAMPLING = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5], [40], [3, 1, 4, 1, 5, 9, 2, 6]]


def _config(number: int):
    task = {"task_type": "CAUSAL_LM"}
    kinds = [
        LoraConfig(r=4, target_modules=ALL, init_lora_weights=False, **task),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **task),
        LoraConfig(r=3, target_modules=["k_proj", "down_proj"], use_dora=True, init_lora_weights=False, **task),
        IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], **task),
        PrefixTuningConfig(num_virtual_tokens=3, **task),
    ]
    return kinds[number % len(kinds)]


@dataclass
class World:
    """Folders of adapters, and PEFT's completions with each: `completions[name][prompt number]`."""

    base: object
    folder: Path
    completions: dict[str, list[list[int]]] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        return self.folder / name

    def copied(self, name: str, to: Path) -> Path:
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.path(name), to)
        return to


def make_world(base, folder: Path, count: int, *, same_kind: bool = False) -> World:
    """`count` adapters "a0", "a1", … whose completions all differ."""
    world = World(base, folder)
    for number in range(count):
        torch.manual_seed(100 + number)
        model = get_peft_model(copy.deepcopy(base), _config(0 if same_kind else number)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    noise = 0.5 * torch.randn_like(parameter)
                    parameter.copy_(parameter * (1 + noise / 4) if "magnitude" in name else parameter + noise)
        model.save_pretrained(folder / f"a{number}")
        world.completions[f"a{number}"] = [_greedy(model, prompt) for prompt in PROMPTS]
    world.completions["base"] = [_greedy(base, prompt) for prompt in PROMPTS]
    assert len({str(each) for each in world.completions.values()}) == count + 1
    return world


def _greedy(model, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


class CopyingPool(CpuPool):
    """As a GPU's pool: adapters are copied into one range of memory and overwrite what it held."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._memory = torch.empty(size, dtype=torch.uint8)
        self.gate = threading.Event()
        """Copies wait for this event."""
        self.gate.set()

    def adopt(self, packed: PackedAdapter) -> PackedAdapter | None:
        return None

    def copy_in(self, packed: PackedAdapter, offset: int, fence: object) -> PackedAdapter:
        assert self.gate.wait(60)
        target = self._memory[offset : offset + packed.nbytes]
        target.copy_(packed.memory)
        return packed.rebase(target)


def use_pools(monkeypatch, *, copying: bool) -> None:
    """With `copying`, engines use a host pool and a device pool, as with a GPU; else a device pool only."""
    if copying:
        monkeypatch.setattr(
            "symbiosis.serving.lora.adapter_cache.make_pools",
            lambda device, config: (
                HostPool(torch.empty(config.host_bytes, dtype=torch.uint8)),
                CopyingPool(config.device_bytes),
            ),
        )
