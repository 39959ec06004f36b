"""Surrogates of blocks: smaller blocks that compute nearly the same. Made by pruning and distillation, kept in a zoo."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from symbiosis.models.loading import build_meta_model, shared_copy
from symbiosis.zoo.checkpoint import CONFIG
from symbiosis.zoo.errors import BadZoo, NoSurrogate
from symbiosis.zoo.manifest import StoredSurrogate
from symbiosis.zoo.surrogates.activations import output_sensitivity, record
from symbiosis.zoo.surrogates.block_modules import Piece, module_path, replace_module
from symbiosis.zoo.surrogates.chain_comparison import ChainDifference, compare_chains, output_cosine, time_shares
from symbiosis.zoo.surrogates.distillation import Training, parts_of, prune, train
from symbiosis.zoo.surrogates.pruning import smaller_copy
from symbiosis.zoo.zoo import Zoo

# S = sequences, T = tokens of each
Report = Callable[[str, int, int], None]
SEQUENCE_TOKENS = 256
_BATCH = 8
_SENSITIVITY_SEQUENCES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SurrogateReport:
    """What a surrogate was made with, what it costs and what it saves."""

    keep: float
    parameters: float
    """Its share of the block's."""
    tokens: int
    """Of the text that it was made with."""
    pruned: ChainDifference
    """After pruning and the closed form."""
    trained: ChainDifference
    cosine: float
    """Of its outputs with the block's, on the held-out text."""
    errors: list[float]
    """Of each tenth of the training."""
    times: dict[int, dict[str, float]]
    """By rows (`time_shares`)."""

    @property
    def figures(self) -> dict[str, float]:
        """Those that a zoo keeps."""
        whole = {"keep": self.keep, "parameters": self.parameters, "tokens": self.tokens, "cosine": self.cosine}
        chain = {"top1": self.trained.top1, "loss_change": self.trained.loss - self.trained.true_loss}
        held_out = {"chain_cosine": self.trained.cosine, "held_out_tokens": self.trained.tokens}
        return {**whole, **chain, **held_out, **{f"time_{rows}": each["ratio"] for rows, each in self.times.items()}}


@dataclass(frozen=True, slots=True)
class MadeSurrogate:
    module: nn.Module
    report: SurrogateReport


