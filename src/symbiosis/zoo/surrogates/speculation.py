"""Speculation at a slow block: the model goes on with a surrogate's output while the true one is under way.

    model.generate(**inputs, custom_generate=Speculation(surrogate))

A pass computes all rows whose true output was missing in the pass before, and one new row. Rows whose true output has arrived
yield tokens; the surrogate's output stands in for the others, and yields a draft of the next token. So while answers take less
time than a pass, each pass has two rows, yields a token, and waits for nothing.

`exact` compares tokens: a draft is kept if the true output leads to the same token. Greedy tokens are those of plain
generation, within the rounding of a pass of several rows. Sampled tokens too, with the same seed: the draft and the token of a
position are drawn with the same noise. `cosine` keeps what the surrogate led to if its output has a cosine of 0.95 with the
true one: it computes each row once, and its answers are approximate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from symbiosis.zoo.errors import CannotSpeculate
from symbiosis.zoo.surrogates.block_modules import Piece, PieceKind, module_path, replace_module
from symbiosis.zoo.surrogates.speculated_block import SpeculatedBlock

# V = vocabulary
MODES = ("exact", "cosine")
_UNSUPPORTED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass(slots=True)
class SpeculationReport:
    """Of one call of `generate`."""

    tokens: int = 0
    passes: int = 0
    rows: int = 0
    """Of all passes."""
    drafts: int = 0
    """Tokens that a surrogate's output led to and that were judged: by the token itself, or by the cosine."""
    accepted: int = 0
    cosines: list[float] = field(default_factory=list)
    """In the mode `cosine`: of each surrogate's output that was judged."""


