"""What the first shard tells the others: batches and adapters."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from symbiosis.adapters.parts import Adapter, Ia3Part, LoraPart, PrefixPart, PromptPart, ReplacedPart, TrainableTokensPart
from symbiosis.distributed.tensor_codec import decode_tensors, encode_tensors
from symbiosis.serving.model.model_input import InputChunk

_KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (LoraPart, Ia3Part, ReplacedPart, TrainableTokensPart, PrefixPart, PromptPart)
}


def encode_batch(chunks: Sequence[InputChunk], adapters: Mapping[str, int], block_size: int) -> bytes:
    """`adapters` are numbers by hash."""
    numbers = array("q", [len(chunks)])
    for chunk in chunks:
        blocks = chunk.block_table[: -(-(chunk.start + len(chunk.ids)) // block_size)]
        adapter = adapters[chunk.adapter] if chunk.adapter else -1
        numbers.extend((chunk.start, len(chunk.ids), len(blocks), adapter, int(chunk.samples)))
        numbers.extend(chunk.ids)
        numbers.extend(blocks)
    return numbers.tobytes()


def decode_batch(content: bytes, adapters: Mapping[int, str]) -> list[InputChunk]:
    numbers = array("q", content).tolist()
    chunks: list[InputChunk] = []
    at = 1
    for _ in range(numbers[0]):
        start, count, blocks, adapter, samples = numbers[at : at + 5]
        at += 5
        ids, block_table = numbers[at : at + count], numbers[at + count : at + count + blocks]
        at += count + blocks
        chunks.append(InputChunk(start, ids, block_table, "" if adapter < 0 else adapters[adapter], bool(samples)))
    return chunks


def encode_numbers(*numbers: int) -> bytes:
    return array("q", numbers).tobytes()


def decode_numbers(content: bytes) -> list[int]:
    return array("q", content).tolist()


def encode_adapter(adapter: Adapter, norms: Mapping[str, Tensor]) -> bytes:
    """An adapter, and DoRA's norms by path."""
    tensors: dict[str, Tensor] = {f"norm/{path}": norm for path, norm in norms.items()}

    def describe(part: Any) -> dict[str, Any]:
        values: dict[str, Any] = {"kind": type(part).__name__}
        for name in (each.name for each in fields(part)):
            value = getattr(part, name)
            if isinstance(value, Tensor):
                tensors[str(len(tensors))] = value
                value = {"tensor": str(len(tensors) - 1)}
            values[name] = value
        return values

    about = {
        "hash": adapter.hash,
        "method": adapter.method,
        "parts": {path: [describe(part) for part in found] for path, found in adapter.parts.items()},
        "virtual": [describe(part) for part in (adapter.prefix, adapter.prompt) if part is not None],
    }
    return encode_tensors(about, tensors)


def decode_adapter(content: bytes) -> tuple[Adapter, dict[str, Tensor]]:
    about, tensors = decode_tensors(content)

    def build(described: dict[str, Any]) -> Any:
        kind = _KINDS[described.pop("kind")]
        values = {name: tensors[v["tensor"]] if isinstance(v, dict) else v for name, v in described.items()}
        return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})

    virtual = [build(each) for each in about["virtual"]]
    adapter = Adapter(
        hash=about["hash"],
        method=about["method"],
        parts={path: tuple(build(part) for part in found) for path, found in about["parts"].items()},
        prefix=next((each for each in virtual if isinstance(each, PrefixPart)), None),
        prompt=next((each for each in virtual if isinstance(each, PromptPart)), None),
    )
    return adapter, {name.removeprefix("norm/"): t for name, t in tensors.items() if name.startswith("norm/")}