def make_surrogates(
    model: PreTrainedModel,
    pieces: Sequence[Piece],
    ids_ST: Tensor,
    held_out_ST: Tensor,
    *,
    keep: float = 0.5,
    training: Training | None = None,
    report: Report = lambda what, done, total: None,
) -> dict[Piece, MadeSurrogate]:
    """A surrogate of each of these pieces of one layer. The model is as it was. Raises `NoSurrogate`."""
    check_keep(keep)
    assert len({piece.layer for piece in pieces}) == 1, "pieces of one layer"
    training, trues = training or Training(), {piece: model.get_submodule(module_path(model, piece)) for piece in pieces}
    parts = {part: None for piece in pieces for part in parts_of(piece)}
    known = record(model, list(parts), ids_ST, progress=lambda done, total: report("recording", done, total))
    report("measuring what matters", 0, 1)
    chosen = ids_ST[:: max(1, len(ids_ST) // _SENSITIVITY_SEQUENCES)][:_SENSITIVITY_SEQUENCES]
    sensitivity = output_sensitivity(model, pieces[0].layer, chosen)
    pruned, small, errors = dict[Piece, nn.Module](), dict[Piece, nn.Module](), dict[Piece, list[float]]()
    for piece, true in trues.items():
        report(f"pruning {piece}", 0, 1)
        pruned[piece] = prune(piece, true, known, keep)
        small[piece] = smaller_copy(pruned[piece], {name: tensor.detach() for name, tensor in pruned[piece].named_parameters()})
        errors[piece] = train(piece, small[piece], true, known[piece], training, sensitivity, report)
    candidates = [*pruned.items(), *small.items()]
    found = compare_chains(model, candidates, held_out_ST, progress=lambda done, total: report("comparing", done, total))
    count = min(len(held_out_ST), _BATCH)
    held_out = record(model, pieces, held_out_ST[:count], batch=count)
    made = dict[Piece, MadeSurrogate]()
    for number, (piece, true) in enumerate(trues.items()):
        sizes = [sum(p.numel() for p in module.parameters()) for module in (small[piece], true)]
        made[piece] = MadeSurrogate(small[piece], SurrogateReport(
            keep=keep, parameters=sizes[0] / sizes[1], tokens=ids_ST.numel(), pruned=found[number],
            trained=found[number + len(trues)], cosine=output_cosine(piece, small[piece], held_out[piece]),
            errors=errors[piece], times=time_shares(model, piece, true, small[piece]),
        ))  # fmt: skip
    return made


def check_keep(keep: float) -> None:
    """Raises `NoSurrogate`."""
    if not 0.05 <= keep <= 0.95:
        raise NoSurrogate(f"keep={keep:g}: expected a share of the block from 0.05 to 0.95")


def surrogate_chain(model: PreTrainedModel, piece: Piece, surrogate: nn.Module) -> PreTrainedModel:
    """A model that shares all with this one but the piece: its assistant, as transformers has it."""
    made = shared_copy(model)
    replace_module(made, module_path(made, piece), surrogate)
    return made


def tokenize(tokenizer: Any, text: str, tokens: int, *, length: int = SEQUENCE_TOKENS) -> tuple[Tensor, Tensor]:
    """Sequences of a text to make a surrogate with, and to measure it with: one in eight, [S, T] each. Raises `NoSurrogate`."""
    ids = torch.tensor(tokenizer(text[: 16 * tokens], add_special_tokens=False)["input_ids"])[:tokens]
    count = len(ids) // length
    if count < _BATCH + 2:
        raise NoSurrogate(f"the text has {len(ids)} tokens: expected at least {(_BATCH + 2) * length}")
    sequences, is_held_out = ids[: count * length].view(count, length), torch.arange(count) % 8 == 7
    used = sequences[~is_held_out]
    return used[: len(used) // _BATCH * _BATCH], sequences[is_held_out]


def load_tokenizer(zoo: Zoo, name: str) -> Any:
    """Of a model of a zoo. Raises `NoSurrogate` if it has none."""
    with tempfile.TemporaryDirectory() as folder:
        for file, stored in zoo.manifest(name).files.items():
            (Path(folder) / file).write_bytes(zoo.read(stored))
        try:
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError, KeyError):
            raise NoSurrogate(f"{name} has no tokenizer in this zoo: expected one, to read the text with") from None


def store_surrogate(zoo: Zoo, name: str, piece: Piece, made: MadeSurrogate) -> StoredSurrogate:
    """Keep a surrogate with a model of a zoo, in the place of an earlier one of that piece."""
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in made.module.named_parameters()}
    return zoo.add_surrogate(name, str(piece), safetensors.torch.save(tensors), piece.places, made.report.figures)


def load_surrogate(zoo: Zoo, name: str, piece: Piece | str) -> nn.Module:
    """The surrogate of a piece of a model. Raises `NoSurrogate`, `BadZoo`."""
    piece = Piece.parse(piece) if isinstance(piece, str) else piece
    manifest = zoo.manifest(name)
    stored = manifest.surrogates.get(str(piece))
    if stored is None:
        known = ", ".join(manifest.surrogates) or "none"
        raise NoSurrogate(f"{name} has no surrogate of {piece} (it has {known}): `symbiosis zoo surrogate` makes one")
    config = AutoConfig.for_model(**json.loads(zoo.read(manifest.files[CONFIG])))
    config._attn_implementation = config._attn_implementation or "sdpa"
    skeleton = build_meta_model(config)
    try:
        return smaller_copy(skeleton.get_submodule(module_path(skeleton, piece)), zoo.block_tensors(stored.object))
    except (KeyError, ValueError, RuntimeError, safetensors.SafetensorError):
        raise BadZoo(f"the surrogate of {piece} of {name} does not fit the model: was the zoo changed?") from None
