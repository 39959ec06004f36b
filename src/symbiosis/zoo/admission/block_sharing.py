"""Blocks of a base in place of a fine-tune's own.

They are ranked by the paper's measure: both blocks have the same input, and the cosine is that of the probabilities of the
vocabulary which the final norm and the head read from their outputs. It ranks blocks; what a chain loses is measured on the
whole chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from transformers import PreTrainedModel

from symbiosis.zoo.partition import BlockKind, BlockPlace, name_in_model, partition

_SAMPLE_TOKENS = 256


class BlockSharing:
    """Of a fine-tune with its base, both as loaded models of one architecture."""

    def __init__(self, base: PreTrainedModel, own: PreTrainedModel) -> None:
        self._own = own
        self._base_weights = {name: each.detach() for name, each in base.named_parameters()}
        self._own_weights = {name: each.detach() for name, each in own.named_parameters()}
        self._blocks = partition(self._own_weights)
        self.different = tuple(
            place
            for place, names in self._blocks.items()
            if any(not torch.equal(self._own_weights[name], self._base_weights[name]) for name in names.values())
        )
        """The places of blocks that are not equal."""

    def weights(self, places: Iterable[BlockPlace]) -> dict[str, Tensor]:
        """Of the base's blocks at these places, by the names of the model's parameters."""
        return {name: self._base_weights[name] for place in places for name in self._blocks[place].values()}

    @torch.inference_mode()
    def cosines(self, windows_NT: Tensor) -> dict[BlockPlace, float]:
        """Of each block that is not equal, in the mean over some tokens, with the most similar first."""
        x_NT = windows_NT[: max(1, _SAMPLE_TOKENS // windows_NT.shape[1])][:, :_SAMPLE_TOKENS]
        lens = _Lens(self._own, self._blocks.get(BlockPlace(BlockKind.HEAD), {}))
        inputs, outputs, embedded = self._run(x_NT)
        found: dict[BlockPlace, float] = {}
        for place in self.different:
            theirs, paths = self.weights([place]), self._blocks[place]
            if place.kind is BlockKind.EMBEDDING:
                embedding = self._own.get_input_embeddings()
                path = next(name for name, each in self._own.named_modules() if each is embedding)
                mine, other = embedded, functional_call(embedding, _below(theirs, path), (x_NT,))
                found[place] = lens.cosine(mine, other)
            elif place.kind is BlockKind.HEAD:
                last = outputs[max(outputs)]
                found[place] = lens.cosine(last, last, theirs)
            else:
                own_name, full_name = next(iter(paths.items()))
                path = full_name.removesuffix(own_name.split(".*.", 1)[1]).rstrip(".")
                assert name_in_model(own_name, place) == full_name
                args, kwargs = inputs[place.layer]
                other = _hidden(functional_call(self._own.get_submodule(path), _below(theirs, path), args, kwargs))
                found[place] = lens.cosine(outputs[place.layer], other)
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    def _run(self, x_NT: Tensor) -> tuple[dict[int, Any], dict[int, Tensor], Tensor]:
        """The arguments and the outputs of all layers by number, and the output of the embedding."""
        inputs: dict[int, Any] = {}
        outputs: dict[int, Tensor] = {}
        embedded: list[Tensor] = []
        layers = {
            place.layer: full.removesuffix(own.split(".*.", 1)[1]).rstrip(".")
            for place, names in self._blocks.items()
            if place.kind in (BlockKind.ATTENTION, BlockKind.FFN)
            for own, full in names.items()
        }
        hooks = [self._own.get_input_embeddings().register_forward_hook(lambda module, args, out: embedded.append(out))]
        for number, path in layers.items():
            layer = self._own.get_submodule(path)

            def keep_input(module: nn.Module, args: Any, kwargs: Any, number: int = number) -> None:
                inputs[number] = (args, kwargs)

            def keep_output(module: nn.Module, args: Any, out: Any, number: int = number) -> None:
                outputs[number] = _hidden(out)

            hooks += [layer.register_forward_pre_hook(keep_input, with_kwargs=True), layer.register_forward_hook(keep_output)]
        try:
            self._own(input_ids=x_NT, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return inputs, outputs, embedded[0]


class _Lens:
    """What the final norm and the head of a model read from a hidden state."""

    def __init__(self, model: PreTrainedModel, head_names: Mapping[str, str]) -> None:
        self._head = model.get_output_embeddings()
        modules = dict(model.named_modules())
        self._head_path = next(path for path, module in modules.items() if module is self._head)
        paths = {name.rpartition(".")[0] for name in head_names.values()} - {self._head_path}
        self._norm_path = next((path for path in sorted(paths) if "norm" in path or "ln" in path), "")
        self._norm = modules[self._norm_path] if self._norm_path else nn.Identity()

    def _probabilities(self, hidden: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        normed = functional_call(self._norm, _below(weights, self._norm_path) if self._norm_path else {}, (hidden,))
        logits: Tensor = functional_call(self._head, _below(weights, self._head_path), (normed,))
        return logits.float().softmax(-1)

    def cosine(self, mine: Tensor, other: Tensor, weights: Mapping[str, Tensor] | None = None) -> float:
        """`weights`: of the head that reads the other one."""
        p, q = self._probabilities(mine, {}), self._probabilities(other, weights or {})
        return float(F.cosine_similarity(p, q, dim=-1).mean())


def _below(weights: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    return {name[len(path) + 1 :]: each for name, each in weights.items() if name.startswith(f"{path}.")}


def _hidden(out: Any) -> Tensor:
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found
