"""What a surrogate costs the whole chain on held-out text, and what it saves at its own place."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.zoo.surrogates.activations import Activations, added
from symbiosis.zoo.surrogates.block_modules import Piece, PieceKind, decoder_layers, module_path, replace_module

# S = sequences, T = tokens of each, V = vocabulary
ROWS = (1, 16, 128)
_FFN_NORMS, _ATTENTION_NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2"), ("input_layernorm", "ln_1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainDifference:
    """Of a chain with a surrogate, from the true chain."""

    tokens: int
    top1: float
    """Share of the positions at which both have the same next token."""
    cosine: float
    """Mean, of the probabilities of the next token."""
    loss: float
    true_loss: float


@torch.no_grad()
def compare_chains(
    model: nn.Module,
    surrogates: Sequence[tuple[Piece, nn.Module]],
    ids_ST: Tensor,
    *,
    batch: int = 2,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ChainDifference]:
    """Each surrogate alone in the place of its piece, on text that it was not made with."""
    paths, sums = [module_path(model, piece) for piece, _ in surrogates], torch.zeros(len(surrogates), 3, dtype=torch.double)
    true_loss = 0.0
    for start in range(0, len(ids_ST), batch):
        ids = ids_ST[start : start + batch]
        true = _logits(model, ids)
        shares, top = true.softmax(-1), true.argmax(-1)
        true_loss += _loss(true, ids)
        for number, (_, surrogate) in enumerate(surrogates):
            before = replace_module(model, paths[number], surrogate)
            try:
                logits = _logits(model, ids)
            finally:
                replace_module(model, paths[number], before)
            same = float((logits.argmax(-1) == top).double().sum())
            loss = _loss(logits, ids)
            cosine = float(torch.cosine_similarity(logits.softmax(-1), shares, dim=-1).double().sum())
            sums[number] += torch.tensor([same, cosine, loss], dtype=torch.double)
        progress(min(start + batch, len(ids_ST)), len(ids_ST))
    count, predicted = ids_ST.numel(), len(ids_ST) * (ids_ST.shape[1] - 1)
    return [
        ChainDifference(
            tokens=count, top1=same / count, cosine=cosine / count, loss=loss / predicted, true_loss=true_loss / predicted
        )
        for same, cosine, loss in sums.tolist()
    ]


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def _loss(logits: Tensor, ids: Tensor) -> float:
    return float(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))


@torch.no_grad()
def output_cosine(piece: Piece, surrogate: nn.Module, known: Activations) -> float:
    """Mean cosine of what the surrogate adds to the residual stream with what the true block adds."""
    values = []
    for start in range(0, len(known.inputs_STD), known.batch):
        part = slice(start, start + known.batch)
        found = added(piece, surrogate, known.inputs_STD[part], known.arguments)
        values.append(torch.cosine_similarity(found, known.outputs_STD[part], dim=-1).flatten())
    return float(torch.cat(values).mean())


@torch.no_grad()
def time_shares(
    model: nn.Module, piece: Piece, true: nn.Module, surrogate: nn.Module, *, rows: Sequence[int] = ROWS, seconds: float = 0.5
) -> dict[int, dict[str, float]]:
    """By rows: median milliseconds of the true block and of its surrogate, each with the norm of its input, and their ratio.

    Both run in turns. The rows are those of one prompt. `seconds` is about the time for each number of rows.
    """
    layer, norm = decoder_layers(model)[piece.layer], None
    if piece.kind is not PieceKind.LAYER:
        names = _FFN_NORMS if piece.kind is PieceKind.FFN else _ATTENTION_NORMS
        norm = next((getattr(layer, name) for name in names if hasattr(layer, name)), None)
    first = next(true.parameters())
    found = dict[int, dict[str, float]]()
    for count in rows:
        x = torch.randn(1, count, _width(model), dtype=first.dtype, device=first.device)
        arguments = _arguments(model, piece, x)
        runs: dict[str, list[float]] = {"true": [], "surrogate": []}
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or len(runs["true"]) < 5:
            for name, module in (("true", true), ("surrogate", surrogate)):
                started = time.perf_counter()
                added(piece, module, x if norm is None else norm(x), arguments)
                if x.is_cuda:
                    torch.cuda.synchronize()
                runs[name].append(time.perf_counter() - started)
        # the first calls of a shape prepare what later ones use
        pairs = list(zip(runs["true"], runs["surrogate"], strict=True))[2:]
        found[count] = {
            "true_ms": 1e3 * statistics.median(t for t, _ in pairs),
            "surrogate_ms": 1e3 * statistics.median(s for _, s in pairs),
            "ratio": statistics.median(s / t for t, s in pairs),
        }
    return found


def _width(model: Any) -> int:
    return int(model.config.get_text_config(decoder=True).hidden_size)


def _arguments(model: nn.Module, piece: Piece, x: Tensor) -> dict[str, Any]:
    """What a layer is called with for these rows, without a cache."""
    if piece.kind is PieceKind.FFN:
        return {}
    positions = torch.arange(x.shape[1], device=x.device)[None]
    rotary = next((module for name, module in model.named_modules() if name.endswith("rotary_emb")), None)
    embeddings = {} if rotary is None else {"position_embeddings": rotary(x, position_ids=positions)}
    return {"attention_mask": None, "position_ids": positions, **embeddings}
