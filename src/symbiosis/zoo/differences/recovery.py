"""Recovery of a difference: its factors are trained so that the chain predicts what the fine-tune predicts (distillation).

Full fine-tunes by AdamW change all directions of a weight a little. The best few directions keep too little of such a model;
trained for some steps, as many keep nearly all.

N, B, T = windows, windows of a step, tokens of a window; O, I = output and input width, r = rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from transformers import PreTrainedModel

from symbiosis.zoo.differences.difference import Difference, DifferenceFinder


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    steps: int = 32
    tokens_per_step: int = 512
    learning_rate: float = 5e-4
    """Of Adam; it falls to zero linearly."""
    window: int = 128


def recover(
    finder: DifferenceFinder,
    difference: Difference,
    windows_NT: Tensor,
    config: RecoveryConfig = RecoveryConfig(),  # noqa: B008 - frozen
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Difference:
    """The difference with trained factors of its linear layers. The embedding stays as it is."""
    window = min(config.window, windows_NT.shape[1])
    pieces_NT = windows_NT[:, : windows_NT.shape[1] // window * window].reshape(-1, window)
    batch = max(1, config.tokens_per_step // window)
    generator = torch.Generator().manual_seed(0)
    student = _Student(finder, difference)
    optimizer = torch.optim.Adam(student.trained, lr=config.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * (1 - step / config.steps))
    with student:
        order = torch.randperm(len(pieces_NT), generator=generator)
        for step in range(config.steps):
            x_BT = pieces_NT[order[(torch.arange(batch) + step * batch) % len(order)]]
            with torch.no_grad():
                log_p = finder.own(input_ids=x_BT, use_cache=False).logits.float().log_softmax(-1)
            log_q = student.logits(x_BT).float().log_softmax(-1)
            loss = F.kl_div(log_q.flatten(0, 1), log_p.flatten(0, 1), log_target=True, reduction="batchmean")
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(student.trained, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            progress(step + 1, config.steps)
    return replace(difference, factors=student.factors(), steps=config.steps)


class _Student:
    """The base with a difference whose factors are trained. A context manager: hooks are on the base within."""

    def __init__(self, finder: DifferenceFinder, difference: Difference) -> None:
        self._base: PreTrainedModel = finder.base
        ends = {finder.facts.embedding, *finder.facts.ties.get(finder.facts.embedding or "", ())}
        self._fixed = {path: each for path, each in difference.factors.items() if path in ends}
        self._trained = {
            path: balance(*each) for path, each in difference.factors.items() if path not in ends
        }  # Adam's steps are equal in size for both factors
        weights = finder.weights(replace(difference, factors=self._fixed))
        self._weights = {name: each.detach() for name, each in weights.items()}
        self._hooks: list[Any] = []

    @property
    def trained(self) -> list[Tensor]:
        return [each for pair in self._trained.values() for each in pair]

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        trained = {path: (b.detach().bfloat16(), a.detach().bfloat16()) for path, (b, a) in self._trained.items()}
        return self._fixed | trained

    def logits(self, x_BT: Tensor) -> Tensor:
        found: Tensor = functional_call(self._base, self._weights, (), {"input_ids": x_BT, "use_cache": False}).logits
        return found

    def __enter__(self) -> _Student:
        self._needed = {name: each.requires_grad for name, each in self._base.named_parameters()}
        self._base.requires_grad_(False)
        for path, (left_Or, right_rI) in self._trained.items():

            def add_delta(module: nn.Module, args: Any, out: Tensor, b: Tensor = left_Or, a: Tensor = right_rI) -> Tensor:
                return out + F.linear(F.linear(args[0], a), b)

            self._hooks.append(self._base.get_submodule(path).register_forward_hook(add_delta))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for name, each in self._base.named_parameters():
            each.requires_grad_(self._needed[name])


def balance(left_Or: Tensor, right_rI: Tensor) -> tuple[Tensor, Tensor]:
    """The same product; each column of the left has the norm of its row of the right. Both require gradients."""
    left_Or, right_rI = left_Or.float(), right_rI.float()
    scale_r = (right_rI.norm(dim=1) / left_Or.norm(dim=0).clamp(min=1e-30)).sqrt()
    return (left_Or * scale_r).requires_grad_(), (right_rI / scale_r.clamp(min=1e-30)[:, None]).requires_grad_()