class Speculation:
    """A decoding loop for transformers' `generate`, for one sequence. `report` is that of the last call.

    `window`: most rows of a pass. A pass of so many waits for the oldest true output.
    """

    def __init__(
        self,
        piece: Piece | str,
        surrogate: nn.Module,
        *,
        mode: str = "exact",
        window: int = 3,
        min_cosine: float = 0.95,
        streamer: Any = None,
    ) -> None:
        """`streamer` is that of transformers, which `generate` does not hand to a loop of one's own."""
        if mode not in MODES:
            raise CannotSpeculate(f"mode={mode!r:.60}: expected one of {', '.join(MODES)}")
        if not isinstance(window, int) or not 2 <= window <= 64:
            raise CannotSpeculate(f"window={window!r:.60}: expected 2 to 64 rows")
        self.piece = Piece.parse(piece) if isinstance(piece, str) else piece
        self.surrogate, self.mode, self.window, self.min_cosine = surrogate, mode, window, min_cosine
        self.streamer = streamer
        self.report = SpeculationReport()

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """What `generate` calls. Raises `CannotSpeculate`."""
        self._check(model, input_ids, generation_config, model_kwargs)
        self.report = SpeculationReport()
        loaded: Any = model
        path = module_path(model, self.piece)
        with (
            SpeculatedBlock(self.piece, model.get_submodule(path), self.surrogate, self.window) as block,
            _replaced(model, path, block),
        ):
            outputs = loaded._prefill(input_ids, generation_config, model_kwargs)
            cache = outputs.past_key_values
            _check_cache(cache)
            first = outputs.logits[:, -1]
            step = _Step(model, block, cache, input_ids, model_kwargs)
            draw = _Draw(logits_processor, do_sample=bool(generation_config.do_sample))
            loop = _Loop(self, step, draw, stopping_criteria)
            if self.streamer is not None:
                self.streamer.put(input_ids.cpu())
            sequence = loop.run(input_ids, first)
            computed = step.context + sequence.shape[1] - 1  # as after plain generation
            step.crop(computed)
            block.take_true_cache(cache, computed)
        if self.streamer is not None:
            self.streamer.end()
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequence, past_key_values=cache)
        return sequence

    def _check(self, model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
        wrong = None
        if len(input_ids) != 1 or (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1:
            wrong = "several sequences or beams: call generate once for each"
        elif not model_kwargs.get("use_cache", True):
            wrong = "generation without a cache"
        elif config.return_dict_in_generate and (name := next((n for n in _UNSUPPORTED if getattr(config, n, False)), None)):
            wrong = name
        elif "prepare_inputs_for_generation" in vars(model) or model_kwargs.get("inputs_embeds") is not None:
            wrong = "prompt tuning or embedded inputs"
        elif self.piece.kind is not PieceKind.FFN and (cache := model_kwargs.get("past_key_values")) and cache.get_seq_length():
            wrong = f"a cache that holds tokens already, at {self.piece}: use it with an FFN, or start anew"
        if wrong is not None:
            raise CannotSpeculate(f"speculation does not support {wrong}")


def _check_cache(cache: Any) -> None:
    layers = getattr(cache, "layers", None)
    if not layers or any(not layer.is_croppable or getattr(layer, "is_sliding", False) for layer in layers):
        raise CannotSpeculate(f"speculation does not support this {type(cache).__name__}: expected a plain dynamic cache")


@contextmanager
def _replaced(model: nn.Module, path: str, block: nn.Module) -> Iterator[None]:
    before = replace_module(model, path, block)
    try:
        yield
    finally:
        replace_module(model, path, before)


class _Step:
    """Passes of the model over new rows. Positions are those of the cache."""

    def __init__(self, model: Any, block: SpeculatedBlock, cache: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
        self._model, self.block, self.cache, self._device = model, block, cache, input_ids.device
        self.length = int(cache.get_seq_length())
        """Rows in the cache."""
        self.context = self.length - input_ids.shape[1]
        """Rows before the first of `input_ids`: below zero where only its end was computed."""
        self._mask = model_kwargs.get("attention_mask")
        positions = model_kwargs.get("position_ids")
        self._shift = 0 if positions is None else int(positions[0, -1]) + 1 - self.length

    def run(self, tokens: list[int], start: int) -> Tensor:
        """Logits of rows from this position of the cache on, [n, V]."""
        self.crop(start)
        count = len(tokens)
        self.block.begin_pass(start)
        mask = None
        if self._mask is not None:
            missing = start + count - self._mask.shape[1]
            mask = nn.functional.pad(self._mask, (0, missing), value=1)
        positions = torch.arange(start, start + count, device=self._device)[None] + self._shift
        outputs = self._model(
            input_ids=torch.tensor([tokens], device=self._device), attention_mask=mask, position_ids=positions,
            past_key_values=self.cache, use_cache=True, return_dict=True,
        )  # fmt: skip
        self.length = start + count
        logits: Tensor = outputs.logits[0]
        return logits

    def crop(self, length: int) -> None:
        if (spare := self.length - length) > 0:
            for layer in self.cache.layers:
                layer.crop(-spare)
            self.length = length


class _Draw:
    """Chooses tokens. A position has one noise, whatever is drawn there first: a draft, or the token itself."""

    def __init__(self, processors: LogitsProcessorList, *, do_sample: bool) -> None:
        self._processors, self._do_sample = processors, do_sample
        self._noise: dict[int, Tensor] = {}

    def __call__(self, sequence: Tensor, logits_V: Tensor) -> int:
        scores = self._processors(sequence, logits_V[None].to(copy=True, dtype=torch.float32))
        if not self._do_sample:
            return int(scores.argmax(-1))
        shares, position = scores.softmax(-1), sequence.shape[1]
        if position not in self._noise:
            # As `torch.multinomial` does it: with the same seed the tokens are those of plain generation.
            self._noise[position] = torch.empty_like(shares).exponential_(1)
        return int((shares / self._noise[position]).argmax(-1))

    def forget(self, position: int) -> None:
        self._noise.pop(position, None)


class _Loop:
    """From the logits after the prompt to the whole sequence.

    `rows` are tokens whose outputs are not settled: the first is known to be right, the others are drafts.
    """

    def __init__(self, speculation: Speculation, step: _Step, draw: _Draw, stopping: StoppingCriteriaList) -> None:
        self._mode, self._window, self._min_cosine = speculation.mode, speculation.window, speculation.min_cosine
        self._report, self._step, self._draw = speculation.report, step, draw
        self._stopping, self._streamer = stopping, speculation.streamer

    def run(self, sequence: Tensor, first_logits: Tensor) -> Tensor:
        self._sequence, self._is_done = sequence, False
        block, settled = self._step.block, self._step.length
        token = self._draw(sequence, first_logits[0])
        self._confirm(token)
        rows, computed = [token], 0
        while not self._is_done:
            if self._mode == "cosine":
                accepted, computed = self._accept_by_cosine(rows, settled)
                rows, settled = rows[accepted:], settled + accepted
                if self._is_done:
                    break
            logits = self._step.run(rows[computed:], settled + computed)
            self._report.passes += 1
            self._report.rows += len(logits)
            verified = block.verified if computed == 0 else 0
            for row in range(verified):
                token = self._draw(self._sequence, logits[row])
                self._confirm(token)
                block.forget(settled + row)
                is_draft = row + 1 < len(rows)
                is_right = is_draft and rows[row + 1] == token
                if self._mode == "exact":
                    self._report.drafts += is_draft
                    self._report.accepted += is_right
                if is_right and not self._is_done:
                    continue
                rows, settled = [token], settled + row + 1
                block.drop(settled)
                break
            else:
                rows, settled = rows[verified:], settled + verified
                drafts = torch.tensor([rows[1:]], dtype=self._sequence.dtype, device=self._sequence.device)
                rows.append(self._draw(torch.cat([self._sequence, drafts], 1), logits[-1]))
            computed = len(rows) - 1 if self._mode == "cosine" else 0
        self._report.tokens = self._sequence.shape[1] - sequence.shape[1]
        return self._sequence

    def _accept_by_cosine(self, rows: list[int], settled: int) -> tuple[int, int]:
        """Rows that are settled by their cosine, and how many of the others need not be computed again."""
        block = self._step.block
        for accepted in range(len(rows) - 1):
            position = settled + accepted
            if len(rows) - accepted >= self._window:
                block.wait(position)
            cosine = block.cosine(position)
            if cosine is None:
                return accepted, len(rows) - 1 - accepted
            self._report.cosines.append(cosine)
            self._report.drafts += 1
            if cosine < self._min_cosine:
                return accepted, 0
            self._report.accepted += 1
            block.forget(position)
            self._confirm(rows[accepted + 1])
            if self._is_done:
                return accepted + 1, 0
        return len(rows) - 1, 0

    def _confirm(self, token: int) -> None:
        new = torch.tensor([[token]], dtype=self._sequence.dtype, device=self._sequence.device)
        self._draw.forget(self._sequence.shape[1])
        self._sequence = torch.cat([self._sequence, new], 1)
        if self._streamer is not None:
            self._streamer.put(new[0].cpu())
        self._is_done = bool(self._stopping(self._sequence, None)[0])
